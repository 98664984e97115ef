"""The settings of a resumed run: those in the run directory, changed by the command line."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from canzona_cli.config.overrides import Overrides
from canzona_cli.config.schema import ScheduleConfig

NAME: Final = "config.yaml"
"""The file in a run directory with the settings with which the run was started, without nulls."""
CHOSEN: Final = (
    *("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "parallel.sequence_parallel"),
    *("train.micro_batch_size", "train.recompute", "cluster.nodes"),
)
"""The settings that depend on the number of GPUs and on the cluster. `config.yaml` has the values for the
GPUs with which the run was started."""


def with_written_recipe(parsed: Overrides) -> Overrides:
    """Uses the settings of the run in `run.dir` as the recipe, if there is such a run and the command line
    does not name a recipe."""
    file = _file(parsed)
    if "recipe" in parsed.groups or file is None or not file.is_file():
        return parsed
    return replace(parsed, groups={"recipe": str(file.absolute()), **parsed.groups})


def is_written(recipe_file: Path, parsed: Overrides) -> bool:
    """Returns True if `recipe_file` is the config.yaml of the run in `run.dir`."""
    file = _file(parsed)
    return file is not None and recipe_file == file.resolve()


def _file(parsed: Overrides) -> Path | None:
    """Returns the path of the config.yaml in `run.dir`; None if the command line does not set `run.dir`."""
    folder = parsed.values.get("run.dir")
    return Path(folder).expanduser() / NAME if isinstance(folder, str) else None


def choose_again(tree: dict[str, object], written: Mapping[str, object], parsed: Overrides) -> None:
    """Drops values that were derived from settings that the command line changes: the layout if it sets GPUs
    or a cluster, and the schedule if it sets the number of steps.

    Args:
        tree: the values, with those of the command line; changed in place.
        written: the values in the run directory.
    """
    if "gpus" in parsed.values or "cluster" in parsed.groups:
        for key in CHOSEN:
            section, _, name = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and key not in parsed.values:
                values[name] = None
    if "train.steps" in parsed.values and not any(key.startswith("schedule.") for key in parsed.values):
        _choose_schedule(tree, written)


def _choose_schedule(tree: dict[str, object], written: Mapping[str, object]) -> None:
    """Sets the schedule's numbers of steps to null if they equal the values that nulls had when the run was started."""
    schedule, train = tree.get("schedule"), written.get("train")
    steps = train.get("steps") if isinstance(train, Mapping) else None
    if not isinstance(schedule, dict) or not isinstance(steps, int) or schedule.get("decay_steps") != steps:
        return
    nulls = ScheduleConfig(decay=schedule["decay"]).complete(steps)
    schedule["decay_steps"] = None
    for name in ("warmup_steps", "wsd_decay_steps"):
        if schedule.get(name) == getattr(nulls, name):
            schedule[name] = None
