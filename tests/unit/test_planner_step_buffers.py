"""What the engine holds in a step, against sums by hand."""

from dataclasses import replace

import pytest

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.schema import Layout, Precision, RunConfig
from canzona_cli.planner.measures import plan_memory
from canzona_cli.planner.memory import BATCH_BYTES
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.planner import plan_unbounded
from canzona_cli.planner.step_buffers import batch_bytes, step_buffers
from canzona_cli.planner.types import MicroGroup
from tests.unit import sizes


def planned(size: sizes.Size, gpus: int, tp: int, **engine: object) -> tuple[RunConfig, Layout, Plan]:
    config = sizes.run(size, gpus, strategy="canzona", tp=tp)
    config, layout = resolve(replace(config, engine=replace(config.engine, **engine)))  # type: ignore[arg-type]
    return config, layout, plan_unbounded(config, layout)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_exchange_buffers_are_two_sets_as_large_as_the_largest_group(dtype: Precision, width: int) -> None:
    config, _, plan = planned("tiny", 2, 2, exchange_dtype=dtype, grouping="registration", c_max_mib=0.75)
    assert len(plan.groups) > 2
    cells = plan.assignment.cells
    for host, found in enumerate(step_buffers(config, plan, 0)):
        held = [
            sum(plan.matrices[i].elements for i in group.matrices if cells[i].host == host) for group in plan.groups
        ]
        stored = [sum(plan.matrices[i].elements // 2 for i in group.matrices) for group in plan.groups]
        assert width * max(held) <= 0.75 * (1 << 20)
        assert found.exchange == 2 * (width + 2) * (max(held) + max(stored))
        assert found.gradients == found.guard == 4 * max(held)
        assert found.reduction == 0
        assert found.update == found.exchange + 8 * max(held)


def test_one_group_needs_one_set() -> None:
    config, _, plan = planned("tiny", 2, 2)
    everything = tuple(range(len(plan.matrices)))
    one = replace(plan, groups=(MicroGroup(stage=0, owner=0, index=0, matrices=everything),))
    total = sum(matrix.elements for matrix in plan.matrices)
    assert sum(found.exchange for found in step_buffers(config, one, 0)) == (4 + 2) * 2 * total


def test_owners_without_matrices_hold_nothing() -> None:
    config, _, plan = planned("tiny", 8, 2)
    without = replace(plan, groups=tuple(group for group in plan.groups if group.owner != 1))
    found = step_buffers(config, without, 0)
    assert len(found) == 8
    assert found[2].update == found[3].update == 0 < found[0].update


@pytest.mark.parametrize("reduced", ["fp32", "bf16"])
def test_without_tensor_parallelism_only_what_is_not_there_in_fp32_is_copied(reduced: Precision) -> None:
    config, _, plan = planned("tiny", 2, 1)
    config = replace(config, train=replace(config.train, grad_reduce_dtype=reduced))
    for owner, found in enumerate(step_buffers(config, plan, 0)):
        own = [m for m, cell in zip(plan.matrices, plan.assignment.cells, strict=True) if cell.owner == owner]
        copied = own if reduced == "bf16" else [m for m in own if m.kind in ("q", "k", "v")]
        assert found.exchange == 0
        assert found.gradients == 4 * sum(m.elements for m in copied)
        assert found.guard == 4 * sum(m.elements for m in own)


def test_fused_weights_are_updated_where_they_lie() -> None:
    config, _, plan = planned("tiny", 2, 1, splitting="fused")
    assert all(found.gradients == 0 < found.guard for found in step_buffers(config, plan, 0))


def test_batches_are_bounded_but_by_a_matrix_that_is_larger() -> None:
    most = BATCH_BYTES // 4
    assert batch_bytes([]) == 0
    assert batch_bytes([10, 20]) == 120
    assert batch_bytes([most // 2] * 5) == BATCH_BYTES
    assert batch_bytes([2 * most, most]) == 2 * BATCH_BYTES
    config, _, plan = planned("8b", 8, 1)
    assert {found.guard for found in step_buffers(config, plan, 0)} == {BATCH_BYTES}


def test_copies_for_an_all_to_all_count_for_two_buckets_while_backward_runs() -> None:
    config, layout, plan = planned("8b", 8, 1, reduction="all_to_all")
    free, _, per_owner = planned("8b", 8, 1, reduction="reduce")
    assert len(plan.buckets) > 2
    for owner, found in enumerate(step_buffers(config, plan, 0)):
        first = [bucket for bucket in plan.buckets if bucket.stage == 0]
        own = [sum(p.end - p.start for p in bucket.ranges if p.owner == owner) for bucket in first]
        assert found.reduction == layout.dp * 4 * sum(sorted(own)[-2:])
    assert not any(found.reduction for found in step_buffers(free, per_owner, 0))
    more, less = (plan_memory(run, layout, p) for run, p in ((config, plan), (free, per_owner)))
    assert more.parts["workspace"] > less.parts["workspace"]
    assert more.buffers.update == less.buffers.update


def test_nothing_of_the_update_is_alive_with_activations() -> None:
    """What the step needs counts only beyond the memory that activations and logits have freed."""
    config, layout, plan = planned("8b", 64, 4)
    memory = plan_memory(config, layout, plan)
    assert memory.buffers.update > 0 == memory.parts["exchange"]
