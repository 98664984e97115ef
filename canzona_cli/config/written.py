"""The settings of a run that is continued: those in its directory, with the command line's on top."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from canzona_cli.config.overrides import Overrides
from canzona_cli.config.schema import ScheduleConfig

NAME: Final = "config.yaml"
"""The file in a run directory with the settings that the run was started with, nulls resolved."""
CHOSEN: Final = (
    *("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "parallel.sequence_parallel"),
    *("train.micro_batch_size", "train.recompute", "cluster.nodes"),
)
"""The settings that are chosen to suit the number of GPUs and the cluster. `config.yaml` has the choice for
those that the run was started with."""


def with_written_recipe(asked: Overrides) -> Overrides:
    """Takes the settings of the run in `run.dir` as the recipe, if the command line names no recipe and there
    is such a run."""
    file = _file(asked)
    if "recipe" in asked.groups or file is None or not file.is_file():
        return asked
    return replace(asked, groups={"recipe": str(file.absolute()), **asked.groups})


def is_written(recipe_file: Path, asked: Overrides) -> bool:
    """Returns True if `recipe_file` has the settings of the run in `run.dir`."""
    file = _file(asked)
    return file is not None and recipe_file == file.resolve()


def _file(asked: Overrides) -> Path | None:
    place = asked.values.get("run.dir")
    return Path(place).expanduser() / NAME if isinstance(place, str) else None


def choose_again(tree: dict[str, object], written: Mapping[str, object], asked: Overrides) -> None:
    """Drops the values that the run's start derived from settings which the command line changes: the layout if
    it gives GPUs or a cluster, the schedule if it gives the number of steps.

    Args:
        tree: the values with the command line's, changed in place.
        written: the values of the run directory.
    """
    if "gpus" in asked.values or "cluster" in asked.groups:
        for key in CHOSEN:
            section, _, name = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and key not in asked.values:
                values[name] = None
    if "train.steps" in asked.values and not any(key.startswith("schedule.") for key in asked.values):
        _choose_schedule(tree, written)


def _choose_schedule(tree: dict[str, object], written: Mapping[str, object]) -> None:
    """Sets the schedule's numbers of steps to null if they are what nulls would have become for the steps that
    the run was started with."""
    schedule, train = tree.get("schedule"), written.get("train")
    steps = train.get("steps") if isinstance(train, Mapping) else None
    if not isinstance(schedule, dict) or not isinstance(steps, int) or schedule.get("decay_steps") != steps:
        return
    nulls = ScheduleConfig(decay=schedule["decay"]).complete(steps)
    schedule["decay_steps"] = None
    for name in ("warmup_steps", "wsd_decay_steps"):
        if schedule.get(name) == getattr(nulls, name):
            schedule[name] = None
