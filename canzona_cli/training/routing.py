"""The distribution of a step's tokens over the experts of each layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from canzona_cli.core.setup import Layout, ModelConfig
from canzona_cli.training.records import Journal

WINDOW: Final = 100
"""The number of steps between two checks for experts that got no token."""
_NAMED: Final = 8
"""The maximum number of experts that a report names."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts' token counts and the balancing loss of one step, the same on every rank."""

    balancing_loss: float
    """The balancing loss, as the mean over layers and micro-batches, without its weight: 1 if tokens are
    spread evenly; 0 if the model has no balancing loss."""
    tokens: tuple[tuple[float, ...], ...]
    """The number of tokens of each expert, as `tokens[layer][expert]`. A token is counted for each of its
    experts."""

    @classmethod
    def from_sums(cls, sums: Sequence[float], model: ModelConfig, layout: Layout) -> "Routing":
        """Makes the record from the flattened result of `RoutingMeter.take`, summed over all ranks.

        With `balancing_loss=sequence`, each data-parallel rank contributes the loss of its own sequences, so
        the sum is divided by the number of these ranks. Otherwise the ranks contribute parts of a single loss
        for the global batch.
        """
        width = 1 + model.num_experts
        layers = [sums[start : start + width] for start in range(0, len(sums), width)]
        parts = layout.num_microbatches * (layout.dp if model.balancing_loss == "sequence" else 1)
        return cls(
            balancing_loss=sum(layer[0] for layer in layers) / (len(layers) * parts),
            tokens=tuple(tuple(layer[1:]) for layer in layers),
        )

    @property
    def load(self) -> float:
        """The load of the busiest expert: its number of tokens divided by the mean over its layer's
        experts."""
        return max(max(layer) * len(layer) / sum(layer) for layer in self.tokens)


class StarvationWatch:
    """A detector of experts that get no tokens, so that their weights are not trained.

    Every `WINDOW` steps, and after the last step, it reports the experts that got no token since its previous
    check.
    """

    def __init__(self, journal: Journal, *, last_step: int) -> None:
        self._journal, self._last_step = journal, last_step
        self._fed: set[tuple[int, int]] = set()
        self._steps = 0

    def after_step(self, step: int, routing: Routing | None) -> None:
        """Adds a step's token counts; None for a dense model. Must be called after every step."""
        if routing is None:
            return
        self._steps += 1
        experts = [(layer, expert) for layer, row in enumerate(routing.tokens) for expert in range(len(row))]
        self._fed |= {(layer, expert) for layer, expert in experts if routing.tokens[layer][expert]}
        if self._steps < WINDOW and step < self._last_step:
            return
        starved = [f"layers.{layer}.experts.{expert}" for layer, expert in experts if (layer, expert) not in self._fed]
        if starved:
            named = ", ".join(starved[:_NAMED]) + (", ..." if len(starved) > _NAMED else "")
            detail = f"{len(starved)} of {len(experts)} experts got no token in {self._steps} steps: {named}"
            facts = {"step": step, "experts": len(starved)}
            self._journal.incident("starved_experts", detail=detail, level="warning", **facts)
        self._fed, self._steps = set(), 0
