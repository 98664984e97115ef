"""Problems with settings, with the values that a run has of them."""

from collections.abc import Iterable

from canzona_cli.core.errors import Problem


def problem_with(setup: object, key: str, reason: str, fix: str = "") -> Problem:
    """Returns a problem with a setting, including the setting's value in this run."""
    return Problem(key, reason, fix, value=value_of(setup, key))


def value_of(setup: object, key: str) -> object:
    """Returns a run's value of the setting with this dotted key."""
    value: object = setup
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_own_values(setup: object, problems: Iterable[Problem]) -> list[Problem]:
    """Returns the problems, with the run's value of the setting filled in where a problem has no value."""
    return [
        problem_with(setup, problem.key, problem.reason, problem.fix) if problem.value is None else problem
        for problem in problems
    ]
