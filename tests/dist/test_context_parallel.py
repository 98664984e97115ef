"""Sequences cut over context-parallel ranks train the model that whole ones train."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.model import CUT_STARTS
from tests.dist import compared, jobs
from tests.dist.compared import Bounds, Found
from tests.dist.ranks import run_ranks
from tests.dist.trained import FIXED

LAYOUTS = {
    "one rank": ("gpus=1",),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "cp2 tp2": ("gpus=4", "parallel.cp=2", "parallel.tp=2"),
    "cp2 dp2": ("gpus=4", "parallel.cp=2"),
    "cp2 pp2": ("gpus=4", "parallel.cp=2", "parallel.pp=2"),
}
SETTINGS = {
    "muon": ("optimizer=muon",),
    "adamw": ("optimizer=adamw",),
    "muon bf16 selective": ("optimizer=muon", "train.precision=bf16", "train.recompute=selective"),
}


# Seen: 2e-7, 8e-6, 1e-4; and 1e-4, 7e-4, 0.05.
FP32 = Bounds(loss=2e-6, grad_norm=3e-5, weights=5e-4)
BF16 = Bounds(loss=5e-4, grad_norm=3e-3, weights=0.15)


def _resolve(where: str, how: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, "train.micro_batch_size=4", *SETTINGS[how], *LAYOUTS[where])


USUALLY = {
    "one rank": tuple(SETTINGS),
    "cp2": tuple(SETTINGS),
    "cp2 tp2": ("muon", "muon bf16 selective"),
    "cp2 dp2": (),
    "cp2 pp2": ("muon",),
}
"""What is not left to the sweep."""


@cache
def _of(where: str, *hows: str) -> dict[str, Found]:
    return compared.found({how: _resolve(where, how) for how in hows})


def _found(where: str, how: str) -> Found:
    return _of(where, *(USUALLY[where] if how in USUALLY[where] else [how]))[how]


def test_a_loss_is_the_mean_over_the_tokens_that_count() -> None:
    """More than a quarter do not. Weights as small as the first ones give any token the chance of every other."""
    config, _ = _resolve("one rank", "adamw")
    first = _found("one rank", "adamw").losses[0]
    assert first == pytest.approx(math.log(config.model.vocab_size), rel=0.02)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param(how, where, marks=[] if how in USUALLY[where] else pytest.mark.sweep)
        for how in SETTINGS
        for where in LAYOUTS
        if where != "one rank"
    ],
)
def test_cut_sequences_train_what_whole_ones_train(how: str, where: str) -> None:
    one = _found("one rank", how)
    assert min(one.grad_norms) > 0.25, "clipping is not active"
    compared.assert_close(_found(where, how), one, BF16 if "bf16" in how else FP32)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of operations, how many are started."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_cut_layer_starts_as_many_more_operations_as_are_priced() -> None:
    """Beside those of its modules, by torch's own count."""
    config, layout = jobs.resolve("recipe=tiny", "optimizer=adamw", "gpus=2", "parallel.tp=1", "parallel.cp=1",
                                  "parallel.pp=1", "train.seq_length=256", "train.micro_batch_size=1")  # fmt: skip

    def rank() -> tuple[list[int], list[int]]:
        from megatron.core.transformer.enums import AttnMaskType

        from canzona_cli.megatron.attention import CausalAttention
        from canzona_cli.megatron.model import build_model
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
            [model] = build_model(replace(config, model=replace(config.model, num_layers=layers)), world)
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
