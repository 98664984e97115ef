"""Compares a resumed run with the saved run. A changed setting may prevent resuming, change the loss curve,
or only distribute the work differently."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import leaves, override_text, settings_affecting
from canzona_cli.core.errors import Problem
from canzona_cli.core.fields import CURVE, MODEL, OPTIMIZER, SPREAD
from canzona_cli.core.setup import ScheduleConfig

_OF_THE_START = ("checkpoint.weights_from", "model.init_std", "train.eval_sequences")
"""The settings that affect the recorded losses of a whole run, but not how a resumed run goes on."""


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
        f"{key} is {value_text(value)} now; up to step {step:,} it was {value_text(previous)}"
        for key, (previous, value) in differing.items()
        if key in settings_affecting(CURVE) and not (other_optimizer and key.startswith("optimizer."))
    )
    spread = (
        f"{key} {value_text(differing[key][0])} -> {value_text(differing[key][1])}"
        for key in settings_affecting(SPREAD)
        if key in differing
    )
    return Changes(problems=problems, warnings=warnings, spread=tuple(spread))


def curve_differences(a: RunConfig, b: RunConfig) -> Mapping[str, tuple[object, object]]:
    """Returns both values of each setting that affects the losses and differs between two runs. The number of steps
    stands for what follows from it in the schedule, and the name of an optimizer for its other settings."""
    differing = _differing(a, b)
    keys = [*settings_affecting(MODEL), *settings_affecting(OPTIMIZER), *settings_affecting(CURVE), *_OF_THE_START]
    ends = [ScheduleConfig(decay=run.schedule.decay).complete(run.train.steps) for run in (a, b)]
    derived = {f"schedule.{name}": (value, getattr(ends[1], name)) for name, value in vars(ends[0]).items()}
    del derived["schedule.decay"]
    changed = [key for key in dict.fromkeys(keys) if key in differing]
    named = [key for key in changed if differing[key] != derived.get(key)]
    if named != changed and "train.steps" in differing:
        named.append("train.steps")
    if "optimizer.name" in named:
        named = [key for key in named if key == "optimizer.name" or not key.startswith("optimizer.")]
    return {key: differing[key] for key in named}


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
            text = value_text(previous)
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
            reason = f"does not match the model saved at step {step:,}, which has {value_text(previous)}"
        elif key in settings_affecting(OPTIMIZER) and not (key == "optimizer.source" and _same_class(previous, value)):
            reason = f"does not match the optimizer state saved at step {step:,}, which has {value_text(previous)}"
        else:
            continue
        name = "optimizer" if key == "optimizer.name" else key
        fix = f"use {name}={value_text(previous)}, or start another run with run.dir=DIR"
        yield Problem(key, reason, fix, value=value)


def _same_class(previous: object, value: object) -> bool:
    """Returns True if two sources name the same class. The files may differ, because a user may have moved
    the class."""
    return str(previous).rpartition(":")[2] == str(value).rpartition(":")[2]


def value_text(value: object) -> str:
    """Formats the value of a setting as a user types it."""
    return f"{value:g}" if isinstance(value, float) else override_text(value)
