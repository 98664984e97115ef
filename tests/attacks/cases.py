"""Which cases of an attack `make test` has: one or two for each reader. The sweep has all."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def mostly_swept(cases: Iterable[object], *everyday: object) -> list[ParameterSet]:
    """Mark all cases but the everyday ones for the sweep. A case is one value, or a tuple of several."""
    listed = list(cases)
    assert all(case in listed for case in everyday), everyday
    values = [case if isinstance(case, tuple) else (case,) for case in listed]
    swept = [() if case in everyday else (pytest.mark.sweep,) for case in listed]
    return [pytest.param(*value, marks=marks) for value, marks in zip(values, swept, strict=True)]
