"""Writes what imports and exports leave: checkpoints of one process and folders, complete or not at all."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.commit import abandon, begin, finish, write_part
from canzona_cli.checkpoint.manifest import Header, Progress, Shard
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.data.locks import Busy, exclusive
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem, SaveFailed, unwritable
from canzona_cli.run.files import RunFiles, sync_folder

_MAKE_ROOM: Final = "make room there, or name a place that can be written"
_PATIENCE_S: Final = 60.0
"""The timeout of `finish`, in seconds. It is never reached, because all parts are already written."""


def write_checkpoint(
    files: RunFiles, shards: Sequence[Shard], config: RunConfig, progress: Progress, *, optimizer: str
) -> Path:
    """Writes a checkpoint of one process, whose matrices are units; it appears complete or not at all.

    Args:
        optimizer: the optimizer whose state it has, or `NO_OPTIMIZER`.

    Raises:
        SaveFailed: the checkpoint cannot be written.
    """
    header = Header(
        progress=progress,
        optimizer=optimizer,
        strategy=optimizer,
        splitting="split",
        world_size=1,
        created=time.time(),
        canzona=version("canzona"),
    )
    texts = {"config.yaml": dump_resolved(config), "layout.json": json.dumps(asdict(Layout.plain()))}
    with _without_advice_on_checkpoints():
        folder = begin(files.checkpoints, progress.step)
        try:
            for number, shard in enumerate(shards):
                write_part(folder, number, shard)
        except BaseException:
            abandon(folder)
            raise
        return finish(folder, len(shards), header, texts, _PATIENCE_S)


@contextmanager
def _without_advice_on_checkpoints() -> Iterator[None]:
    """Replaces the fix of a SaveFailed: unlike a run, an import has no other checkpoints that could be
    deleted."""
    try:
        yield
    except SaveFailed as error:
        raise SaveFailed(*(replace(problem, fix=_MAKE_ROOM) for problem in error.problems)) from None


@contextmanager
def staged(out: Path, *, key: str) -> Iterator[Path]:
    """Yields a hidden folder next to `out`, and renames it to `out` after the block; removes it if the block
    fails.

    Files in it must be synced to the disk by the end of the block. If the process is killed, the next call
    for the same place removes the hidden folder.

    Args:
        key: the option or setting that named the place, for messages.

    Raises:
        ConfigError: the place is not empty, or another process is writing there.
        EnvironmentProblem: the place cannot be written.
    """
    place = Path(os.path.abspath(out))
    check_empty(place, key=key)
    partial = place.with_name(f".{place.name}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(place.with_name(f".{place.name}.lock")):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(mode=0o755)
            try:
                yield partial
                sync_folder(partial)
                os.rename(partial, place)  # replaces an empty folder, and fails for anything else
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(place.parent)
    except Busy:
        fix = "wait for it, or name another place"
        raise ConfigError(Problem(key=key, value=out, reason="is being written by another process", fix=fix)) from None
    except OSError as error:
        raise unwritable(key, out, error, fix=_MAKE_ROOM) from None
    except SaveFailed as error:  # its path is in the hidden folder, which is gone
        raise EnvironmentProblem(*(replace(each, key=key, value=out) for each in error.problems)) from None


def check_empty(place: Path, *, key: str) -> None:
    """Checks that a place does not exist or is an empty folder, because existing files are never replaced.

    Raises:
        ConfigError: the place has something.
    """
    if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
        fix = "name a folder that does not exist yet, or an empty one"
        raise ConfigError(Problem(key=key, value=place, reason="already exists and is not an empty folder", fix=fix))
