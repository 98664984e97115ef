"""The step of a turn from which steps count."""

from types import SimpleNamespace
from typing import cast

import pytest

from canzona_cli.bench import turns as turning
from canzona_cli.bench.sitting import Samples, StepSample, Turns, last_steps
from canzona_cli.bench.turns import RunningStrategy, take_turns
from canzona_cli.megatron.model import Trainee


def taken(monkeypatch: pytest.MonkeyPatch, replaced: list[int], turns: Turns) -> int:
    """Returns the number of steps of a turn whose step n replaces `replaced[n]` updates; the step after it knows."""
    told = iter([0, *replaced, *[0] * 20])
    step = lambda *_, **__: SimpleNamespace(loss=6.0, stop=False, fallbacks=next(told))  # noqa: E731
    monkeypatch.setattr(turning, "train_step", step)
    monkeypatch.setattr(turning, "finish_gathering", lambda chunks: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    strategy = RunningStrategy(trainee=cast("Trainee", SimpleNamespace(chunks=[])), batches=iter(()))
    assert take_turns(turns, {"a": strategy}, stop_requested=lambda: False, on_turn=lambda *_: None)
    assert len(strategy.losses) == len(strategy.processor_s)
    return len(strategy.losses)


@pytest.mark.parametrize(
    ("replaced", "steps"),
    [([0, 0], 4), ([7, 7, 7, 0], 4 + 3), ([7] * 20, 4 + 4), ([0, 0, 0, 7], 4)],
    ids=["never", "in the first three", "for ever", "once it counts"],
)
def test_turns_warm_up_until_updates_are_as_priced(
    monkeypatch: pytest.MonkeyPatch, replaced: list[int], steps: int
) -> None:
    turns = Turns(names=("a",), rounds=1, steps_per_turn=4, warm_up_steps=2, settling=4)
    assert taken(monkeypatch, replaced, turns) == steps


def test_strategies_that_are_compared_step_by_step_all_take_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, [7] * 20, Turns(names=("a",), rounds=3, steps_per_turn=2)) == 6


def test_the_last_steps_count_however_many_there_were() -> None:
    steps = tuple(StepSample(step_s=each, processor_s=each, phases={}) for each in (9.0, 8.0, 7.0, 2.0, 4.0))
    samples = Samples(losses=(6.0,) * 5, tensor_bytes=(1,), ranks=(steps,))
    assert last_steps(samples, 2).iteration_s == (3.0,)
    assert last_steps(samples, 1).iteration_s == (4.0,)
