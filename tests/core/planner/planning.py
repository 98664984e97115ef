"""Problems for tests of the planner: hand-made matrices, and exact answers to small ones."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.links import EFFICIENCY, Group, Links
from canzona_cli.core.model.family import Kind
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.pipeline import HostedPipeline
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout
from tests.sizes import H100, Size, layout, run

LAYER: tuple[tuple[Kind, str, int], ...] = (
    ("proj", "self_attention.linear_proj.weight", 0),
    ("q", "self_attention.linear_qkv.weight", 1),
    ("k", "self_attention.linear_qkv.weight", 1),
    ("v", "self_attention.linear_qkv.weight", 1),
    ("gate", "mlp.linear_fc1.weight", 2),
    ("up", "mlp.linear_fc1.weight", 3),
    ("down", "mlp.linear_fc2.weight", 4),
)
"""Kind, parameter and unit of the matrices of one layer, in registration order."""
FUSED_FC1: tuple[tuple[Kind, str, int], ...] = (
    *LAYER[:4],
    ("fc1", "mlp.linear_fc1.weight", 2),
    ("down", "mlp.linear_fc2.weight", 3),
)
"""The same with splitting qkv."""


def transformer(
    layers: int, hidden: int, ffn: int, kv: int, *, stages: int = 1, fused_fc1: bool = False
) -> tuple[Matrix, ...]:
    """Returns a Llama-like model: qkv split, and fc1 too unless `fused_fc1`; `kv` rows of k and of v."""
    layer_of: tuple[tuple[Kind, str, int], ...] = FUSED_FC1 if fused_fc1 else LAYER
    shapes: dict[str, tuple[int, int]] = {
        "proj": (hidden, hidden),
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "fc1": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    return tuple(
        Matrix(
            index=layer * len(layer_of) + position,
            name=f"layers.{layer}.{kind}",
            kind=kind,
            layer=layer,
            stage=layer * stages // layers,
            rows=shapes[kind][0],
            cols=shapes[kind][1],
            shard_dim=1 if kind in ("proj", "down") else 0,
            parameter=f"decoder.layers.{layer}.{parameter}",
            unit=layer * (layer_of[-1][2] + 1) + unit,
        )
        for layer in range(layers)
        for position, (kind, parameter, unit) in enumerate(layer_of)
    )


def newton_schulz(matrices: Sequence[Matrix]) -> list[float]:
    """Seconds of five standard Newton-Schulz steps on each, at 700 TFLOP/s."""
    sides = [(min(matrix.rows, matrix.cols), max(matrix.rows, matrix.cols)) for matrix in matrices]
    return [5 * (4 * m * m * n + 2 * m**3) / 700e12 for m, n in sides]


def grid(tp: int, dp: int, pp: int = 1) -> Layout:
    return layout(tp=tp, pp=pp, dp=dp)


def models(*kv: int) -> st.SearchStrategy[tuple[Matrix, ...]]:
    """Draws small models with so many rows of k and of v."""
    return st.builds(
        transformer,
        layers=st.integers(1, 8),
        hidden=st.sampled_from([64, 128, 192]),
        ffn=st.sampled_from([64, 192, 384]),
        kv=st.sampled_from(kv),
        fused_fc1=st.booleans(),
    )


def grids(most: int) -> st.SearchStrategy[Layout]:
    """Draws grids of up to four hosts and `most` owners."""
    return st.builds(grid, tp=st.sampled_from([1, 2, 4]), dp=st.integers(1, most))


def link(tp: int, bytes_per_s: float = 1e9, latency_s: float = 1e-6, width: int = 4) -> HostedPipeline:
    """A TP group whose exchanges take the same both ways, and whose copies take no time."""
    cluster = replace(
        H100,
        intra_node_gb_per_s=bytes_per_s / EFFICIENCY["machine"] / 1e9,
        intra_node_latency_us=1e6 * latency_s,
        measured_on={},
    )
    return HostedPipeline(
        tp=tp, links=Links(cluster=cluster), group=Group(size=tp, per_machine=tp), width=width, grad=width
    )


@cache
def planned_in(mode: str, size: Size, tp: int, dp: int) -> tuple[RunConfig, Layout, Plan]:
    """A run in a mode, and its plan whatever memory there is."""
    config = run(size, tp * dp, strategy="canzona", tp=tp)
    config, mesh = replace(config, engine=replace(config.engine, mode=mode)), layout(tp=tp, dp=dp)  # type: ignore[arg-type]
    return config, mesh, plan_unbounded(config.setup, mesh)


def megatrons_layout(
    elements: Sequence[int], bucket: int | None, shards: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Returns the places that Megatron's layer-wise optimizer gives parameters of these sizes: start and end of each
    bucket; start, end and bucket of each parameter."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    tensors = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in elements]
    laid_out = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
        tensors, bucket, shards, DistributedDataParallelConfig()
    )
    return laid_out.bucket_indices, [laid_out.param_index_map[tensor] for tensor in tensors]


def least_height(costs: Sequence[float], bins: int) -> float:
    """Height of the best packing, by trying all."""
    best = float("inf")

    def place(item: int, heights: list[float]) -> None:
        nonlocal best
        if max(heights) >= best:
            return
        if item == len(costs):
            best = max(heights)
            return
        for height in sorted(set(heights)):  # bins of one height are alike
            index = heights.index(height)
            heights[index] += costs[item]
            place(item + 1, heights)
            heights[index] = height

    place(0, [0.0] * bins)
    return best


def least_makespan(
    units: Sequence[Sequence[float]], dp: int, tp: int, shares: Mapping[float, float] | None = None
) -> float:
    """Busiest cell of the best assignment of units to owners and of their matrices to hosts, by trying all.

    Args:
        shares: by cost: what a matrix that may be shared costs each rank then.
    """
    best = float("inf")
    for owner_of in itertools.product(range(dp), repeat=len(units)):
        held = [
            [cost for unit, o in zip(units, owner_of, strict=True) if o == owner for cost in unit]
            for owner in range(dp)
        ]
        best = min(best, max(_least_row(costs, tp, shares or {}) for costs in held))
    return best


def _least_row(costs: Sequence[float], tp: int, shares: Mapping[float, float]) -> float:
    ways = [[(0.0, cost), *([(shares[cost], 0.0)] if cost in shares else [])] for cost in costs]
    return min(
        sum(each for each, _ in chosen) + (least_height([host for _, host in chosen], tp) if chosen else 0.0)
        for chosen in itertools.product(*ways)
    )
