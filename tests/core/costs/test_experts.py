"""The costs of experts that are divided among ranks, against hand-computed cases and what must hold for any layout."""

from dataclasses import replace
from typing import get_args

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import layer_activations
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import StageTime, stage_time
from canzona_cli.core.costs.modules import HOST_LAUNCHES, copy_passes, dispatch, products_seconds
from canzona_cli.core.model.families import family_of
from canzona_cli.core.setup import Dispatcher, Layout
from tests import sizes

RUN = compose_run(["recipe=qwen3-30b-a3b", "optimizer=adamw", "gpus=64"], training=False).config
TOKENS, HIDDEN, FFN, CHOSEN = 4096, 2048, 768, 8
NVLINK, PORT = 360e9, 45e9
"""The bytes per second that large collectives reach."""


def layout(ep: int, tp: int = 1, micro_batch_size: int = 1) -> Layout:
    return replace(sizes.layout(tp=tp, dp=64 // tp, micro=micro_batch_size, count=4), ep=ep)


def by(dispatcher: Dispatcher, *, overlap: bool = False) -> RunConfig:
    cluster = replace(RUN.cluster, dispatch_overlap=overlap)
    return replace(RUN, parallel=replace(RUN.parallel, dispatcher=dispatcher), cluster=cluster)


def in_layer(time: StageTime, layer: int = 3) -> float:
    modules = [module for module in time.modules if module.layer == layer]
    return sum(module.forward_s + module.backward_s + sum(move.seconds for move in module.moves) for module in modules)


def test_every_copy_of_a_token_leaves_the_node_on_its_own() -> None:
    """Half of all copies go to the other node when there are two."""
    moved = dispatch(by("alltoall").setup, layout(ep=16))
    assert moved.link == "network"
    assert moved.link_s == pytest.approx(CHOSEN * TOKENS * HIDDEN * 2 / 2 / PORT)


def test_deepep_sends_one_copy_to_each_node() -> None:
    """A token has none of its 8 experts on the other of two nodes once in 2^8 times."""
    moved = dispatch(by("flex").setup, layout(ep=16))
    assert moved.link == "network"
    assert moved.link_s == pytest.approx(TOKENS * HIDDEN * 2 * (1 - 2**-8) / PORT)


def test_within_a_node_deepep_sends_one_copy_to_each_rank() -> None:
    moved = dispatch(by("flex").setup, layout(ep=8))
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert moved.link == "machine"
    assert moved.link_s == pytest.approx(TOKENS * HIDDEN * 2 * ranks * 7 / 8 / NVLINK)


def test_allgather_sends_all_tokens_to_all_ranks() -> None:
    moved = dispatch(by("allgather").setup, layout(ep=8))
    assert moved.link_s == pytest.approx(7 * TOKENS * HIDDEN * 2 / NVLINK)


def test_a_tensor_parallel_rank_sends_its_part_of_the_sequence() -> None:
    whole, half = (dispatch(by("flex").setup, layout(ep=16, tp=tp)).link_s for tp in (1, 2))
    assert half == pytest.approx(whole / 2)


def test_products_are_the_quicker_the_more_tokens_an_expert_has() -> None:
    work = next(work for work in family_of(RUN.model).modules(RUN.model) if work.part == "fc1")
    seconds = [products_seconds(RUN.setup, layout(ep), work) for ep in (1, 8, 64)]
    flops = 2.0 * CHOSEN * TOKENS * HIDDEN * 2 * FFN
    assert seconds == sorted(seconds, reverse=True)
    assert 200e12 < flops / seconds[0] < flops / seconds[-1] < 710e12


def test_at_most_four_products_run_side_by_side() -> None:
    """128 experts take 32 times as long as four with as many tokens for each."""
    work = next(work for work in family_of(RUN.model).modules(RUN.model) if work.part == "fc1")
    few = replace(RUN, train=replace(RUN.train, seq_length=TOKENS // 32))
    assert products_seconds(RUN.setup, layout(ep=1), work) == pytest.approx(
        32 * products_seconds(few.setup, layout(ep=32), work)
    )


def test_copies_are_sorted_once_more_where_each_travels_on_its_own() -> None:
    assert [copy_passes(by(kind).setup, layout(8)) for kind in get_args(Dispatcher)] == [
        2.0 if kind == "alltoall" else 1.0 for kind in get_args(Dispatcher)
    ]
    assert copy_passes(by("alltoall").setup, layout(1)) == 1.0


def test_only_travel_that_is_as_long_as_the_computation_is_hidden() -> None:
    travel = Transfer(latency_s=0.5, link="network", link_s=1.5)
    for computing_s, seconds in ((0.0, 2.0), (1.0, 1.25), (2.0, 0.5), (9.0, 0.5)):
        assert travel.exposed(computing_s, units=0.25).seconds == pytest.approx(seconds)


def test_hidden_travel_is_never_longer_and_hides_nothing_else() -> None:
    for dispatcher in ("alltoall", "flex"):
        shown, short = (in_layer(stage_time(by(dispatcher, overlap=o), layout(16), 0)) for o in (False, True))
        travel = 4 * dispatch(by(dispatcher).setup, layout(16)).seconds
        assert shown - travel < short < shown


def test_few_tokens_take_as_long_as_the_host_needs_to_start_their_kernels() -> None:
    short = replace(by("flex"), train=replace(RUN.train, seq_length=64))
    seconds = in_layer(stage_time(short, layout(8), 0))
    assert seconds == pytest.approx(2 * HOST_LAUNCHES * RUN.cluster.launch_us * 1e-6)


def test_a_dense_model_has_none_of_these_costs() -> None:
    dense = compose_run(["recipe=qwen3-8b", "optimizer=adamw", "gpus=64"], training=False).config
    slow = replace(dense, cluster=replace(dense.cluster, launch_us=500.0, dispatch_overlap=True))
    assert stage_time(slow, layout(1), 0).passes == stage_time(dense, layout(1), 0).passes


def test_activations_have_every_copy_of_a_token() -> None:
    """Tensor parallelism cuts an expert's width, but not the copies, unless experts are divided among ranks."""
    dense = replace(RUN, model=replace(RUN.model, num_experts=0, ffn_hidden_size=CHOSEN * FFN))
    for ep, copies in ((1, 1), (4, 2)):
        of_experts, of_dense = (
            layer_activations(run.setup, run.model, layout(ep, tp=2), "none") for run in (RUN, dense)
        )
        assert of_experts - of_dense == 2 * TOKENS * CHOSEN * 2 * HIDDEN // copies
