"""Differences of a resumed run from the saved one: impossible, another loss curve,
or work shared differently."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import affecting, leaves
from canzona_cli.errors import Problem
from canzona_cli.fields import CURVE, MODEL, OPTIMIZER, SPREAD


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between the saved run and the run that resumes it."""

    problems: tuple[Problem, ...]
    """The reasons why it cannot be resumed."""
    warnings: tuple[str, ...]
    """One for each setting whose change alters the loss curve."""
    spread: tuple[str, ...]
    """One for each setting whose change shares the work out differently, apart from the layout.
    The curve stays."""


def changes(old: RunConfig, new: RunConfig, *, step: int) -> Changes:
    """Compare two resolved runs by what their settings say they affect.

    Args:
        old: the run as it was saved.
        step: the step of the checkpoint, for messages.
    """
    before, now = _settings(old), _settings(new)
    differing = {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    problems = tuple(_impossible(differing, step))
    foreign = any(problem.key in affecting(OPTIMIZER) for problem in problems)
    warnings = tuple(
        f"{key} is {_shown(value)} now; up to step {step:,} it was {_shown(previous)}"
        for key, (previous, value) in differing.items()
        if key in affecting(CURVE) and not (foreign and key.startswith("optimizer."))
    )
    spread = (
        f"{key} {_shown(differing[key][0])} -> {_shown(differing[key][1])}"
        for key in affecting(SPREAD)
        if key in differing
    )
    return Changes(problems=problems, warnings=warnings, spread=tuple(spread))


def shape_problems(old: RunConfig, new: RunConfig, source: str) -> tuple[Problem, ...]:
    """Lists why the weights of a run do not fit another: one for each setting of the model that differs."""
    before, now = _settings(old), _settings(new)
    return tuple(
        Problem(
            key=key,
            value=now.get(key),
            reason=f"is {_shown(before.get(key))} for the weights in {source}",
            fix=f"{key}={_shown(before.get(key))}",
        )
        for key in affecting(MODEL)
        if before.get(key) != now.get(key)
    )


def _settings(config: RunConfig) -> dict[str, object]:
    """All settings, the schedule with its nulls chosen:
    another number of steps may well be another schedule."""
    chosen = config.schedule.complete(config.train.steps)
    return dict(leaves(asdict(config))) | {f"schedule.{name}": value for name, value in vars(chosen).items()}


def _impossible(differing: Mapping[str, tuple[object, object]], step: int) -> Iterator[Problem]:
    for key, (previous, value) in differing.items():
        if key in affecting(MODEL):
            reason = f"does not match the model saved at step {step:,}, which has {_shown(previous)}"
        elif key in affecting(OPTIMIZER) and not (key == "optimizer.source" and _same_class(previous, value)):
            reason = f"does not match the optimizer whose state was saved at step {step:,}: {_shown(previous)}"
        else:
            continue
        name = "optimizer" if key == "optimizer.name" else key
        fix = f"{name}={_shown(previous)}, or start another run: run.dir=DIR"
        yield Problem(key=key, value=value, reason=reason, fix=fix)


def _same_class(previous: object, value: object) -> bool:
    """Returns True if two sources name the same class; in another file it may be the next version of it."""
    return str(previous).rpartition(":")[2] == str(value).rpartition(":")[2]


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
