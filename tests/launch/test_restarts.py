"""A run that fails is restarted by its launch, or resumed by the command it leaves; never in vain, never unasked."""

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.overrides import parse_overrides
from canzona_cli.launch import restarts
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.restarts import LONGEST_WAIT_S, Restarts, resume_command, resume_hint, run_with_restarts
from canzona_cli.launch.stop import Requests, handle_signals
from canzona_cli.records.codec import load_if_valid
from canzona_cli.records.files import RunFiles, StopReason, read_json
from canzona_cli.records.records import RunResult, RunStatus
from tests.checkpoint.checkpoints import save as save_checkpoint
from tests.cli.commands.support import canzona, start_stand_in
from tests.faults.support import run_config
from tests.launch.stand_in import STEP_S, STEPS

CRASHED = Outcome(status="failed", exit_code=70, message="rank 1: OSError: 0x7f3a lost after 31 s", step=30, rank=1)


def alike(**changes: object) -> Outcome:
    return replace(CRASHED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "code", "restarted", "resumable"),
    [
        *(("failed", 70, True, True), ("failed", 71, True, True), ("failed", 2, False, False)),
        *(("failed", 3, False, True), ("failed", 4, False, False), ("failed", 5, False, False)),
        *(("diverged", 70, False, True), ("interrupted", 130, False, True), ("preempted", 75, False, True)),
        ("done", 0, False, False),
    ],
)
def test_only_what_may_be_a_machines_fault_is_tried_again_and_only_an_early_end_leaves_a_command(
    status: RunStatus, code: int, restarted: bool, resumable: bool
) -> None:
    outcome = alike(status=status, exit_code=code)
    assert (Restarts(most=3).decide(outcome).again_in_s is not None) is restarted
    assert Restarts().decide(outcome) == outcome, "not unless it is asked for"
    assert outcome.resumable is resumable


def test_the_same_step_in_the_same_words_is_not_tried_a_third_time_and_numbers_are_no_words() -> None:
    tried = Restarts(most=9)
    assert tried.decide(CRASHED).again_in_s is not None
    for other in (alike(step=31), alike(exit_code=71), alike(message="rank 1: KeyError")):
        assert tried.decide(other).again_in_s is not None
    refused = tried.decide(alike(message="rank 0: OSError: 0x7eee lost after 29 s", rank=0))
    assert refused.again_in_s is None
    assert refused.message.endswith("it already failed this way at step 30, and is not restarted")


def test_waits_double_up_to_a_bound_while_nothing_is_gained_and_so_many_attempts_are_enough() -> None:
    tried, waits = Restarts(most=11, first_wait_s=10), []
    for step in (30, 29, 30, 40, 40, 39, 38, 37, 36, 35, 34):
        waits.append(tried.decide(alike(step=step, message=f"rank {'abcdefghijk'[tried.done]}")).again_in_s)
        tried.done += 1
    assert waits == [10, 20, 40, 10, 20, 40, 80, 160, 320, LONGEST_WAIT_S, LONGEST_WAIT_S]
    last = tried.decide(alike(step=50))
    assert last.again_in_s is None
    assert "restarted 11 times, as often as run.restarts allows" in last.message


@pytest.mark.parametrize(
    ("number", "saved", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, True, 75), (signal.SIGTERM, False, 130), (None, True, 130)],
)
def test_a_stop_while_it_waits_is_heard(tmp_path: Path, number: signal.Signals | None, saved: bool, code: int) -> None:
    """The stop comes from a signal here, or (None) from another machine of the run."""
    files, requests = RunFiles(tmp_path), Requests()
    if saved:
        save_checkpoint(files.checkpoints, 30)
    ask: Callable[[], None] = files.request_stop if number is None else lambda: os.kill(os.getpid(), number)
    asking = threading.Timer(0.3, ask)

    def attempt() -> Outcome:
        assert not asking.is_alive(), "it was started again"
        asking.start()
        return alike(again_in_s=60.0, go_on="canzona train")

    with handle_signals(requests.add):
        outcome = run_with_restarts(
            attempt, Restarts(most=2), files, requests, node_rank=0, say=lambda text: said.append(text)
        )
    assert (outcome.exit_code, outcome.again_in_s) == (code, None)
    assert load_if_valid(files.result, RunResult) == outcome.result
    assert outcome.go_on == "canzona train"
    assert "stopped before the restart, after a failure at step 30: rank 1" in outcome.message
    reason: StopReason = "preempted" if number == signal.SIGTERM else "interrupted"
    assert files.stop_reason() == reason, "what the other machines see"


said: list[str] = []


def test_all_machines_do_as_machine_0_decides_and_meet_again_in_a_new_place(tmp_path: Path) -> None:
    files, tried = RunFiles(tmp_path), Restarts(most=1)
    heard: dict[int, list[Outcome]] = {0: [], 1: []}

    def launcher(number: int) -> None:
        for attempt in range(2):
            here = Machines(files, node_rank=number, nodes=2, restarts=attempt)
            if number == 0:
                tried.done = attempt
                here.gather(f"host:{attempt}", patience_s=20, say=said.append)
            else:
                assert here.arrive(patience_s=20) == f"host:{attempt}"
            own = CRASHED if number else alike(message="rank 0: connection reset", secondary=True, rank=0)
            heard[number].append(here.conclude(own, settle=tried.decide, patience_s=20))

    threads = [threading.Thread(target=launcher, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1]
    assert [end.again_in_s is None for end in heard[1]] == [False, True]
    assert {end.rank for end in heard[0]} == {1}


def test_a_machine_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    here = Machines(RunFiles(tmp_path), nodes=2)
    assert here.conclude(CRASHED, settle=Restarts(most=9).decide, patience_s=0.2).again_in_s is None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`canzona train` starts the stand-in, and does not wait long."""
    start_stand_in(monkeypatch)
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.1)


TYPED = ("recipe=qwen3-tiny", "gpus=1", "optimizer=adamw", f"train.steps={STEPS}", "data.tokenizer=byte")


def test_a_run_restarts_from_its_newest_checkpoint_and_every_attempt_is_kept(tmp_path: Path, stand_in: None) -> None:
    root = tmp_path / "run"
    typed = ("train", *TYPED, f"run.dir={root}", "run.restarts=3")
    done = canzona(*typed, environment={"STAND_IN": "crash@3,crash@5,done"}, code=0)
    assert "restarting in 0 s (restart 2 of 3; press Ctrl-C to cancel)" in done.stderr
    files = RunFiles(root)
    result = load_if_valid(files.result, RunResult)
    assert result is not None
    assert (result.status, result.restarts, result.step, result.go_on) == ("done", 2, STEPS, None)
    steps = [json.loads(line)["step"] for line in files.metrics.read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    for number, (restarted, lost) in enumerate(((0, 3), (1, 5)), 1):
        before = RunFiles(files.attempts / str(number))
        ended = load_if_valid(before.result, RunResult)
        assert ended is not None
        assert (ended.exit_code, ended.restarts) == (70, restarted)
        assert before.agent_log(0).read_text() == f"launch {number}\n"
        assert json.loads(before.metrics.read_text())["step"] == lost
    report = json.loads(canzona("report", root, "--json").stdout)
    assert report["restarts"] == 2
    goodput = report["goodput"]
    assert goodput["kept_s"] == pytest.approx(STEPS * STEP_S)
    assert goodput["redone_s"] == pytest.approx(2 * STEP_S)
    assert goodput["between_s"] >= 0.1 + 0.2, "the two waits"
    parts = sum(goodput[part] for part in ("kept_s", "redone_s", "between_s", "other_s"))
    assert parts == pytest.approx(goodput["wall_s"])
    assert goodput["share"] == pytest.approx(goodput["kept_s"] / goodput["wall_s"])


def test_a_dry_run_says_that_a_run_would_begin_with_other_weights_or_why_not(tmp_path: Path, stand_in: None) -> None:
    root = tmp_path / "my, run"
    canzona("train", *TYPED, f"run.dir='{root}'", environment={"STAND_IN": "done"}, code=0)
    other = [text.replace("adamw", "muon") for text in TYPED]
    new = ("train", *other, f"init='{root}'", "--dry-run")
    would = canzona(*new, code=0)
    newest = root / "checkpoints" / f"step-{STEPS:08d}"
    assert f"the run would start at step 1 with the weights of {newest}" in would.stderr
    refused = canzona(*new, "model.num_layers=3", code=2)
    assert "is 4 for the weights in" in " ".join(refused.stderr.split())


def test_what_fails_twice_alike_ends_and_the_command_it_prints_goes_on_with_it(tmp_path: Path, stand_in: None) -> None:
    environment = {"STAND_IN": "crash@3,crash@3,done"}
    typed = ("train", *TYPED, f"run.root='{tmp_path}/my, runs'", "run.restarts=5")
    failed = canzona(*typed, cwd=tmp_path, environment=environment, code=70)
    (root,) = (tmp_path / "my, runs").iterdir()
    result = read_json(root / "result.json") or {}
    assert (result["status"], result["restarts"]) == ("failed", 1)
    assert "it already failed this way at step 3" in str(result["message"])
    command = str(result["go_on"])
    assert f"to continue: {command}" in failed.stdout.splitlines()
    assert f"  continue   {command}" in canzona("report", root).stdout.splitlines()
    program, *words = shlex.split(command)
    assert (program, *words) == ("canzona", "resume", str(root))
    canzona(*words, cwd=tmp_path, environment=environment, code=0)
    assert (read_json(root / "result.json") or {})["step"] == STEPS
    assert len(list(root.parent.iterdir())) == 1, "another run was started"


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BATCH = STEP | {"ENVIRONMENT": "BATCH", "SLURM_JOB_PARTITION": "h100", "SLURM_JOB_ACCOUNT": "us"}
TWO_NODES = run_config(nodes=2)


@pytest.mark.parametrize("run_dir", ["/runs/qwen3-tiny-20261122", "/my runs/a, b", "/it's=(1) $HOME/\\'x"])
def test_any_shell_and_the_grammar_of_overrides_read_what_was_typed(run_dir: str) -> None:
    typed = ["recipe=my recipe.yaml", "run.profile_steps=[5,7]", "data.path='a, b'", 'description=$HOME/"x"']
    assert shlex.split(resume_command(typed, [], run_config(), Path(run_dir), environment={}))[1:] == [
        "resume",
        run_dir,
    ]
    command = resume_command(typed, [Path("/own recipes")], TWO_NODES, Path(run_dir), environment={})
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    program, train, *words = told.decode().split("\0")[:-1]
    assert [program, train, *words[-2:]] == ["canzona", "train", "--recipes-dir", "/own recipes"]
    assert words[:-3] == typed
    read = parse_overrides([words[-3]])
    assert not read.problems
    assert read.values == {"run.dir": run_dir}


def test_where_it_began_once_is_not_where_it_goes_on() -> None:
    typed = ["run.dir=old", "checkpoint.resume=step-00000030", "checkpoint.resume=runs/other", "gpus=2"]
    command = resume_command(typed, [], TWO_NODES, Path("/runs/old"), environment={})
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


def test_what_to_know_of_it_is_said_beside_it(tmp_path: Path) -> None:
    files, one = RunFiles(tmp_path), run_config()
    preempted = Outcome(status="preempted", exit_code=75, go_on="GO")
    assert resume_hint(preempted, files, one, {}) == "nothing was saved; to start again in this directory: GO"
    save_checkpoint(files.checkpoints, 3)
    assert resume_hint(preempted, files, one, {}) == "to continue: GO"
    assert resume_hint(preempted, files, one, BATCH) == "to continue, unless Slurm queues this job again: GO"
    assert (
        resume_hint(preempted, files, TWO_NODES, {})
        == "to continue, on every machine with its own cluster.node_rank: GO"
    )
    diverged = replace(preempted, status="diverged")
    assert resume_hint(diverged, files, one, {}) == "to continue, with the change suggested above: GO"
