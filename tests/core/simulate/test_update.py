"""The update phase against pipelines worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.sharing import SharedCost, shared_bytes, shared_exchanges
from canzona_cli.core.costs.tp_modes import homes
from canzona_cli.core.costs.update import RULES
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.plan import Assignment, Cell, MicroGroup
from canzona_cli.core.setup import ClusterConfig, MuonTpMode
from canzona_cli.core.simulate.update import RankUpdate, UpdateModel
from tests import sizes
from tests.sizes import H100, layout, run

NO_COPIES = replace(H100, intra_node_latency_us=0.0, memory_gb_per_s=1e15, launch_us=0.0)
"""Packing is free, exchanges are not."""
FREE = replace(NO_COPIES, intra_node_gb_per_s=1e15)
SIDE = 1024
BYTES = 360e9
"""The bytes per second of a link inside a machine."""


def matrix(index: int, shard_dim: Literal[0, 1] | None = 0) -> Matrix:
    return sizes.matrix(index, SIDE, SIDE, shard_dim)


def hosted(
    costs: list[float],
    hosts: list[int],
    groups: Sequence[tuple[int, ...]],
    cluster: ClusterConfig,
    tp: int = 2,
    *,
    norm_s: float = 0.0,
    shard_dim: Literal[0, 1] | None = 0,
    config: RunConfig | None = None,
) -> tuple[RankUpdate, ...]:
    """Matrices of one owner."""
    matrices = [matrix(index, shard_dim) for index in range(len(costs))]
    config = config or run("8b", tp, strategy="canzona", cluster=cluster)
    return UpdateModel(config.setup, layout(tp=tp), matrices, costs).hosted(
        [MicroGroup(stage=0, owner=0, index=n, matrices=members) for n, members in enumerate(groups)],
        Assignment(cells=tuple(Cell(owner=0, host=host) for host in hosts)),
        norm_s,
    )


def test_without_tensor_parallelism_an_owner_updates_one_after_another() -> None:
    (update,) = hosted([0.5, 0.25], [0, 0], [(0, 1)], NO_COPIES, tp=1)
    assert (update.seconds, update.matrix_update_s, update.exchange_total_s) == (0.75, 0.75, 0.0)


def test_free_exchanges_leave_the_updates() -> None:
    one, other = hosted([0.5, 0.25, 0.25], [0, 1, 1], [(0, 1), (2,)], FREE)
    assert one.matrix_update_s == other.matrix_update_s == 0.5
    assert one.seconds == pytest.approx(0.5)
    assert other.seconds == pytest.approx(0.5)


def test_only_the_first_gradients_and_the_last_weights_are_exposed_under_long_updates() -> None:
    count, cost = 6, 1.0
    groups = [(2 * n, 2 * n + 1) for n in range(count)]
    updates = hosted([cost] * 2 * count, [0, 1] * count, groups, NO_COPIES)
    gradients, weights = SIDE * SIDE / 2 * 4 / BYTES, SIDE * SIDE / 2 * 2 / BYTES
    for update in updates:
        assert update.matrix_update_s == count * cost
        assert update.exchange_s == pytest.approx(gradients + weights)
        assert update.exchange_total_s == pytest.approx(count * (gradients + weights))


def test_short_updates_leave_every_exchange_exposed() -> None:
    groups = [(0, 1), (2, 3), (4, 5)]
    (update, _) = hosted([0.0] * 6, [0, 1] * 3, groups, NO_COPIES)
    assert update.exchange_s == pytest.approx(update.exchange_total_s)
    assert update.exchange_s == pytest.approx(3 * SIDE * SIDE / 2 * (4 + 2) / BYTES)


def test_a_group_on_one_host_takes_its_receiver_longer() -> None:
    even = hosted([0.0] * 4, [0, 1, 2, 3], [(0, 1, 2, 3)], NO_COPIES, tp=4)
    flooded = hosted([0.0] * 4, [0, 0, 0, 0], [(0, 1, 2, 3)], NO_COPIES, tp=4)
    assert flooded[0].exchange_total_s == pytest.approx(4 * even[0].exchange_total_s)


def test_norm_clip_and_adamw_hide_the_first_two_exchanges() -> None:
    """One of three exchanges stays exposed: the one whose gradients start with the first update. All weights are
    exposed."""
    norm_s = 1.0
    (update, _) = hosted([0.0] * 6, [0, 1] * 3, [(0, 1), (2, 3), (4, 5)], NO_COPIES, norm_s=norm_s)
    # With a flag for each matrix.
    gradients, weights = SIDE * SIDE / 2 * 4 / BYTES, (SIDE * SIDE / 2 + 1) * 2 / BYTES
    assert update.exchange_s == pytest.approx(gradients + 3 * weights)
    assert update.exchange_total_s == pytest.approx(3 * (gradients + weights))
    assert update.begun_s == norm_s


@pytest.mark.parametrize(("count", "alone"), [(1, 1), (2, 0), (3, 1), (4, 0)])
def test_of_two_shared_matrices_one_is_updated_while_the_other_travels(count: int, alone: int) -> None:
    """An odd one waits for what its next part needs, 6 of 11 gathers and the all-to-alls; and all wait for everything
    where there is nothing to do meanwhile."""
    parts, matrices = len(shared_exchanges(5)) + 1, [matrix(index) for index in range(count)]
    model = UpdateModel(
        run("8b", 2, strategy="canzona", cluster=NO_COPIES).setup, layout(tp=2), matrices, [1.0] * count
    )
    travels = shared_bytes(matrices[0], 2, 5, 2) / BYTES
    for cost, waited in ((1.0, alone * 8 / 13), (0.0, count)):
        shared_costs = {index: SharedCost(fragment=(cost,) * parts) for index in range(count)}
        assignment = Assignment(cells=(Cell(owner=0, host=0),) * count, shared_costs=shared_costs)
        group = MicroGroup(stage=0, owner=0, index=0, matrices=tuple(range(count)))
        for update in model.hosted([group], assignment):
            assert update.matrix_update_s == count * parts * cost
            assert update.exchange_s == pytest.approx(waited * travels, rel=1e-3)
            assert update.exchange_total_s == pytest.approx(count * travels, rel=1e-3)


def test_a_fast_host_waits_for_the_slow_one_to_send_weights() -> None:
    slow, fast = hosted([1.0, 0.25], [0, 1], [(0, 1)], FREE)
    assert slow.exchange_s == pytest.approx(0.0)
    assert fast.exchange_s == pytest.approx(0.75)


def test_packing_and_unpacking_go_through_memory() -> None:
    cluster = replace(FREE, memory_gb_per_s=1000.0)
    (update, _) = hosted([0.0, 0.0], [0, 1], [(0, 1)], cluster)
    # Gradients read and written: the other's fragment packed, one whole matrix put together. Weights: of both fragments
    # the old and the new one read, one of them written; that they are rounded is a part of the update.
    moved = SIDE * SIDE * (0.5 * 2 * 4 + 2 * 4 + 2 * 0.5 * 3 * 2)
    assert update.packed_s + update.exchange_s == pytest.approx(moved / (0.72 * 1e12))


def test_packing_reads_and_writes_gradients_in_the_types_that_they_have() -> None:
    """Gradients that are reduced and sent in bf16 have half the bytes; whole gradients are fp32."""
    cluster = replace(FREE, memory_gb_per_s=1000.0)
    config = run("8b", 2, strategy="canzona", cluster=cluster, grad_reduce_dtype="bf16")
    config = replace(config, engine=replace(config.engine, exchange_dtype="bf16"))
    (update, _) = hosted([0.0, 0.0], [0, 1], [(0, 1)], cluster, config=config)
    # Before the norm only packing: half of one matrix, 2 bytes read and 2 written.
    assert update.packed_s == pytest.approx(SIDE * SIDE * 0.5 * (2 + 2) / (0.72 * 1e12))
    # After it, two fragments of 2 bytes become one of 4; weights as above.
    moved = SIDE * SIDE * (0.5 * (2 + 2) + (2 + 4) + 2 * 0.5 * 3 * 2)
    assert update.packed_s + update.exchange_s == pytest.approx(moved / (0.72 * 1e12))


def test_the_copy_of_every_fragment_is_launched() -> None:
    (update, _) = hosted([0.0, 0.0], [0, 1], [(0, 1)], replace(FREE, launch_us=10.0))
    # Of two matrices a rank hosts one. Gradients: one fragment packed, two unpacked. Weights: the other's fragment
    # packed, its own rounded and written; one unpacked.
    assert update.packed_s + update.exchange_s == pytest.approx((1 + 2 + 3 + 1) * 10e-6)
    # The updates themselves, without those of other operations: one graph.
    assert update.matrix_update_s == pytest.approx(10e-6)


def test_gradients_travel_in_the_exchanges_own_type() -> None:
    for dtype, grad_reduce, width in (("fp32", "bf16", 4), ("bf16", "fp32", 2)):
        config = run("8b", 2, strategy="canzona", cluster=NO_COPIES, grad_reduce_dtype=grad_reduce)  # type: ignore[arg-type]
        config = replace(config, engine=replace(config.engine, exchange_dtype=dtype))  # type: ignore[arg-type]
        update = hosted([0.0, 0.0], [0, 1], [(0, 1)], NO_COPIES, config=config)[0]
        assert update.exchange_total_s == pytest.approx(SIDE * SIDE / 2 * (width + 2) / BYTES)


def test_a_matrix_every_rank_holds_whole_only_sends_weights() -> None:
    (update, _) = hosted([0.0], [0], [(0,)], NO_COPIES, shard_dim=None)
    assert update.exchange_total_s == pytest.approx(SIDE * SIDE * 2 / BYTES)


def test_duplicated_updates_gather_in_fp32_and_hide_nothing() -> None:
    costs = [0.5, 0.25]
    model = UpdateModel(
        run("8b", 8, cluster=NO_COPIES).setup, layout(tp=8), [matrix(0), matrix(1, shard_dim=None)], costs
    )
    update = model.unplanned([0, 1])[0]
    assert update.matrix_update_s == pytest.approx(0.75)
    # A matrix that every rank holds whole need not be gathered.
    assert update.exchange_s == pytest.approx(7 / 8 * SIDE * SIDE * 4 / BYTES)
    assert update.exchange_total_s == pytest.approx(update.exchange_s)


def test_a_duplicated_update_does_its_elementwise_part_on_its_fragment_only() -> None:
    model = UpdateModel(
        run("8b", 8, cluster=replace(FREE, memory_gb_per_s=1000.0)).setup, layout(tp=8), [matrix(0)], [0.5]
    )
    saved = 7 / 8 * SIDE * SIDE * (RULES["muon"].fragment_bytes + 2) / (0.72 * 1e12)
    assert model.unplanned([0])[0].matrix_update_s == pytest.approx(0.5 - saved)


def in_mode(mode: MuonTpMode, tp: int, cluster: ClusterConfig) -> RunConfig:
    config = run("8b", tp, cluster=cluster)
    return replace(config, engine=replace(config.engine, muon_tp_mode=mode))


def test_distributed_updates_wait_for_a_square_in_every_step() -> None:
    """Fragments of a matrix that is cut along its long side, worked out by hand; the square is not divided."""
    tp, m, n, rate = 4, SIDE, 4 * SIDE, 4e11
    slow = replace(NO_COPIES, matmul_tflops=((1, rate / 1e12),))
    cut = sizes.matrix(0, n, m, 0)
    (update,) = UpdateModel(in_mode("distributed", tp, slow).setup, layout(tp=tp), [cut], [1.0]).unplanned([0])
    assert update.matrix_update_s == pytest.approx(5 * (4 * m * m * n / tp + 2 * m**3) / rate, rel=1e-4)
    # A ring moves each square twice, all but one rank's part. The norm is one fp32 number.
    assert update.exchange_s == pytest.approx((5 * 2 * m * m + 4) * 2 * (tp - 1) / tp / BYTES)
    assert update.exchange_total_s == update.exchange_s


def test_a_matrix_cut_along_its_short_side_has_squares_of_its_long_side() -> None:
    """Such as k and v; they take longer than as whole matrices."""
    tp, m, n, rate = 4, SIDE, 4 * SIDE, 4e11
    slow = replace(NO_COPIES, matmul_tflops=((1, rate / 1e12),))
    (update,) = UpdateModel(
        in_mode("distributed", tp, slow).setup, layout(tp=tp), [sizes.matrix(0, m, n, 0)], [1.0]
    ).unplanned([0])
    assert update.matrix_update_s == pytest.approx(5 * (4 * n * n * m / tp + 2 * n**3) / rate, rel=1e-4)
    assert update.matrix_update_s > 5 * (4 * m * m * n + 2 * m**3) / rate
    assert update.exchange_s == pytest.approx((5 * 2 * n * n + 4) * 2 * (tp - 1) / tp / BYTES)


def test_a_home_updates_whole_matrices_between_two_exchanges() -> None:
    """Longest first: rank 0 is the home of one square and of the half, rank 1 of the other square. Rank 1 sends rank 0
    more than it gets; nothing overlaps."""
    matrices = [matrix(0), matrix(1, shard_dim=1), sizes.matrix(2, SIDE // 2, SIDE, 0)]
    model = UpdateModel(in_mode("layer_sharded", 2, NO_COPIES).setup, layout(tp=2), matrices, [0.5, 0.25, 0.125])
    one, other = model.unplanned([2, 1, 0])
    assert (one.matrix_update_s, other.matrix_update_s) == pytest.approx((0.25 + 0.125, 0.5), abs=1e-6)
    each_way = 4 * (SIDE * SIDE + SIDE * SIDE / 2) / 2 / BYTES
    assert other.exchange_s == pytest.approx(2 * each_way, rel=1e-3)
    assert one.seconds == pytest.approx(other.seconds)
    assert one.exchange_total_s == pytest.approx(one.exchange_s)


def test_matrices_of_one_weight_have_one_home() -> None:
    q, k = (replace(matrix(index), parameter="layers.0.linear_qkv.weight") for index in (0, 1))
    others = [matrix(index) for index in (2, 3, 4)]
    found = [[one.index for one in at_home] for at_home in homes([q, k, *others], 2)]
    # A weight of 2 SIDE rows costs 2 SIDE^3, as much as two squares.
    assert found == [[0, 1, 4], [2, 3]]


def test_homes_of_experts_update_them_while_other_matrices_travel() -> None:
    model = UpdateModel(in_mode("layer_sharded", 2, NO_COPIES).setup, layout(tp=2), [matrix(0)], [0.0])
    each_way = 4 * SIDE * SIDE / 2 / BYTES
    for update in model.unplanned([0], [2 * each_way, each_way / 2]):
        assert update.seconds == pytest.approx(2 * each_way, rel=1e-2)
