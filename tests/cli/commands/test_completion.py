"""Shell completion in a real bash, with words split at `=` as readline delivers them, and without."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona, importable, ran
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def command_folder(folder: Path) -> Path:
    """A folder with a `canzona` command, as an installation would put on PATH."""
    folder.mkdir(exist_ok=True)
    command = folder / "canzona"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m canzona_cli.cli.app "$@"\n')
    command.chmod(0o755)
    return folder


def complete(words: list[str], tmp_path: Path) -> list[str]:
    """COMPREPLY for these COMP_WORDS, the cursor in the last."""
    script = canzona("--show-completion", "bash", code=0)
    quoted = " ".join(shlex.quote(word) for word in words)
    bash = f"""{script.stdout}
compopt() {{ local IFS=' '; echo "compopt $*"; }}  # outside of readline the real one only complains
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
_canzona_completion canzona
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = f"{command_folder(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"
    result = ran("bash", "--norc", "-c", bash, environment={"PATH": path})
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("canzona train recipe = qwen3-t", ["qwen3-tiny"]),
        ("canzona train recipe=qwen3-t", ["recipe=qwen3-tiny"]),
        ("canzona train rec", ["compopt -o nospace", "recipe="]),
        ("canzona gener", ["generate"]),
    ],
)
def test_bash_offers(words: str, offered: list[str], tmp_path: Path) -> None:
    assert complete(words.split(), tmp_path) == offered


def test_tab_in_an_interactive_bash_finishes_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "rc").write_text(f"{canzona('--show-completion', 'bash').stdout}\nPS1='ready> '\n")
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"],
        env={
            **importable(),
            "PATH": f"{command_folder(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TERM": "dumb",
        },
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    try:
        seen = _read_until(master, "ready> ")
        os.write(master, b"echo typed; canzona train recipe=qwen3-ti\t")
        seen = _read_until(master, "recipe=qwen3-tiny ")
        assert "recipe=qwen3-tiny " in seen, "completed once, the word before the = intact, a space behind"
    finally:
        shell.kill()
        shell.wait(timeout=PATIENCE_S)
        os.close(master)
        os.close(slave)


def _read_until(terminal: int, text: str, timeout_s: float = PATIENCE_S) -> str:
    seen, deadline = "", time.monotonic() + timeout_s
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
