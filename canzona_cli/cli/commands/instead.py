"""Explains a command line that the parser refuses, and suggests replacements for options and commands that do
not exist. This module is imported only for such a command line."""

import shlex
from collections.abc import Collection, Sequence
from typing import Any

from canzona_cli.config.unknown_keys import as_override, hints, missing_feature_problem
from canzona_cli.core.errors import Problem, closest

_LEAVE_OUT = "leave it out"
"""The fix for a setting that canzona does not have. It makes no sense for a command, so `other_command`
replaces it."""


def other_options(context: Any, words: Sequence[str], unknown: str) -> list[Problem]:
    """Suggests a replacement for each option that the command does not have.

    Args:
        context: the parser's context of the command.
        words: the arguments after the command's name.
        unknown: the first unknown option, as the parser names it.
    """
    options, problems = _options(context), []
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option != unknown and (not option.startswith("--") or len(option) == 2 or option in options):
            continue
        next_word = words[index + 1] if index + 1 < len(words) else ""
        if not equals and not next_word.startswith("-") and "=" not in next_word:
            value = next_word
        problems.append(_other_option(context, option, value))
    return problems or [_other_option(context, unknown, "")]


def _removed(typed: str) -> str | None:
    """Returns the fix for a removed command or option; None for any other."""
    fix = hints("commands").get(typed)
    return None if fix is None else str(fix)


def _command(context: Any) -> str:
    """Returns the command as it is typed after `canzona`, such as `clusters list`."""
    return str(context.command_path.partition(" ")[2])


def _options(context: Any) -> list[str]:
    return [name for part in context.command.params for name in part.opts if name.startswith("-")]


def other_command(words: Sequence[str], commands: Collection[str]) -> Problem:
    """Suggests a replacement for a command that does not exist.

    Args:
        words: the command line, starting with the unknown command.
        commands: the existing commands.
    """
    word, *after = words
    reason = "there is no such command"
    if (removed := _removed(word)) is not None:
        reason, fix = "was removed", removed
    elif (missing := missing_feature_problem(word)) is not None:
        reason = missing.reason
        fix = missing.fix if missing.fix != _LEAVE_OUT else "see canzona --help"
    elif word == "help":
        fix = f"write canzona {shlex.join([*after[:1], '--help'])}"
    elif "=" in word or word.endswith((".yaml", ".yml")):
        override = word if "=" in word else f"recipe={word}"
        reason, fix = "is not a command", f"write canzona train {shlex.join([override, *after])}"
    else:
        hint = hints("words").get(word.lower()) or closest(word, commands)
        fix = f"write canzona {hint} {shlex.join(after)}".rstrip() if hint else f"there are {', '.join(commands)}"
    return Problem(key=word, reason=reason, fix=fix)


def bad_usage(context: Any, error: Any, words: Sequence[str]) -> Problem:
    """Returns the problem with arguments that the parser refuses: an unknown subcommand, a missing argument,
    too many arguments, or a value that is not valid.

    Args:
        context: the parser's context of the command.
        error: the parser's error.
        words: the arguments after the command's name.
    """
    path, fix = context.command_path, f"see {context.command_path} --help"
    parameter = getattr(error, "param", None)
    subcommands = getattr(context.command, "commands", {})
    if parameter is None and subcommands:
        word = words[0] if words else ""
        if (instead := _removed(f"{_command(context)} {word}")) is not None:
            return Problem(key=f"{path} {word}", reason="was removed", fix=instead)
        near = closest(word, subcommands)
        existing = ", ".join(f"{path} {name}" for name in subcommands)
        fix = f"write {path} {near}" if near else f"there are {existing}"
        return Problem(key=f"{path} {word}".strip(), reason="there is no such command", fix=fix)
    if parameter is None:
        return Problem(key=path, reason=_sentence(error.format_message()), fix=fix)
    option, value = _option_and_value(parameter)
    name = option or value
    if getattr(error, "message", "") in ("", None):
        required = [_option_and_value(other) for other in context.command.params if other.required]
        arguments = [value for option, value in required if not option]
        options = [f"{option} {value}" for option, value in required if option]
        return Problem(key=name, reason="is missing", fix=f"write {' '.join([path, *arguments, *options])}")
    return Problem(key=name, reason=_sentence(error.message), fix=fix)


def _option_and_value(parameter: Any) -> tuple[str, str]:
    """Returns the longest name of an option (empty for an argument), and the placeholder of its value."""
    option = max(parameter.opts, key=len) if parameter.param_type_name == "option" else ""
    value = parameter.metavar or str(parameter.name).upper()
    return option, value + ("..." if parameter.nargs == -1 else "")


def _sentence(message: str) -> str:
    """Returns the parser's message as a reason, without its capital letter and full stop."""
    return message[:1].lower() + message[1:].rstrip(".")


def _other_option(context: Any, option: str, value: str) -> Problem:
    """Suggests a replacement for one option: a setting, another option, or the help page."""
    if (fix := _removed(f"{_command(context)} {option}")) is not None:
        return Problem(key=option, value=value or None, reason="was removed", fix=fix)
    near = closest(option, _options(context), cutoff=0.75)
    takes_overrides = any(part.name == "overrides" for part in context.command.params)
    hint = as_override(option, value, exact=near is not None) if takes_overrides else None
    reason = f"is not an option of {context.command_path}"
    if hint is None:
        fix = f"did you mean {near}?" if near else f"see {context.command_path} --help"
        return Problem(key=option, reason=reason, fix=fix)
    if option.startswith("--resume"):
        hint += ": a run continues in its directory"
    reason += "; settings are written KEY=VALUE"
    return Problem(key=option, value=value or None, reason=reason, fix=f"write {hint}")
