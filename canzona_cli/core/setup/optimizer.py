"""The settings of the built-in optimizers and of a user's custom optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from canzona_cli.core.fields import CURVE, NOTHING, OPTIMIZER, PLAN, SPREAD, Example
from canzona_cli.core.optimizers.facts import OptimizerBase, known_optimizers

if TYPE_CHECKING:
    UpdateName = str
    OptimizerName = str
    OptimizerConfig = OptimizerBase
else:
    UpdateName = Literal[tuple(known_optimizers())]
    OptimizerName = UpdateName | Literal["custom"]


@dataclass(frozen=True, kw_only=True)
class CustomConfig(OptimizerBase):
    """A torch optimizer that updates whole matrices. `source` names its class: a user's, or one in
    `canzona_cli/core/optimizers`."""

    name: Annotated[Literal["custom"], "The optimizer.", OPTIMIZER | PLAN]
    PLAUSIBLE_LR: ClassVar[float] = 10.0
    source: Annotated[
        str,
        "FILE.py:Class, or module:Class of an installed package listed in `allow`. "
        "The class is called with the matrices, lr, weight_decay and `options`.",
        Example("my_optimizer.py:MyOptimizer"),
        OPTIMIZER | CURVE,
    ]
    allow: Annotated[
        tuple[str, ...],
        "Packages whose classes `source` may name. Files need no entry.",
        Example("[my_package]"),
        NOTHING,
    ] = ()
    options: Annotated[
        dict[str, bool | int | float | str | tuple[bool | int | float | str, ...]],
        "Additional keyword arguments of the class: plain values and lists of plain values.",
        Example("'{momentum:0.9}'"),
        CURVE,
    ] = field(default_factory=dict, hash=False)
    cost_like: Annotated[
        UpdateName,
        "Optimizer whose update costs and state sizes plans assume for the class. Update times that"
        " cluster.measured_updates lists for custom take precedence.",
        SPREAD | PLAN,
    ] = "muon"

    @property
    def built_in(self) -> bool:
        """True if the class is part of canzona, so that a recipe may name it without the user's consent."""
        return self.source.startswith("canzona_cli.core.optimizers.")


OPTIMIZERS: Mapping[str, type[OptimizerBase]] = {
    **{name: facts.settings for name, facts in known_optimizers().items()},
    "custom": CustomConfig,
}
if not TYPE_CHECKING:
    OptimizerConfig = reduce(or_, OPTIMIZERS.values())
