"""The checkpoints of a run: which exist, which is the newest, which are removed,
and which one a run resumes from."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, hidden_name, hidden_path, step_of
from canzona_cli.checkpoint.verify import read_manifest, way_out
from canzona_cli.errors import CheckpointInvalid, ConfigError, Problem
from canzona_cli.run.files import RunFiles, sync_folder

_KEY = "checkpoint.resume"
_PLACES = "give a run directory, or a checkpoint in one, such as RUN/checkpoints/step-00000030"
_GLANCES = 5
_GLANCE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint of a store, judged by its manifest and the sizes of its files."""

    name: str
    step: int
    path: Path
    manifest: Manifest | None
    """None when it cannot be used."""
    problems: tuple[Problem, ...] = ()
    """The reasons why it cannot be used."""

    @property
    def sound(self) -> bool:
        return self.manifest is not None


@dataclass(frozen=True)
class CheckpointStore:
    """The folder `checkpoints` of a run directory; it need not exist."""

    root: Path

    @classmethod
    def under(cls, path: Path) -> "CheckpointStore":
        """Returns the store of the run directory `path`,
        or of the folder itself if it is not a run directory."""
        return cls(path / "checkpoints" if (path / "checkpoints").is_dir() else path)

    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """Lists every checkpoint, in the order of steps."""
        return self._steadily(lambda: tuple(self._backwards())[::-1])

    def latest(self) -> StoredCheckpoint | None:
        """Returns the checkpoint of the highest step, usable or not; None in an empty store."""
        return self._steadily(lambda: next(self._backwards(), None))

    def newest(self) -> StoredCheckpoint | None:
        """Returns the usable checkpoint of the highest step; None if there is none."""
        return self._steadily(lambda: next((checkpoint for checkpoint in self._backwards() if checkpoint.sound), None))

    def retain(self, keep: int, keep_every: int | None) -> tuple[str, ...]:
        """Remove all that are older than the newest `keep` usable ones,
        but for multiples of `keep_every` steps.

        Returns:
            The names that went.

        Raises:
            OSError: one could not be removed.
        """
        if keep < 1:
            raise ValueError("a store keeps at least one checkpoint")
        usable, gone = 0, []
        for name, path in reversed(self._paths().items()):
            if usable < keep:
                # Only those that count are read; a damaged one must not cause the removal of an older, sound
                # one.
                usable += judge(name, path).sound
            elif keep_every is None or (step_of(name) or 0) % keep_every:
                _remove(path, hidden_path(self.root / name, "removed"))
                gone.append(name)
        return tuple(gone)

    def move_later(self, step: int, folder: Path) -> tuple[str, ...]:
        """Moves checkpoints of higher steps into `folder`, because the run resumes from `step`.

        Returns:
            Their names.

        Raises:
            OSError: one could not be moved.
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
        """Removes what killed saves and removals left, and completes a replacement.
        No save may be in progress.

        Returns:
            Names of the folders that went.

        Raises:
            OSError: one could not be removed.
        """
        gone = []
        for name in self._names():
            hidden = hidden_name(name)
            if hidden is None:
                continue
            path, (visible, state) = self.root / name, hidden
            if state == "replaced" and not os.path.lexists(self.root / visible):
                os.rename(path, self.root / visible)
                continue
            shutil.rmtree(path)
            gone.append(name)
        return tuple(gone)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _paths(self) -> dict[str, Path]:
        """Returns names and folders by step, also of those that a killed replacement has left hidden."""
        names = self._names()
        waiting = {h[0]: self.root / name for name in names if (h := hidden_name(name)) and h[1] == "replaced"}
        paths = waiting | {name: self.root / name for name in names if step_of(name) is not None}
        return dict(sorted(paths.items(), key=lambda item: step_of(item[0]) or 0))

    def _backwards(self) -> Iterator[StoredCheckpoint]:
        for name, path in reversed(self._paths().items()):
            yield judge(name, path)

    def _steadily[T](self, look: Callable[[], T]) -> T:
        """Repeats `look` until no folder is renamed meanwhile, as a save may be replacing a checkpoint."""
        for _ in range(_GLANCES):
            before = self._identities()
            seen = look()
            if self._identities() == before:
                break
            time.sleep(_GLANCE_S)
        return seen

    def _identities(self) -> set[tuple[Path, int]]:
        identities = set()
        for path in self._paths().values():
            with suppress(OSError):
                identities.add((path, path.lstat().st_ino))
        return identities


def is_checkpoint(path: Path) -> bool:
    """Returns True if this is meant as one checkpoint: by its name, or by what is in it."""
    return step_of(path.name) is not None or (path / MANIFEST).exists()


def judge(name: str, path: Path) -> StoredCheckpoint:
    """Judges a checkpoint by its manifest and the sizes of its files."""
    manifest, problems = None, tuple[Problem, ...]()
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
        run_checkpoints: folder `checkpoints` of the run that is started; need not exist.
        resume: `auto`, a name such as `step-00000030`, the path of a checkpoint or of a run directory.
        key: the setting that says so.

    Returns:
        None only for `auto` in a store without any checkpoint.

    Raises:
        ConfigError: there is no such checkpoint.
        CheckpointInvalid: it is the one that is meant, and it cannot be used; an older one is offered, not
            taken.
    """
    store = CheckpointStore(run_checkpoints)
    if resume == "auto":
        latest = store.latest()
        return None if latest is None else _usable(latest)
    path = Path(resume).expanduser()
    if step_of(resume) is not None:
        named = {checkpoint.name: checkpoint for checkpoint in store.checkpoints()}
        if resume in named:
            return _usable(named[resume])
        key, reason, fix = _KEY, f"{run_checkpoints} has no such checkpoint", _there(store)
    elif not path.is_dir():
        reason, fix = "is neither a folder nor the name of a checkpoint", _there(store)
    else:
        path = path.resolve()
        checkpoint = judge(path.name, path) if is_checkpoint(path) else CheckpointStore.under(path).latest()
        if checkpoint is not None:
            return _usable(checkpoint, by_path=True)
        reason, fix = "there is no checkpoint in this folder", _PLACES
    raise ConfigError(Problem(key=key, value=resume, reason=reason, fix=fix))


def _usable(checkpoint: StoredCheckpoint, *, by_path: bool = False) -> Path:
    """Returns its folder if it is sound; `by_path` offers the previous one by path,
    as it is another run's."""
    if checkpoint.sound:
        return checkpoint.path
    if not by_path:
        raise CheckpointInvalid(*checkpoint.problems)
    fix = way_out(checkpoint.path, by_path=True)
    raise CheckpointInvalid(*(replace(problem, fix=fix) for problem in checkpoint.problems))


def _there(store: CheckpointStore) -> str:
    names = [checkpoint.name for checkpoint in store.checkpoints() if checkpoint.sound]
    if not names:
        return f"{store.root} has none; checkpoint.resume=auto starts from the beginning there"
    return f"checkpoints there: {', '.join(names[-5:])}"


def _remove(path: Path, hidden: Path) -> None:
    """Hides a checkpoint in one step, then deletes it."""
    if path.is_symlink():
        path.unlink()
        return
    if hidden.exists():
        shutil.rmtree(hidden)
    shutil.rmtree(path.rename(hidden))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The checkpoints that a path names, in the order of steps."""

    root: Path
    """The folder they lie in."""
    checkpoints: tuple[StoredCheckpoint, ...]

    @property
    def newest(self) -> StoredCheckpoint:
        """Returns the newest checkpoint; raises ConfigError if there is none."""
        return self.required().checkpoints[-1]

    def at(self, step: int | None) -> StoredCheckpoint:
        """Returns the checkpoint of a step; of None, the newest.

        Raises:
            ConfigError: there is none.
        """
        if step is None:
            return self.newest
        checkpoint = next((checkpoint for checkpoint in self.required().checkpoints if checkpoint.step == step), None)
        if checkpoint is None:
            fix = f"steps there: {', '.join(str(checkpoint.step) for checkpoint in self.checkpoints[-5:])}"
            reason = f"{self.root} has no checkpoint of that step"
            raise ConfigError(Problem(key="--step", value=step, reason=reason, fix=fix))
        return checkpoint

    def required(self) -> "Chosen":
        """Returns itself; raises ConfigError if there is no checkpoint."""
        if not self.checkpoints:
            raise ConfigError(_no_choice(self.root, "the run has no checkpoint yet"))
        return self


def choose(where: Path | None, *, runs: Path = Path("runs")) -> Chosen:
    """Chooses the checkpoint at `where`, all of the run there, or all of the newest run that has some.

    Raises:
        ConfigError: there is no run and no checkpoint; the problem's key is `RUN_OR_CHECKPOINT`.
    """
    if where is None:
        where = _newest_run(runs)
    path = Path(where).absolute()
    reason = "there is no such checkpoint" if is_checkpoint(path) else "there is no such directory"
    if path.is_dir():
        if is_checkpoint(path):
            return Chosen(root=path.parent, checkpoints=(judge(path.name, path),))
        files, store = RunFiles(path), CheckpointStore.under(path)
        checkpoints = store.checkpoints()
        if checkpoints or files.checkpoints.is_dir() or files.config.exists():
            return Chosen(root=store.root if checkpoints else files.checkpoints, checkpoints=checkpoints)
        reason = "contains neither a run nor a checkpoint"
    raise ConfigError(_no_choice(where, reason))


def _newest_run(runs: Path) -> Path:
    """Finds the current directory if it is a run's, else the run under `runs` that was saved last."""
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
