"""Runs the command: in a fork of this process, which has imported what it needs, or in a Python of its own."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, TextIO

import pytest

import canzona_cli.cli.app
from canzona_cli.cli.commands import train_run
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.tree import list_recipes
from canzona_cli.launch import torchrun
from canzona_cli.launch.torchrun import LaunchCommand
from tests.records.runs import CORPUS
from tests.waiting import PATIENCE_S


def canzona(
    *arguments: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`canzona ARGUMENTS` in an 80-column terminal that is not one; text out and err. Asserts the exit code, if given.

    A fork costs a hundredth of a Python that imports everything again, and is as well apart from the tests: its own
    working directory, environment and descriptors. Variables that Python itself reads when it starts have no effect.
    """
    ready_to_fork()
    argv = [str(argument) for argument in arguments]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = multiprocessing.get_context("fork").Process(
            target=_command, args=(argv, cwd, _environment(environment), (given, out, err), sender)
        )
        process.start()
        sender.close()
        try:
            process.join(PATIENCE_S)
            assert process.exitcode is not None, f"canzona {argv} does not end"
        finally:
            process.kill()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    _import_as_well(receiver)
    assert code in (None, process.exitcode), (process.exitcode, *said)
    return subprocess.CompletedProcess(["canzona", *argv], process.exitcode, *said)


@cache
def ready_to_fork() -> None:
    """Composes a run and the built-in recipes in this process, so that forks find them, Hydra's plugins and the
    adapters of types made: that is half of what a short command takes, and most of one that looks at all recipes."""
    compose_run(["recipe=tiny", "gpus=2"], training=False)
    list_recipes()


def start_stand_in(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[[RunConfig], Mapping[str, str]] = lambda _: {}
) -> None:
    """Makes `canzona train` start `tests.launch.stand_in` in place of torchrun, and prepare no corpus.

    Args:
        environment: the stand-in's variables, by its run.
    """

    def build(config: RunConfig, run_dir: Path) -> LaunchCommand:
        argv = (sys.executable, "-m", "tests.launch.stand_in", str(run_dir))
        return LaunchCommand(argv=argv, environment=environment(config))

    monkeypatch.setattr(torchrun, "build", build)
    monkeypatch.setattr(train_run, "ensure_corpus", lambda *_, **__: CORPUS)


def canzona_process(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return _ended([sys.executable, "-m", "canzona_cli.cli.app", *arguments], cwd, _environment(environment), code)


def ran(
    *command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program that may import the package, and asserts its exit code; text out and err."""
    return _ended(command, cwd, {**os.environ, **importable(), **(environment or {})}, code)


def _ended(
    command: Sequence[str | Path], cwd: Path | None, environment: Mapping[str, str], code: int | None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def loads_none_of(names: Sequence[str], statement: str) -> None:
    """Asserts that a Python of its own has none of these modules in it after a statement."""
    found = f"import sys\n{statement}\nprint([name for name in {tuple(names)!r} if name in sys.modules])"
    assert ran(sys.executable, "-c", found).stdout.splitlines()[-1] == "[]"


def imports_none_of(names: Sequence[str], *arguments: str) -> None:
    """Asserts that the command succeeds in a Python of its own, and has none of these modules in it at its end."""
    command = f"from canzona_cli.cli.app import main; sys.argv = ['canzona', *{list(arguments)!r}]"
    loads_none_of(names, f"{command}\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code")


def importable() -> dict[str, str]:
    """Makes the package importable from any directory, installed or not."""
    root = str(Path(__file__).resolve().parents[3])
    return {"PYTHONPATH": os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)}


def tests_cache() -> dict[str, str]:
    """The variable that keeps a command from the user's cache folder."""
    return {"CANZONA_CACHE": os.environ["CANZONA_CACHE"]}


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("CANZONA", "_CANZONA"))}
    return {**settings, **importable(), **tests_cache(), "COLUMNS": "80", "NO_COLOR": "1", **(more or {})}


def _command(
    argv: list[str],
    cwd: Path | None,
    environment: dict[str, str],
    files: tuple[BinaryIO, BinaryIO, BinaryIO],
    sender: Connection,
) -> None:
    before = set(sys.modules)
    for descriptor, file in enumerate(files):
        os.dup2(file.fileno(), descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _text(1), _text(2)  # noqa: SIM115
    os.chdir(cwd or Path.cwd())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [canzona_cli.cli.app.__file__, *argv]
    code: int | str | None = 0
    try:
        canzona_cli.cli.app.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    imported = sys.modules.keys() - before
    # torch would make threads here, and what forks then may hang.
    sender.send([] if "torch" in imported else [name for name in imported if name.startswith("canzona_cli.")])
    os._exit(code if isinstance(code, int) else bool(code))


def _text(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _import_as_well(receiver: Connection) -> None:
    """Import what a command has imported, for those after it."""
    try:
        names: list[str] = receiver.recv()
    except EOFError:  # it was killed
        return
    for name in names:
        import_module(name)
