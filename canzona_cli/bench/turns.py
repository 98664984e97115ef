"""Runs the turns of a bench's strategies on one rank."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from canzona_cli.bench.results import Samples, StepSample, Turns
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.errors import Diverged, Problem
from canzona_cli.core.megatron.holdings import finish_gathering, leaves
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.training.data import Batch
from canzona_cli.training.loop import suspend_garbage_collection
from canzona_cli.training.step import train_step


@dataclass(kw_only=True)
class RunningStrategy:
    """A strategy that was built on this rank, and its measurements so far."""

    trainee: Trainee
    batches: Iterator[Batch]
    losses: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)


def take_turns(
    turns: Turns,
    strategies: Mapping[str, RunningStrategy],
    *,
    stop_requested: Callable[[], bool],
    on_turn: Callable[[str, float], None],
) -> bool:
    """Runs all rounds. All ranks have to call this.

    Args:
        stop_requested: a function that returns True if this rank has seen a request to stop.
        on_turn: a function that is called after every turn, outside the measured time, with the strategy's
            name and its last loss.

    Returns:
        True after all rounds; False after a request to stop.

    Raises:
        Diverged: a loss or a gradient is not finite. All ranks raise this together.
    """
    with suspend_garbage_collection():
        for round_ in range(turns.rounds):
            for name in turns.order(round_):
                strategy = strategies[name]
                try:
                    if not _take_turn(strategy, turns, stop_requested):
                        return False
                except Diverged as error:  # the optimizer's error does not name the strategy
                    named = (replace(problem, key=f"{name}, {problem.key}") for problem in error.problems)
                    raise Diverged(*named) from error
                loss = strategy.losses[-1]
                if not math.isfinite(loss):
                    key, reason = f"{name}, step {len(strategy.losses)}", "the loss is no longer a finite number"
                    fix = "lower optimizer.lr; the times of a diverged run are meaningless"
                    raise Diverged(Problem(key=key, value=loss, reason=reason, fix=fix))
                on_turn(name, loss)
    return True


def gather_samples(strategies: Mapping[str, RunningStrategy]) -> dict[str, Samples]:
    """Gathers the measurements of all ranks on every rank; returns them by strategy. All ranks have to call
    this."""
    samples = {}
    for name, strategy in strategies.items():
        steps = tuple(
            StepSample(step_s=timing.step_s, processor_s=processor_s, phases=dict(timing.phases))
            for timing, processor_s in zip(strategy.trainee.timer.timings(), strategy.processor_s, strict=True)
        )
        losses, allocated_bytes = tuple(strategy.losses), tensor_bytes(strategy.trainee)
        by_rank = gather(Samples(losses=losses, tensor_bytes=(allocated_bytes,), ranks=(steps,)), Samples)
        samples[name] = Samples(
            losses=losses,
            tensor_bytes=tuple(size for measured in by_rank for size in measured.tensor_bytes),
            ranks=tuple(of_rank for measured in by_rank for of_rank in measured.ranks),
        )
    return samples


def tensor_bytes(trainee: Trainee) -> int:
    """Returns the bytes of this rank's tensors that stay allocated between steps: buffers, masters, optimizer
    state, messages and scratch memory."""
    optimizer = trainee.optimizer
    buffers = [buffer for chunk in trainee.chunks for buffer in chunk.buffers]
    tensors = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
    tensors += [parameter for chunk in trainee.chunks for parameter in chunk.parameters()]
    scratch_bytes = 0
    for leaf in leaves(optimizer):
        if isinstance(optimizer, CanzonaOptimizer) and leaf is optimizer.matrices:
            tensors += [master.detach() for master in leaf.masters.values()]
            states = [group.optimizer.state for group in leaf.groups if group.optimizer is not None]
            scratch_bytes += leaf.scratch_bytes
        else:
            tensors += leaf.get_parameters()
            states = [leaf.optimizer.state]
        entries = [entry for state in states for entry in state.values()]
        tensors += [value for entry in entries for value in entry.values()]
    storages = {  # each storage counts once, even if several tensors are views of it
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return scratch_bytes + sum(storages.values())


def _take_turn(strategy: RunningStrategy, turns: Turns, stop_requested: Callable[[], bool]) -> bool:
    """Runs the steps of one turn between two barriers; returns False after a request to stop."""
    trainee = strategy.trainee
    gc.collect()  # the garbage of earlier turns; all other objects are frozen
    torch.distributed.barrier()
    for _ in range(turns.steps_per_turn):
        begin = time.process_time()
        step = train_step(trainee, strategy.batches, stop_requested=stop_requested)
        strategy.processor_s.append(time.process_time() - begin)
        strategy.losses.append(step.loss)
        if step.stop:
            return False
    # An unfinished gathering would run during the next strategy's steps.
    finish_gathering(trainee.chunks)
    torch.distributed.barrier()
    return True
