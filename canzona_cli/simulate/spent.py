"""What an iteration is spent on besides the arithmetic that no layout can do without: what limits a layout."""

from dataclasses import dataclass, fields
from typing import Final

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.simulate.model_time import stage_time
from canzona_cli.simulate.simulate import StrategyResult

LABELS: Final = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tensor_s": "TP and CP exchanges",
    "pipeline_s": "pipeline",
    "reduce_s": "gradient reduction",
    "gather_s": "parameter gathering",
    "update_s": "updates",
    "other_s": "other",
}
"""Of `Spent`'s fields, in words."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of the slowest rank; they add up to the iteration."""

    compute_s: float
    """Forward and backward."""
    recompute_s: float
    tensor_s: float
    """Tensor-parallel exchanges in forward and backward, and what slices of a sequence tell one another."""
    pipeline_s: float
    """Waiting for other stages."""
    reduce_s: float
    """Of gradients, as far as no backward hides it."""
    gather_s: float
    """Of parameters, as far as no forward hides it."""
    update_s: float
    """Norm and clipping, exchange, matrix update and AdamW."""
    other_s: float

    @property
    def limits(self) -> list[tuple[str, float]]:
        """(label, seconds) of all but compute, the most first."""
        found = [(LABELS[field.name], getattr(self, field.name)) for field in fields(self)[1:]]
        return sorted(found, key=lambda limit: -limit[1])


def spent(config: RunConfig, layout: Layout, result: StrategyResult) -> Spent:
    """What the slowest rank of a simulated iteration does with its time."""
    phases = result.phases
    stage = stage_time(config, layout, result.slowest_rank // (layout.tp * layout.owners))
    count = layout.num_microbatches
    again_s = count * sum(module.again_s for module in stage.modules)
    tensor_s = count * sum(transfer.seconds for module in stage.modules for transfer in module.moves)
    compute_s = phases["forward"] + phases["backward"] - again_s - tensor_s
    known = {
        "pipeline_s": phases["pipeline"],
        "reduce_s": phases["grad_reduce"],
        "gather_s": phases["param_gather"],
        "update_s": sum(phases[name] for name in ("norm_clip", "exchange", "matrix_update", "adamw_update")),
    }
    other_s = result.iteration_s - compute_s - again_s - tensor_s - sum(known.values())
    return Spent(compute_s=compute_s, recompute_s=again_s, tensor_s=tensor_s, other_s=max(0.0, other_s), **known)
