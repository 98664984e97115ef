"""The paths of a run and the mounts of the container in which its jobs run it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.launch.preflight import container_problems
from tests.cli.commands.support import canzona
from tests.faults.support import run_config

APPTAINER = ("apptainer", "exec", "--nv")
PYXIS = "--container-image=/images/canzona.sqsh"


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANZONA_CACHE", "/scratch/cache")


def contained(
    command: tuple[str, ...] = (),
    srun_args: tuple[str, ...] = (),
    setup: tuple[str, ...] = (),
    *,
    path: str = "/scratch/corpus",
    root: str = "/scratch/runs",
    validation: str | None = None,
) -> RunConfig:
    """Returns a run in a container, whose paths are all below /scratch unless said otherwise."""
    config = run_config()
    data = replace(config.data, source="prepared", path=path, validation=validation)
    cluster = replace(config.cluster, command=command, srun_args=srun_args, setup=setup)
    return replace(config, cluster=cluster, data=data, run=replace(config.run, root=root, dir=None))


@pytest.mark.parametrize(
    ("command", "srun_args"),
    [
        ((), ()),
        (("my-wrapper", "canzona"), ()),
        ((*APPTAINER, "--contain", "--bind", "/data,/scratch:/scratch:ro", "x.sif", "canzona"), ()),
        ((*APPTAINER, "-C", "--bind=/scratch", "x.sif", "canzona"), ()),
        ((*APPTAINER, "-C", "--mount", "type=bind,src=/scratch,dst=/scratch", "x.sif", "canzona"), ()),
        (("docker", "run", "-v", "/scratch:/scratch", "image", "canzona"), ()),
        (("podman", "run", "--volume=/scratch/:/scratch", "image", "canzona"), ()),
        (("canzona",), (PYXIS, "--container-mounts=/images,/scratch:/scratch")),
    ],
)
def test_paths_below_a_mount_are_accepted(command: tuple[str, ...], srun_args: tuple[str, ...]) -> None:
    assert [*container_problems(contained(command, srun_args))] == []


@pytest.mark.parametrize(
    ("command", "srun_args"),
    [
        ((*APPTAINER, "-C", "--bind", "/data", "x.sif", "canzona"), ()),
        ((*APPTAINER, "--bind", "/scratch:/inside", "x.sif", "canzona"), ()),
        (("docker", "run", "-v", "scratch:/scratch", "image", "canzona"), ()),
        (("docker", "run", "--mount", "type=bind,source=/scratch,target=/s", "image", "canzona"), ()),
        (("canzona",), (PYXIS, "--container-mounts=/scratch2")),
        (("canzona",), (PYXIS,)),
    ],
)
def test_paths_that_the_container_lacks_are_refused_one_by_one(
    command: tuple[str, ...], srun_args: tuple[str, ...]
) -> None:
    problems = [*container_problems(contained(command, srun_args, validation="/scratch/held-out"))]
    assert [(problem.key, problem.value) for problem in problems] == [
        ("data.path", "/scratch/corpus"),
        ("data.validation", "/scratch/held-out"),
        ("run.root", "/scratch/runs"),
        ("CANZONA_CACHE", "/scratch/cache"),
    ]
    assert all("mount /scratch in" in problem.fix for problem in problems)


def test_a_relative_path_is_refused_unless_the_container_starts_in_the_same_folder() -> None:
    [problem] = container_problems(contained(("docker", "run", "-v", "/scratch:/scratch", "image"), root="runs"))
    assert (problem.key, problem.fix) == ("run.root", f"run.root={Path.cwd()}/runs")
    assert [*container_problems(contained((*APPTAINER, "-B/x", "-B", "/scratch", "x.sif"), root="runs"))] == []
    [problem] = container_problems(contained((*APPTAINER, "--pwd", "/", "-B", "/scratch", "x.sif"), root="runs"))
    assert problem.key == "run.root"


def test_the_home_directory_and_mounts_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = partial(contained, path="~/corpus")
    monkeypatch.delenv("CANZONA_CACHE", raising=False)
    bind = ("--bind", "/scratch", "x.sif", "canzona")
    assert [*container_problems(at_home((*APPTAINER, *bind)))] == []
    refused = [problem.key for problem in container_problems(at_home((*APPTAINER, "--no-home", *bind)))]
    assert refused == ["data.path", "CANZONA_CACHE"]
    in_set_up = contained((*APPTAINER, "-C", "x.sif"), setup=("export APPTAINER_BIND=/scratch",))
    assert [*container_problems(in_set_up)] == [], "the lines are not read, so nothing is known"
    cache = at_home(("canzona",), (PYXIS, "--container-mounts=/scratch"), ("export CANZONA_CACHE=/scratch/c",))
    assert [problem.key for problem in container_problems(cache)] == ["data.path"]


@pytest.mark.parametrize("command", [("train", "--dry-run"), ("slurm",)])
def test_a_dry_run_and_a_job_are_refused_before_anything_is_submitted(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = ("recipe=qwen3-tiny", "gpus=1", "cluster.command=[docker,run,-v,'/scratch:/scratch',image,canzona]")
    failed = canzona(*command, *run, "run.root=/elsewhere", cwd=tmp_path, code=2)
    assert "run.root" in failed.stderr
    assert "/elsewhere" in failed.stderr
