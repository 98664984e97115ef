"""Whether strategies that compute the same update learn the same: a fast wrong answer is not a result. No torch.

All strategies start from the same weights and see the same batches, so the first losses, before any update, agree but
for the order of sums in the forward pass. After that bf16 runs part slowly: an update that rounds otherwise changes a
weight's last bit, and the next loss a little.
"""

from collections.abc import Iterator

from canzona_cli.bench.results import BenchResult
from canzona_cli.errors import CanzonaError, Problem

FIRST_STEP = 1e-3
"""Relative difference of the first losses. Measured: none, as all strategies run the same forward pass."""
LATER = 0.03
"""Of the steps that follow. Measured over 21 steps of qwen3-tiny in bf16, one sequence on each data-parallel rank: at
most 0.002 with Muon, 0.005 with Shampoo, 0.011 with SOAP; a learning rate 10% off came to 0.034 within 8 steps."""
COMPARED = 30
"""Steps; later losses of runs that compute the same part further, by rounding alone."""


class StrategiesDisagree(CanzonaError):
    """Strategies that should have learnt the same did not: none of their times may be compared."""

    headline = "Strategies disagree"


def check_losses(result: BenchResult) -> None:
    """Refuse a result whose strategies have not learnt the same.

    Raises:
        StrategiesDisagree: with every strategy that parts from its kin.
    """
    problems = disagreements(result)
    if problems:
        raise StrategiesDisagree(*problems)


def disagreements(result: BenchResult) -> tuple[Problem, ...]:
    """One problem for each strategy whose losses part from those of its kin, at the first step that does."""
    return tuple(_disagreements(result))


def _disagreements(result: BenchResult) -> Iterator[Problem]:
    for number, reference in enumerate(result.references):
        name = f"{result.reference} in sitting {number + 1}"
        yield from _apart(name, reference.losses, result.reference, result.references[0].losses)
    firsts: dict[str, str] = {result.strategies[result.reference].arithmetic: result.reference}
    for name, found in result.strategies.items():
        if name == "adamw":  # another rule
            continue
        kin = firsts.setdefault(found.arithmetic, name)
        yield from _apart(name, found.measured.losses, kin, result.strategies[kin].measured.losses)


def _apart(name: str, losses: tuple[float, ...], reference: str, expected: tuple[float, ...]) -> Iterator[Problem]:
    for step, (own, theirs) in enumerate(zip(losses[:COMPARED], expected[:COMPARED], strict=True), 1):
        tolerance = FIRST_STEP if step == 1 else LATER
        difference = abs(own - theirs) / abs(theirs)
        if not difference <= tolerance:  # a NaN is no agreement
            yield Problem(
                key=f"{name}, step {step}",
                value=f"loss {own:.5f}",
                reason=(
                    f"{reference} has a loss of {theirs:.5f} there, from the same weights and on the same data: "
                    f"{difference:.2%} apart, where rounding explains {tolerance:.1%}"
                ),
                fix="no speed-up is told of strategies that compute different things; both losses by step are in the "
                "results file",
            )
            return
