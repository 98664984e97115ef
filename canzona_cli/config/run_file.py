"""A run's config.yaml: which file it is, what it contains, and which of its values another run chooses again."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from canzona_cli.config.recipes import WRITTEN
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import content_problems
from canzona_cli.config.settings import leaves, sections, settings
from canzona_cli.config.typed import build
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.reading import display_path, read_yaml
from canzona_cli.core.setup import ScheduleConfig

if TYPE_CHECKING:
    from canzona_cli.config.overrides import Overrides

CHOSEN: Final = (
    *("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "parallel.sequence_parallel"),
    *("train.micro_batch_size", "train.recompute", "cluster.nodes"),
)
"""The settings that depend on the number of GPUs and on the cluster. A run's `config.yaml` has the values
chosen for the GPUs with which it was started."""
OTHER_VERSION: Final = "was made by another version of canzona, or edited: this version has no setting"
"""The reason why a config.yaml cannot be used in full; it ends with the names of settings."""


def is_of_run(file: Path) -> bool:
    """Returns True if a file is the resolved configuration of a run or a checkpoint: it lies beside the layout that
    was chosen for it, or in the run directory that it names."""
    if file.name != WRITTEN or (file.parent / "layout.json").is_file():
        return file.name == WRITTEN
    run = read_yaml(file).get("run")
    return isinstance(run, Mapping) and Path(str(run.get("dir"))).name == file.parent.name


def load_resolved(path: Path) -> RunConfig:
    """Reads the config.yaml of a run directory, to go on with the run.

    Raises:
        ConfigError: the file has problems; all are reported at once.
    """
    tree = read_yaml(path)
    refuse(other_version(tree, path))
    return _build(tree, path)


def load_known(path: Path) -> tuple[RunConfig, Mapping[str, object]]:
    """Reads the config.yaml of a run directory, to report the run. Returns its configuration, and the settings that
    this version of canzona does not have.

    Raises:
        ConfigError: the file has other problems.
    """
    tree = read_yaml(path)
    unknown = _unknown(tree)
    known = {
        name: {key: each for key, each in part.items() if f"{name}.{key}" not in unknown}
        if name in sections() and isinstance(part, Mapping)
        else part
        for name, part in tree.items()
        if name not in unknown
    }
    return _build(known, path), unknown


def _build(tree: dict[str, object], path: Path) -> RunConfig:
    unsafe = list(content_problems(tree, display_path(path)))
    config = build(tree, texts={}, where=display_path(path))
    if unsafe or isinstance(config, list):
        raise ConfigError(*unsafe, *(config if isinstance(config, list) else ()))
    return config


def other_version(tree: Mapping[str, object], path: Path) -> list[Problem]:
    """Returns a problem if the config.yaml of a run has a setting that this version of canzona does not have."""
    if not (unknown := _unknown(tree)):
        return []
    fix = "use the version of canzona that made it, or start a new run from a recipe"
    return [Problem(display_path(path), f"{OTHER_VERSION} {next(iter(unknown))}", fix)]


def _unknown(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that this version of canzona does not have."""
    return {key: value for key, value in leaves(tree) if key not in settings() and key not in sections()}


def dump_resolved(config: RunConfig) -> str:
    """Returns the configuration as YAML, which `load_resolved` reads back unchanged."""
    import yaml

    text: str = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def choose_again(tree: dict[str, object], stored: Mapping[str, object], parsed: "Overrides") -> None:
    """Drops values of a run's `config.yaml` that were derived from settings that the command line changes: the
    layout if it sets GPUs or a cluster, the schedule if it sets the number of steps, and the batch if it sets
    the sequence length.

    Args:
        tree: the stored values, overridden by the command line's; changed in place.
        stored: the values stored in the run directory or the checkpoint.
    """
    if "gpus" in parsed.values or "cluster" in parsed.groups:
        for key in CHOSEN:
            section, _, name = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and key not in parsed.values:
                values[name] = None
    if "train.steps" in parsed.values and not any(key.startswith("schedule.") for key in parsed.values):
        _choose_schedule(tree, stored)
    if "train.seq_length" in parsed.values and not {"train.batch_tokens", "train.global_batch_size"} & {*parsed.values}:
        _choose_batch(tree, stored, parsed)


def _choose_batch(tree: Mapping[str, object], stored: Mapping[str, object], parsed: "Overrides") -> None:
    """Sets the batch and the micro-batch to null if the stored batch has exactly the tokens of
    `batch_tokens`, from which it was derived."""
    train, before = tree.get("train"), stored.get("train")
    if not isinstance(train, dict) or not isinstance(before, Mapping):
        return
    batch, length = before.get("global_batch_size"), before.get("seq_length")
    if isinstance(batch, int) and isinstance(length, int) and batch * length == before.get("batch_tokens"):
        for name in ("global_batch_size", "micro_batch_size"):
            if f"train.{name}" not in parsed.values:
                train[name] = None


def _choose_schedule(tree: dict[str, object], stored: Mapping[str, object]) -> None:
    """Sets the schedule's numbers of steps to null if they have the values that replaced nulls when the run
    started."""
    schedule, train = tree.get("schedule"), stored.get("train")
    steps = train.get("steps") if isinstance(train, Mapping) else None
    if not isinstance(schedule, dict) or not isinstance(steps, int) or schedule.get("decay_steps") != steps:
        return
    nulls = ScheduleConfig(decay=schedule["decay"]).complete(steps)
    schedule["decay_steps"] = None
    for name in ("warmup_steps", "wsd_decay_steps"):
        if schedule.get(name) == getattr(nulls, name):
            schedule[name] = None
