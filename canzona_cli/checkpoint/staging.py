"""Writes the checkpoint of an import, or the folder of an export, either completely or not at all."""

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
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, SaveFailed, write_error
from canzona_cli.core.setup import Layout
from canzona_cli.data.locks import Busy, exclusive_lock
from canzona_cli.records.files import RunFiles, sync_folder

_MAKE_ROOM: Final = "make room there, or choose a writable folder"
_PATIENCE_S: Final = 60.0
"""The timeout of `finish`, in seconds. It is never reached, because all parts are already written."""


def write_checkpoint(
    files: RunFiles, shards: Sequence[Shard], config: RunConfig, progress: Progress, *, optimizer: str
) -> Path:
    """Writes a checkpoint of whole units (`model.geometry`) from a single process. The checkpoint becomes
    visible only when it is complete.

    Args:
        optimizer: the optimizer whose state the shards contain, or `NO_OPTIMIZER`.

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
    try:
        folder = begin(files.checkpoints, progress.step)
        try:
            for rank, shard in enumerate(shards):
                write_part(folder, rank, shard)
        except BaseException:
            abandon(folder)
            raise
        return finish(folder, len(shards), header, texts, _PATIENCE_S)
    except SaveFailed as error:
        # The usual fix, to keep fewer checkpoints, does not apply to an import.
        raise SaveFailed(*(replace(problem, fix=_MAKE_ROOM) for problem in error.problems)) from None


@contextmanager
def stage_folder(out: Path, *, key: str) -> Iterator[Path]:
    """Yields a hidden folder next to `out`, and renames it to `out` after the block. If the block fails, the
    hidden folder is removed.

    The block has to sync the files that it writes to the disk. If the process is killed, the next call with
    the same `out` removes the hidden folder.

    Args:
        key: the option or setting that `out` comes from, for messages.

    Raises:
        ConfigError: `out` exists and is not an empty folder, or another process is writing there.
        EnvironmentProblem: `out` cannot be written.
    """
    target = Path(os.path.abspath(out))
    check_empty(target, key=key)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.with_name(f".{target.name}.lock")):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(mode=0o755)
            try:
                yield partial
                sync_folder(partial)
                os.rename(partial, target)  # replaces an empty folder, and fails for anything else
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(target.parent)
    except Busy:
        fix = "wait until it has finished, or choose another folder"
        raise ConfigError(Problem(key=key, value=out, reason="is being written by another process", fix=fix)) from None
    except OSError as error:
        raise write_error(key, out, error, fix=_MAKE_ROOM) from None
    except SaveFailed as error:  # name `out`, because the error names a path in the hidden folder
        raise EnvironmentProblem(*(replace(problem, key=key, value=out) for problem in error.problems)) from None


def check_empty(place: Path, *, key: str) -> None:
    """Checks that a path does not exist, or is an empty folder, because existing files are never replaced.

    Raises:
        ConfigError: the path exists and is not an empty folder.
    """
    if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
        fix = "choose an empty folder, or one that does not exist"
        raise ConfigError(Problem(key=key, value=place, reason="already exists and is not an empty folder", fix=fix))
