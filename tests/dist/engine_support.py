"""Engines under test: real steps from random tokens, everything a rank keeps as digests, faults at chosen places."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.setup import CustomConfig, Layout
from canzona_cli.training.data import Batch, BatchStream
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.dist.samples import samples_of
from tests.dist.whole import named_parameters

FIXED = (
    *SMALL,
    "engine.strategy=canzona",
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
)
SMALL_GROUPS = ("engine.c_max_mib=0.05",)
"""About one matrix each, so that an owner has many and their messages share memory."""

Digests = dict[str, str]


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    """A run of `SMALL` under canzona, at a constant learning rate."""
    return jobs.resolve(*FIXED, *overrides)


def custom(config: RunConfig, source: Path, name: str, **options: bool | int | float | str) -> RunConfig:
    """The same run with a user's own optimizer."""
    base = config.optimizer
    return replace(
        config,
        optimizer=CustomConfig(
            name="custom",
            lr=base.lr,
            weight_decay=base.weight_decay,
            clip_grad=base.clip_grad,
            source=f"{source}:{name}",
            options={**options},
        ),
    )


def batches(trainee: Trainee, steps: int = 100) -> Iterator[Batch]:
    """Random tokens, the same for every layout; always from the start."""
    samples = samples_of(trainee.setup, steps * trainee.world.layout.global_batch_size)
    return BatchStream(samples, trainee.world)


def engine_of(trainee: Trainee) -> CanzonaOptimizer:
    """The run's optimizer, which is the engine's."""
    assert isinstance(trainee.optimizer, CanzonaOptimizer)
    return trainee.optimizer


def parameter(trainee: Trainee, name: str) -> torch.nn.Parameter | None:
    """Returns a parameter by its name in the whole model, or None on other stages."""
    return dict(named_parameters(trainee.chunks)).get(name)


def digest(tensor: torch.Tensor) -> str:
    """Equal if and only if all bits are."""
    raw = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def weights(trainee: Trainee) -> Digests:
    """Every parameter of this rank."""
    return {name: digest(param) for name, param in named_parameters(trainee.chunks)}


def kept(trainee: Trainee) -> Digests:
    """All that this rank's optimizers keep: masters and state of the matrices, AdamW's main parameters and state."""
    found: Digests = {}
    for name, entry in engine_of(trainee).matrices.state_dict().items():
        assert isinstance(entry, dict)
        found |= {f"{name}.{key}": value for key, value in _flat(entry)}
    for number, leaf in enumerate(adamw_leaves(trainee)):
        for place, main in enumerate(leaf.get_parameters()):
            found[f"adamw.{number}.{place}"] = digest(main)
            state = leaf.optimizer.state.get(main, {})
            found |= {f"adamw.{number}.{place}.{key}": value for key, value in _flat(state)}
    return found


def adamw_leaves(trainee: Trainee) -> list[MegatronOptimizer]:
    """Megatron's optimizers inside of the engine's."""
    leaves: list[MegatronOptimizer] = [engine_of(trainee).chained_optimizers[0]]
    while any(hasattr(leaf, "chained_optimizers") for leaf in leaves):
        leaves = [inner for leaf in leaves for inner in getattr(leaf, "chained_optimizers", [leaf])]
    return [leaf for leaf in leaves if getattr(leaf, "optimizer", None) is not None]


def _flat(state: dict[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", told) for inner, told in _flat(value))
        else:
            yield key, digest(value) if isinstance(value, torch.Tensor) else repr(value)


@contextmanager
def poisoned(param: torch.nn.Parameter | None, value: float) -> Iterator[None]:
    """One element of every gradient of `param` is `value`, from this rank's backward pass on."""
    if param is None:
        yield
        return

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[spoiled.numel() // 2] = value
        return spoiled

    handle = param.register_hook(spoil)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """Warnings of a logger, which tests otherwise silence."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener, before = logging.getLogger(name), Listener(), logging.root.manager.disable
    logger.addHandler(listener)
    logging.disable(logging.NOTSET)
    try:
        yield lines
    finally:
        logging.disable(before)
        logger.removeHandler(listener)


def tensor_bytes(trainee: Trainee) -> int:
    """Returns the bytes that this rank keeps from step to step, each storage once: buffers, masters, state, messages,
    scratch."""
    matrices = engine_of(trainee).matrices
    (model,) = trainee.chunks
    buffers = (*model.buffers, *model.expert_parallel_buffers)
    tensors: list[object] = [data for buffer in buffers for data in (buffer.param_data, buffer.grad_data)]
    tensors += list(model.parameters())
    for leaf in adamw_leaves(trainee):
        tensors += leaf.get_parameters()
        tensors += [value for entry in leaf.optimizer.state.values() for value in entry.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values()) + hosted_bytes(trainee) + matrices.scratch_bytes


def hosted_bytes(trainee: Trainee) -> int:
    """Returns the bytes of masters and optimizer state of the matrices, or fragments of them, that this rank
    updates."""
    matrices = engine_of(trainee).matrices
    tensors: list[object] = list(matrices.masters.values())
    for group in (*matrices.groups, *matrices.sharing):
        if group.optimizer is not None:
            tensors += [value for entry in group.optimizer.state.values() for value in entry.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
