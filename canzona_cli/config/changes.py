"""Compares a resumed run with the saved run. A changed setting may prevent resuming, change the loss curve,
or only distribute the work differently."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import leaves, override_text, settings_affecting
from canzona_cli.core.errors import Problem
from canzona_cli.core.fields import CURVE, MODEL, OPTIMIZER, SPREAD


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between the saved run and the run that resumes it."""

    problems: tuple[Problem, ...]
    """The reasons why the run cannot be resumed."""
    warnings: tuple[str, ...]
    """A warning for each changed setting that alters the loss curve, except the settings of an optimizer that
    does not match the saved state."""
    spread: tuple[str, ...]
    """A note for each changed setting that distributes work differently but leaves the loss curve unchanged.
    Settings of the layout are not included."""


def changes(old: RunConfig, new: RunConfig, *, step: int) -> Changes:
    """Returns the differences between a saved run and the run that resumes it.

    Args:
        old: the saved run.
        new: the run that would resume it.
        step: the step of the checkpoint, for messages.
    """
    differing = _differing(old, new)
    problems = tuple(_resume_problems(differing, step))
    other_optimizer = any(problem.key in settings_affecting(OPTIMIZER) for problem in problems)
    warnings = tuple(
        f"{key} is {_value_text(value)} now; up to step {step:,} it was {_value_text(previous)}"
        for key, (previous, value) in differing.items()
        if key in settings_affecting(CURVE) and not (other_optimizer and key.startswith("optimizer."))
    )
    spread = (
        f"{key} {_value_text(differing[key][0])} -> {_value_text(differing[key][1])}"
        for key in settings_affecting(SPREAD)
        if key in differing
    )
    return Changes(problems=problems, warnings=warnings, spread=tuple(spread))


def curve_differences(a: RunConfig, b: RunConfig) -> tuple[str, ...]:
    """Returns the keys of the settings that affect the losses and differ between two runs."""
    differing = _differing(a, b)
    keys = dict.fromkeys([*settings_affecting(MODEL), *settings_affecting(OPTIMIZER), *settings_affecting(CURVE)])
    return tuple(key for key in keys if key in differing)


def shape_problems(old: RunConfig, new: RunConfig, source: str) -> tuple[Problem, ...]:
    """Returns a problem for each model setting that differs: the weights of `old` then do not fit `new`.

    Args:
        old: the run that saved the weights.
        new: the run that would start from them.
        source: the path of the weights, for messages.
    """
    differing = _differing(old, new)
    problems = []
    for key in settings_affecting(MODEL):
        if key in differing:
            previous, value = differing[key]
            text = _value_text(previous)
            reason = f"is {text} for the weights in {source}"
            problems.append(Problem(key, reason, f"use {key}={text}", value=value))
    return tuple(problems)


def _differing(old: RunConfig, new: RunConfig) -> dict[str, tuple[object, object]]:
    """Returns the old and the new value of each setting that differs, by dotted key."""
    old_settings, new_settings = _settings(old), _settings(new)
    pairs = {key: (old_settings.get(key), new_settings.get(key)) for key in sorted(old_settings | new_settings)}
    return {key: (previous, value) for key, (previous, value) in pairs.items() if previous != value}


def _settings(config: RunConfig) -> dict[str, object]:
    """Returns all settings by dotted key, with the schedule's nulls resolved.

    The resolved values depend on the number of steps, so a change of `train.steps` may change the schedule.
    """
    schedule = config.schedule.complete(config.train.steps)
    return dict(leaves(asdict(config))) | {f"schedule.{name}": value for name, value in vars(schedule).items()}


def _resume_problems(differing: Mapping[str, tuple[object, object]], step: int) -> Iterator[Problem]:
    for key, (previous, value) in differing.items():
        if key in settings_affecting(MODEL):
            reason = f"does not match the model saved at step {step:,}, which has {_value_text(previous)}"
        elif key in settings_affecting(OPTIMIZER) and not (key == "optimizer.source" and _same_class(previous, value)):
            reason = f"does not match the optimizer state saved at step {step:,}, which has {_value_text(previous)}"
        else:
            continue
        name = "optimizer" if key == "optimizer.name" else key
        fix = f"use {name}={_value_text(previous)}, or start another run with run.dir=DIR"
        yield Problem(key, reason, fix, value=value)


def _same_class(previous: object, value: object) -> bool:
    """Returns True if two sources name the same class. The files may differ, because a user may have moved
    the class."""
    return str(previous).rpartition(":")[2] == str(value).rpartition(":")[2]


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else override_text(value)
