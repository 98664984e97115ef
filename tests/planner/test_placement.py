"""Our count of Megatron's layer-wise packing is Megatron's own packing."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from canzona_cli.costs.memory import layerwise_placement
from canzona_cli.model.matrices import layer_shapes
from tests.sizes import Size, model


@pytest.mark.parametrize("bucket", [None, 40_000_000])
@pytest.mark.parametrize(("size", "tp", "shards"), [("0.6b", 1, 8), ("8b", 1, 32), ("8b", 2, 64), ("32b", 8, 32)])
def test_layerwise_counts_what_megatron_lays_out(size: Size, tp: int, shards: int, bucket: int | None) -> None:
    shape = model(size)
    sizes = tuple(rows * cols // tp for rows, cols in layer_shapes(shape, "fused"))
    params = [
        torch.nn.Parameter(torch.empty(rows // tp, cols, device="meta"))
        for _ in range(shape.num_layers)
        for rows, cols in layer_shapes(shape, "fused")
    ]
    laid_out = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
        params, bucket, shards, DistributedDataParallelConfig()
    )
    buckets = laid_out.bucket_indices
    loads = [0] * shards
    for start, end, bucket_id in laid_out.param_index_map.values():
        first, last = buckets[bucket_id]
        loads[(start - first) * shards // (last - first)] += end - start

    held = layerwise_placement(sizes, shape.num_layers, shards, bucket)

    assert held.padded == buckets[-1][1]
    assert held.worst == max(loads)
