"""Lists, chooses and removes the checkpoints of a run."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, hidden_name, hidden_path, step_of
from canzona_cli.checkpoint.verify import fallback_fix, read_manifest
from canzona_cli.core.errors import CheckpointInvalid, ConfigError, Problem
from canzona_cli.core.reading import expanded
from canzona_cli.records.files import RunFiles, sync_folder

_KEY = "checkpoint.resume"
_PLACES = "give a run directory, or a checkpoint in one, such as RUN/checkpoints/step-00000030"
_ATTEMPTS = 5
_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint of a store, with the result of checking its manifest and the sizes of its files."""

    name: str
    step: int
    path: Path
    manifest: Manifest | None
    """The manifest; None if the checkpoint cannot be used."""
    problems: tuple[Problem, ...] = ()
    """The reasons why the checkpoint cannot be used."""

    @property
    def usable(self) -> bool:
        """True if the manifest is valid and all files have the right sizes."""
        return self.manifest is not None


@dataclass(frozen=True)
class CheckpointStore:
    """The folder `checkpoints` of a run directory, which may not exist yet."""

    root: Path

    @classmethod
    def from_path(cls, path: Path) -> "CheckpointStore":
        """Returns the store in a run directory (`path`/checkpoints) if that folder exists, otherwise the
        store `path`."""
        return cls(path / "checkpoints" if (path / "checkpoints").is_dir() else path)

    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """Lists all checkpoints, usable or not, in the order of steps."""
        return self._read_stable(lambda: tuple(self._newest_first())[::-1])

    def latest(self) -> StoredCheckpoint | None:
        """Returns the checkpoint of the highest step, usable or not; None if the store is empty."""
        return self._read_stable(lambda: next(self._newest_first(), None))

    def retain(self, keep: int, keep_every: int | None) -> tuple[str, ...]:
        """Removes old checkpoints. Keeps the newest `keep` usable checkpoints, every checkpoint newer than
        the oldest of these, and checkpoints at multiples of `keep_every` steps.

        Returns:
            The names of the removed checkpoints, newest first.

        Raises:
            OSError: a checkpoint could not be removed.
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError("a store keeps at least one checkpoint")
        usable_count = 0
        removed = []
        for name, path in reversed(self._paths().items()):
            if usable_count < keep:
                # Only usable checkpoints are counted, so that a damaged one never causes the removal of a
                # usable one. Older checkpoints are not even read.
                usable_count += judge(name, path).usable
            elif keep_every is None or (step_of(name) or 0) % keep_every:
                _remove(path, hidden_path(self.root / name, "removed"))
                removed.append(name)
        return tuple(removed)

    def move_later(self, step: int, folder: Path) -> tuple[str, ...]:
        """Moves the checkpoints of steps after `step` into `folder`, because the run resumes from `step`.

        Returns:
            The names of the moved checkpoints.

        Raises:
            OSError: a checkpoint could not be moved.
        """
        later = {name: path for name, path in self._paths().items() if (step_of(name) or 0) > step}
        if later:
            folder.mkdir(parents=True, exist_ok=True)
        for name, path in later.items():
            os.rename(path, folder / name)
        if later:
            sync_folder(self.root)
        return tuple(later)

    def clear_partials(self) -> tuple[str, ...]:
        """Removes the hidden folders that saves and removals left when they were killed. Must not be called
        while a save is in progress.

        If a save was killed between the two renames by which it replaces a checkpoint, the old checkpoint
        gets its name back.

        Returns:
            The names of the removed folders.

        Raises:
            OSError: a folder could not be removed.
        """
        removed = []
        for name in self._names():
            hidden = hidden_name(name)
            if hidden is None:
                continue
            path = self.root / name
            visible, state = hidden
            if state == "replaced" and not os.path.lexists(self.root / visible):
                os.rename(path, self.root / visible)
                continue
            shutil.rmtree(path)
            removed.append(name)
        return tuple(removed)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _paths(self) -> dict[str, Path]:
        """Returns the path of every checkpoint by its name, in the order of steps.

        Includes checkpoints that are hidden because a save is replacing them, or was killed while doing so.
        """
        replaced: dict[str, Path] = {}
        visible: dict[str, Path] = {}
        for name in self._names():
            hidden = hidden_name(name)
            if hidden is not None and hidden[1] == "replaced":
                replaced[hidden[0]] = self.root / name
            elif step_of(name) is not None:
                visible[name] = self.root / name
        paths = replaced | visible
        return dict(sorted(paths.items(), key=lambda item: step_of(item[0]) or 0))

    def _newest_first(self) -> Iterator[StoredCheckpoint]:
        for name, path in reversed(self._paths().items()):
            yield judge(name, path)

    def _read_stable[T](self, read: Callable[[], T]) -> T:
        """Returns the result of `read`. If folders changed during the call, because a save was replacing a
        checkpoint, calls it again, until there were `_ATTEMPTS` calls."""
        for _ in range(_ATTEMPTS):
            before = self._identities()
            result = read()
            if self._identities() == before:
                break
            time.sleep(_PAUSE_S)
        return result

    def _identities(self) -> set[tuple[Path, int]]:
        """Returns the path and the inode of each checkpoint's folder; they change when a folder is
        replaced."""
        identities = set()
        for path in self._paths().values():
            with suppress(OSError):
                identities.add((path, path.lstat().st_ino))
        return identities


def is_checkpoint(path: Path) -> bool:
    """Returns True if the path has the name of a checkpoint or contains a manifest."""
    return step_of(path.name) is not None or (path / MANIFEST).exists()


def judge(name: str, path: Path) -> StoredCheckpoint:
    """Checks a checkpoint's manifest and the sizes of its files, and returns the checkpoint with its
    problems."""
    manifest = None
    problems: tuple[Problem, ...] = ()
    if path.is_symlink():
        problems = (Problem(key=name, reason="is a symbolic link; give the path of its target to use it"),)
    else:
        try:
            manifest = read_manifest(path)
        except CheckpointInvalid as error:
            problems = error.problems
    return StoredCheckpoint(name=name, step=step_of(name) or 0, path=path, manifest=manifest, problems=problems)


def resolve(run_checkpoints: Path, resume: str, *, key: str = _KEY) -> Path | None:
    """Finds the folder of the checkpoint that `checkpoint.resume` names, and checks its manifest and sizes.

    Args:
        run_checkpoints: the `checkpoints` folder of the run being started, which may not exist yet.
        resume: `auto`, a name such as `step-00000030`, or the path of a checkpoint or of a run directory.
        key: the setting that `resume` comes from, for messages.

    Returns:
        The checkpoint's folder; None for `auto` if the store has no checkpoint.

    Raises:
        ConfigError: there is no such checkpoint.
        CheckpointInvalid: the checkpoint cannot be used. The fix names the previous usable checkpoint, if
            there is one; it is not used unless the user asks for it.
    """
    store = CheckpointStore(run_checkpoints)
    if resume == "auto":
        latest = store.latest()
        return None if latest is None else _usable_path(latest)
    path = expanded(resume)
    if step_of(resume) is not None:
        named = {checkpoint.name: checkpoint for checkpoint in store.checkpoints()}
        if resume in named:
            return _usable_path(named[resume])
        reason, fix = f"{run_checkpoints} has no such checkpoint", _available_fix(store)
    elif not path.is_dir():
        reason, fix = "is neither a folder nor the name of a checkpoint", _available_fix(store)
    else:
        path = path.resolve()
        checkpoint = judge(path.name, path) if is_checkpoint(path) else CheckpointStore.from_path(path).latest()
        if checkpoint is not None:
            return _usable_path(checkpoint, by_path=True)
        reason, fix = "there is no checkpoint in this folder", _PLACES
    raise ConfigError(Problem(key=key, value=resume, reason=reason, fix=fix))


def _usable_path(checkpoint: StoredCheckpoint, *, by_path: bool = False) -> Path:
    """Returns the checkpoint's folder.

    Args:
        by_path: True to suggest the previous checkpoint by its path, because it may belong to another run.

    Raises:
        CheckpointInvalid: the checkpoint cannot be used.
    """
    if checkpoint.usable:
        return checkpoint.path
    if not by_path:
        raise CheckpointInvalid(*checkpoint.problems)
    fix = fallback_fix(checkpoint.path, by_path=True)
    raise CheckpointInvalid(*(replace(problem, fix=fix) for problem in checkpoint.problems))


def _available_fix(store: CheckpointStore) -> str:
    """Returns a fix that names the newest usable checkpoints of the store."""
    names = [checkpoint.name for checkpoint in store.checkpoints() if checkpoint.usable]
    if not names:
        auto = "if it has none at all, checkpoint.resume=auto starts from the beginning"
        return f"{store.root} has no usable checkpoint; {auto}"
    return f"checkpoints there: {', '.join(names[-5:])}"


def _remove(path: Path, hidden: Path) -> None:
    """Renames a checkpoint to its hidden name and then deletes it, so that readers never see half of a
    checkpoint."""
    if path.is_symlink():
        path.unlink()
        return
    if hidden.exists():
        shutil.rmtree(hidden)
    shutil.rmtree(path.rename(hidden))


@dataclass(frozen=True, kw_only=True)
class ChosenCheckpoints:
    """The checkpoints that a command works on, in the order of steps."""

    root: Path
    """The folder that contains the checkpoints."""
    checkpoints: tuple[StoredCheckpoint, ...]

    @property
    def newest(self) -> StoredCheckpoint:
        """The newest checkpoint; raises ConfigError if there is none."""
        return self.require_any().checkpoints[-1]

    def find(self, step: int | None) -> StoredCheckpoint:
        """Returns the checkpoint of a step, or the newest checkpoint if `step` is None.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        if step is None:
            return self.newest
        checkpoint = next(
            (checkpoint for checkpoint in self.require_any().checkpoints if checkpoint.step == step), None
        )
        if checkpoint is None:
            fix = f"use one of {', '.join(str(checkpoint.step) for checkpoint in self.checkpoints[-5:])}"
            reason = f"{self.root} has no checkpoint of this step"
            raise ConfigError(Problem(key="--step", value=step, reason=reason, fix=fix))
        return checkpoint

    def require_any(self) -> "ChosenCheckpoints":
        """Returns this object unchanged; raises ConfigError if it has no checkpoint."""
        if not self.checkpoints:
            raise ConfigError(_no_choice(self.root, "the run has no checkpoint yet"))
        return self


def choose(where: Path | None, *, runs: Path = Path("runs")) -> ChosenCheckpoints:
    """Returns the checkpoint at a path, or all checkpoints of the run at that path.

    Args:
        where: the path of a checkpoint, a run directory or a folder of checkpoints. None means the current
            directory if it is a run with checkpoints, otherwise the run under `runs` that was saved last.

    Raises:
        ConfigError: there is neither a run nor a checkpoint; the problem's key is `RUN_OR_CHECKPOINT`.
    """
    if where is None:
        where = _newest_run(runs)
    path = Path(where).absolute()
    reason = "there is no such checkpoint" if is_checkpoint(path) else "there is no such directory"
    if path.is_dir():
        if is_checkpoint(path):
            return ChosenCheckpoints(root=path.parent, checkpoints=(judge(path.name, path),))
        files, store = RunFiles(path), CheckpointStore.from_path(path)
        checkpoints = store.checkpoints()
        if checkpoints or files.checkpoints.is_dir() or files.config.exists():
            return ChosenCheckpoints(root=store.root if checkpoints else files.checkpoints, checkpoints=checkpoints)
        reason = "contains neither a run nor a checkpoint"
    raise ConfigError(_no_choice(where, reason))


def _newest_run(runs: Path) -> Path:
    """Returns the current directory if it is a run with checkpoints, otherwise the run under `runs` that was
    saved last."""
    if RunFiles(Path()).checkpoints.is_dir():
        return Path()
    try:
        saved = [path for path in runs.iterdir() if RunFiles(path).checkpoints.is_dir()]
    except OSError:
        saved = []
    if not saved:
        raise ConfigError(_no_choice(None, f"no run has been saved under {runs}"))
    return max(saved, key=lambda path: RunFiles(path).checkpoints.stat().st_mtime)


def _no_choice(where: Path | None, reason: str) -> Problem:
    return Problem(key="RUN_OR_CHECKPOINT", value=where, reason=reason, fix=_PLACES)
