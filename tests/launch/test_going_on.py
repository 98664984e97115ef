"""The command that a run leaves is what was typed, means the same to a shell, and names the run's directory."""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.overrides import parse_overrides
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.restarts import resume_command, resume_hint
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import RunStatus
from tests.checkpoint.checkpoints import save
from tests.faults.support import run_config

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BATCH = STEP | {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_PARTITION": "h100",
    "SLURM_JOB_ACCOUNT": "us",
}
TWO_NODES = run_config(nodes=2)


@pytest.mark.parametrize("run_dir", ["/runs/qwen3-tiny-20261122", "/my runs/a, b", "/it's=(1) $HOME/\\'x", "/a\nb"])
def test_any_shell_and_the_grammar_of_overrides_read_what_was_typed(run_dir: str) -> None:
    typed = ["recipe=my recipe.yaml", "run.trace_steps=[5,7]", "data.path='a, b'", 'data.cache_dir=$HOME/"x"']
    command = resume_command(typed, [Path("/own recipes")], run_config(), Path(run_dir), environment={})
    assert "\n" not in command
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    program, train, *words = told.decode().split("\0")[:-1]
    assert [program, train, *words[-2:]] == ["canzona", "train", "--recipes-dir", "/own recipes"]
    assert words[:-3] == typed
    read = parse_overrides([words[-3]])
    assert not read.problems
    assert read.values == {"run.dir": run_dir}


def test_where_it_began_once_is_not_where_it_goes_on() -> None:
    typed = ["run.dir=old", "checkpoint.resume=step-00000030", "checkpoint.resume=runs/other", "gpus=2"]
    command = resume_command(typed, [], run_config(), Path("/runs/old"), environment={})
    assert command == "canzona train checkpoint.resume=runs/other gpus=2 run.dir=/runs/old"


def test_slurm_gets_another_job_with_the_limits_of_this_one_and_an_allocation_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, where = tmp_path / "squeue", os.environ["PATH"]
    for limit, words in (("1:01:00", "--time=1:01:00 "), ("UNLIMITED", "")):
        squeue.write_text(f'#!/bin/sh\n[ "$3" = --jobs=7 ] && echo {limit}\n')
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{where}")
        job = resume_command(["gpus=2"], [], TWO_NODES, Path("/r"), environment=BATCH)
        assert job == f"canzona slurm --submit {words}--partition=h100 --account=us gpus=2 run.dir=/r"
    step = resume_command(["gpus=2"], [], TWO_NODES, Path("/r"), environment=STEP)
    assert step == "srun --nodes=2 --ntasks-per-node=1 canzona train gpus=2 run.dir=/r"
    login = resume_command(["gpus=2"], [], TWO_NODES, Path("/r"), environment={"SLURM_JOB_ID": "7"})
    assert shlex.split(login)[:2] == ["canzona", "train"]


@pytest.mark.parametrize(
    ("status", "code", "goes_on"),
    [
        ("interrupted", 130, True),
        ("preempted", 75, True),
        ("failed", 70, True),
        ("failed", 71, True),
        ("failed", 3, True),
        ("diverged", 70, True),
        ("failed", 2, False),
        ("failed", 4, False),
        ("failed", 5, False),
        ("done", 0, False),
    ],
)
def test_it_is_left_by_every_run_that_ended_early_and_would_not_end_so_again(
    tmp_path: Path, status: RunStatus, code: int, goes_on: bool
) -> None:
    outcome = Outcome(status=status, exit_code=code)
    assert outcome.resumable is goes_on
    assert resume_hint(outcome, RunFiles(tmp_path), run_config(), {}) == ""


def test_what_to_know_of_it_is_said_beside_it(tmp_path: Path) -> None:
    files, one = RunFiles(tmp_path), run_config()
    preempted = Outcome(status="preempted", exit_code=75, go_on="GO")
    assert resume_hint(preempted, files, one, {}) == "nothing was saved; to start again in this directory: GO"
    save(files.checkpoints, 3)
    assert resume_hint(preempted, files, one, {}) == "to go on: GO"
    assert resume_hint(preempted, files, one, BATCH) == "to go on, unless Slurm queues this job again: GO"
    assert (
        resume_hint(preempted, files, TWO_NODES, {}) == "to go on, on every machine with its own cluster.node_rank: GO"
    )
    diverged = replace(preempted, status="diverged")
    assert resume_hint(diverged, files, one, {}) == "to go on, with what is said above added: GO"
