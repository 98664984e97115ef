"""A run to attack."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from canzona_cli.records.files import RunFiles
from tests.attacks.victim import TINY, Attack, Streams, Victim, attacked
from tests.cli.commands.support import canzona, start_stand_in


@pytest.fixture(scope="session", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports and composes what a run needs before commands are forked, because each of them would do it again."""
    assert canzona("train", *TINY, "--dry-run", cwd=tmp_path_factory.mktemp("dry")).returncode == 0


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """The files of the run that `train` starts."""
    return RunFiles(tmp_path / "run")


@pytest.fixture
def train(tmp_path: Path, files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attack]:
    """Starts `canzona train`, all real but for torchrun and its ranks, of which `tests.launch.stand_in` is one."""

    start_stand_in(monkeypatch)
    started: list[Victim] = []

    def start(
        streams: Streams,
        *overrides: str,
        ending: str = "stopped",
        environment: Mapping[str, str | None] = MappingProxyType({}),
        cwd: Path = tmp_path,
        **more: Callable[[], None],
    ) -> Victim:
        wanted = {"STAND_IN": ending, **environment}
        arguments = ("train", *TINY, f"run.dir={files.root}", *overrides)
        started.append(attacked(*arguments, streams=streams, cwd=cwd, environment=wanted, **more))
        return started[-1]

    yield start
    for victim in started:
        victim.kill()
