"""What the attacks share: a run to attack, and one table of them all, which stands at the end of the output."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from canzona_cli.commands import train_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.launch import torchrun
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.run.files import RunFiles
from tests.attacks.table import AttackRow, RecordAttack, table_lines
from tests.attacks.victim import TINY, Attack, Streams, Victim, attacked
from tests.run.runs import CORPUS

_ROWS: pytest.StashKey[list[AttackRow]] = pytest.StashKey()


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Of the run that `train` starts."""
    return RunFiles(tmp_path / "run")


@pytest.fixture
def train(tmp_path: Path, files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attack]:
    """Starts `canzona train`, all real but for torchrun and its ranks, of which `tests.attacks.worker` is one."""

    def build(config: RunConfig, run_dir: Path) -> LaunchCommand:
        return LaunchCommand(argv=(sys.executable, "-m", "tests.attacks.worker", str(run_dir)), environment={})

    def corpus(*_: object) -> PreparedCorpus:
        return CORPUS

    monkeypatch.setattr(torchrun, "build", build)
    monkeypatch.setattr(train_run, "ensure_corpus", corpus)
    started: list[Victim] = []

    def start(
        streams: Streams,
        *overrides: str,
        ending: str = "stopped",
        environment: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Victim:
        wanted = {"ENDING": ending, **(environment or {})}
        arguments = ("train", *TINY, f"run.dir={files.root}", *overrides)
        started.append(attacked(*arguments, streams=streams, cwd=cwd or tmp_path, environment=wanted, before=before))
        return started[-1]

    yield start
    for victim in started:
        victim.kill()


@pytest.fixture
def record_attack(request: pytest.FixtureRequest) -> RecordAttack:
    """Call with what was done and what came of it, after the assertions."""

    def record(*, attack: str, answer: str, exit_code: int | None) -> None:
        row = AttackRow(attack=attack, answer=answer, exit_code=exit_code)
        request.config.stash.setdefault(_ROWS, []).append(row)

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("attacks")
        for line in table_lines(rows):
            terminalreporter.write_line(line)
