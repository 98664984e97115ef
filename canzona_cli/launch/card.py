"""Reads cards, which hold the losses of a recorded run of a recipe, and compares later runs with them.

A card is `recipes/cards/RECIPE.yaml`. No training run of a recipe without a card has been recorded; such a
recipe has only been planned.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from canzona_cli.config.changes import curve_differences
from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.reading import parse, read_yaml
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.summary import RunSummary
from canzona_cli.records.words import number

Kind = Literal["validation", "loss"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A recorded run of a recipe. Losses are in nats per token."""

    command: str
    """The command that started the run."""
    machine: str
    """The machine on which the command ran, and the precision of its matmuls."""
    date: str
    """The day of the run: 2026-11-26."""
    commit: str
    """The commit of canzona that ran the command."""
    corpus: str
    """The name of the prepared corpus, with the version of Python whose source code is the text."""
    loss: Mapping[int, float]
    """The training loss by step."""
    validation: Mapping[int, float]
    """The validation loss by step."""
    tolerance: float
    """The largest difference from the card that a correct run may have. It was chosen from reruns on other
    layouts and with other matmul implementations (`recipes/README.md`)."""
    again: Literal["tests", "person"] = "tests"
    """The way to repeat the run: by a test (`make test-sweep`, up to the first validation), or by a person
    because it takes too long for a test."""

    @property
    def words(self) -> str:
        """The card as a line of text: `validation loss 1.8839 ± 0.02 at step 120 (recorded on 2 cores,
        2026-11-26)`."""
        step, loss = max(self.validation.items())
        where = f"recorded on {self.machine}, {self.date}"
        return f"validation loss {number(loss, '.4f')} ± {self.tolerance:g} at step {step:,} ({where})"


def load_card(recipe: str) -> Card | None:
    """Reads the card of a built-in recipe; returns None if the recipe has no card."""
    path = builtin_recipes_dir() / "cards" / f"{recipe}.yaml"
    return parse(Card, read_yaml(path)) if path.is_file() else None


def card_of(config: RunConfig) -> Card | None:
    """Returns the card of a resolved run's recipe. Returns None if the recipe has no card, or if a setting
    that changes the losses differs from the recorded run's."""
    card = load_card(config.name)
    if card is None:
        return None
    recorded, _ = resolve(compose_run(shlex.split(card.command)[2:]).config)
    return None if curve_differences(recorded, config) else card


def judge(card: Card, run: RunSummary, corpus: PreparedCorpus | None) -> str | None:
    """Compares a run with the card at the last step for which both have a loss, preferably a validation loss.

    Returns:
        The comparison as a line of text; None if the card has no loss at any step of the run.
    """
    recorded: dict[Kind, Mapping[int, float]] = {"validation": card.validation, "loss": card.loss}
    measured = {"validation": run.validations, "loss": run.losses}
    for kind, losses in recorded.items():
        pairs = [(step, loss, losses[step]) for step, loss in measured[kind] if loss is not None and step in losses]
        if not pairs:
            continue
        step, loss, expected = max(pairs)
        words = f"{kind} {number(loss, '.4f')} at step {step:,}, card {number(expected, '.4f')} ± {card.tolerance:g}"
        if not abs(loss - expected) <= card.tolerance:
            words += ": outside the tolerance of the card"
        if corpus is not None and corpus.prefix.name != card.corpus:
            words += f"; the run was trained on {corpus.prefix.name}, the card's run on {card.corpus}"
        return words
    return None
