"""`canzona report` tells how any run went: finished, failed, interrupted, killed; and refuses what is no run."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from canzona_cli.config.compose import dump_resolved
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles, append_json_line, sweep_file
from canzona_cli.records.records import (
    CheckpointEvent,
    Incident,
    RankError,
    RankResult,
    RunResult,
    RunStatus,
    StageEvent,
    StepMetrics,
    SweepPlan,
    ValidationLoss,
)
from canzona_cli.records.summary import load_summary
from tests.cli.commands.support import canzona
from tests.records.runs import CONFIG, CORPUS, LAYOUT, STEPS, metrics
from tests.records.sweeps import add_run, add_sweep, configured

FIXTURE = Path(__file__).parents[1] / "views" / "breakdown.json"


def make_run(root: Path, *, status: RunStatus | None = "done", steps: int = STEPS) -> RunFiles:
    """A run directory as the launcher and the workers leave it."""
    files = RunFiles(root)
    files.ranks.mkdir(parents=True)
    files.config.write_text(dump_resolved(CONFIG))
    save(files.layout, LAYOUT)
    save(files.corpus, CORPUS)
    append_json_line(files.validation, asdict(ValidationLoss(step=0, loss=9.7213, time=1_700_000_000.0)))
    for record in metrics(steps):
        append_json_line(files.metrics, asdict(record))
    last = ValidationLoss(step=steps, loss=4.8121, time=1_700_000_000.0 + steps * 0.4)
    append_json_line(files.validation, asdict(last))
    for rank in range(4):
        save(files.rank(rank), RankResult(rank=rank, status=status or "running", time=1.0))
    if status is not None:
        code = {"done": 0, "failed": 70, "diverged": 70, "interrupted": 130, "preempted": 75}[status]
        save(files.result, RunResult(status=status, exit_code=code, step=steps))
    return files


def test_a_finished_run_shows_status_loss_validation_curve_and_breakdown(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    shutil.copy(FIXTURE, files.breakdown)
    done = canzona("report", str(files.root), code=0)
    assert "done, exit code 0" in done.stdout
    assert "300 of 300 in 2 min 00 s" in done.stdout
    assert "9.7213 → 4.8121 (-50.5%), steps 0 → 300" in done.stdout
    assert re.search("[▁▂▃▄▅▆▇█]{20}", done.stdout), "the loss curve"
    assert "!" not in done.stdout, "nothing to note"
    assert len(done.stdout.splitlines()) <= 25
    everything = canzona("report", str(files.root), "-v").stdout
    assert "phase, ms" in everything
    assert "phase, ms" not in done.stdout, "the times of all phases"
    tokens = STEPS * 32 * 256
    assert f"{tokens / CORPUS.train_tokens:.2g} (2.46 M tokens needed, 9.3 M available)" in done.stdout
    found = json.loads(canzona("report", str(files.root), "--json").stdout)
    assert found["epochs"] == pytest.approx(tokens / CORPUS.train_tokens)


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", status="diverged", steps=7)
    for rank in range(4):
        error = RankError(type="Diverged", message="step 7: the loss is 270", since=3)
        save(files.rank(rank), RankResult(rank=rank, status="diverged", error=error, time=1.0))
    done = canzona("report", str(files.root), code=0)
    assert "diverged, exit code 70" in done.stdout
    assert "rank 0" not in done.stdout, "it was nobody's fault"
    assert json.loads(canzona("report", str(files.root), "--json").stdout)["status"] == "diverged"


def test_no_line_is_wider_than_the_terminal_but_that_of_a_path_which_stays_whole(tmp_path: Path) -> None:
    files = make_run(tmp_path / ("long-" * 30))
    shutil.copy(FIXTURE, files.breakdown)
    done = canzona("report", str(files.root), code=0)
    wide = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert len(wide) == 1
    assert wide[0].endswith(str(files.root))


def test_without_a_directory_the_newest_run_is_shown(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "older")):
        os.utime(make_run(tmp_path / "runs" / name).config, (10.0 - age, 10.0 - age))
    for folder in (tmp_path, tmp_path / "runs" / "newest"):
        done = canzona("report", "--json", cwd=folder, code=0)
        assert (folder / json.loads(done.stdout)["run_dir"]).samefile(tmp_path / "runs" / "newest")
    (tmp_path / "none").mkdir()
    assert canzona("report", cwd=tmp_path / "none").returncode == 2


def test_what_lies_between_two_launches_is_no_training(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", steps=0)
    files.metrics.unlink(missing_ok=True)
    files.validation.unlink()
    for time in (100, 103, 160, 1000, 1004, 1050):  # of each launch: it says so, its first rank does, the end
        stage = "start workers" if time not in (160, 1050) else "finish"
        append_json_line(files.events, asdict(StageEvent(time=time, stage=stage)))
    summary = json.loads(canzona("report", str(files.root), "--json").stdout)
    assert summary["elapsed_s"] == (160 - 100) + (1050 - 1000)


def test_a_failed_run_shows_the_first_failing_rank_before_anything_else(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", status="failed", steps=7)
    for rank, (message, when) in {0: ("connection reset [by] peer", 20.0), 2: ("token 900 >= 384", 10.0)}.items():
        error = RankError(type="ValueError", message=message, traceback="Traceback ...")
        save(files.rank(rank), RankResult(rank=rank, status="failed", error=error, time=when))
    done = canzona("report", str(files.root), code=0)
    assert done.stdout.splitlines()[0] == "rank 2: ValueError: token 900 >= 384"
    assert "1 other rank failed after it" in " ".join(done.stdout.split())
    long = RankError(type="RuntimeError", message="\n".join(f"line {number}" for number in range(30)), traceback="Tr")
    save(files.rank(2), RankResult(rank=2, status="failed", error=long, time=10.0))
    short, everything = (canzona("report", str(files.root), *more).stdout for more in ((), ("-v",)))
    assert "line 3 ..." in short
    assert "line 4" not in short
    assert "line 29" in everything
    assert "failed, exit code 70" in done.stdout
    assert "no breakdown of the step: it has no breakdown.json, which is written" in " ".join(done.stdout.split())


def test_a_killed_run_with_a_torn_line_is_still_read(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", status=None, steps=40)
    with files.metrics.open("a") as file:
        file.write('{"step": 41, "lo')
    assert "canzona resume" not in canzona("report", str(files.root)).stdout, "nothing was saved"
    (files.checkpoints / "step-00000030").mkdir(parents=True)
    done = canzona("report", str(files.root), code=0)
    text = " ".join(done.stdout.split())
    assert "if it was killed: canzona resume" in text
    assert "running or stopped" in text, "there is no lock to tell"
    assert "there is no result.json" in text
    assert "metrics.jsonl: 1 damaged line skipped" in text
    assert "40 of 300" in text


def test_a_run_without_a_result_is_running_while_its_launcher_holds_the_lock(tmp_path: Path) -> None:
    """The lock is a process's own, as the launcher's is; a machine's list of locks does not have those of others."""
    files = make_run(tmp_path / "run", status=None, steps=1)
    files.claim.write_text(f"{socket.gethostname()} 1\n")
    hold = (
        "import fcntl, sys; fcntl.flock(lock := open(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    command = (sys.executable, "-c", hold, str(files.claim))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        running = load_summary(files.root)
        launcher.kill()
    assert (running.status, *running.notes[:1]) == ("running", "there is no result.json: the run is still running")
    assert load_summary(files.root).status == "stopped"
    files.claim.write_text("another-machine 1\n")
    assert load_summary(files.root).status == "running or stopped"


def test_what_the_guards_did_is_told_only_where_they_did_something(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", steps=40)
    assert "not finite" not in canzona("report", str(files.root)).stdout
    append_json_line(files.metrics, asdict(StepMetrics(step=41, loss=4.0, skipped=3, fallbacks=2)))
    shown = canzona("report", str(files.root)).stdout
    assert "3 steps skipped: gradients not finite" in shown
    assert "2 matrix updates needed a fallback: see logs" in shown
    report = json.loads(canzona("report", str(files.root), "--json").stdout)
    assert (report["skipped"], report["fallbacks"]) == (3, 2)


def test_what_was_said_aloud_is_said_again_the_newest_of_many(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", steps=40)
    append_json_line(files.events, asdict(CheckpointEvent(step=30, seconds=1.0, stall_s=0.1, bytes=1)))
    for rank in range(7):
        words = f"rank {rank} is slow"
        append_json_line(
            files.events, Incident(event="straggler", detail=words, level="warning", facts={"rank": rank}).line()
        )
    shown = canzona("report", str(files.root)).stdout
    assert "2 earlier warnings in events.jsonl" in shown
    assert [f"rank {rank} is slow" in shown for rank in range(7)] == [False] * 2 + [True] * 5
    warnings = json.loads(canzona("report", str(files.root), "--json").stdout)["warnings"]
    assert warnings == [f"rank {rank} is slow" for rank in range(7)], "a checkpoint is no warning"


def test_json_is_complete_and_stable(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", status="interrupted", steps=40)
    append_json_line(files.metrics, asdict(StepMetrics(step=41)))
    shutil.copy(FIXTURE, files.breakdown)
    done = canzona("report", str(files.root), "--json", code=0)
    report = json.loads(done.stdout)
    assert set(report) == {
        *("version", "run_dir", "name", "status", "exit_code", "message", "step", "steps_planned", "elapsed_s"),
        *("loss", "validation", "errors", "breakdown", "notes", "skipped", "fallbacks"),
        *("warnings", "epochs", "epochs_by_set", "validation_by_set", "restarts", "go_on", "goodput"),
    }
    assert (report["status"], report["exit_code"], report["step"]) == ("interrupted", 130, 41)
    assert report["loss"]["last"]["step"] == 40, "the last finite loss"
    assert report["validation"]["first"] == {"step": 0, "loss": 9.7213}
    assert report["breakdown"]["phases"]["forward"]["in_step"] is True


def test_what_is_no_run_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for place in (tmp_path, tmp_path / "absent", tmp_path / "notes.txt"):
        done = canzona("report", str(place), code=2)
        assert "RUN_DIR" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


def test_a_run_nearby_is_suggested(tmp_path: Path) -> None:
    files = make_run(tmp_path / "real", steps=3)
    done = canzona("report", str(tmp_path / "reel"), environment={"COLUMNS": "300"}, code=2)
    assert str(files.root) in done.stdout + done.stderr


def test_two_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", steps=40)
    shutil.copy(FIXTURE, one.breakdown)
    done = canzona("report", "--compare", str(one.root), str(other.root), code=0)
    text = " ".join(done.stdout.split())
    assert "all settings are equal" in text
    assert "step 40 (last in both)" in text
    assert "B: no breakdown" in text
    content = json.loads(canzona("report", "--compare", str(one.root), str(other.root), "--json").stdout)
    assert content["runs"]["b"]["step"] == 40
    assert content["loss"]["first"]["change"] == 0
    assert content["settings"] == {}


def test_runs_that_cannot_be_compared_are_named_together(tmp_path: Path) -> None:
    done = canzona(
        "report", "--compare", str(tmp_path / "one"), str(tmp_path / "other"), environment={"COLUMNS": "300"}, code=2
    )
    assert "2 problems" in done.stderr
    assert str(tmp_path / "one") in done.stderr
    assert str(tmp_path / "other") in done.stderr
    files = make_run(tmp_path / "run", steps=3)
    for arguments, reason in (
        (("--compare", str(files.root)), "there is one run"),
        ((str(files.root),) * 3, "3 run directories"),
    ):
        done = canzona("report", *arguments, code=2)
        assert reason in " ".join(done.stderr.split())
        assert "--compare RUN_A RUN_B" in " ".join(done.stderr.split())


def test_the_directory_of_a_sweep_is_enough(tmp_path: Path) -> None:
    losses = {("muon", 0.01): {1: 2.0, 2: 2.1, 3: 2.2}, ("adamw", 0.01): {1: 3.0, 2: 3.1, 3: 3.2}}
    root = str(add_sweep(tmp_path / "sweep", losses))
    assert "muon is better than adamw" in canzona("report", "--compare", root, code=0).stdout
    content = json.loads(canzona("report", "--compare", root, "--json", code=0).stdout)
    assert [group["settings"] for group in content["groups"]] == [{"optimizer.name": n} for n in ("muon", "adamw")]


def test_a_sweep_that_is_not_finished_says_what_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    add_sweep(root, {("muon", 0.01): {1: 2.0}})
    names = [f"optimizer={name}_lr=0.01_seed={seed}" for name in ("muon", "adamw") for seed in (1, 2, 3, 4)]
    save(sweep_file(root), SweepPlan(runs=tuple(names)))
    report = partial(canzona, "report", "--compare", str(root))
    assert "(8 runs so far: 1 done, 7 not begun)" in " ".join(report(code=2).stderr.split())
    add_run(root / names[1], configured(lr=0.01, seed=2), {0: 6.0}, status=None, training={1: 6.0})
    text = " ".join(report(code=0).stdout.split())
    assert "8 runs so far: 1 done, 1 running or stopped, 6 not begun" in text, "no page about two runs"
    add_sweep(root, {("muon", 0.01): {3: 2.0, 4: 2.1}, ("adamw", 0.01): {1: 3.0, 3: 3.1, 4: 3.2}})
    text = " ".join(report("--html", root / "a.html", code=0).stdout.split())
    assert "7 of 8 runs; validation loss" in text
    assert "so far, muon is better than adamw" in text
    assert "so far, muon is better" in (root / "a.html").read_text()
    assert json.loads(report("--json", code=0).stdout)["not_begun"] == [str(root / names[5])]
    save(RunFiles(root / names[1]).result, RunResult(status="failed", exit_code=70, step=1))
    add_sweep(root, {("adamw", 0.01): {2: 3.3}})
    assert "so far" not in report(code=0).stdout, "a run that failed is one that has ended"


def test_the_run_behind_html_is_put_where_it_belongs(tmp_path: Path) -> None:
    """There is no other run here, so that is no reason to say so."""
    files = make_run(tmp_path / "lr=0.001_seed=1", steps=3)
    for option in ((), ("--compare",)):
        said = canzona("report", *option, "--html", files.root.name, cwd=tmp_path, code=2).stderr
        assert "write lr=0.001_seed=1 --html lr=0.001_seed=1.html" in " ".join(said.split())


def test_a_damaged_prediction_is_noted(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    shutil.copy(FIXTURE, files.breakdown)
    files.predicted.write_text("{")
    done = canzona("report", str(files.root), code=0)
    assert "no prediction: predicted.json" in " ".join(done.stdout.split())
    assert "matrix update" in done.stdout
