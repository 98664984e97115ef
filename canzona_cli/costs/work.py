"""The work of a matrix's update, by its rule: products, factorisations, passes over memory, launches; and its FLOPs.

Each rule stands in the optimizer's facts; `costs.update` says what it takes on a device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import get_args

from canzona_cli.optimizers.facts import Algorithm, Form, Rule, Work, known

RULES: Mapping[str, Rule] = {name: facts.rule for name, facts in known().items()}


@lru_cache(maxsize=4096)
def work(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Returns the work of every update of a (rows, cols) matrix, and what a refresh adds."""
    return RULES[a.name].work(a, rows, cols)


def flops(a: Algorithm, rows: int, cols: int) -> float:
    """FLOPs of one update of a (rows, cols) matrix, a multiply-add being two; refreshes spread over their period.

    With m = min(rows, cols), n = max(rows, cols), r = rows, c = cols:
    - muon, normuon, Newton-Schulz (Jordan et al. 2024), s steps: standard s (4 m^2 n + 2 m^3) for X X', A A and B
      X; Gram form, see `muon_facts`: 8 m^2 n + 28 m^3 for s = 5. The form auto is the cheaper by these;
    - shampoo: statistics and both roots applied 4 r^2 c + 4 r c^2; a refresh is per side an eigendecomposition and a
      product, 9 n^3 + 2 n^3, or the products of a Newton iteration, 62 n^3 (58 n^3 where only one side has a root);
    - soap: statistics, projection and its inverse 6 r^2 c + 6 r c^2; a refresh is per side a product that serves
      the estimated eigenvalues and the power iteration, and a QR, 2 n^3 + 8/3 n^3, and the first moment turned to the
      new bases 4 r^2 c + 4 r c^2;
    - kl-shampoo: statistics 2 r^2 c + 2 r c^2, whitening and turning 6 r^2 c + 6 r c^2 + 2 m^2 n; a
      refresh is per side a product and a QR, 2 n^3 + 8/3 n^3;
    - soap-muon: soap and muon;
    - adamw: 15 per element.
    A side longer than `max_preconditioner_dim` has none of the terms of its preconditioner.
    """
    return min(step.flops + refresh.flops / a.refresh_period for step, refresh in _works(a, rows, cols))


def _works(a: Algorithm, rows: int, cols: int) -> Iterator[tuple[Work, Work]]:
    """Yields the work of each form that it may have."""
    for form in get_args(Form) if a.form == "auto" else (a.form,):
        yield work(replace(a, form=form), rows, cols)
