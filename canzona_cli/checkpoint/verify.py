"""Verifies a checkpoint before its tensors are used: the manifest by means of the hash that it contains, all
other files by means of the manifest.

No content of a checkpoint is executed, no link is followed, and no name can point outside its folder.
"""

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from blake3 import blake3

from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, StoredFile, parse_manifest, step_name, step_of
from canzona_cli.checkpoint.shard_file import read_table
from canzona_cli.core.errors import CheckpointInvalid, Problem, refuse
from canzona_cli.core.host import cores
from canzona_cli.core.reading import Absent, read_plain

OnBytes = Callable[[int], None]
"""A callback that receives the number of bytes hashed since its previous call. Several threads call it."""

_CHUNK = 4 << 20
_MOST_THREADS = 8
_MOST_PROBLEMS = 10
_SHARDS = ".safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest, and checks that all files exist with the right sizes, without reading
    the files.

    Raises:
        CheckpointInvalid: the manifest is not valid, or files are missing or have another size. The error
            names the first ten of them, and the previous usable checkpoint.
    """
    manifest = _parse(folder)
    reasons = {name: _size_problem(folder, name, entry) for name, entry in sorted(manifest.files.items())}
    problems = [problem_of(folder, name, reason) for name, reason in reasons.items() if reason is not None]
    refuse(limit_problems(problems), CheckpointInvalid)
    return manifest


def verify(folder: Path, *, on_bytes: OnBytes | None = None) -> tuple[Manifest, list[Problem]]:
    """Hashes all files of a checkpoint, several at a time, and compares the files' tensors with the manifest.

    Returns:
        The manifest, and a problem for every file that does not match the manifest.

    Raises:
        CheckpointInvalid: the manifest is missing or not valid, so the files cannot be checked.
    """
    manifest = _parse(folder)
    files = dict(sorted(manifest.files.items()))
    interrupted = Event()

    def count(hashed_bytes: int) -> None:
        if interrupted.is_set():
            raise InterruptedError("verification was interrupted")
        if on_bytes is not None:
            on_bytes(hashed_bytes)

    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, cores())) as pool:
        try:
            results = [*pool.map(lambda item: verify_file(folder, *item, on_bytes=count), files.items())]
        except BaseException:  # after Ctrl-C, the pool must end without hashing the rest of large files
            interrupted.set()
            raise
    intact = [name for name, problem in zip(files, results, strict=True) if problem is None]
    problems = [problem for problem in results if problem is not None]
    return manifest, problems + table_problems(folder, manifest, intact)


def verify_file(folder: Path, name: str, entry: StoredFile, *, on_bytes: OnBytes | None = None) -> Problem | None:
    """Checks the size and the hash of one file of a checkpoint. Returns the problem; None if the file is
    intact."""
    reason = _size_problem(folder, name, entry)
    if reason is None:
        try:
            digest = _hash(folder / name, on_bytes)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        else:
            if digest != entry.blake3:
                reason = "damaged: its content does not match the hash in the manifest"
    return None if reason is None else problem_of(folder, name, reason)


def table_problems(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[Problem]:
    """Returns a problem for every safetensors file among `names` whose header does not match the manifest.

    The files should be hashed first, because a header that matches says nothing about the values of tensors.
    """
    problems = []
    for name in sorted(name for name in names if name.endswith(_SHARDS)):
        listed = {key: (t.dtype, t.shape) for key, t in manifest.tensors.items() if t.file == name}
        try:
            in_file, size = read_table(folder / name)
        except (OSError, ValueError) as error:
            problems.append(problem_of(folder, name, f"{error}"))
            continue
        differing = sorted(key for key in in_file.keys() | listed.keys() if in_file.get(key) != listed.get(key))
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            reason = f"its tensors differ from those in the manifest: {differing[0]}{more}"
            problems.append(problem_of(folder, name, reason))
        elif size != manifest.files[name].bytes:
            problems.append(problem_of(folder, name, "there are bytes after its tensors"))
    return problems


def foreign_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Lists the names in the folder that do not belong to the checkpoint. These files are never read."""
    return tuple(sorted(set(os.listdir(folder)) - {MANIFEST, *manifest.files}))


def limit_problems(
    problems: Sequence[Problem], most: int = _MOST_PROBLEMS, *, key: str = "checkpoint"
) -> list[Problem]:
    """Returns the first `most` problems. If there are more, one more problem, with key `key`, states how
    many."""
    shown = list(problems[:most])
    if len(problems) > len(shown):
        shown.append(Problem(key=key, reason=f"and {len(problems) - len(shown)} more"))
    return shown


def previous_usable(folder: Path) -> Path | None:
    """Returns the newest earlier checkpoint in the same store that is not a link, whose manifest is valid and
    whose files have the right sizes; None if there is no such checkpoint.

    If the folder does not have the name of a checkpoint, all checkpoints next to it are searched.
    """
    step = step_of(folder.name)
    try:
        names = os.listdir(folder.parent)
    except OSError:
        return None
    earlier = sorted((s for s in map(step_of, names) if s is not None and (step is None or s < step)), reverse=True)
    for candidate in (folder.parent / step_name(s) for s in earlier):
        try:
            manifest = _read(candidate)
        except ValueError:
            continue
        if not candidate.is_symlink() and not any(_size_problem(candidate, *item) for item in manifest.files.items()):
            return candidate
    return None


def fallback_fix(folder: Path, *, by_path: bool = False) -> str:
    """Returns the fix for a checkpoint that cannot be used: resume from the previous one, or start again.

    Args:
        by_path: True to name the previous checkpoint by its path, because it does not belong to the run that
            resumes.
    """
    previous = previous_usable(folder)
    if previous is not None:
        return f"resume from the previous checkpoint: checkpoint.resume={previous if by_path else previous.name}"
    return f"no earlier checkpoint is usable: move {folder} and any older ones away to start from the beginning"


def _parse(folder: Path) -> Manifest:
    """Reads and parses a checkpoint's manifest; raises CheckpointInvalid if it is not valid."""
    try:
        return _read(folder)
    except Absent:
        reason = "missing" if folder.is_dir() else "there is no such checkpoint"
    except ValueError as error:
        reason = str(error)
    raise CheckpointInvalid(problem_of(folder, MANIFEST, reason))


def _read(folder: Path) -> Manifest:
    """Reads and parses a checkpoint's manifest; raises ValueError if it is not valid or of another step than
    the folder's name."""
    manifest = parse_manifest(read_plain(folder / MANIFEST, follow=False))
    if step_of(folder.name) not in (None, manifest.progress.step):
        raise ValueError(f"it was saved at step {manifest.progress.step}: the folder has been renamed")
    return manifest


def _size_problem(folder: Path, name: str, entry: StoredFile) -> str | None:
    """Returns the reason why a file does not have the listed size; None if it has."""
    try:
        status = os.lstat(folder / name)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file; links are not followed"
    if status.st_size < entry.bytes:
        return f"truncated: {status.st_size:,} of {entry.bytes:,} bytes"
    return f"too long: {status.st_size:,} instead of {entry.bytes:,} bytes" if status.st_size > entry.bytes else None


def _hash(path: Path, on_bytes: OnBytes | None) -> str:
    hasher, buffer = blake3(), memoryview(bytearray(_CHUNK))
    # O_NOFOLLOW refuses links. O_NONBLOCK prevents waiting for the other end of a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while read := file.readinto(buffer):
            hasher.update(buffer[:read])
            if on_bytes is not None:
                on_bytes(read)
    return hasher.hexdigest()


def problem_of(folder: Path, name: str, reason: str) -> Problem:
    """Returns the problem to report for one file of a checkpoint. The fix names the previous usable
    checkpoint."""
    return Problem(key=f"{folder.name}/{name}", reason=reason, fix=fallback_fix(folder))
