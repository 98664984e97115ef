"""Runs that are saved while they train: when, what a failure costs, and that stopping and going on changes nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.checkpoint import commit
from canzona_cli.checkpoint.manifest import Shard, hidden_name
from canzona_cli.checkpoint.verify import read_manifest, verify
from canzona_cli.core.errors import ExitCode
from canzona_cli.records.files import RunFiles
from canzona_cli.training import saving
from tests.dist.jobs import SMALL
from tests.dist.whole_runs import TEXTS, Ending, Rank, Run, checkpoint, events, lines, names, train
from tests.waiting import PATIENCE_S

STEPS = 6
FIXED = (
    *SMALL,
    "model.num_layers=1",
    "gpus=2",
    "train.batch_tokens=256",
    f"train.steps={STEPS}",
    "train.eval_interval=2",
    "train.eval_sequences=8",
)
DP2 = (*FIXED, "parallel.tp=1", "optimizer=adamw")
TP2 = (*FIXED, "parallel.tp=2", "optimizer=muon", "engine.strategy=canzona", "checkpoint.every_minutes=null")
BY_STEPS = (*DP2, "checkpoint.every_minutes=null")
BY_TIME = (*DP2, "checkpoint.every_minutes=1", "checkpoint.at_end=false")


def hold_writes(ready: Callable[[Path], object]) -> None:
    """Have this rank write its part of a checkpoint once `ready` returns, for the folder it writes into."""

    def write_part(partial: Path, rank: int, shard: Shard) -> None:
        ready(partial)
        commit.write_part(partial, rank, shard)

    setattr(saving, "write_part", write_part)  # noqa: B010  # of this rank


def step_of(partial: Path) -> int:
    hidden = hidden_name(partial.name)
    assert hidden is not None
    return int(hidden[0].removeprefix("step-"))


def wait_until_told(files: RunFiles, times: int) -> None:
    """Return once it has been told so often that a save waits for the one before."""
    deadline = time.monotonic() + PATIENCE_S
    while times and (not files.events.exists() or len(events(files.root, "save_waits")) < times):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stop_at_3(rank: Rank, step: int) -> None:
    if step == 3 and rank.number == 0:
        rank.files.request_stop("preempted")


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    """The same losses, rates, norms and validations, bit by bit, and at the end the same bytes on the disk."""
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    ended = train(tmp_path, {"straight": Run(settings=TP2), "halves": Run(settings=TP2, on_step=stop_at_3)})
    assert ended["straight"] == [Ending(how="done", code=0, step=STEPS, checkpoint="step-00000006")] * 2
    assert ended["halves"] == [Ending(how="preempted", code=0, step=3, checkpoint="step-00000003")] * 2
    assert verify(checkpoint(halves, 3))[1] == []
    RunFiles(halves).stop.unlink()
    assert {ending.how for ending in train(tmp_path, {"halves": Run(settings=TP2, start="halves")})["halves"]} == {
        "done"
    }

    def curve(root: Path) -> list[list[object]]:
        wanted = ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "fallbacks")
        return [[line[key] for key in wanted] for line in lines(RunFiles(root).metrics)]

    assert [line[0] for line in curve(straight)] == list(range(1, STEPS + 1))
    assert curve(halves) == curve(straight)
    validations = [[(v["step"], v["loss"]) for v in lines(RunFiles(root).validation)] for root in (straight, halves)]
    assert [step for step, _ in validations[0]] == [0, 2, 4, 6]
    assert validations[0] == validations[1]
    ends = [read_manifest(checkpoint(root, 6)) for root in (straight, halves)]
    assert ends[0].progress == ends[1].progress
    assert ends[0].tensors == ends[1].tensors
    assert ends[0].scalars == ends[1].scalars
    assert ends[0].files == ends[1].files, "the hashes of the shards"


BEGUN = threading.Event()
"""An event on a rank: step 5 of the run whose saves are put off has begun."""


def settle_at_5(rank: Rank, step: int) -> None:
    if step == 5:
        BEGUN.set()
        rank.saver.wait_until_written()


def hold_rank_0(rank: Rank) -> None:
    BEGUN.clear()
    hold_writes(lambda _: rank.number == 1 or BEGUN.wait(PATIENCE_S))


def fail_the_second(rank: Rank) -> None:
    """Lets the second of rank 1's writes fail."""
    calls: list[Path] = []

    def spoil(partial: Path) -> None:
        calls.append(partial)
        if rank.number == 1 and len(calls) == 2:
            (partial / f"rank-{rank.number:05d}.safetensors").mkdir()  # cannot be written, for root neither

    hold_writes(spoil)


def ask_rank_1(rank: Rank, step: int) -> None:
    if rank.number == 1 and step == 2:
        rank.asked.set()


def minutes_at(*steps: int) -> Callable[[int, int], float]:
    """A minute passes at the end of each of these steps."""
    return lambda _, begun: 61.0 * sum(begun >= step for step in steps)


IN_THE_WAY = {"lost on the way": "false", "lost at the end": "true"}
RUNS = {
    "by steps": Run(settings=(*BY_STEPS, "checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.keep_every=4")),
    # On rank 1 a minute always has passed.
    "by the clock": Run(
        settings=BY_TIME,
        on_step=settle_at_5,
        clock=lambda rank, step: 1e6 * step if rank else minutes_at(3, 5)(rank, step),
    ),
    "put off": Run(settings=BY_TIME, prepare=hold_rank_0, on_step=settle_at_5, clock=minutes_at(2, 4)),
    "due at the last step": Run(
        settings=BY_TIME,
        prepare=lambda rank: hold_writes(lambda partial: wait_until_told(rank.files, step_of(partial) < STEPS)),
        clock=minutes_at(2, STEPS),
    ),
    "failed": Run(settings=(*BY_STEPS, "checkpoint.every_steps=2"), prepare=fail_the_second),
    "signal": Run(settings=DP2, on_step=ask_rank_1),
    "quick": Run(settings=(*DP2, "checkpoint.every_steps=1")),
    "slow": Run(
        settings=(*DP2, "checkpoint.every_steps=1"),
        prepare=lambda rank: hold_writes(lambda partial: wait_until_told(rank.files, step_of(partial) % STEPS)),
    ),
    **{
        name: Run(settings=(*BY_STEPS, "checkpoint.every_steps=4", f"checkpoint.at_end={at_end}"))
        for name, at_end in IN_THE_WAY.items()
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in IN_THE_WAY:
        (folder / name).mkdir()
        RunFiles(folder / name).checkpoints.write_text("in the way")
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, list[Ending]]:
    return train(folder, {name: replace(run, validates=False) for name, run in RUNS.items()})


def test_checkpoints_come_by_steps_and_old_ones_go(ended: dict[str, list[Ending]], folder: Path) -> None:
    root = folder / "by steps"
    assert names(root) == ["step-00000004", "step-00000006"]
    told = events(root, "checkpoint")
    assert [event["step"] for event in told] == [2, 4, 6]
    for event in told:
        assert event["path"] == f"checkpoints/step-{event['step']:08d}"
        assert event["seconds"] > 0  # type: ignore[operator]
    last = root / str(told[-1]["path"])
    assert told[-1]["bytes"] == sum(file.stat().st_size for file in last.iterdir())
    assert (last / "config.yaml").read_text() == TEXTS["config.yaml"]


def test_checkpoints_come_by_rank_0s_clock_alone(ended: dict[str, list[Ending]], folder: Path) -> None:
    assert names(folder / "by the clock") == ["step-00000003", "step-00000005"]
    assert events(folder / "by the clock", "save_waits") == []


def test_a_save_due_by_time_waits_for_the_one_before(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Due at the ends of steps 2 and 4, while the first is written until step 5 begins."""
    assert names(folder / "put off") == ["step-00000002", "step-00000005"]
    [told] = events(folder / "put off", "save_waits")
    assert told["step"] == 4
    assert told["detail"] == "the checkpoint due after step 4 waits until that of step 2 is written"


def test_a_save_due_by_time_at_the_last_step_is_not_put_off(ended: dict[str, list[Ending]], folder: Path) -> None:
    """The one before is written only once it is told that training waits for it."""
    assert names(folder / "due at the last step") == ["step-00000002", f"step-{STEPS:08d}"]


def test_a_save_that_fails_costs_that_checkpoint_and_nothing_else(ended: dict[str, list[Ending]], folder: Path) -> None:
    """The second of rank 1's three saves fails."""
    root = folder / "failed"
    assert {ending.how for ending in ended["failed"]} == {"done"}
    assert names(root) == ["step-00000002", "step-00000006"]
    [failure] = events(root, "save_failed")
    assert (failure["step"], failure["level"]) == (4, "warning")
    for words in ("step 4 was not saved", "rank 1", "the last checkpoint is step-00000002"):
        assert words in str(failure["detail"])
    assert not [path for path in RunFiles(root).checkpoints.iterdir() if path.name.startswith(".")]


def test_only_the_save_a_run_ends_with_decides_how_it_ends(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Nothing can be saved where a file is in the way: all steps are made, and what is lost is told on every rank."""
    for name, steps in (("lost on the way", [4]), ("lost at the end", [4, 6])):
        assert [ending.step for ending in ended[name]] == [STEPS] * 2
        assert [line["step"] for line in lines(RunFiles(folder / name).metrics)] == list(range(1, STEPS + 1))
        assert [event["step"] for event in events(folder / name, "save_failed")] == steps
    assert {ending.how for ending in ended["lost on the way"]} == {"done"}
    for ending in ended["lost at the end"]:
        assert ending.code == ExitCode.ENVIRONMENT
        assert "the run ended at step 6 without being saved" in ending.how
        assert "there is no checkpoint yet" in ending.how


def test_a_signal_to_one_rank_preempts_all_of_them(ended: dict[str, list[Ending]], folder: Path) -> None:
    assert ended["signal"] == [Ending(how="preempted", code=0, step=2, checkpoint="step-00000002")] * 2
    assert names(folder / "signal") == ["step-00000002"]


def test_the_next_save_waits_for_the_one_before(ended: dict[str, list[Ending]], folder: Path) -> None:
    """Its memory is used again: a slow disk delays training, and never mixes two steps in one checkpoint."""
    quick, slow = folder / "quick", folder / "slow"
    assert names(slow) == names(quick) == ["step-00000004", "step-00000005", "step-00000006"]
    for name in names(slow):
        first, second = (read_manifest(RunFiles(root).checkpoints / name) for root in (quick, slow))
        assert first.files == second.files
    assert [told["step"] for told in events(slow, "save_waits")] == [2, 3, 4, 5, 6]
    assert events(slow, "save_waits")[0]["detail"] == "training waits after step 2 until the save of step 1 is written"
