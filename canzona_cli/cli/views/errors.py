"""The error messages of all commands: each problem's setting, value, reason and fix, or the report of a
bug."""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, RenderableType
from rich.text import Text

from canzona_cli import __version__
from canzona_cli.cli.views.page import Page, Screen, paragraph
from canzona_cli.config.secrets import redact, shown_value
from canzona_cli.core.errors import BadUsage, CanzonaError, ConfigError, ExitCode, Problem, machine_error
from canzona_cli.records.words import clean, plural

_LONGEST_VALUE = 200


def show_failure(error: Exception) -> int:
    """Prints the error that ended the command on standard error; returns the exit code."""
    reported = error if isinstance(error, CanzonaError) else machine_error(error)
    if reported is None:
        return _show_bug(error)
    Console(stderr=True).print(ErrorView(error=reported), soft_wrap=True)
    return int(reported.exit_code)


@dataclass(frozen=True, kw_only=True)
class ErrorView(Page):
    """A headline, and for each problem `key = value`, the reason, and the fix after an arrow.

    Consecutive problems with the same reason and fix share one reason and fix, below their keys.
    """

    error: CanzonaError

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        problems = self.error.problems
        headline = Text(_headline(self.error), style="bold red")
        if len(problems) > 1:
            headline.append(f": {plural(len(problems), 'problem')}")
        yield paragraph(headline)
        for (reason, fix), alike in groupby(problems, key=lambda problem: (problem.reason, problem.fix)):
            yield Text()
            for problem in alike:
                yield paragraph(_place(problem), "bold", first="  ", rest="      ")
            yield paragraph(_lines(reason), first="    ")
            if fix:
                yield paragraph(_lines(fix, "green"), first="    → ")


def _lines(text: str, style: str = "") -> Text:
    """Returns a reason or a fix, which may have several lines, without secrets and control characters."""
    return Text(clean(redact(text), newlines=True), style=style)


def _headline(error: CanzonaError) -> str:
    """Returns the error's headline, or that of `BadUsage` if only a command's arguments and options are
    wrong."""
    keys = [problem.key for problem in error.problems]
    only_arguments = keys and all(key.startswith("--") or key.isupper() for key in keys)
    return BadUsage.headline if only_arguments and isinstance(error, ConfigError) else error.headline


def _place(problem: Problem) -> str:
    key = clean(redact(problem.key))
    if problem.value is None:
        return key
    shown = shown_value(problem.key, problem.value)
    value = clean(str(shown).lower() if isinstance(shown, bool) else shown)
    if len(value) > _LONGEST_VALUE:
        value = value[: _LONGEST_VALUE - 3] + "..."
    # Without the quotes, an empty string would look like a missing value.
    return f"{key} = {value or "''"}"


def _show_bug(error: Exception) -> int:
    report = redact("".join(traceback.format_exception(error)))
    header = f"canzona {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n"
    sys.stderr.write(f"This is a bug in canzona: {type(error).__name__}: {redact(str(error))}\n")
    try:
        descriptor, path = tempfile.mkstemp(prefix="canzona-bug-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(header + redact(" ".join(sys.argv)) + "\n\n" + report)
    except OSError:
        sys.stderr.write(report)
    else:
        sys.stderr.write(f"The traceback is in {path}; please report it and describe what you did.\n")
    return int(ExitCode.CRASH)
