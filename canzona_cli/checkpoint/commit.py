"""Commits a checkpoint atomically: it becomes visible when it is complete, or not at all.

Every rank writes into a hidden folder next to the checkpoints, and writes a part file there when it is done.
Rank 0 waits for all part files, adds the manifest, and renames the folder. While they write, ranks
synchronise only through these files, because only training may use collectives. Whenever the run is killed,
the store has all earlier checkpoints, and the new checkpoint either completely or not at all. The checkpoint of an
import and the folder of an export are written by a single process, and become visible in the same way.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from canzona_cli.checkpoint.manifest import (
    MANIFEST,
    Header,
    Manifest,
    Progress,
    Scalar,
    Shard,
    StoredFile,
    StoredTensor,
    hidden_name,
    hidden_path,
    manifest_text,
    partial_path,
    step_name,
)
from canzona_cli.checkpoint.shard_file import write_shard
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, SaveFailed, write_error
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import Layout
from canzona_cli.core.writing import Busy, exclusive_lock, write_atomic, write_new
from canzona_cli.records.files import RunFiles, staged, sync_folder

_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5
_NAMED_RANKS: Final = 8
_REMOVALS: Final = 8
"""The number of attempts to remove a folder. A rank that is still writing may create up to three more files
in the folder, each of which can make an attempt fail."""
_FIXES: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: "make room on that disk, or keep fewer checkpoints (checkpoint.keep)",
    errno.EDQUOT: "make room within your quota, or keep fewer checkpoints (checkpoint.keep)",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "remount that file system for writing",
    errno.EACCES: "make that folder writable",
    errno.EPERM: "make that folder writable",
}
"""The fix for an error of the operating system, by its number."""

_MAKE_ROOM: Final = "make room there, or choose a writable folder"
_IMPORT_PATIENCE_S: Final = 60.0
"""The timeout of `finish` for an import, in seconds. It is never reached, because all parts are already written."""


def begin(store_root: Path, step: int) -> Path:
    """Creates the empty folder into which all ranks write the checkpoint of `step`.

    Only rank 0 calls this, before any rank writes. The other ranks get the path from `manifest.partial_path`.
    Folders of earlier, unfinished saves are removed.

    Raises:
        SaveFailed: the folder cannot be created.
    """
    partial = partial_path(store_root, step)
    try:
        if not store_root.is_dir():
            store_root.mkdir(mode=0o755, exist_ok=True)
            sync_folder(store_root.parent)
        for name in os.listdir(store_root):
            if (hidden := hidden_name(name)) is not None and hidden[1] == "partial":
                # A rank may still be writing into a folder that rank 0 has abandoned. If the removal fails
                # for this reason, the next save tries again.
                shutil.rmtree(store_root / name, ignore_errors=name != partial.name)
        partial.mkdir(mode=0o755)
    except OSError as error:
        raise _save_error(partial, error) from None
    return partial


def write_part(partial: Path, rank: int, shard: Shard) -> None:
    """Writes one rank's share of a checkpoint, and then a part file, from which rank 0 learns that the share
    is complete.

    Every rank calls this, from any thread. If writing fails, the part file contains the reason. If not even
    the part file can be written, an empty marker file takes its place.

    Args:
        partial: the folder that `begin` made.
        shard: this rank's share; must not change until this function returns.

    Raises:
        SaveFailed: a file could not be written. Errors other than OSError are raised unchanged.
    """
    path = _shard_path(partial, rank)
    part: dict[str, object] = {"rank": rank, "file": None, "tensors": {}, "scalars": dict(shard.scalars)}
    try:
        if shard.tensors:
            stored, tensors = write_shard(path, shard.tensors)
            part["file"] = asdict(stored)
            part["tensors"] = {name: asdict(tensor) for name, tensor in tensors.items()}
        write_atomic(_part_path(partial, rank), json.dumps(part).encode())
    except BaseException as error:
        reported = error if isinstance(error, SaveFailed) else _save_error(path, error)
        with suppress(OSError):
            path.unlink(missing_ok=True)  # makes room for the part file with the reason
        failure = {"error": reported.problems[0].reason, "fix": reported.problems[0].fix}
        try:
            write_atomic(_part_path(partial, rank), json.dumps(failure).encode())
        except OSError:
            with suppress(OSError):  # a full disk often has room for an empty file
                _failure_marker(partial, rank).touch()
        if isinstance(error, OSError):
            raise reported from None
        raise


def finish(
    partial: Path,
    world_size: int,
    header: Header,
    texts: Mapping[str, str],
    timeout_s: float,
) -> Path:
    """Waits for every rank's part, writes the manifest, and makes the checkpoint visible.

    Only rank 0 calls this, after its own `write_part`.

    Args:
        partial: the folder that `begin` made.
        header: the fields of the manifest other than its tables.
        texts: the text of further files, by name: `config.yaml`, `layout.json`, `plan.json`.
        timeout_s: the seconds after which the save fails if no file grows.

    Returns:
        The checkpoint's folder, `step-00000030`. An existing checkpoint of the same step is replaced; readers
        see the old one until the new one is complete.

    Raises:
        SaveFailed: a rank failed or did not finish, or a file could not be written. The partial folder is
            removed; earlier checkpoints are untouched.
    """
    try:
        files: dict[str, StoredFile] = {}
        tensors: dict[str, StoredTensor] = {}
        scalars: dict[str, Scalar] = {}
        for rank, part in _await_parts(partial, world_size, timeout_s).items():
            if part["file"] is not None:
                path = _shard_path(partial, rank)
                stored = StoredFile(**part["file"])
                files[path.name] = stored
                if (size := path.stat().st_size) != stored.bytes:
                    raise _rank_error(partial, rank, f"its file has {size} of the {stored.bytes} bytes it wrote")
            duplicates = [*(tensors.keys() & part["tensors"]), *(scalars.keys() & part["scalars"])]
            if duplicates:
                raise _rank_error(partial, rank, f"{duplicates[0]} is also written by another rank")
            tensors |= {name: parse(StoredTensor, entry) for name, entry in part["tensors"].items()}
            scalars |= part["scalars"]
        for name, text in texts.items():
            files[name] = _write_text(partial / name, text)
        manifest = manifest_text(Manifest(**vars(header), files=files, tensors=tensors, scalars=scalars))
        _write_text(partial / MANIFEST, manifest)
        for rank in range(world_size):
            _part_path(partial, rank).unlink()
        sync_folder(partial)
        return _publish(partial, partial.parent / step_name(header.progress.step))
    except BaseException as error:
        abandon(partial)
        if isinstance(error, OSError):
            raise _save_error(partial, error) from None
        raise


def abandon(partial: Path) -> None:
    """Removes the folder of a checkpoint that will not be finished. Never raises an error; if the folder
    remains, the next `begin` removes it."""
    for _ in range(_REMOVALS):
        shutil.rmtree(partial, ignore_errors=True)
        if not partial.exists():
            return


def bytes_written(partial: Path) -> int:
    """Returns the total size, in bytes, of the files in a checkpoint's folder, finished or not. If the folder
    is renamed or removed meanwhile, the result is too low."""
    total = 0
    try:
        with os.scandir(partial) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass  # renamed or removed meanwhile
    return total


def _shard_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.safetensors"


def _part_path(partial: Path, rank: int) -> Path:
    """Returns the path of the part file, in which a rank lists the tensors that it has written, or reports an
    error."""
    return partial / f"part-{rank:05d}.json"


def _failure_marker(partial: Path, rank: int) -> Path:
    """Returns the path of the empty file that a rank creates if it fails and cannot write the reason."""
    return partial / f"part-{rank:05d}.failed"


def _save_error(path: Path, error: BaseException) -> SaveFailed:
    """Returns the error to raise if `path` could not be written, with the reason and the fix."""
    reason, fix = f"{type(error).__name__}: {error}", ""
    if isinstance(error, OSError):
        reason, fix = error.strerror or str(error), _FIXES.get(error.errno, "")
    return SaveFailed(Problem(key="checkpoint", value=path, reason=f"cannot be written: {reason}", fix=fix))


def _await_parts(partial: Path, world_size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Waits for the part files of all ranks, and returns their contents by rank, in rank order.

    Raises:
        SaveFailed: a rank reports a failure, or nothing was written for `timeout_s` seconds.
    """
    parts: dict[int, dict[str, Any]] = {}
    written = bytes_written(partial)
    deadline = time.monotonic() + timeout_s
    poll_s = _POLL_S
    while True:
        names = set(os.listdir(partial))
        for rank in range(world_size):
            path = _part_path(partial, rank)
            if _failure_marker(partial, rank).name in names:
                raise _rank_error(partial, rank, "could write neither its part nor the reason", _FIXES[errno.ENOSPC])
            if rank in parts or path.name not in names:
                continue
            parts[rank] = json.loads(path.read_bytes())
            if "error" in parts[rank]:
                raise _rank_error(partial, rank, parts[rank]["error"], parts[rank]["fix"])
        if len(parts) == world_size:
            return dict(sorted(parts.items()))
        if time.monotonic() > deadline:
            before, written = written, bytes_written(partial)
            if written == before:
                missing = [rank for rank in range(world_size) if rank not in parts]
                raise _missing_parts_error(partial, missing, timeout_s)
            deadline = time.monotonic() + timeout_s
        time.sleep(poll_s)
        poll_s = min(_LONGEST_POLL_S, poll_s * 1.05)


def _rank_error(partial: Path, rank: int, reason: str, fix: str = "") -> SaveFailed:
    return SaveFailed(Problem(key="checkpoint", value=partial, reason=f"rank {rank}: {reason}", fix=fix))


def _missing_parts_error(partial: Path, ranks: list[int], timeout_s: float) -> SaveFailed:
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    subject = (
        f"rank {named} did not write its part" if len(ranks) == 1 else f"ranks {named}{more} did not write their parts"
    )
    reason = f"{subject}, and no file grew for {timeout_s:.0f} s"
    fix = "read the logs of these ranks, and check that every node sees the same folder"
    return SaveFailed(Problem(key="checkpoint", value=partial, reason=reason, fix=fix))


def _publish(partial: Path, target: Path) -> Path:
    """Renames the complete folder `partial` to `target`. An existing checkpoint there is hidden first, and
    deleted afterwards."""
    hidden_old = hidden_path(target, "replaced")
    has_old = os.path.lexists(target)
    if has_old:
        if hidden_old.exists():  # a save of this step was killed after its rename
            shutil.rmtree(hidden_old)
        os.rename(target, hidden_old)
    try:
        os.rename(partial, target)
    except OSError:
        if has_old:
            os.rename(hidden_old, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(hidden_old, ignore_errors=True)
    return target


def _write_text(path: Path, text: str) -> StoredFile:
    data = text.encode()
    write_new(path, data)
    return StoredFile(bytes=len(data), blake3=blake3(data).hexdigest())


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
        return finish(folder, len(shards), header, texts, _IMPORT_PATIENCE_S)
    except SaveFailed as error:
        # The usual fix, to keep fewer checkpoints, does not apply to an import.
        raise SaveFailed(*(replace(problem, fix=_MAKE_ROOM) for problem in error.problems)) from None


@contextmanager
def stage_folder(out: Path, *, key: str) -> Iterator[Path]:
    """Yields a hidden folder that becomes `out` after the block, as `staged` does, and holds a lock meanwhile.

    Args:
        key: the option or setting that `out` comes from, for messages.

    Raises:
        ConfigError: `out` exists and is not an empty folder, or another process is writing there.
        EnvironmentProblem: `out` cannot be written.
    """
    target = Path(os.path.abspath(out))
    check_empty(target, key=key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.with_name(f".{target.name}.lock")), staged(target) as partial:
            yield partial
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
