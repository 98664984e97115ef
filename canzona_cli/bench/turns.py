"""Strategies of one sitting, taking turns on one rank."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from canzona_cli.bench.files import Sitting
from canzona_cli.bench.samples import Samples, StepSample
from canzona_cli.bench.tensors import tensor_bytes
from canzona_cli.errors import Problem, WorkerCrashed
from canzona_cli.megatron.gathering import finish_gathering
from canzona_cli.megatron.trainee import Trainee
from canzona_cli.training.data import Batch
from canzona_cli.training.step import train_step


@dataclass(kw_only=True)
class Contestant:
    """One strategy on this rank, and what it has done so far."""

    trainee: Trainee
    batches: Iterator[Batch]
    losses: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)


def hold(
    sitting: Sitting,
    contestants: Mapping[str, Contestant],
    *,
    stop_requested: Callable[[], bool],
    tell: Callable[[int, str, float], None],
) -> bool:
    """All rounds. Collective.

    Args:
        stop_requested: whether this rank knows that somebody asked to stop.
        tell: given round, strategy and last loss after every turn, outside of what is measured.

    Returns:
        Whether all rounds were held; False when somebody asked to stop.

    Raises:
        WorkerCrashed: a loss or a gradient is not finite; on every rank together.
    """
    for number in range(sitting.rounds):
        for name in sitting.order(number):
            contestant = contestants[name]
            try:
                if not _take_turn(contestant, sitting.steps_per_turn, stop_requested):
                    return False
            except WorkerCrashed as error:  # which of them it was is nothing an optimizer can know
                named = (replace(problem, key=f"{name}, {problem.key}") for problem in error.problems)
                raise WorkerCrashed(*named) from error
            loss = contestant.losses[-1]
            if loss - loss != 0:
                raise WorkerCrashed(
                    Problem(
                        key=f"{name}, step {len(contestant.losses)}",
                        value=loss,
                        reason="the loss is no longer a finite number",
                        fix="lower optimizer.lr: times of a run that has diverged say nothing",
                    )
                )
            tell(number, name, loss)
    return True


def gather_samples(contestants: Mapping[str, Contestant]) -> dict[str, Samples]:
    """What every rank measured, on every rank. Collective."""
    found = {}
    for name, contestant in contestants.items():
        own = tuple(
            StepSample(step_s=timing.step_s, processor_s=processor_s, phases=dict(timing.phases))
            for timing, processor_s in zip(contestant.trainee.timer.timings(), contestant.processor_s, strict=True)
        )
        everyone = _gather((own, tensor_bytes(contestant.trainee)))
        found[name] = Samples(
            losses=tuple(contestant.losses),
            tensor_bytes=tuple(size for _, size in everyone),
            ranks=tuple(steps for steps, _ in everyone),
        )
    return found


def _take_turn(contestant: Contestant, steps: int, stop_requested: Callable[[], bool]) -> bool:
    """A few training steps from one barrier to the next; False when somebody asked to stop."""
    trainee = contestant.trainee
    with _no_garbage_collection():
        torch.distributed.barrier()
        for _ in range(steps):
            worked = time.process_time()
            step = train_step(trainee, contestant.batches, stop_requested=stop_requested)
            contestant.processor_s.append(time.process_time() - worked)
            contestant.losses.append(step.loss)
            if step.stop:
                return False
        # Else it would run under the next strategy's steps.
        finish_gathering(trainee.model)
        torch.distributed.barrier()
    return True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What one strategy leaves is not collected in another one's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _gather[T](value: T) -> list[T]:
    values: list[T] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
