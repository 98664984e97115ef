"""Reads the arguments of a Megatron-LM run from a script, a command line, Megatron's printed arguments, or a
checkpoint.

The table `megatron_arguments.yaml` in this folder gives the meaning of each argument for canzona.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final, Literal

from canzona_cli.config.reading import LARGEST_YAML, Unreadable, parse_yaml, read_plain
from canzona_cli.config.shell_script import Script, known_part, read_script, unknown
from canzona_cli.errors import ConfigError, Problem

OPTION: Final = "--from-megatron"
_TABLE: Final = Path(__file__).with_suffix(".yaml")
_PRINTED: Final = re.compile(r"-{8,} arguments -{8,}(.*?)-{8,} end of arguments -{8,}", re.DOTALL)
_PRINTED_LINE: Final = re.compile(r"^(?:.*?\s)?([A-Za-z_]\w*) \.* (.*)$", re.MULTILINE)
_NOTHING: Final = frozenset({"None", "[]", ""})
_DTYPES: Final = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_NODES: Final = re.compile(r"^#SBATCH\s+(?:--nodes|-N)[=\s]*(\d+)\s*$", re.MULTILINE)
_PER_NODE: Final = (
    re.compile(r"^#SBATCH\s+(?:--gpus-per-node|--gres)[=\s]*(?:gpu:)?(?:\w+:)?(\d+)", re.MULTILINE),
    re.compile(r"^#SBATCH\s+--ntasks-per-node[=\s]*(\d+)", re.MULTILINE),
)

Meaning = Literal["same", "muon", "used", "refused", "plans_only", "left_out", "no_effect"]
"""The sections of the table that list arguments."""


@cache
def table() -> Mapping[str, Mapping[str, object]]:
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


def default(name: str) -> object:
    """Returns Megatron's default for an argument; None if it has none, or if the table does not give it."""
    section = meaning(name)
    if section is None or section == "no_effect":
        return None
    entry = table()[section][name]
    return entry[0] if isinstance(entry, list) else entry


def limited(section: Meaning) -> Iterator[tuple[str, tuple[object, list[object], str]]]:
    """Yields the arguments of a section in which every entry limits the accepted values. Each comes with
    Megatron's default, the accepted values, and the reason for the limit."""
    for name, entry in table()[section].items():
        assert isinstance(entry, list)
        megatron_default, accepted, reason = entry
        yield name, (megatron_default, accepted, reason)


def argument_of(flag: str) -> tuple[str, str | None]:
    """Returns the name of the argument that a flag sets, and the value that the flag implies (None if the
    value follows the flag)."""
    name = flag.lstrip("-").replace("-", "_")
    renamed = table()["flags"].get(name)
    if isinstance(renamed, list):
        argument, value = renamed
        return str(argument), value
    if meaning(name) is None:
        for prefix in ("no_", "disable_"):
            if name.startswith(prefix) and meaning(name.removeprefix(prefix)) is not None:
                return name.removeprefix(prefix), "false"
    return name, None


@dataclass(kw_only=True)
class Arguments:
    """The arguments of a Megatron-LM run, read from a file or a checkpoint."""

    path: Path
    values: dict[str, str] = field(default_factory=dict)
    """The values by Megatron's names; `true` or `false` for switches."""
    written: dict[str, str] = field(default_factory=dict)
    """The arguments as written in the file (flags, for example), by Megatron's names."""
    not_understood: list[str] = field(default_factory=list)
    """The arguments that canzona does not know or cannot interpret, as written in the file."""
    no_effect: list[str] = field(default_factory=list)
    """The arguments that have no effect on a plan, as written in the file."""
    sourced: list[str] = field(default_factory=list)
    """The scripts that the file includes with `source`, which are not read."""
    nodes: int | None = None
    per_node: int | None = None
    """The number of processes on each node."""

    def add(self, name: str, value: str, written: str) -> None:
        """Adds an argument. If it is added more than once, the last value wins."""
        match meaning(name):
            case None:
                self.not_understood.append(written)
            case "no_effect":
                self.no_effect.append(written)
            case _:
                self.values[name] = value
                self.written[name] = written


def read_arguments(path: Path) -> Arguments:
    """Reads the arguments of a Megatron-LM run.

    Raises:
        ConfigError: the file cannot be read or contains no Megatron arguments.
    """
    arguments = Arguments(path=path)
    try:
        text = read_plain(path, most=LARGEST_YAML).decode(errors="replace").replace("\r\n", "\n")
        if printed := _PRINTED.search(text):
            _take_printed(printed[1], arguments)
        else:
            _take_script(text, read_script(text), arguments)
    except Unreadable as error:
        fix = "give a script, a command line, or the arguments that Megatron prints when it starts"
        raise ConfigError(Problem(OPTION, f"{error}", fix, value=str(path))) from None
    return arguments


def saved_arguments(values: Mapping[str, object], path: Path) -> Arguments:
    """Returns the arguments that Megatron-LM saved in a checkpoint.

    Args:
        path: the checkpoint.
    """
    arguments = Arguments(path=path)
    for name, value in values.items():
        _take_value(name, str(value), arguments)
    return arguments


def _take_printed(text: str, arguments: Arguments) -> None:
    for name, value in _PRINTED_LINE.findall(text):
        _take_value(name, value.strip(), arguments)


def _take_value(name: str, value: str, arguments: Arguments) -> None:
    """Adds an argument whose value is written in Python's notation, such as `True`."""
    if value in _NOTHING or (meaning(name) is None and value == "False"):
        return
    switch_value = {"True": "true", "False": "false"}.get(value)
    arguments.add(name, switch_value or _DTYPES.get(value, value.strip("[]'")), name)


def _take_script(text: str, script: Script, arguments: Arguments) -> None:
    launcher, words = _command_line(script)
    if not any(word.startswith("--") for word in words):
        raise Unreadable("contains no command with Megatron arguments")
    for flag, values in _flags(words):
        name, implied = argument_of(flag)
        is_switch = isinstance(default(name), bool)
        takes_value = meaning(name) is not None and not is_switch
        # An unknown word that is not the flag's value may expand to other flags.
        hidden = [word for word in (values[1:] if takes_value else values) if unknown(word)]
        arguments.not_understood += [f"{unknown(word)}" for word in hidden]
        values = [word for word in values if word not in hidden]
        if is_switch is bool(values) and meaning(name) not in (None, "no_effect") and implied is None:
            arguments.not_understood.append(" ".join([flag, *values]))
        else:
            arguments.add(name, implied or " ".join(values) or "true", flag)
    arguments.not_understood += [word for word in script.undecided if word.startswith("--")]
    arguments.sourced = [known_part(words[1]) for words in script.commands if words[0] in ("source", ".") and words[1:]]
    launcher_flags = {flag.replace("-", "_"): values for flag, values in _flags(launcher)}
    nodes = _whole(launcher_flags.get("__nnodes"), _NODES.search(text))
    per_node = _whole(launcher_flags.get("__nproc_per_node"), *(pattern.search(text) for pattern in _PER_NODE))
    if nodes is None and per_node is not None and "__nnodes" not in launcher_flags:
        nodes = 1
    arguments.nodes, arguments.per_node = nodes, per_node
    if nodes and per_node:
        arguments.add("world_size", str(nodes * per_node), "the number of processes")
    elif (world_size := script.variables.get("WORLD_SIZE", "")).isdecimal():
        arguments.add("world_size", world_size, "WORLD_SIZE")


def _command_line(script: Script) -> tuple[list[str], list[str]]:
    """Finds the command with the most flags; returns its words up to and including the Python script, and the
    words after it.

    All lines that begin with a flag form one command, because a file may contain only arguments.
    """
    commands = [[word.strip("'\"") for word in " ".join(words).split()] for words in script.commands]
    commands.append([word for words in commands if words and words[0].startswith("--") for word in words])
    command = max(commands, key=lambda words: sum(word.startswith("--") for word in words))
    script_end = next((index + 1 for index, word in enumerate(command) if word.endswith(".py")), 0)
    return command[:script_end], command[script_end:]


def _flags(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag of a command line with the words up to the next flag."""
    flag, values = "", list[str]()
    for word in (*words, "--"):
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag:
            yield flag, values
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        flag = "" if flag == "--" else flag


def _whole(values: Sequence[str] | None, *matches: re.Match[str] | None) -> int | None:
    """Returns the first whole number among a flag's values and the matches' first groups; None if there is
    none."""
    texts = [*(values or ()), *(match[1] for match in matches if match)]
    return next((int(text) for text in texts if text.isdecimal()), None)
