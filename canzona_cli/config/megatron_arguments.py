"""Reads the arguments of a Megatron-LM run: from the block that Megatron prints at its start, from a command line
without shell, or from a checkpoint.

The table `megatron_arguments.yaml` in this folder gives the meaning of each argument for canzona. Names and defaults
are those of the installed Megatron-LM: its parser is rebuilt from its sources, because to import
`megatron.training.arguments` takes eight seconds and loads torch. The calls of `add_argument` are parsed, and the
dataclasses whose fields become options (`ArgumentGroupFactory`). A test compares the result with Megatron's own
parser, option by option.
"""

import argparse
import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.reading import LARGEST_YAML, Unreadable, parse_yaml, read_plain

OPTION: Final = "--from-megatron"
TYPED: Final = "-- "
"""The beginning of a command line that is given in the place of a file."""
_TABLE: Final = Path(__file__).with_suffix(".yaml")
_BORDER: Final = re.compile(rb"(?<!-)-{8,} (end of )?arguments -{8,}")
_PRINTED_LINE: Final = re.compile(r"^(?:.*?\s)?([A-Za-z_]\w*) (\.*) (.*)$", re.MULTILINE)
_WIDTH: Final = 48
"""The number of characters in an argument's name and the dots after it, in what Megatron prints."""
_PADDED: Final = re.compile(rb"padded vocab \(size: \d{1,12}\) with \d{1,12} dummy tokens \(new size: (\d{1,12})\)")
_BUILDING: Final = re.compile(rb"building (\w{1,20}) model")
_LONGEST: Final = 1 << 17
"""The maximum number of characters in a command line."""
_NOTHING: Final = frozenset({"None", "[]", ""})
_LIST: Final = re.compile(r"\[[^\[\]]*\]")
_DTYPES: Final = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_DERIVED: Final = {
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "recompute_activations": ("recompute_granularity", "selective"),
}
"""Switches that Megatron turns into the value of another argument before it prints the arguments."""
_NOT_PRINTED: Final = frozenset({"batch_size", "checkpoint_activations", "model_parallel_size", "warmup"})
"""Old arguments that Megatron refuses, or deletes before it prints the others."""
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"\\$`]*\"|\\\n")
_SHELL: Final = re.compile(r"[$`;|&<>(){}#!*?\\'\"]|\n(?=\s*\S)")
_LAUNCHERS: Final = (("torchrun",), ("-m", "torch.distributed.run"), ("-m", "torch.distributed.launch"))
_HOW: Final = (
    "give a log of the run, which has the arguments that Megatron prints at its start, or only the arguments: "
    "canzona plan --from-megatron -- pretrain_gpt.py --num-layers 32 ..."
)

Meaning = Literal["same", "muon", "used", "refused", "plans_only", "left_out", "no_effect"]
"""The sections of the table, which list arguments."""


@cache
def table() -> Mapping[Meaning, Mapping[str, object] | Sequence[str]]:
    """Returns the sections of `megatron_arguments.yaml`; `no_effect` is a list of patterns."""
    content = parse_yaml(read_plain(_TABLE, most=LARGEST_YAML))
    assert isinstance(content, dict)
    return content


def meaning(name: str) -> Meaning | None:
    """Returns the table's section that lists a Megatron argument; None for an argument that canzona does not
    know."""
    sections: tuple[Meaning, ...] = ("same", "muon", "used", "refused", "plans_only", "left_out")
    for section in sections:
        if name in table()[section]:
            return section
    return "no_effect" if any(fnmatchcase(name, pattern) for pattern in table()["no_effect"]) else None


def limited(section: Literal["refused", "plans_only"]) -> Iterator[tuple[str, list[object], str]]:
    """Yields the arguments of a section in which every entry limits the accepted values. Each comes with the
    accepted values, and the reason for the limit."""
    entries = table()[section]
    assert isinstance(entries, Mapping)
    for name, entry in entries.items():
        assert isinstance(entry, list)
        accepted, reason = entry
        yield name, accepted, reason


def default(name: str) -> str | None:
    """Returns the installed Megatron-LM's default for an argument, as a run would print it."""
    return _text(str(defaults().get(name)))


@dataclass(kw_only=True)
class Arguments:
    """The arguments of a Megatron-LM run."""

    path: Path
    """The file that they come from."""
    program: str | None
    """`gpt` for the program `pretrain_gpt.py`; the file name of another program; None if it is not known."""
    complete: bool = True
    """False if the source gives only the arguments that differ from Megatron's defaults."""
    values: dict[str, str | None] = field(default_factory=dict)
    """The values by Megatron's names; `true` or `false` for switches."""
    written: dict[str, str] = field(default_factory=dict)
    """The arguments that are given, as written (flags, for example), by Megatron's names."""
    not_understood: list[str] = field(default_factory=list)
    """The arguments that canzona does not know, as written."""
    no_effect: list[str] = field(default_factory=list)
    """The arguments that have no effect on a plan, as written."""
    tokenizer: str | None = None
    """The type of the tokenizer."""
    nodes: int | None = None
    per_node: int | None = None
    """The number of processes on each node."""

    @property
    def assumed(self) -> list[str]:
        """The arguments that have an effect but are not in the source, for which the installed Megatron's
        defaults are taken: the run has another version of Megatron, or a line is lost."""
        absent = defaults().keys() - self.values.keys() - _NOT_PRINTED
        return sorted(name for name in absent if meaning(name) not in (None, "no_effect"))

    def text(self, name: str) -> str | None:
        """Returns the value of an argument; Megatron's default if the source does not have it."""
        return self.values[name] if name in self.values else default(name)

    def take(self, name: str, value: object, written: str) -> None:
        """Adds an argument with its value in Python's notation, such as `True`."""
        text = _text(str(value))
        if name == "tokenizer_type":
            self.tokenizer = text
        match meaning(name):
            case None:
                if text not in (None, "false"):
                    self.not_understood.append(written)
            case "no_effect":
                if text is not None:
                    self.no_effect.append(written)
            case _:
                self.values[name] = text
                self.written[name] = written


def read_arguments(source: str) -> Arguments:
    """Reads the arguments of a Megatron-LM run.

    Args:
        source: a file, or a command line after `TYPED`.

    Raises:
        ConfigError: the file cannot be read, or is not a log or a command line without shell.
    """
    shown = "--" if source.startswith(TYPED) else source
    try:
        if source.startswith(TYPED):
            return _command_line(shlex.split(source.removeprefix(TYPED)), Path("command line"))
        path = Path(source)
        content = read_plain(path)
        if b"-- arguments --" in content:
            return _printed(content, path)
        if len(content) > _LONGEST:
            raise Unreadable("does not have the arguments that Megatron prints at its start")
        text = content.decode(errors="replace").replace("\r\n", "\n").strip()
        return _command_line(_words(text), path)
    except ValueError as error:  # Unreadable, or a quote in a typed command line that is not closed
        raise ConfigError(Problem(OPTION, f"{error}", _HOW, value=shown)) from None


def saved_arguments(values: Mapping[str, object], path: Path) -> Arguments:
    """Returns the arguments that Megatron-LM saved in a checkpoint.

    Args:
        path: the checkpoint.
    """
    arguments = Arguments(path=path, program="gpt")
    for name, value in values.items():
        arguments.take(name, value, name)
    return arguments


def _printed(content: bytes, path: Path) -> Arguments:
    """Reads the block of arguments in a log, the size of the vocabulary that a run prints after it, and the
    name of the model."""
    borders = [*_BORDER.finditer(content)]
    blocks = [content[start.end() : end.start()] for start, end in pairwise(borders) if not start[1] and end[1]]
    if not blocks or not borders[-1][1]:
        raise Unreadable("ends within the arguments that Megatron prints, or has other lines in their place")
    runs = [_block(block, path) for block in blocks]
    arguments = runs[-1]
    for run in runs:
        changed = [name for name in run.values if run.values[name] != arguments.values.get(name)]
        if changed:
            raise Unreadable(f"has the arguments of several runs, which differ in {', '.join(changed[:4])}")
    sizes = {int(size) for size in _PADDED.findall(content)}
    if arguments.values.get("padded_vocab_size") is None and len(sizes) == 1:
        arguments.take("padded_vocab_size", sizes.pop(), "padded vocab")
    models = {model.decode() for model in _BUILDING.findall(content)}
    if len(models) == 1:
        model = models.pop()
        arguments.program = "gpt" if model == "GPT" else f"{model} model"
    return arguments


def _block(block: bytes, path: Path) -> Arguments:
    if len(block) > LARGEST_YAML:
        raise Unreadable("has more than 1 MiB between the first and the last argument")
    arguments = Arguments(path=path, program=None)
    for name, dots, value in _PRINTED_LINE.findall(block.decode(errors="replace").replace("\r\n", "\n")):
        if len(name) + len(dots) == max(_WIDTH, len(name)):
            arguments.take(name, value.strip(), name)
    return arguments


def _words(text: str) -> list[str]:
    """Splits a file into words if no shell would do more than that; in a file of arguments alone, line ends are
    spaces."""
    without_quotes = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), text)
    if text.startswith("--"):
        without_quotes = without_quotes.replace("\n", " ")
    if sign := _SHELL.search(without_quotes):
        line = text.count("\n", 0, sign.start()) + 1
        what = "a second command" if sign[0] == "\n" else f"`{sign[0]}`"
        raise Unreadable(
            f"needs a shell (line {line + (sign[0] == '\n')} has {what}), and canzona runs and guesses none"
        )
    return shlex.split(_QUOTED.sub(lambda quoted: "" if quoted[0] == "\\\n" else quoted[0], text))


def _command_line(words: Sequence[str], path: Path) -> Arguments:
    """Parses a command line as Megatron does: a launcher and a program, which may be left out, and arguments."""
    start = next((place for place, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    words = words[start:]  # without variables of the environment
    end = next((place + 1 for place, word in enumerate(words) if word.endswith(".py")), 0)
    launcher, given = words[:end], words[end:]
    if not given or not given[0].startswith("--"):
        raise Unreadable("is neither a log with the arguments that Megatron prints nor a command line of Megatron")
    program = Path(launcher[-1]).name if launcher else None
    arguments = Arguments(path=path, program="gpt" if program == "pretrain_gpt.py" else program, complete=False)
    values = vars(parser().parse_args(given))
    for switch, (name, value) in _DERIVED.items():
        if values.get(switch):
            values[name] = value
    flags = flags_of(given)
    for name, value in values.items():
        if name in flags:
            arguments.take(name, value, flags[name])
        elif meaning(name) not in (None, "no_effect"):
            arguments.values[name] = _text(str(value))
    if any(set(one) <= set(launcher) for one in _LAUNCHERS) and launcher[0] in ("torchrun", "python", "python3"):
        arguments.nodes, arguments.per_node = _number(launcher, "nnodes", "1"), _number(launcher, "nproc_per_node", "")
    if arguments.nodes and arguments.per_node:
        arguments.take("world_size", arguments.nodes * arguments.per_node, "the number of processes")
    return arguments


def _number(launcher: Iterable[str], flag: str, missing: str) -> int | None:
    """Returns the value of a flag of torchrun; None if it is not a whole number."""
    words = [part for word in launcher for part in word.split("=")]
    names = [word.replace("-", "_") for word in words]
    value = words[names.index(f"__{flag}") + 1] if f"__{flag}" in names else missing
    return int(value) if value.isdecimal() and len(value) < 10 else None


def _text(value: str) -> str | None:
    """Returns a value in Python's notation as the text of an argument."""
    if value in _NOTHING:
        return None
    if _LIST.fullmatch(value):
        return " ".join(part.strip(" '\"") for part in value[1:-1].split(","))
    return {"True": "true", "False": "false"}.get(value) or _DTYPES.get(value, value)


_ARGUMENTS: Final = "megatron.training.arguments"
_TYPES: Final[Mapping[str, type]] = {"int": int, "float": float, "bool": bool}
"""The types that the parser checks; the values of other options stay text."""
_KEYWORDS: Final = frozenset({"dest", "default", "nargs", "action", "type"})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Unreadable(f"is not a command line of Megatron-LM: {message}")


@cache
def parser() -> argparse.ArgumentParser:
    """Returns a parser with the options and defaults of the installed Megatron-LM. It raises Unreadable for a
    command line that Megatron-LM would not accept."""
    rebuilt = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for flags, keywords in _options():
        rebuilt.add_argument(*flags, **keywords)
    return rebuilt


@cache
def defaults() -> Mapping[str, object]:
    """Returns the default of each argument of the installed Megatron-LM, by name."""
    return {action.dest: action.default for action in parser()._actions}


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """Returns the flags in a command line, by the names of the arguments that they set."""
    names = {flag: action.dest for action in parser()._actions for flag in action.option_strings}
    flags = (word.partition("=")[0] for word in words)
    return {names[flag]: flag for flag in flags if flag in names}


def _options() -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the flags and the keywords of all options."""
    tree = _tree(_ARGUMENTS)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        lists = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            match call.func:
                case ast.Attribute(attr="add_argument"):
                    yield _option([str(_value(flag)) for flag in call.args], given)
                case ast.Name(id="ArgumentGroupFactory"):
                    excluded = given.get("exclude")
                    excluded = lists[excluded.id] if isinstance(excluded, ast.Name) else excluded
                    names = _value(excluded) if excluded is not None else ()
                    assert isinstance(names, list | tuple)
                    assert isinstance(call.args[0], ast.Name)
                    yield from _options_of_class(_ARGUMENTS, call.args[0].id, frozenset(names))


def _option(flags: list[str], given: Mapping[str, ast.expr]) -> tuple[list[str], dict[str, Any]]:
    keywords: dict[str, Any] = {name: _value(node) for name, node in given.items() if name in _KEYWORDS}
    kind = keywords.pop("type", None)
    if kind in _TYPES:
        keywords["type"] = _TYPES[str(kind)]
    if keywords.get("action") == "BooleanOptionalAction":
        keywords["action"] = argparse.BooleanOptionalAction
        keywords.pop("type", None)
    return flags, keywords


def _options_of_class(module: str, name: str, excluded: frozenset[str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the options that Megatron-LM makes of a dataclass' fields."""
    for field_name, (annotation, value) in _fields(module, name).items():
        call = value if isinstance(value, ast.Call) else None
        given = {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
        if field_name in excluded or (call and _value(given.get("init")) is False):
            continue
        default = _value(given.get("default")) if call else _value(value)
        if isinstance(factory := given.get("default_factory"), ast.Name | ast.Lambda):
            default = [] if isinstance(factory, ast.Name) else _value(factory.body)
        kind, nargs = _kind(annotation)
        keywords: dict[str, Any] = {"dest": field_name, "default": default}
        flags = [f"--{field_name.replace('_', '-')}"]
        if kind == "bool":
            keywords["action"] = "store_true" if not default and default is not None else "store_false"
            if keywords["action"] == "store_false":
                flags = [flag.replace("--", prefix, 1) for flag in flags for prefix in ("--no-", "--disable-")]
        elif kind in _TYPES:
            keywords["type"] = _TYPES[kind]
        if nargs:
            keywords["nargs"] = nargs
        for meta in _entries(given.get("metadata")).values():
            own = _entries(meta)
            names = _value(own["arg_names"]) if "arg_names" in own else flags
            assert isinstance(names, list)
            flags, overridden = _option([str(flag) for flag in names], own)
            keywords |= overridden
            if isinstance(keywords.get("action"), str):
                keywords.pop("type", None)
        yield flags, keywords


def _fields(module: str, name: str) -> dict[str, tuple[ast.expr, ast.expr | None]]:
    """Returns the annotation and the default of each field of a dataclass and its bases."""
    home, found = _class(module, name)
    fields: dict[str, tuple[ast.expr, ast.expr | None]] = {}
    for base in reversed(found.bases):
        if isinstance(base, ast.Name):
            fields |= _fields(home, base.id)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = node.annotation, node.value
    return fields


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Returns a class that a module defines or imports, and the module that defines it."""
    tree = _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            package = _package(module, node.level) if node.level else ""
            return _class(".".join(filter(None, (package, node.module))), name)
    raise Unreadable(f"needs {name} of {module}, which the installed Megatron-LM does not have")


def _kind(annotation: ast.expr) -> tuple[str, str | None]:
    """Returns the name of an option's type, and `+` if it takes several values."""
    match annotation:
        case ast.Name(id=name):
            return name, None
        case ast.BinOp(op=ast.BitOr(), left=left):
            return _kind(left)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inside):
            return _kind(inside)
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inside):
            return _kind(inside)[0], "+"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            first = choices.elts[0] if isinstance(choices, ast.Tuple) else choices
            return type(_value(first)).__name__, None
    return "str", None


def _value(node: ast.expr | None) -> object:
    """Returns the value of a literal, or the last name of another expression, such as `auto` for
    `AttnBackend.auto`."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
    return None


def _entries(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    return {str(_value(key)): value for key, value in zip(node.keys, node.values, strict=True)}


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise Unreadable(f"needs the sources of {module}, which cannot be read: {error}") from None


def _path(module: str) -> Path:
    top, *rest = module.split(".")
    spec = find_spec(top)  # of a submodule, it would import the packages that contain it
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        path = Path(folder, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise Unreadable(f"needs {module}, which is not installed")


def _package(module: str, level: int) -> str:
    parts = module.split(".")
    return ".".join(parts[: len(parts) - level + (_path(module).name == "__init__.py")])
