"""A description of AdamW, which updates the parameters that are not matrices, or all parameters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from canzona_cli.core.fields import OPTIMIZER, PLAN

from .facts import Algorithm, Facts, OptimizerBase, Rule, Work


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerBase):
    """AdamW on every parameter, by Megatron's DistributedOptimizer."""

    name: Annotated[Literal["adamw"], "The optimizer.", OPTIMIZER | PLAN]


def _adamw(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    return Work(elementwise=15.0 * rows * cols), ()


FACTS = (Facts(settings=AdamWConfig, rule=Rule(work=_adamw, fragment_bytes=28, moments=2)),)
