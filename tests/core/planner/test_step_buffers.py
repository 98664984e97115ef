"""The memory that the engine holds in a step, against sums by hand."""

from dataclasses import replace

import pytest

from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import transient
from canzona_cli.core.costs.memory import least_buffer_bytes
from canzona_cli.core.costs.scratch import BATCH_BYTES, least_workspace_bytes
from canzona_cli.core.costs.update import algorithm_of
from canzona_cli.core.model.matrices import layer_shapes
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.memory import batch_bytes, step_buffers
from canzona_cli.core.planner.plan import MicroGroup, Plan
from canzona_cli.core.setup import Layout, Precision
from tests import sizes


def planned(size: sizes.Size, gpus: int, tp: int, **engine: object) -> tuple[RunConfig, Layout, Plan]:
    config = sizes.run(size, gpus, strategy="canzona", tp=tp)
    config, layout = resolve(replace(config, engine=replace(config.engine, **engine)))  # type: ignore[arg-type]
    return config, layout, plan_unbounded(config.setup, layout)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_messages_are_two_sets_as_large_as_the_largest_group(dtype: Precision, width: int) -> None:
    config, _, plan = planned("tiny", 2, 2, exchange_dtype=dtype, c_max_mib=0.75)
    assert len(plan.groups) > 2
    cells = plan.assignment.cells
    groups = [[(plan.matrices[i].elements, cells[i].host) for i in group.matrices] for group in plan.groups]
    for host, found in enumerate(step_buffers(config.setup, plan, 0)):
        here = [sum(size for size, at in group if at == host) for group in groups]
        there = [sum(size for size, at in group if at != host) for group in groups]
        flags = (
            [sum(at == host for _, at in group) for group in groups],
            [sum(at != host for _, at in g) for g in groups],
        )
        assert width * max(here) <= 0.75 * (1 << 20)
        # Half of what others host goes out and half of what is hosted here comes in; weights the other way, with flags.
        gradients = width * (max(there) // 2 + max(here) // 2)
        weights = 2 * sum(
            max(size // 2 + flag for size, flag in zip(sizes, flag_of, strict=True))
            for sizes, flag_of in zip((here, there), flags, strict=True)
        )
        assert found.exchange == 2 * (gradients + weights)
        assert found.gradients == 4 * max(here)
        assert found.reduction == 0


@pytest.mark.parametrize("splitting", ["split", "per_head", "fused", "qkv"])
def test_one_group_needs_one_set(splitting: str) -> None:
    config, _, plan = planned("tiny", 2, 2, splitting=splitting)
    everything = tuple(range(len(plan.matrices)))
    one = replace(plan, groups=(MicroGroup(stage=0, owner=0, index=0, matrices=everything),))
    buffers = step_buffers(config.setup, one, 0)
    moved = sum(
        matrix.elements // 2 if matrix.home is None else matrix.elements * (matrix.home != cell.host)
        for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True)
    )
    # Every fragment that moves is in a sender's and in a receiver's message, and so is a flag for each matrix.
    assert sum(found.exchange for found in buffers) == 2 * (4 + 2) * moved + 2 * 2 * len(plan.matrices)


def test_heads_that_are_hosted_where_they_lie_are_not_copied() -> None:
    config, _, plan = planned("tiny", 2, 2, splitting="per_head")
    everything = tuple(range(len(plan.matrices)))
    one = replace(plan, groups=(MicroGroup(stage=0, owner=0, index=0, matrices=everything),))
    copied = sum(
        matrix.elements
        for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True)
        if matrix.home != cell.host
    )
    assert sum(found.gradients for found in step_buffers(config.setup, one, 0)) == 4 * copied


def test_owners_without_matrices_hold_nothing() -> None:
    config, _, plan = planned("tiny", 8, 2)
    without = replace(plan, groups=tuple(group for group in plan.groups if group.owner != 1))
    found = step_buffers(config.setup, without, 0)
    assert len(found) == 8
    assert found[2].lasting == found[3].lasting == 0 < found[0].lasting


@pytest.mark.parametrize("reduced", ["fp32", "bf16"])
def test_without_tensor_parallelism_only_what_is_not_there_in_fp32_is_copied(reduced: Precision) -> None:
    config, _, plan = planned("tiny", 2, 1)
    config = replace(config, train=replace(config.train, grad_reduce_dtype=reduced))
    for owner, found in enumerate(step_buffers(config.setup, plan, 0)):
        own = [m for m, cell in zip(plan.matrices, plan.assignment.cells, strict=True) if cell.owner == owner]
        copied = own if reduced == "bf16" else [m for m in own if m.kind in ("q", "k", "v")]
        assert found.exchange == 0
        assert found.gradients == 4 * sum(m.elements for m in copied)


@pytest.mark.parametrize("splitting", ["fused", "per_head"])
def test_what_lies_whole_is_updated_where_it_lies(splitting: str) -> None:
    config, _, plan = planned("tiny", 2, 1, splitting=splitting)
    assert all(found.gradients == 0 for found in step_buffers(config.setup, plan, 0))


def test_batches_are_bounded_but_by_a_matrix_that_is_larger() -> None:
    most = BATCH_BYTES // 4
    assert batch_bytes([]) == 0
    assert batch_bytes([10, 20]) == 120
    assert batch_bytes([most // 2] * 5) == BATCH_BYTES
    assert batch_bytes([most // 2 + 1] * 5) == BATCH_BYTES // 2 + 4
    assert batch_bytes([2 * most, most]) == 2 * BATCH_BYTES


def test_rings_hold_ones_share_of_all_gradients_and_of_some_buckets_weights() -> None:
    config, _, plan = planned("8b", 8, 1, reduction="ring")
    buckets = [bucket for bucket in plan.buckets if bucket.stage == 0]
    for owner, found in enumerate(step_buffers(config.setup, plan, 0)):
        own = [sum(part.end - part.start for part in one.ranges if part.owner == owner) for one in buckets]
        assert found.reduction == 4 * sum(own)
        assert found.gathering == 2 * sum(sorted(own)[-5:]), "four on their way, and one that has arrived"


def test_weights_on_their_way_need_memory_where_there_are_no_logits() -> None:
    config, layout, plan = planned("8b", 8, 1)
    needed = transient(config.setup, plan.subject.optimizer, layout, 0)
    free = needed.parts()["workspace"]
    assert needed.parts(gathering=needed.logits + free + 7)["workspace"] == free + 7


@pytest.mark.parametrize(
    ("splitting", "tp"),
    [
        pytest.param(splitting, tp, marks=[] if splitting == "split" or tp == 4 else [pytest.mark.sweep])
        for splitting in ("split", "qkv", "fused", "per_head")
        for tp in (1, 2, 4, 8)
    ],
)
def test_the_estimate_before_a_plan_counts_the_least_buffers_one_can_have(splitting: str, tp: int) -> None:
    """Those of groups of one large matrix a host."""
    config = sizes.run("8b", 64, strategy="canzona", tp=tp)
    config = replace(config, engine=replace(config.engine, splitting=splitting, mode="hosted"))  # type: ignore[arg-type]
    config, layout = resolve(config)
    least = least_workspace_bytes(config, algorithm_of(config.setup)) + least_buffer_bytes(config.setup, layout, 0)
    largest = max(rows * cols for rows, cols in layer_shapes(config.model, splitting))
    small = replace(config, engine=replace(config.engine, c_max_mib=4 * largest / (1 << 20)))
    plan = plan_unbounded(small.setup, layout)
    found = max(buffers.lasting for buffers in step_buffers(small.setup, plan, 0))
    if tp > 1:
        assert found == pytest.approx(least, rel=0.25)
    else:
        assert found <= max(1.3 * least, least + 4 * largest)
