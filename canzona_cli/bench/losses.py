"""Whether strategies that compute the same update learn the same: a fast wrong answer is not a result. No torch.

All strategies start from the same weights and see the same batches, so the first losses, before any update, agree
except for the order of sums in the forward pass. After that bf16 runs drift apart slowly: an update that is rounded
differently changes a weight's last bit, and so the next loss a little.
"""

from collections.abc import Iterator

from canzona_cli.bench.results import BenchResult
from canzona_cli.errors import CanzonaError, Problem, refuse

FIRST_STEP = 1e-3
"""Largest relative difference of the first losses. Measured: none, as all strategies run the same forward pass."""
LATER = 0.03
"""The same for later steps. Measured over 21 steps of qwen3-tiny in bf16, one sequence on each data-parallel rank: at
most 0.002 with Muon, 0.005 with Shampoo, 0.011 with SOAP; a learning rate 10% off led to 0.034 within 8 steps."""
COMPARED = 30
"""How many steps are compared; after more, even runs that compute the same drift apart by rounding alone."""


class StrategiesDisagree(CanzonaError):
    """Strategies that compute the same update did not learn the same: their times must not be compared."""

    headline = "Strategies disagree"


def check_losses(result: BenchResult) -> None:
    """Refuse a result whose strategies have not learnt the same.

    Raises:
        StrategiesDisagree: with every strategy whose losses differ from those of its kin.
    """
    refuse(disagreements(result), StrategiesDisagree)


def disagreements(result: BenchResult) -> list[Problem]:
    """One problem for each strategy whose losses differ from those of its kin, naming the first such step."""
    found: list[Problem] = []
    for number, reference in enumerate(result.references):
        name = f"{result.reference} in sitting {number + 1}"
        found += _apart(name, reference.losses, result.reference, result.references[0].losses)
    for name, like in kin(result).items():
        own, theirs = (result.strategies[one].measured.losses for one in (name, like))
        found += _apart(name, own, like, theirs)
    return found


def kin(result: BenchResult) -> dict[str, str]:
    """For each strategy the first that computes the same updates, whose losses it must agree with; or itself."""
    firsts: dict[str, str] = {result.strategies[result.reference].arithmetic: result.reference}
    return {
        name: name if name == "adamw" else firsts.setdefault(bench.arithmetic, name)  # adamw has another rule
        for name, bench in result.strategies.items()
    }


def _apart(name: str, losses: tuple[float, ...], reference: str, expected: tuple[float, ...]) -> Iterator[Problem]:
    for step, (own, theirs) in enumerate(zip(losses[:COMPARED], expected[:COMPARED], strict=True), 1):
        tolerance = FIRST_STEP if step == 1 else LATER
        difference = abs(own - theirs) / abs(theirs)
        if not difference <= tolerance:  # also true of a NaN
            yield Problem(
                key=f"{name}, step {step}",
                value=f"loss {own:.5f}",
                reason=(
                    f"{reference} has a loss of {theirs:.5f} there, with the same initial weights and data: they "
                    f"differ by {difference:.2%}, and rounding explains at most {tolerance:.1%}"
                ),
                fix="no speed-up is shown for strategies that compute different things; bench.json has the losses of "
                "every step",
            )
            return
