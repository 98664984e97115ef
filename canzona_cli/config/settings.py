"""The settings that exist, read off the schema: dotted names, types, defaults, what their fields say about
them; and which of them a misspelt key was probably meant to be."""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from canzona_cli.config.schema import OPTIMIZERS, RunConfig
from canzona_cli.errors import Problem
from canzona_cli.fields import Affects, Example, Range, Unit

Kind = Literal["integer", "number", "boolean", "text", "choice", "list", "mapping", "other"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run."""

    key: str
    """Dotted: `train.steps`."""
    kind: Kind
    choices: tuple[str, ...] = ()
    """The values of a choice."""
    optional: bool
    """True if null (automatic) is a value of it."""
    required: bool
    """True if composition must give it a value."""
    default: object = None
    """The default value."""
    range: Range
    """The range of a number."""
    help: str
    """Empty where the field has none, which a test refuses."""
    unit: str
    affects: Affects | None
    """None where the field does not say, which a test refuses."""
    example: str
    optimizers: frozenset[str] = frozenset()
    """The optimizers that have an `optimizer.*` setting."""

    @property
    def meaning(self) -> str:
        """The help and the unit, on one line."""
        return f"{self.help} In {self.unit}." if self.unit else self.help


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by dotted key, in the schema's order."""
    known_settings: dict[str, Setting] = {}
    top_level = {setting.key: setting for setting in _settings_of(RunConfig, "")}
    for name, hint in get_type_hints(RunConfig).items():
        if name == "optimizer":
            for optimizer, variant in OPTIMIZERS.items():
                for setting in _settings_of(variant, "optimizer."):
                    known = known_settings.get(setting.key)
                    having = (known.optimizers if known else frozenset()) | {optimizer}
                    choices = tuple(OPTIMIZERS) if setting.key == "optimizer.name" else setting.choices
                    known_settings[setting.key] = replace(setting, optimizers=having, choices=choices)
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            known_settings.update({setting.key: setting for setting in _settings_of(hint, f"{name}.")})
        else:
            known_settings[name] = top_level[name]
    return known_settings


def setting_of(key: str) -> Setting | None:
    """The setting a dotted key is of; `optimizer.options.momentum` is an entry of `optimizer.options`."""
    return settings().get(mapping_key(key) or key)


def mapping_key(key: str) -> str | None:
    """The mapping that a key is an entry of, if it is one."""
    return next(
        (name for name, known in settings().items() if known.kind == "mapping" and key.startswith(f"{name}.")), None
    )


def problem_with(config: RunConfig, key: str, reason: str, fix: str = "") -> Problem:
    """Returns a problem with a setting of a run, shown with the value that it has."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return Problem(key=key, value=value, reason=reason, fix=fix)


def with_own_values(config: RunConfig, problems: Iterable[Problem]) -> list[Problem]:
    """The problems, each without a value shown with the one that its setting has in the run."""
    return [
        problem_with(config, problem.key, problem.reason, problem.fix) if problem.value is None else problem
        for problem in problems
    ]


@cache
def sections() -> Mapping[str, frozenset[str]]:
    """The names of the sections (`train`, `model`, ...) with the bare names of their settings."""
    names_by_section: dict[str, set[str]] = {}
    for key in settings():
        section, dot, name = key.partition(".")
        if dot:
            names_by_section.setdefault(section, set()).add(name)
    return {section: frozenset(names) for section, names in names_by_section.items()}


@cache
def affecting(effect: Affects, section: str = "") -> tuple[str, ...]:
    """The settings whose change has an effect, in the schema's order; of a section, their bare names."""
    prefix = f"{section}." if section else ""
    return tuple(
        key.removeprefix(prefix)
        for key, setting in settings().items()
        if key.startswith(prefix) and setting.affects is not None and effect in setting.affects
    )


OTHER_WORDS = {
    "config": "recipe",
    "config_name": "recipe",
    "n": "gpus",
    "np": "gpus",
    "nproc": "gpus",
    "nproc_per_node": "gpus",
    "num_gpus": "gpus",
    "world_size": "gpus",
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "iters": "train.steps",
    "iterations": "train.steps",
    "max_steps": "train.steps",
    "o": "run.dir",
    "out": "run.dir",
    "output": "run.dir",
    "output_dir": "run.dir",
    "resume": "run.dir",
}
"""The names that other programs give a setting of ours, where they look different.
A run continues in its directory."""


def exact_key(word: str) -> str | None:
    """The setting that `word` is the name, the last word, or another program's name of;
    None where several share it."""
    flat = word.replace("-", "_").lower()
    known = [key for key in settings() if flat in (key, key.rpartition(".")[2])]
    return OTHER_WORDS.get(flat) or (known[0] if len(known) == 1 or flat in known else None)


def closest_key(key: str) -> str | None:
    """The setting the user probably meant by `key`.

    `tp` means `parallel.tp`, `train.lr` means `optimizer.lr`: the last word counts most, then the whole.
    Words left out are forgiven: `num_heads` means `num_attention_heads`, though it looks more like
    `num_layers`.
    """
    flat = key.strip("/").replace("/", ".").replace("-", "_").lower()
    last = flat.rpartition(".")[2]
    if last in OTHER_WORDS:
        return OTHER_WORDS[last]
    known = settings()
    best, best_score = None, 0.0
    for name in known:
        section, _, bare = name.rpartition(".")
        whole = SequenceMatcher(None, flat, name).ratio()
        word = SequenceMatcher(None, last, bare).ratio()
        left_out = set(bare.split("_")) - set(last.split("_"))
        if set(last.split("_")) < set(bare.split("_")):
            word = max(word, 0.95 - 0.05 * len(left_out))
        score = max(whole, 0.9 * word + 0.1 * SequenceMatcher(None, flat.rpartition(".")[0], section).ratio())
        if score > best_score:
            best, best_score = name, score
    return best if best_score >= 0.7 else None


def leaves(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every setting that a tree of sections gives, by its dotted key.
    A mapping such as `optimizer.options` is one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and name in sections():
            yield from ((f"{name}.{inner_name}", inner) for inner_name, inner in value.items())
        else:
            yield name, value


def _settings_of(owner: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        kind, choices, optional, marks = _kind(hints[field.name])
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Setting(
            key=prefix + field.name,
            kind=kind,
            choices=choices,
            optional=optional,
            required=default is MISSING,
            default=None if default is MISSING else default,
            range=next((mark for mark in marks if isinstance(mark, Range)), Range()),
            help=next((mark for mark in marks if isinstance(mark, str)), ""),
            unit=next((mark.name for mark in marks if isinstance(mark, Unit)), ""),
            affects=next((mark for mark in marks if isinstance(mark, Affects)), None),
            example=next((mark.value for mark in marks if isinstance(mark, Example)), ""),
        )


def _kind(hint: object) -> tuple[Kind, tuple[str, ...], bool, tuple[object, ...]]:
    """Returns the sort of value a type hint asks for, the choices it names, whether it admits None, and its
    annotations at any depth."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        kind, choices, optional, inner_marks = _kind(inner)
        return kind, choices, optional, (*marks, *inner_marks)
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        kind, choices, _, inner_marks = _kind(rest[0]) if len(rest) == 1 else ("other", (), False, ())
        if all(get_origin(part) is Literal for part in rest):  # "auto" beside the names of a shared alias
            kind, choices = "choice", tuple(choice for part in rest for choice in get_args(part))
        return kind, choices, len(rest) < len(get_args(hint)), inner_marks
    if get_origin(hint) is Literal:
        return "choice", get_args(hint), False, ()
    kinds: dict[object, Kind] = {
        bool: "boolean", int: "integer", float: "number", str: "text", tuple: "list", dict: "mapping"
    }  # fmt: skip
    return kinds.get(get_origin(hint) or hint, "other"), (), False, ()
