"""Megatron's own optimizers gather whole model chunks ahead with an interleaved pipeline, as Megatron-LM has them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron import optimizer
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step, validate
from tests.dist import jobs
from tests.dist.samples import samples_of
from tests.dist.synthetic import finish_gathering
from tests.dist.trained import FIXED

STAGES, CHUNKS, PASSES = 2, 3, 4 * 3
SETTINGS = {
    "adamw": ("optimizer=adamw",),
    # Megatron's own needs bf16 weights.
    "layerwise": ("engine.strategy=layerwise", "engine.splitting=qkv", "train.precision=bf16"),
}
INTERLEAVED = (
    *FIXED, "gpus=4", f"parallel.pp={STAGES}", f"parallel.vpp={CHUNKS}", "model.num_layers=6", "train.seq_length=32",
    "parallel.bucket_elements=10000",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The part of a run that one rank saw."""

    losses: list[float]
    weights: list[np.ndarray]
    events: list[tuple[str, int, int]]
    """The last step, in order: ("gather", model chunk, bucket) and ("forward", model chunk, number of the pass)."""
    buckets: list[int]
    """The number of buckets of each model chunk."""


def _run(config: RunConfig, world: World) -> Seen:
    trainee = assemble(config, world, None)
    samples = samples_of(config.setup, 4 * world.layout.global_batch_size)
    batches = BatchStream(samples, world)
    losses = [train_step(trainee, batches).loss for _ in range(2)]
    # It gathers by itself what the next step then starts to gather again.
    losses.append(validate(trainee, BatchStream(samples, world), samples=1 * world.layout.global_batch_size))
    losses.append(train_step(trainee, batches).loss)
    recorded = _recorded(trainee)
    losses.append(train_step(trainee, batches).loss)
    events = tuple(recorded)
    finish_gathering(trainee)
    return Seen(
        losses=losses,
        weights=[param.detach().float().numpy().copy() for chunk in trainee.chunks for param in chunk.parameters()],
        events=list(events),
        buckets=[len(chunk.bucket_groups) for chunk in trainee.chunks],
    )


def _recorded(trainee: Trainee) -> list[tuple[str, int, int]]:
    events: list[tuple[str, int, int]] = []
    for number, chunk in enumerate(trainee.chunks):
        for place, group in enumerate(chunk.bucket_groups):
            begin = group.start_param_sync

            def start(
                *arguments: object, begin: Callable[..., None] = begin, which: tuple[int, int] = (number, place),
                **named: object,
            ) -> None:  # fmt: skip
                events.append(("gather", *which))
                begin(*arguments, **named)

            group.start_param_sync = start

        def forward(*_: object, number: int = number) -> None:
            events.append(("forward", number, sum(name == "forward" for name, *_ in events)))

        chunk.register_forward_pre_hook(forward)
    return events


@pytest.mark.sweep  # test_cut_models trains interleaved stages too
@pytest.mark.parametrize("how", ["adamw", "layerwise"])
def test_whole_model_chunks_are_gathered_ahead_and_train_the_same(how: str) -> None:
    """All of the first two before the first forward pass, and the third as the first stage begins with the second."""
    config, layout = jobs.resolve(*INTERLEAVED, *SETTINGS[how])

    def work(aligned: bool, world: World) -> Seen:
        with pytest.MonkeyPatch.context() as patch:
            if not aligned:
                patch.setattr(optimizer, "aligns_param_gather", lambda *_: False)
            return _run(config, world)

    ranks = jobs.on_ranks({True: (config, layout), False: (config, layout)}, work)
    for rank, (seen, chained) in enumerate(zip(ranks[True], ranks[False], strict=True)):
        stage = rank // layout.owners
        assert seen.losses == chained.losses
        assert all(np.array_equal(one, other) for one, other in zip(seen.weights, chained.weights, strict=True))
        assert sum(seen.buckets) > CHUNKS or stage > 0, "several buckets, or their order says nothing"
        gathered = [[("gather", chunk, place) for place in range(count)] for chunk, count in enumerate(seen.buckets)]
        forwards = [event for event in seen.events if event[0] == "forward"]
        assert len(forwards) == PASSES
        begun = STAGES - stage
        assert seen.events == [*gathered[0], *gathered[1], *forwards[:begun], *gathered[2], *forwards[begun:]]
        assert sorted(chained.events) == sorted(seen.events)
        assert chained.events.index(("forward", 0, 0)) == 0, "one bucket ahead, nothing starts before it is needed"
