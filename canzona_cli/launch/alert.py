"""Calls a command of the user's when a run ends, for example to send a message.

The command is in an environment variable, not in a setting: a recipe from somebody else must not execute anything, and
the addresses of chat services are secrets, which settings must not contain.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.processes import kill_tree
from canzona_cli.records.codec import record_dict

VARIABLE: Final = "CANZONA_ON_END"
LIMIT_S = 30.0
"""The seconds that the command may take."""


def alert(
    outcome: Outcome,
    run_dir: Path | None,
    *,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Calls the command with the outcome as one line of JSON on its standard input. The fields are those of
    `result.json`, and `run_dir`. A failure of the command is only reported.

    Args:
        run_dir: the run directory; None if the run ended before it had one.
        say: a function that prints a message for the user at once.
    """
    content = {**record_dict(outcome.result), "run_dir": run_dir}
    try:
        problem = _execute(shlex.split(environment.get(VARIABLE, "")), json.dumps(content, default=str), limit_s)
    except (OSError, ValueError) as error:  # ValueError: a quote is not closed
        problem = f"cannot be executed ({getattr(error, 'strerror', None) or error})"
    if problem:  # without the command's words, because they may contain a secret
        say(f"warning: the command in {VARIABLE} {problem}; the run's exit code stays {outcome.exit_code}")


def _execute(words: list[str], line: str, limit_s: float) -> str:
    """Executes the command; returns what went wrong, empty if nothing did or there is no command."""
    if not words:
        return ""
    # Only the input is a pipe, so a process that the command leaves behind cannot block this one.
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        process.communicate(f"{line}\n".encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:.0f} s and was stopped"
    finally:
        kill_tree(process)
    return f"ended with code {process.returncode}" if process.returncode else ""
