"""The last words of a failed command: what to do about it, or where the traceback of our own mistake is."""

import os
import sys
import tempfile
import traceback

from canzona_cli import __version__
from canzona_cli.config.redaction import redacted
from canzona_cli.errors import CanzonaError, ExitCode


def show_failure(error: Exception) -> int:
    """Says what ended the command; returns its exit code."""
    return _show_error(error) if isinstance(error, CanzonaError) else _show_bug(error)


def _show_error(error: CanzonaError) -> int:
    from rich.console import Console

    from canzona_cli.report.errors import render_error

    Console(stderr=True).print(render_error(error))
    return int(error.exit_code)


def _show_bug(error: Exception) -> int:
    report = redacted("".join(traceback.format_exception(error)))
    header = f"canzona {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n"
    sys.stderr.write(f"This is a bug in canzona: {type(error).__name__}: {redacted(str(error))}\n")
    try:
        descriptor, path = tempfile.mkstemp(prefix="canzona-bug-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(header + redacted(" ".join(sys.argv)) + "\n\n" + report)
    except OSError:
        sys.stderr.write(report)
    else:
        sys.stderr.write(f"Its traceback is in {path}; please send it along with what you did.\n")
    return int(ExitCode.CRASH)
