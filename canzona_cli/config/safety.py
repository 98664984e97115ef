"""What a configuration may not do whatever its values mean: run code unasked, hold secrets, or carry characters that
end up in file names, commands and terminals."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from canzona_cli.config.redaction import secret_problems
from canzona_cli.config.schema import CustomConfig, RunConfig
from canzona_cli.errors import Problem

_ARGUMENTS = ("run.dir", "cluster.rdzv_endpoint")
"""Settings that, or whose last part, become arguments of torchrun: a leading dash would make an option of them."""
_OWN_RULES = ("name", "cluster.rdzv_id")
"""Settings that `canzona_cli.config.checks` is stricter with."""
_PROSE = ("description",)
"""Settings that may have several lines."""
_PLACES = ("run.dir", "run.root")


def safety_problems(config: RunConfig) -> Iterator[Problem]:
    """Secrets, and characters that no name or path may have."""
    tree = asdict(config)
    yield from secret_problems(tree)
    for key, text in _texts(tree):
        if key in _OWN_RULES:
            continue
        strange = sorted({char for char in text if not char.isprintable() and not (char in "\n\t" and key in _PROSE)})
        if strange:
            named = ", ".join(char.encode("unicode_escape").decode("ascii") for char in strange[:4])
            yield Problem(
                key=key,
                value=text,
                reason=f"has characters that are not printable ({named}); they could hide what a terminal, a file name "
                "or a command really says",
                fix="leave them out",
            )
        elif key in _ARGUMENTS and Path(text).name.startswith("-"):
            yield Problem(
                key=key, value=text, reason="begins with a dash, as options of a command do", fix="begin with a letter"
            )


def unasked_problems(config: RunConfig, explicit: Collection[str], *, training: bool) -> Iterator[Problem]:
    """What only the command line may ask for, where a recipe does.

    Args:
        explicit: dotted keys that the command line sets.
        training: whether code would be loaded at all.
    """
    custom = config.optimizer
    if training and isinstance(custom, CustomConfig) and custom.source and not custom.built_in:
        own = {"optimizer.source", "optimizer.allow"}
        if not own & set(explicit):
            yield Problem(
                key="optimizer.source",
                value=custom.source,
                reason="a recipe asks to run this code, and code is only run when the command line asks for it",
                fix=f"if you trust it: optimizer.source={custom.source}",
            )
    for key in _PLACES:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None and key not in explicit and ".." in Path(value).parts:
            yield Problem(
                key=key,
                value=value,
                reason="a recipe leads out of the folder it is used in",
                fix=f"if it is meant: {key}={value} on the command line",
            )


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            below = f"{key}.{name}" if key else str(name)
            yield from _texts(str(name), below)  # names of an optimizer's options are as free as their values
            yield from _texts(inner, below)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value
