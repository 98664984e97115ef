"""The memory estimate against hand-computed cases and against what every honest estimate must obey."""

from collections import Counter
from dataclasses import replace
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.buffers import stage_weights, transient
from canzona_cli.core.costs.memory import (
    GIB,
    MemoryEstimate,
    balanced_placement,
    capacity,
    estimate,
    factor_bytes,
    least_recomputed,
    moment_bytes,
    placement,
)
from canzona_cli.core.costs.scratch import workspace_bytes
from canzona_cli.core.costs.update import STACK_BYTES, algorithm_of
from canzona_cli.core.model.families import parameter_count
from canzona_cli.core.model.matrices import layer_shapes, matrix_shapes
from canzona_cli.core.optimizers.facts import Algorithm
from canzona_cli.core.setup import CustomConfig, MuonConfig, Precision, Splitting
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.simulate.possible import RECOMPUTE
from tests.sizes import H100, layout, run

N = 596_049_920
MATRICES = 440_401_920
OTHERS = N - MATRICES


@pytest.mark.parametrize(
    ("dp", "precision", "weights", "state"), [(1, "bf16", 2, 12), (8, "bf16", 2, 12 / 8), (1, "fp32", 4, 8)]
)
def test_adamw_shards_its_state_alone_and_fp32_weights_are_masters(
    dp: int, precision: Precision, weights: int, state: float
) -> None:
    """Bytes a parameter; gradients are fp32."""
    parts = estimate(run("0.6b", dp, strategy="adamw", precision=precision).setup, layout(dp=dp)).parts
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (weights * N, 4 * N, state * N)


def test_gradients_reduced_in_bf16_take_half() -> None:
    assert estimate(run("0.6b", 1, grad_reduce_dtype="bf16").setup, layout()).parts["gradients"] == 2 * N


def test_sc_muon_shards_no_state() -> None:
    config = run("0.6b", 8, strategy="sc")
    expected = 8 * MATRICES + 12 * OTHERS
    assert estimate(config.setup, layout()).parts["optimizer"] == expected
    assert estimate(config.setup, layout(dp=8)).parts["optimizer"] == expected


@pytest.mark.parametrize("optimizer", ["soap", "shampoo"])
def test_sc_by_the_engine_keeps_all_matrices_whole_on_every_rank(optimizer: str) -> None:
    """Masters, moments and factors do not shrink with tp or dp; Megatron's sc of Muon holds fragments."""
    configs = [
        compose_run(["recipe=0.6b", f"optimizer={optimizer}", "engine.strategy=sc", f"parallel.tp={tp}"]).config
        for tp in (1, 2)
    ]
    how = algorithm_of(configs[0].setup)
    factors = 28 * sum(factor_bytes(how, *shape) for shape in layer_shapes(configs[0].model, "split"))
    kept = (4 + moment_bytes(how)) * MATRICES + factors
    for config, here in zip(configs, (layout(dp=4), layout(tp=2, dp=2)), strict=True):
        others = stage_weights(config.setup, here, 0).others
        assert estimate(config.setup, here).parts["optimizer"] == kept + 12 * others


def test_layerwise_keeps_whole_parameters_on_some_rank() -> None:
    # One rank a parameter and more: the fullest holds a single fc1, every buffer shard is as large as that one.
    shards = 28 * 4 * 2
    config = run("0.6b", shards)
    fc1 = 2 * 3072 * 1024
    held = placement(config.setup, layout(dp=shards), 0)
    assert held is not None
    assert held.worst == fc1
    assert held.padded == shards * fc1
    parts = estimate(config.setup, layout(dp=shards)).parts
    assert parts["weights"] == 2 * (shards * fc1 + OTHERS)
    assert parts["optimizer"] == 8 * fc1 + 12 * -(-OTHERS // shards)


def test_canzona_spreads_whole_matrices_over_the_grid() -> None:
    config = run("0.6b", 8, strategy="canzona", tp=2)
    held = placement(config.setup, layout(tp=2, dp=4), 0)
    assert held is not None
    assert MATRICES / 8 <= held.worst < MATRICES / 8 + 3072 * 1024
    assert held.padded == 0


def test_pipeline_stages_hold_what_is_theirs() -> None:
    config = run("8b", 4, strategy="adamw")
    count = parameter_count(config.model)
    first = estimate(config.setup, layout(pp=4, count=16))
    assert first.worst_rank == "pp stage 0"
    assert first.parts["weights"] == 2 * ((count.layer_matrices + count.vectors - 4096) // 4 + count.embedding)
    assert first.parts["logits"] == 0
    # With one micro-batch in flight everywhere, the stage with the logits needs most.
    assert estimate(config.setup, layout(pp=4, micro=8)).worst_rank == "pp stage 3"


def test_activations_of_a_layer_counted_by_hand() -> None:
    """0.6B, one sequence of 4096, flash attention: 4h + (4a + 3g)d + 3f elements a token and layer, then 2h. Full
    recomputation keeps one input a layer."""
    parts = estimate(run("0.6b", 1).setup, layout()).parts
    assert parts["activations"] == 2 * 4096 * (28 * (4 * 1024 + (4 * 16 + 3 * 8) * 128 + 3 * 3072) + 2 * 1024)
    assert parts["logits"] == 10 * 4096 * 151_936  # bf16, softmax and gradient in fp32
    parts = estimate(run("0.6b", 1).setup, replace(layout(), recompute="full")).parts
    assert parts["activations"] == 2 * 4096 * (28 * 1024 + 2 * 1024)


@pytest.mark.parametrize("cp", [1, 2])
def test_no_attention_keeps_scores(cp: int) -> None:
    """Equally many tokens in longer sequences take the same memory."""
    config = run("tiny", 1)
    longer = replace(config, train=replace(config.train, seq_length=512))
    short, long = (replace(layout(micro=micro), cp=cp) for micro in (4, 2))
    assert estimate(config.setup, short).parts == estimate(longer.setup, long).parts


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_selective_recomputation_gains_nothing_where_sequences_are_whole(transformer_engine: bool) -> None:
    config = run("8b", 1, cluster=replace(H100, transformer_engine=transformer_engine))
    assert (
        estimate(config.setup, layout()).total == estimate(config.setup, replace(layout(), recompute="selective")).total
    )


def test_selective_recomputation_frees_keys_and_values_that_were_gathered() -> None:
    """8B without Transformer Engine, a sequence of 4096 over four ranks: of 8 + 8 heads, for 8 rotated keys; and a copy
    of 32 heads' context."""
    config = run("8b", 1, cluster=replace(H100, transformer_engine=False))
    none, selective = (
        estimate(config.setup, replace(layout(), cp=4, recompute=recompute)).parts["activations"]
        for recompute in ("none", "selective")
    )
    assert none - selective == 36 * 2 * 128 * ((8 + 8) * 4096 + (32 - 8) * 1024)


@given(
    strategy=st.sampled_from(("adamw", "sc", "layerwise", "asc", "paper", "canzona")),
    dp=st.sampled_from((1, 2, 8)),
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 4)),
    micro=st.sampled_from((1, 2)),
    splitting=st.sampled_from(get_args(Splitting)),
)
def test_more_of_anything_needs_more(
    strategy: str, dp: int, tp: int, pp: int, micro: int, splitting: Splitting
) -> None:
    config = run("4b", dp * tp * pp, strategy=strategy)  # type: ignore[arg-type]
    config = replace(config, engine=replace(config.engine, splitting=splitting))

    def total(**changes: int) -> MemoryEstimate:
        return estimate(config.setup, layout(**{"tp": tp, "pp": pp, "dp": dp, "micro": micro, "count": 8, **changes}))

    here = total()
    assert total(micro=2 * micro).total > here.total
    assert total(tp=2 * tp).total < here.total
    # Padding aside, another data-parallel rank can only take state away.
    assert total(dp=2 * dp).parts["optimizer"] <= here.parts["optimizer"]
    assert all(size >= 0 for size in here.parts.values())
    assert here.fits == (here.total <= here.capacity)


def test_a_home_keeps_four_fp32_copies_of_its_share_at_once() -> None:
    """Megatron's mode layer_sharded exchanges all matrices of an owner together: 8B on two owners at TP 8."""
    config, mesh = run("8b", 16, strategy="layerwise"), layout(tp=8, dp=2)
    sharded = replace(config, engine=replace(config.engine, muon_tp_mode="layer_sharded"))
    one, other = (transient(mode.setup, algorithm_of(mode.setup), mesh, 0).update for mode in (config, sharded))
    assert one < other == 4 * 4 * stage_weights(config.setup, mesh, 0).matrices // 2
    assert estimate(config.setup, mesh).total <= estimate(sharded.setup, mesh).total


def test_megatrons_strategies_split_q_k_and_v_at_most() -> None:
    """canzona's matrices are what was asked for."""
    for strategy in ("sc", "layerwise", "asc", "paper", "canzona"):
        config = run("8b", 8, strategy=strategy)
        shapes = {
            splitting: matrix_shapes(replace(config, engine=replace(config.engine, splitting=splitting)).setup)
            for splitting in get_args(Splitting)
        }
        assert shapes["fused"] == layer_shapes(config.model, "fused")
        assert len(shapes["qkv"]) == 6
        if strategy in ("sc", "layerwise"):
            assert shapes["qkv"] == shapes["split"] == shapes["per_head"]
        else:
            assert shapes["split"] == layer_shapes(config.model, "split")
            assert len(shapes["per_head"]) == 4 + 32 + 2 * 8


def test_moments_of_each_algorithm() -> None:
    expected = {"muon": 4, "normuon": 4, "soap": 8, "shampoo": 8, "adamw": 8}
    for name, size in expected.items():
        assert moment_bytes(Algorithm(name=name)) == size


@pytest.mark.parametrize("like", ["muon", "shampoo", "soap", "adamw"])
def test_a_users_own_optimizer_holds_what_the_one_it_is_like_holds(like: str) -> None:
    own = CustomConfig(name="custom", lr=1e-3, source="mine.py:Mine", cost_like=like)
    config = replace(run("8b", 8, strategy="canzona"), optimizer=own)
    parts = estimate(config.setup, layout(tp=2, dp=4)).parts
    held = placement(config.setup, layout(tp=2, dp=4), 0)
    assert held is not None
    how = algorithm_of(config.setup)
    assert how.name == like
    factors = sum(count * factor_bytes(how, *shape) for shape, count in held.worst_shapes.items())
    others = stage_weights(config.setup, layout(tp=2, dp=4), 0).others // 4
    assert parts["optimizer"] == (4 + moment_bytes(how)) * held.worst + factors + 12 * others


def test_capacity_leaves_out_what_is_reserved() -> None:
    assert capacity(run("0.6b", 1).setup) == int((79.6 - 6.0) * GIB)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=7).map(tuple),
    layers=st.integers(1, 12),
    cells=st.integers(1, 60),
    natural_order=st.booleans(),
)
def test_balancing_stays_within_a_matrix_of_the_mean(
    shapes: tuple[tuple[int, int], ...], layers: int, cells: int, natural_order: bool
) -> None:
    held = balanced_placement(((tuple((shape, 1) for shape in shapes), layers),), cells, natural_order=natural_order)
    total, largest = layers * sum(r * c for r, c in shapes), max(r * c for r, c in shapes)
    assert max(largest, total / cells) <= held.worst <= total / cells + largest
    assert sum(count * r * c for (r, c), count in held.worst_shapes.items()) == held.worst


@given(
    shapes=st.lists(st.sampled_from(((8, 8), (4, 16), (8, 24), (1, 7), (30, 30))), min_size=1, max_size=40).map(tuple),
    layers=st.integers(1, 9),
    cells=st.integers(1, 70),
)
def test_equal_matrices_are_placed_together_as_one_by_one(
    shapes: tuple[tuple[int, int], ...], layers: int, cells: int
) -> None:
    loads, contents = [0] * cells, [Counter[tuple[int, int]]() for _ in range(cells)]
    for rows, cols in sorted(layers * shapes, key=lambda shape: (-shape[0] * shape[1], shape)):
        cell = loads.index(min(loads))
        loads[cell] += rows * cols
        contents[cell][rows, cols] += 1
    held = balanced_placement(((tuple((shape, 1) for shape in shapes), layers),), cells, natural_order=False)
    assert held.worst == max(loads)
    assert held.worst_shapes == contents[loads.index(max(loads))]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["canzona", "layerwise", "sc", "adamw"])
def test_the_first_layout_that_fits_needs_at_most_its_estimate(strategy: AnyStrategy, pp: int) -> None:
    config = run("8b", 16, strategy=strategy)
    for mesh in (layout(tp=2, pp=pp, dp=8 // pp), layout(tp=1, pp=pp, dp=16 // pp)):
        layouts = [replace(mesh, recompute=recompute) for recompute in RECOMPUTE]
        totals = [estimate(config.setup, each).total for each in layouts]
        for limit in (limit for total in totals for limit in (total, total - 1)):
            first = next((place for place, total in enumerate(totals) if total <= limit), None)
            assert least_recomputed(config.setup, layouts, limit) == first


def test_scratch_of_stacks_is_planned() -> None:
    """Two iterates and squares in bf16 for as many as are stacked, and their directions in fp32."""
    config = run("32b", 256, strategy="canzona")

    def scratch(shapes: list[tuple[int, int]], stack: Literal["auto"] | bool) -> int:
        assert isinstance(config.optimizer, MuonConfig)
        optimizer = replace(config.optimizer, stack=stack, form="standard")
        stacking = replace(config, optimizer=optimizer)
        return workspace_bytes(stacking.setup, algorithm_of(stacking.setup), [shapes])

    k, count = (1024, 5120), 3
    elements, square = 1024 * 5120, 1024**2
    assert scratch([k] * count, False) == 4 * (elements + square) + 4 * elements
    assert scratch([k] * count, "auto") == count * 4 * (elements + square) + count * 4 * elements
    assert scratch([k] * 1000, "auto") <= 2 * STACK_BYTES["cuda"]
    assert scratch([k] * 1000, True) == scratch([k] * 1000, "auto")
    large = (5120, 25600)
    assert scratch([large] * count, "auto") == scratch([large], False)
