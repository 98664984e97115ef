"""The baseline that canzona is compared with is Megatron's own behaviour."""

import random
from collections.abc import Sequence

import pytest

from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.buffers import default_bucket_elements, stage_weights
from canzona_cli.core.costs.links import Groups, Links
from canzona_cli.core.costs.memory import GIB, estimate
from canzona_cli.core.costs.padding import align
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.planner.buckets import Parameter, stage_parameters
from canzona_cli.core.planner.plan import Assignment, Bucket
from canzona_cli.core.simulate.predict import assign_layerwise, simulate_strategy
from tests.core.planner.planning import grid, megatrons_layout, transformer
from tests.sizes import layout, run


@pytest.mark.parametrize("seed", range(20))
def test_layerwise_is_megatrons_layout(seed: int) -> None:
    """Owner, bucket and position of every parameter, on models with odd widths and counts."""
    draw = random.Random(seed)
    tp = draw.choice([1, 2, 4])
    dp = draw.choice([1, 2, 3, 5, 8, 24, 64])
    hidden = tp * draw.randrange(1, 40)
    matrices = transformer(draw.randrange(1, 30), hidden, tp * draw.randrange(1, 90), tp * draw.randrange(1, 9))
    parameters = stage_parameters(matrices, 0, tp)
    total = sum(parameter.elements for parameter in parameters)
    bucket = draw.choice([None, max(1, total // 7), max(1, total // 2), total + 1])

    buckets, theirs = megatrons_layout([parameter.elements for parameter in parameters], bucket, dp)
    assignment, ours = assign_layerwise(matrices, grid(tp, dp), bucket)
    assert [one.elements for one in ours] == [end - start for start, end in buckets]
    assert sum(one.padding for one in ours) == buckets[-1][1] - total
    places = placed(ours, parameters, assignment, dp)
    range_of = {index: (one.index, part) for one in ours for part in one.ranges for index in part.matrices}
    for parameter, (start, end, number) in zip(parameters, theirs, strict=True):
        first, last = buckets[number]
        owner = (start - first) * dp // (last - first)
        assert places[parameter.name] == (number, start - first, end - first, owner)
        for index in parameter.matrices:
            bucket_of, part = range_of[index]
            assert (bucket_of, part.owner) == (number, owner)
            assert part.start <= start - first <= end - first <= part.end
            assert assignment.cells[index].owner == owner


def test_what_layerwise_reduces_behind_the_backward_is_megatrons_last_buckets() -> None:
    """32B on 256 GPUs: each bucket of equal shards grows until 32 shards of the largest parameter are 90% full, a
    quarter of the model; the two first parameters, left over, are padded 18 times."""
    config = run("32b", 256, strategy="layerwise", tp=8)
    config, layout = resolve(config)
    assert (layout.tp, layout.owners) == (8, 32)
    matrices = matrices_of(config.model, layout, "qkv")
    elements = [parameter.elements for parameter in stage_parameters(matrices, 0, layout.tp)]
    theirs, _ = megatrons_layout(elements, default_bucket_elements(layout.owners), layout.owners)
    sizes = [end - start for start, end in theirs]
    assert sizes[-1] > 17 * sum(elements[:2])
    assert len(sizes) == 5
    # What completes with the first layer; the rest has 3/4 of the backward pass to hide under.
    links, group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).data
    late = sum(links.reduce_scatter(4 * size, group).seconds for size in sizes[-2:])
    found, adamw = (simulate_strategy(config.setup, layout, name, matrices) for name in ("layerwise", "adamw"))
    assert found.phases["grad_reduce"] - adamw.phases["grad_reduce"] == pytest.approx(late, rel=0.1)


def test_layerwise_stores_a_shard_as_long_as_the_largest_parameter_for_every_rank_and_model_chunk() -> None:
    """32B at TP 4 x PP 2 x DP 128, a layer in each of 32 chunks: Megatron lays out every chunk's buffer by itself, so
    four parameters are padded to 128 shards of the longest, 1.5 TiB a rank."""
    config = run("32b", 1024, strategy="layerwise", tp=4)
    mesh = layout(tp=4, pp=2, vpp=32, dp=128)
    matrices = matrices_of(config.model, mesh, "qkv")
    parameters = stage_parameters(matrices, 0, mesh.tp)
    stored = 0
    for chunk in range(mesh.vpp):
        own = [parameter.elements for parameter in parameters if parameter.chunk == chunk]
        assert len(own) == 4
        theirs, _ = megatrons_layout(own, default_bucket_elements(mesh.owners), mesh.owners)
        stored += theirs[-1][1]
    _, buckets = assign_layerwise(matrices, mesh, default_bucket_elements(mesh.owners))
    assert sum(bucket.elements for bucket in buckets if bucket.stage == 0) == stored
    others = stage_weights(config.setup, mesh, mesh.pp - 1).others  # with the final norm
    parts = estimate(config.setup, mesh).parts
    assert (parts["weights"], parts["gradients"]) == (2 * (stored + others), 4 * (stored + others))
    assert sum(parts.values()) > 1400 * GIB


def placed(
    buckets: Sequence[Bucket], parameters: Sequence[Parameter], assignment: Assignment, owners: int
) -> dict[str, tuple[int, int, int, int]]:
    """Bucket, start, end and owner of each parameter: every owner's aligned one after another in its shard."""
    named, found = {parameter.name: parameter for parameter in parameters}, {}
    for bucket in buckets:
        ends = [owner * bucket.elements // owners for owner in range(owners)]
        for name in bucket.parameters:
            owner = assignment.cells[named[name].matrices[0]].owner
            start = align(ends[owner])
            ends[owner] = start + named[name].elements
            found[name] = bucket.index, start, ends[owner], owner
    return found
