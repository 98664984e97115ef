"""One Slurm for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, missing, running


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    lacking = missing()
    if lacking is not None:
        pytest.fail(f"no Slurm to test with: {lacking}")
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_jobs_left(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.cancel_all()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder from which a test's jobs are submitted and in which they leave their logs."""
    return tmp_path
