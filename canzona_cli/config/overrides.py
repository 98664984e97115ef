"""Parses `KEY=VALUE` arguments one by one, so that all bad arguments are reported together."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.config.recipes import GROUPS, WRITTEN
from canzona_cli.config.secrets import resolver_problem, target_problem
from canzona_cli.config.settings import mapping_key, setting_of, settings
from canzona_cli.config.unknown_keys import closest_key, unknown_key
from canzona_cli.core.errors import Problem, closest

_BARE_WORD = re.compile(r"[-+\w.]+")
_PLAIN = re.compile(r"[\w./~@%+-]*[./~@%+-][\w./~@%+-]*")
"""The path-like texts, which `text_value` does not quote. Letters alone could mean true or null, and digits
alone would be a number."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}|[1-9](\.[0-9]{1,17})?e-?[0-9]{1,2}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*([-.][A-Za-z0-9_]+)*")
_SHORT = {"init": "checkpoint.weights_from"}
"""The short names of settings on the command line."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The parsed overrides of a command line."""

    groups: Mapping[str, str]
    """The chosen options by group (`recipe`, `model`, ...). A recipe or cluster may be a path."""
    values: Mapping[str, object]
    """The values by dotted key. All keys are existing settings."""
    texts: Mapping[str, str]
    """The values as text, by dotted key."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    """A warning for each value that a later, different value of the same setting replaces."""


def parse_overrides(arguments: Sequence[str]) -> Overrides:
    """Parses every argument, with values in Hydra's override grammar. Problems are returned in the result, not
    raised."""
    groups: dict[str, str] = {}
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    warnings: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key, text = _SHORT.get(key.strip(), key.strip()), text.strip()
        if argument.encode(errors="ignore").decode() != argument:  # bytes that Python could not decode
            fix = "rename the file or directory: its name must be UTF-8"
            problems.append(Problem(key, "is not UTF-8", fix, value=text))
        elif not equals or not key:
            problems.append(_not_an_override(argument))
        elif key[0] in "+~":
            problems.append(_not_a_change(key, text))
        elif "_target_" in argument:
            problems.append(target_problem(key, f"in the override {argument}"))
        elif key in GROUPS:
            _read_group(key, text, groups, problems)
        elif setting_of(key) is None:
            problems.append(unknown_key(key, text))
        elif (mapping := mapping_key(key)) is not None and not key.removeprefix(f"{mapping}.").isidentifier():
            fix = f"write {mapping}.NAME=VALUE"
            problems.append(Problem(key, "is not a valid Python argument name", fix, value=text))
        elif key == "optimizer.name":
            reason = "is set by choosing an optimizer"
            problems.append(Problem(key, reason, f"write optimizer={text}", value=text))
        else:
            parsed = _parse_value(key, text)
            if isinstance(parsed, Problem):
                problems.append(parsed)
            else:
                if texts.get(key, text) != text:
                    warnings.append(f"{key}={texts[key]} is ignored: {key}={text} comes after it")
                (values[key],) = parsed
                texts[key] = text
    return Overrides(groups=groups, values=values, texts=texts, problems=tuple(problems), warnings=tuple(warnings))


def key_of(override: str) -> str:
    """Returns the full key of a `KEY=VALUE` argument, whose key may be a short name such as `init`."""
    key = override.partition("=")[0].strip()
    return _SHORT.get(key, key)


def plain_value(text: str) -> str | int | float | None:
    """Returns the value of a text that is an ordinary number or word in Hydra's grammar, so that most command lines
    start without importing Hydra; None for any other text."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text if _WORD.fullmatch(text) and text.lower() not in ("null", "true", "false", "nan", "inf") else None


def text_value(text: str) -> str:
    """Formats a text as the value of a setting that takes text. All texts except path-like ones are quoted."""
    if _PLAIN.fullmatch(text):
        return text
    # In Hydra's grammar a backslash is an escape only before a quote, so only such backslashes are doubled.
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def _read_group(group: str, text: str, groups: dict[str, str], problems: list[Problem]) -> None:
    option = text.strip("'\"")
    if group in groups:
        problems.append(Problem(group, f"is given twice, first as {groups[group]}", "keep one of them", value=option))
    elif not option or option.startswith(("[", "{", "$")) or ("," in option and "/" not in option):
        unnamed = Problem(group, "does not name an option", f"write {group}=NAME", value=text)
        problems.append(_sweep_problem(group, text) if "," in option else unnamed)
    else:
        groups[group] = option


def _parse_value(key: str, text: str) -> tuple[object] | Problem:
    if (refused := resolver_problem(key, text)) is not None:
        return refused
    if (plain := plain_value(text)) is not None:
        return (text if _takes_text(key) else plain,)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except (RecursionError, ValueError):  # for example a thousand brackets, or an integer of 5,000 digits
        return Problem(key, "is not a valid value", f"write {key}=VALUE", value=text)
    except HydraException as error:
        if _takes_text(key):
            return (text,)  # a path may contain characters that are special in the grammar, such as parentheses
        if (words := _plain_words(key, text)) is not None:
            return (words,)
        if (bare := text.rstrip(",; ")) not in ("", text) and not isinstance(_parse_value(key, bare), Problem):
            return Problem(key, f"ends in {text[len(bare) :]!r}", f"write {key}={bare}", value=text)
        reason = str(error).splitlines()[0].partition(" expecting ")[0].rstrip(".")  # the rest is Hydra's grammar
        reason = f"cannot be read: {reason[:1].lower()}{reason[1:]}"
        return Problem(key, reason, f"write a plain value: {key}=VALUE", value=text)
    if override.is_sweep_override():
        return _sweep_problem(key, text)
    value = override.value()
    if _takes_text(key) and value is not None and not isinstance(value, str | list | dict):
        value = text.strip("'\"")  # for example `name=0042`
    return (value,)


def _plain_words(key: str, text: str) -> list[str] | None:
    """Returns the words of a list such as `[numactl,--membind=0-3,canzona]`, whose options Hydra's grammar does not
    accept without quotes; None if the setting is not a list, or a word has quotes, brackets or spaces."""
    if key not in settings() or settings()[key].kind != "list" or re.fullmatch(r"\[[^][{}'\"\s]*\]", text) is None:
        return None
    return text[1:-1].split(",")


def _takes_text(key: str) -> bool:
    return key in settings() and settings()[key].kind == "text"


def _sweep_problem(key: str, text: str) -> Problem:
    quote = f"; or quote the value if it is a single text: {key}=\"'{text}'\"" if _takes_text(key) else ""
    fix = f"add --sweep to `canzona train` or `canzona slurm` to start a run for each value{quote}"
    return Problem(key, "asks for several runs", fix, value=text)


def _not_an_override(argument: str) -> Problem:
    if argument and (Path(argument) / WRITTEN).is_file():
        run, settings_file = shlex.quote(argument), shlex.quote(str(Path(argument) / WRITTEN))
        fix = f"write recipe={settings_file} for another run with its settings, or canzona resume {run} to continue it"
        return Problem(argument, "is a run directory, not a setting", fix)
    if argument.endswith((".yaml", ".yml")) or closest(argument, ("qwen3-tiny",), cutoff=0.5) is not None:
        return Problem(argument, "is not of the form KEY=VALUE", f"write recipe={argument}")
    hint = closest_key(argument) if _BARE_WORD.fullmatch(argument) else None
    fix = f"write {hint}=VALUE" if hint else "write a setting and its value, for example train.steps=100"
    return Problem(argument or "''", "is not of the form KEY=VALUE", fix)


def _not_a_change(key: str, text: str) -> Problem:
    bare = key.lstrip("+~")
    existing = bare if bare in settings() or bare in GROUPS else closest_key(bare)
    reason = f"{key[: len(key) - len(bare)]} would add or remove a setting, but canzona's settings are fixed"
    fix = f"write {existing}=VALUE" if existing else "write KEY=VALUE with a key that exists"
    return Problem(key, reason, fix, value=text)
