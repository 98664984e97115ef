"""The cases of an attack that `make test` has: one or two for each reader. The sweep has all."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def mostly(mark: pytest.MarkDecorator, cases: Iterable[object], *everyday: object) -> list[ParameterSet]:
    """Marks all cases but the everyday ones. A case is one value, or a tuple of several."""
    listed = list(cases)
    assert all(case in listed for case in everyday), everyday
    values = [case if isinstance(case, tuple) else (case,) for case in listed]
    chosen = [() if case in everyday else (mark,) for case in listed]
    return [pytest.param(*value, marks=marks) for value, marks in zip(values, chosen, strict=True)]
