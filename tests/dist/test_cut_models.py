"""Sequences cut over context-parallel ranks, and stages of several chunks, train the model that one rank trains."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.modules import CUT_STARTS
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.setup import Layout, Setup
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.step import validate
from tests.dist import jobs
from tests.dist.jobs import Runs
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens
from tests.dist.trained import FIXED, Trained, different, run_trainings

STEPS = 2
"""The second begins with the weights, momenta and averages of the first."""
SMALL = ("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=96", "train.seq_length=32")
SEVEN = (*SMALL, "model.num_layers=7", "train.global_batch_size=4")
LAYOUTS = {
    "one rank": ("gpus=1", "train.micro_batch_size=4"),
    "sp tp2": ("gpus=2", "parallel.tp=2", "parallel.sequence_parallel=true", "train.micro_batch_size=4"),
    "cp2 tp2": ("gpus=4", "parallel.cp=2", "parallel.tp=2", "train.micro_batch_size=4"),
    "one rank, of chunks": (*SMALL, "gpus=1"),
    "pp2": (*SMALL, "gpus=4", "parallel.pp=2", "parallel.vpp=1"),
    "pp2 vpp2": (*SMALL, "gpus=4", "parallel.pp=2", "parallel.vpp=2"),
    "one rank, 7 layers": (*SEVEN, "gpus=1"),
    "pp2 vpp2, 7 layers": (*SEVEN, "gpus=2", "parallel.pp=2", "parallel.vpp=2"),
}
SETTINGS = {
    "muon": ("optimizer=muon",),
    "muon unclipped": ("optimizer=muon", "optimizer.clip_grad=0"),
    "adamw": ("optimizer=adamw",),
}
Run = tuple[str, str]
"""A layout and settings."""
COMPARED: dict[Run, str] = {
    ("sp tp2", "muon"): "one rank",
    ("cp2 tp2", "muon"): "one rank",
    ("pp2 vpp2", "muon unclipped"): "one rank, of chunks",
    # Chunks of 2 and 2, 2 and 1 layers.
    ("pp2 vpp2, 7 layers", "muon unclipped"): "one rank, 7 layers",
}
"""Layouts with the one rank that trains the same; `tests.dist.fuzz` draws more."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The relative difference that another order of summation may cause; more than was seen in four steps."""

    loss: float
    grad_norm: float
    weights: float


# Seen in fp32: losses 4e-7, norms 8e-6 (5e-5 over chunks), weights 1e-4.
CUT = Bounds(loss=2e-6, grad_norm=3e-5, weights=5e-4)
CHUNKS = Bounds(loss=2e-6, grad_norm=2e-4, weights=5e-3)


class MaskedTokens(RandomTokens):
    """The loss leaves some tokens out, more of a sample's first quarter than of the rest: ranks that share a sequence
    count differently many."""

    def __getitem__(self, index: int) -> Batch:
        sample = super().__getitem__(index)
        sample["loss_mask"][: len(sample["tokens"]) // 4 + index % 5] = 0.0
        return sample


def _resolve(run: Run) -> tuple[RunConfig, Layout]:
    where, how = run
    return jobs.resolve(*FIXED, *SETTINGS[how], *LAYOUTS[where])


def _masked(setup: Setup, count: int) -> MaskedTokens:
    return MaskedTokens(samples=count, seq_length=setup.train.seq_length, vocab_size=setup.model.vocab_size)


def _validated(trainee: Trainee) -> float:
    count = 2 * trainee.world.layout.global_batch_size
    return validate(trainee, BatchStream(_masked(trainee.setup, count), trainee.world), samples=count)


def _train(runs: Sequence[Run]) -> list[Trained]:
    found = run_trainings([(*_resolve(run), STEPS) for run in runs], read=_masked, look=_validated)
    assert all(len(set(one.kept)) == 1 for one in found), "ranks disagree about a validation"
    return found


RUNS = Runs(
    [
        *(other for run, one in COMPARED.items() for other in (run, (one, run[1]))),
        *(("pp2", "muon unclipped"), ("one rank", "adamw")),
    ],
    lambda run: run[0],
    _train,
)


def _apart(one: Trained, reference: Trained) -> float:
    """Returns the distance between two runs' ends over the distance they went, in norms over all weights."""
    between, way = (
        sum(float((one.after[name] - other[name]).square().sum()) for name in other)
        for other in (reference.after, reference.before)
    )
    return math.sqrt(between / way)


def test_a_loss_is_the_mean_over_the_tokens_that_count() -> None:
    """More than a quarter do not. Weights as small as the first ones give any token the chance of every other."""
    first = RUNS["one rank", "adamw"].losses[0]
    assert first == pytest.approx(math.log(_resolve(("one rank", "adamw"))[0].model.vocab_size), rel=0.02)


@pytest.mark.parametrize("run", COMPARED, ids=" ".join)
def test_a_cut_model_trains_what_one_rank_trains(run: Run) -> None:
    where, how = run
    one, found = RUNS[COMPARED[run], how], RUNS[run]
    bounds = CHUNKS if "vpp" in where else CUT
    assert min(one.grad_norms) > 0.25 or "vpp" in where, "clipping is not active"
    assert different(found.before, one.before) == []
    assert (*found.losses, found.kept[0]) == pytest.approx((*one.losses, one.kept[0]), rel=bounds.loss)
    assert found.grad_norms == pytest.approx(one.grad_norms, rel=bounds.grad_norm)
    assert _apart(found, one) < bounds.weights


def test_chunks_change_no_bit() -> None:
    """The same sums in the same order, but for the norm of all gradients, by which nothing is clipped here."""
    interleaved, plain = RUNS["pp2 vpp2", "muon unclipped"], RUNS["pp2", "muon unclipped"]
    assert interleaved.losses == plain.losses
    assert interleaved.kept[0] == plain.kept[0]
    assert interleaved.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)
    assert different(interleaved.after, plain.after) == []


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of the operations that are started."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_cut_layer_starts_as_many_more_operations_as_are_priced() -> None:
    """Counts operations by torch's own count, those of the layer's modules excluded."""
    config, layout = jobs.resolve("recipe=tiny", "optimizer=adamw", "gpus=2", "parallel.tp=1", "parallel.cp=1",
                                  "parallel.pp=1", "train.seq_length=256", "train.micro_batch_size=1")  # fmt: skip

    def rank() -> tuple[list[int], list[int]]:
        from megatron.core.transformer.enums import AttnMaskType

        from canzona_cli.core.megatron.attention import CausalAttention
        from canzona_cli.core.megatron.model import build_model
        from canzona_cli.training.assemble import join

        def both(forward: Callable[[], torch.Tensor]) -> tuple[int, int]:
            torch.autograd.backward(forward().float().sum())  # what is made once
            with _Counted() as counted:  # type: ignore[no-untyped-call]
                found = forward().float().sum()
                ahead = counted.count
                torch.autograd.backward(found)
            return ahead, counted.count - ahead

        world = join(config, layout)
        tokens, places = torch.zeros(1, 256, dtype=torch.long), torch.arange(256).expand(1, 256)
        of_model = []
        for layers in (1, 2):
            [model] = build_model(replace(config, model=replace(config.model, num_layers=layers)).setup, world)
            of_model.append(both(partial(model, tokens, places, None, labels=tokens)))
        of_attention = []
        for size in (1, 2):
            groups = [torch.distributed.new_group([number]) for number in range(2)]
            group = torch.distributed.group.WORLD if size == 2 else groups[world.rank]
            attention = CausalAttention(softmax_scale=None, attn_mask_type=AttnMaskType.causal,
                                        pg_collection=SimpleNamespace(cp=group))  # fmt: skip
            query, key, value = (
                torch.randn(256 // size, 1, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
            )
            of_attention.append(both(partial(attention, query, key, value)))
        return (
            [two - one for one, two in zip(*of_model, strict=True)],
            [cut - whole for whole, cut in zip(*of_attention, strict=True)],
        )

    layer, more = run_ranks(2, rank)[0]
    for of_layer, besides in zip(layer, more, strict=True):
        assert 4 * besides / of_layer == pytest.approx(CUT_STARTS, rel=0.1)
