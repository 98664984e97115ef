"""Checks that the container of a run's jobs sees the run's paths, as far as the options that start the container say.

A path has to lead to the same files inside and outside, because the machine that submits a job reads and writes some
of them as well.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import Problem
from canzona_cli.core.reading import expanded
from canzona_cli.core.setup import ClusterConfig

_MOUNTS: Final = ("--bind", "-B", "--mount", "--volume", "-v", "--container-mounts")
"""The options that mount folders, in Apptainer, Docker, Podman and pyxis."""
_APPTAINER: Final = ("apptainer", "singularity")
"""The programs that mount the home directory and the current directory, and start in the latter, unless told not to."""
_OTHERS: Final = ("docker", "podman", "enroot")
_CONTAINED: Final = (
    "--contain",
    "-c",
    "--containall",
    "-C",
    "--no-home",
    "--no-mount",
    "--pwd",
    "--cwd",
    "--home",
    "-H",
)
_BY_VARIABLE: Final = re.compile(r"(APPTAINER|SINGULARITY)_BIND(PATH)?\b")


def container_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each path of the run that the container of its jobs does not see. Yields nothing if the run
    has no container, or if it is started by a program that this module does not know."""
    words = (*config.cluster.command, *config.cluster.srun_args)
    if (mounted := _mounted(config.cluster, words)) is None:
        return
    starts_here = _is_apptainer(words) and not any(word.partition("=")[0] in _CONTAINED for word in words)
    for key, text in _paths(config):
        path = expanded(text)
        if not path.is_absolute() and not starts_here:
            reason = "is relative, and the container of cluster.command or cluster.srun_args starts in another folder"
            yield Problem(key, reason, f"{key}={path.absolute()}", value=text)
        elif not any(path.absolute().is_relative_to(folder) for folder in mounted):
            known = ", ".join(map(str, mounted)) or "nothing"
            reason = f"is not in the container, which mounts {known} at the same place as outside"
            fix = f"mount {_top(path)} in cluster.command or cluster.srun_args, or choose a folder that is mounted"
            yield Problem(key, reason, fix, value=text)


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the settings that are paths, with their values."""
    data, run = config.data, config.run
    if data.source == "prepared":
        named = (("data.path", data.path), ("data.validation", data.validation))
        yield from ((key, path) for key, path in named if path)
        yield from (("data.blend", path) for path in data.blend or {})
    elif "/" in data.tokenizer:
        yield "data.tokenizer", data.tokenizer
    yield ("run.dir", run.dir) if run.dir is not None else ("run.root", run.root)
    if config.checkpoint.weights_from is not None:
        yield "checkpoint.weights_from", config.checkpoint.weights_from
    if data.cache_dir is not None or not any("CANZONA_CACHE" in line for line in config.cluster.setup):
        yield "data.cache_dir", data.cache_dir or str(data.cache_root)


def _is_apptainer(words: Sequence[str]) -> bool:
    return any(Path(word).name in _APPTAINER for word in words)


def _mounted(cluster: ClusterConfig, words: Sequence[str]) -> list[Path] | None:
    """Returns the folders that the container has at the same place as the machine; None if that is unknown."""
    values = [*_values(words)]
    apptainer, names = _is_apptainer(words), [word.partition("=")[0] for word in words]
    known = apptainer or "--container-image" in names or any(Path(word).name in _OTHERS for word in cluster.command)
    by_variable = any(_BY_VARIABLE.search(text) for text in (*cluster.setup, *os.environ))
    if not (known or values) or (apptainer and by_variable):
        return None
    folders = [folder for value in values if (folder := _same_place(value)) is not None]
    if apptainer and not set(names) & {*_CONTAINED}:
        folders += [Path.home(), Path.cwd(), Path("/tmp")]
    elif "--container-mount-home" in names:
        folders.append(Path.home())
    return folders


def _values(words: Sequence[str]) -> Iterator[str]:
    """Yields the mounts that a command line names, one by one: `/a:/b:ro`, or `type=bind,src=/a,dst=/b`."""
    for option, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = option.partition("=")
        if name in _MOUNTS:
            value = value if equals else following
            yield from [value] if "src=" in value or "source=" in value else value.split(",")


def _same_place(mount: str) -> Path | None:
    """Returns the folder of a mount that has the same path inside and outside; None for another mount."""
    if "=" in mount:
        fields = dict(field.partition("=")[::2] for field in mount.split(","))
        source = fields.get("source") or fields.get("src")
        target = fields.get("destination") or fields.get("dst") or fields.get("target") or source
    else:
        source, target = (*mount.split(":"), "")[:2]
        target = target if target.startswith("/") else source
    if not source or not source.startswith("/") or target is None or Path(source) != Path(target):
        return None
    return Path(source)


def _top(path: Path) -> Path:
    """Returns the first folder of a path below the root, which is what clusters mount."""
    return Path(*path.absolute().parts[:2])
