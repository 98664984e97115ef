"""The choice of the checkpoints that a person means by a path, or by none."""

from dataclasses import dataclass
from pathlib import Path

from canzona_cli.checkpoint.store import CheckpointStore, Found, is_checkpoint, judge
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.files import RunFiles

_KEY = "RUN_OR_CHECKPOINT"
_FIX = "give a run directory, or a checkpoint in one, such as RUN/checkpoints/step-00000030"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The checkpoints to look at, in the order of steps."""

    root: Path
    """The folder they lie in."""
    found: tuple[Found, ...]

    @property
    def newest(self) -> Found:
        """Raises ConfigError when there is none."""
        return self.required().found[-1]

    def at(self, step: int | None) -> Found:
        """The one of a step; None: the newest.

        Raises:
            ConfigError: there is none.
        """
        if step is None:
            return self.newest
        found = next((found for found in self.required().found if found.step == step), None)
        if found is None:
            fix = f"steps there: {', '.join(str(found.step) for found in self.found[-5:])}"
            reason = f"{self.root} has no checkpoint of that step"
            raise ConfigError(Problem(key="--step", value=step, reason=reason, fix=fix))
        return found

    def required(self) -> "Chosen":
        """The same; raises ConfigError when there is none."""
        if not self.found:
            raise ConfigError(Problem(key=_KEY, value=self.root, reason="the run has no checkpoint yet", fix=_FIX))
        return self


def choose(where: Path | None, *, runs: Path = Path("runs")) -> Chosen:
    """The checkpoint at `where`, all of the run there, or all of the newest run that has some.

    Raises:
        ConfigError: there is no run and no checkpoint; the problem's key is `RUN_OR_CHECKPOINT`.
    """
    if where is None:
        where = _newest_run(runs)
    path = Path(where).absolute()
    reason = "there is no such checkpoint" if is_checkpoint(path) else "there is no such directory"
    if path.is_dir():
        if is_checkpoint(path):
            return Chosen(root=path.parent, found=(judge(path.name, path),))
        files, store = RunFiles(path), CheckpointStore.under(path)
        found = store.found()
        if found or files.checkpoints.is_dir() or files.config.exists():
            return Chosen(root=store.root if found else files.checkpoints, found=found)
        reason = "contains neither a run nor a checkpoint"
    raise ConfigError(Problem(key=_KEY, value=where, reason=reason, fix=_FIX))


def _newest_run(runs: Path) -> Path:
    """Here, if this is a run directory; else the run under `runs` that was saved last."""
    if RunFiles(Path()).checkpoints.is_dir():
        return Path()
    try:
        saved = [path for path in runs.iterdir() if RunFiles(path).checkpoints.is_dir()]
    except OSError:
        saved = []
    if not saved:
        reason = f"no run has been saved under {runs}"
        raise ConfigError(Problem(key=_KEY, reason=reason, fix=_FIX))
    return max(saved, key=lambda path: RunFiles(path).checkpoints.stat().st_mtime)
