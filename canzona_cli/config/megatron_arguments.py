"""Reads the arguments of a Megatron-LM run: from the block that Megatron prints at its start, from a command line
without shell, or from a checkpoint.

The table `megatron_arguments.yaml` in this folder gives the meaning of each argument for canzona. Names and
defaults are those of the installed Megatron-LM (`megatron_parser`).
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from canzona_cli.config.megatron_parser import defaults, flags_of, parser
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
