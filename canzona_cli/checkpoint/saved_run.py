"""The run that a checkpoint is of, and a checkpoint read back whole. Imports no torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.checkpoint.contents import content_problems
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.store import Found
from canzona_cli.checkpoint.verify import (
    OnBytes,
    foreign_files,
    read_manifest,
    shortened,
    table_problems,
    verify,
    verify_file,
    way_out,
)
from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CanzonaError, CheckpointInvalid, ConfigError, Problem, refuse


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One checkpoint, every byte of it read, and its tables compared with its model."""

    found: Found
    bytes: int
    """The bytes that were read."""
    seconds: float
    problems: tuple[Problem, ...]
    foreign: tuple[str, ...]
    """Names in its folder that are not part of it."""


def saved_run(checkpoint: Path) -> tuple[Manifest, RunConfig]:
    """Reads what a checkpoint says of itself, and the run it is of; only the headers of big files are read.

    Raises:
        CheckpointInvalid: it is damaged, or holds what no run of its model saves, as far as that shows.
    """
    manifest = read_manifest(checkpoint)
    inputs = ("config.yaml", "layout.json")
    damaged = [verify_file(checkpoint, name, manifest.files[name]) for name in inputs if name in manifest.files]
    found = [problem for problem in damaged if problem is not None]
    found += [
        Problem(key=f"{checkpoint.name}/{name}", reason="the manifest does not list this file")
        for name in inputs
        if name not in manifest.files
    ]
    refuse(found, CheckpointInvalid)
    with of_checkpoint(checkpoint):
        saved = load_resolved(checkpoint / "config.yaml")
    wrong = table_problems(checkpoint, manifest, [*manifest.files])
    wrong += content_problems(checkpoint, manifest, saved.model)
    refuse(shortened(wrong), CheckpointInvalid)
    return manifest, saved


@contextmanager
def of_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Turns errors in reading the saved run into errors of the checkpoint, rather than of what was typed."""
    try:
        yield
    except ConfigError as error:
        fix = way_out(checkpoint)
        raise CheckpointInvalid(
            *(replace(problem, key=f"{checkpoint.name}: {problem.key}", fix=fix) for problem in error.problems)
        ) from None


def saved_config(folder: Path, manifest: Manifest) -> RunConfig | None:
    """The settings a checkpoint was written with; None where they cannot be read or are not those of the manifest."""
    entry = manifest.files.get("config.yaml")
    if entry is None or verify_file(folder, "config.yaml", entry) is not None:
        return None
    try:
        return load_resolved(folder / "config.yaml")
    except (CanzonaError, OSError):
        return None


def read_back(found: Found, on_bytes: OnBytes) -> Verified | None:
    """Hash all files of a checkpoint; None where it has been removed meanwhile."""
    read: list[int] = []  # appending is safe from several threads
    began = time.perf_counter()

    def count(done: int) -> None:
        read.append(done)
        on_bytes(done)

    foreign: tuple[str, ...] = ()
    try:
        manifest, problems = verify(found.path, on_bytes=count)
        foreign = foreign_files(found.path, manifest)
        if (config := saved_config(found.path, manifest)) is not None:
            problems += content_problems(found.path, manifest, config.model)
    except FileNotFoundError:
        return None
    except CheckpointInvalid as error:
        problems = list(error.problems)
    if not found.path.exists():
        return None
    seconds = time.perf_counter() - began
    return Verified(found=found, bytes=sum(read), seconds=seconds, problems=tuple(problems), foreign=foreign)
