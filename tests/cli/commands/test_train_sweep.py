"""`canzona train --sweep` and what an array's task makes of it: every run has its turn, its directory and its row."""

import json
from functools import partial
from pathlib import Path

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.writing import exclusive_lock
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.words import duration, size
from tests.cli.commands.support import canzona, start_stand_in

TINY = ("recipe=qwen3-tiny", "gpus=1", "train.steps=1", "model.num_layers=1")


def ending_of(config: RunConfig) -> dict[str, str]:
    """The stand-in's variables: run 3 of a sweep crashes, in run 4 somebody presses Ctrl-C."""
    seed = config.train.seed
    return {"STAND_IN": {3: "crash@1", 4: "ctrl-c@1"}.get(seed, "done@1"), "STAND_IN_LOSS": str(seed)}


def results(root: Path) -> dict[str, tuple[object, object]]:
    found = {path.name: read_json(RunFiles(path).result) or {} for path in sorted(root.iterdir()) if path.is_dir()}
    return {name: (result["status"], result["exit_code"]) for name, result in found.items()}


def test_each_run_has_its_turn_whatever_became_of_the_others_and_the_sweep_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_stand_in(monkeypatch, ending_of)
    train = partial(canzona, "train", *TINY, "--sweep", cwd=tmp_path)
    done = train("train.seed=2,3,1,4,5", "run.dir='here, there'")
    root = tmp_path / "here, there"
    assert done.returncode == 130, done.stderr
    assert results(root) == {
        "seed=1": ("done", 0),
        "seed=2": ("done", 0),
        "seed=3": ("failed", 70),
        "seed=4": ("interrupted", 130),
    }, "the one that failed cost no other; Ctrl-C ends the sweep"
    said = " ".join(done.stderr.split())
    assert said.startswith(f"5 runs in {root}; while they train: canzona report --compare '{root}'")
    assert "5 runs so far: 2 done, 1 failed, 1 interrupted, 1 not begun" in " ".join(done.stdout.split())
    assert "run.dir=" in said
    lines = [line for line in done.stdout.splitlines() if " of 5: " in line]
    assert [line.split(": done")[0] for line in lines if ": done" in line] == [
        "run 1 of 5: train.seed=2",
        "run 3 of 5: train.seed=1",
    ]
    assert len(lines) == 4, "a line for each run"
    assert "layout" not in done.stdout
    table = " ".join(done.stdout.partition("training loss")[2].split())
    assert "all runs 2.3333 1.5275" in table, "the mean of the seeds 1, 2 and 4"
    assert "standard deviation over 3 seeds" in table
    assert "1 run in no mean: seed=3 (failed, step 1)" in table
    assert f"canzona report --compare '{root}'" in said

    looked = train("train.seed=1,2", "run.dir='here, there'", "--dry-run")
    assert looked.returncode == 0, "both are done, which ends the sweep with 0 too"
    assert looked.stdout.count("finished") == 2

    again = train("train.seed=2,3,1,5", "run.dir='here, there'")
    assert again.returncode == 70, "the largest exit code"
    assert "run 1 of 4: train.seed=2: is already finished" in " ".join(again.stderr.split())
    assert results(root)["seed=5"] == ("done", 0)


def test_a_sweep_goes_on_in_its_directory_only_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is kept, so with other steps it would be compared with runs of another schedule."""
    start_stand_in(monkeypatch, lambda _: {"STAND_IN": "done@1"})
    train = partial(canzona, "train", *TINY, "--sweep", "run.dir=sweep", cwd=tmp_path)
    train("train.seed=1,2", code=0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = ("train.seed=1,2,3", "train.steps=100", "optimizer=soap", "optimizer.lr=0.5", "model.init_std=0.1")
    for dry_run in ((), ("--dry-run",)):
        refused = train(*other, *dry_run, code=2)
        said = " ".join(refused.stderr.split())
        assert "3 problems" in said, "soap's settings are not named one by one, nor is the schedule of 100 steps"
        for key, was, now in (
            ("train.steps", "1", "100"),
            ("optimizer", "muon", "soap"),
            ("model.init_std", "0.02", "0.1"),
        ):
            assert f"{key} = {now} is {was} in 2 runs of the earlier sweep in" in said
            assert f"sweep-2 for another sweep, or {key}={was} to go on" in said
        assert refused.stdout == ""
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    again = train("train.seed=1,2", "gpus=1", "checkpoint.keep=2", code=0)
    assert again.stderr.count("is already finished") == 2, "these settings change no loss"
    more = train("train.seed=2,3", code=0)
    assert more.stderr.count("is already finished") == 1
    assert results(tmp_path / "sweep") == dict.fromkeys(("seed=1", "seed=2", "seed=3"), ("done", 0))
    assert "3 runs; training loss" in " ".join(more.stdout.split()), "all runs of the directory are compared"
    longer = tmp_path / "sweep" / "seed=3"
    config = (longer / "config.yaml").read_text()
    (longer / "config.yaml").write_text(
        config.replace(" steps: 1\n", " steps: 2\n").replace("decay_steps: 1\n", "decay_steps: 2\n")
    )
    said = " ".join(train("train.seed=1,2,3", code=2).stderr.split())
    assert "is 2 in seed=3" in said
    assert "move it out of the directory, and the sweep trains it anew" in said, "its own value suits no other run"
    longer.rename(tmp_path / "longer")
    train("train.seed=1,2,3", code=0)
    with exclusive_lock(tmp_path / "sweep" / ".lock"):
        assert "another sweep is running there" in " ".join(train("train.seed=1,2,3", code=2).stderr.split())


def test_a_dry_run_of_a_sweep_is_one_table_and_says_what_is_common_once(tmp_path: Path) -> None:
    asked = ("train", "recipe=qwen3-8b", "--sweep", "gpus=8,16", "optimizer.lr=1e-3,3e-3", "--dry-run")
    done = canzona(*asked, cwd=tmp_path, environment={"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}, code=0)
    lines = done.stdout.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line.startswith("gpus=")] == [
        [f"gpus={gpus}_lr={lr}", str(gpus)] for gpus in (8, 16) for lr in (0.001, 0.003)
    ]
    assert done.stdout.count("batch 256") == 1
    assert done.stderr.count("no GPU is visible here") == done.stderr.count("THIS IS A TRIAL RUN") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_sweep_adds_up_what_its_runs_need(tmp_path: Path) -> None:
    asked = ("train", "recipe=qwen3-8b", "gpus=8", "train.steps=1000", "--dry-run")
    runs = [
        json.loads(canzona(*asked, f"optimizer={name}", "--json", cwd=tmp_path, code=0).stdout)
        for name in ("muon", "adamw")
    ]
    outlooks = [run["outlook"] for run in runs]
    seconds = sum(outlook["training_s"] for outlook in outlooks)
    disk = sum(outlook["checkpoints_kept"] * outlook["checkpoint_bytes"] for outlook in outlooks)
    memory = max(run["memory"]["total_bytes"] for run in runs)
    done = canzona(*asked, "--sweep", "optimizer=muon,adamw", "train.seed=1,2,3", cwd=tmp_path, code=0)
    said = " ".join(done.stdout.split())
    assert f"6 runs, one after another: {duration(3 * seconds)} of steps (planned)" in said
    assert f"; {size(3 * disk)} on disk, at most {memory / 2**30:.2f} GiB on a rank" in said


def test_long_names_of_runs_stay_on_one_line_and_an_unknown_time_is_said(tmp_path: Path) -> None:
    varied = ("optimizer=muon,soap", "optimizer.lr=0.001,0.002", "train.seed=1", "optimizer.adamw_lr=0.01,0.02")
    done = canzona("train", *TINY, "--sweep", *varied, "--dry-run", cwd=tmp_path, environment={"COLUMNS": "80"}, code=0)
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("optimizer=")]
    assert sorted(names) == [
        f"optimizer={optimizer}_lr={lr}_adamw_lr={adamw_lr}"
        for optimizer in ("muon", "soap")
        for lr in ("0.001", "0.002")
        for adamw_lr in ("0.01", "0.02")
    ]
    assert "8 runs, one after another: the time is unknown; `canzona calibrate`" in " ".join(done.stdout.split())


def test_a_mistake_in_one_run_is_told_before_any_starts(tmp_path: Path) -> None:
    done = canzona("train", *TINY, "--sweep", "train.seed=1,2", "parallel.tp=1,3", cwd=tmp_path, code=2)
    said = " ".join(done.stderr.split())
    assert "in the run with train.seed=1 parallel.tp=3 and 1 other" in said
    assert list(tmp_path.iterdir()) == []


STEP = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
STEP |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "SLURM_ARRAY_JOB_ID": "40"}


def test_task_k_of_an_array_is_combination_k_in_one_directory_with_the_others(tmp_path: Path) -> None:
    printed = []
    for task in (0, 3):
        step = STEP | {"SLURM_ARRAY_TASK_ID": str(task)}
        arguments = ("train", *TINY, "--dry-run", "--config", "--sweep", "train.seed=1,2", "optimizer.lr=1e-3,3e-3")
        printed.append(canzona(*arguments, cwd=tmp_path, environment=step))
        assert printed[-1].returncode == 0, printed[-1].stderr
    for done, seed, lr in zip(printed, (1, 2), ("0.001", "0.003"), strict=True):
        assert f"runs/sweep-40/seed={seed}_lr={lr}" in done.stdout
        assert f"seed: {seed}\n" in done.stdout
        assert done.stdout.count("resolved configuration") == 1
    outside = canzona(*arguments, cwd=tmp_path, environment=STEP | {"SLURM_ARRAY_TASK_ID": "4"}, code=2)
    assert "tasks 0 to 3" in " ".join(outside.stderr.split())


def test_a_task_of_an_array_knows_the_runs_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_stand_in(monkeypatch, lambda _: {"STAND_IN": "done@1"})
    step = STEP | {"SLURM_ARRAY_TASK_ID": "1"}
    canzona("train", *TINY, "--sweep", "train.seed=1,2,3", cwd=tmp_path, environment=step, code=0)
    said = canzona("report", "--compare", "runs/sweep-40", cwd=tmp_path, code=2).stderr
    assert "3 runs so far: 1 done, 2 not begun" in " ".join(said.split())


def test_a_sweep_is_an_array_of_as_many_tasks_as_runs(tmp_path: Path) -> None:
    arguments = ("slurm", *TINY, "--sweep", "train.seed=1,2,3")
    script = canzona(*arguments, cwd=tmp_path, code=0)
    lines = script.stdout.splitlines()
    assert "#SBATCH --array=0-2" in lines
    assert "    --sweep" in lines, "each task reads the sweep again and takes its part"
    some = canzona(*arguments, "--array", "0,2%1", "--json", cwd=tmp_path)
    assert "#SBATCH --array=0,2%1\n" in json.loads(some.stdout)["script"]
    assert canzona(*arguments, "--needs", cwd=tmp_path).stdout == f"1 0 {tmp_path / 'runs' / 'slurm'}\n"
    outside = canzona(*arguments, "--array", "2-3", cwd=tmp_path, code=2)
    assert "only tasks 0 to 2" in " ".join(outside.stderr.split())
    machines = canzona("slurm", "recipe=qwen3-8b", "--sweep", "gpus=8,16", cwd=tmp_path, code=2)
    assert "the same nodes" in " ".join(machines.stderr.split())
    equal = canzona("slurm", *TINY, "--array", "0-3", cwd=tmp_path, code=2)
    assert "train.seed=1,2,3,4 --sweep" in " ".join(equal.stderr.split())
