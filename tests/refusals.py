"""The output of canzona for a run that it refuses."""

from collections.abc import Callable

import pytest

from canzona_cli.core.errors import ConfigError, Problem


def refused[**P](asked: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> tuple[Problem, ...]:
    """Returns all problems for which a configuration is refused when this is called."""
    with pytest.raises(ConfigError) as caught:
        asked(*args, **kwargs)
    return caught.value.problems
