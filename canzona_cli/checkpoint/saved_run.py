"""The run that a checkpoint is of. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from canzona_cli.checkpoint.contents import content_problems
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.verify import read_manifest, shortened, table_problems, verify_file, way_out
from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import CheckpointInvalid, ConfigError, Problem, refuse


def saved_run(checkpoint: Path) -> tuple[Manifest, RunConfig]:
    """What a checkpoint says of itself, and the run it is of; of big files the headers alone are read.

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
    """What cannot be read of the run that was saved is wrong with the checkpoint, not with what was typed."""
    try:
        yield
    except ConfigError as error:
        fix = way_out(checkpoint)
        raise CheckpointInvalid(
            *(replace(problem, key=f"{checkpoint.name}: {problem.key}", fix=fix) for problem in error.problems)
        ) from None
