"""Claims a run directory for one launch at a time, refuses folders in which other users could change the
run's files, and writes the files that are needed to repeat the run."""

import errno
import fcntl
import os
import platform
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import redact
from canzona_cli.core.costs.machine import installed_version, profile_mismatches
from canzona_cli.core.errors import (
    CanzonaError,
    ConfigError,
    EnvironmentProblem,
    ExitCode,
    Problem,
    machine_error,
    problem_with,
    write_error,
)
from canzona_cli.core.host import existing_folder, tool_output
from canzona_cli.core.model.matrices import Routing
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.predict import predict
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch.outcome import failed_outcome
from canzona_cli.launch.resume import Resumption, choose_resumption, holds_run, next_free, resume_point, set_aside
from canzona_cli.launch.stop import early_stop_outcome
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.launch.view import EarlierSteps
from canzona_cli.records.codec import read_lines, save
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.files import RunFiles, write_json_atomic
from canzona_cli.records.records import StepMetrics, ValidationLoss

_PACKAGES = ("canzona", "torch", "megatron-core", "emerging-optimizers", "transformer-engine", "numpy", "tokenizers")

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""The error numbers of file systems that have no locks."""

_RECORDED_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "CANZONA_CACHE"),
)
"""The only environment variables that are recorded, because other variables may contain secrets."""


class RunDirectory:
    """A run directory. `create` claims it for this launch, for as long as the object lives. On machines other
    than machine 0, the object is made without a claim."""

    def __init__(self, files: RunFiles, *, lock: IO[str] | None = None, used: bool = False) -> None:
        self.files = files
        self.earlier: EarlierSteps | None = None
        """The part of a resumed run that is already done; None if the run starts at its first step."""
        self.notes: tuple[str, ...] = ()
        """Notes for the user on the files of earlier launches, one per line."""
        self._lock = lock
        self._used = used
        """True if the directory has files of an earlier launch."""
        self._resumed = False
        """True once this launch has called `resume`."""

    @property
    def path(self) -> Path:
        return self.files.root

    @classmethod
    def create(cls, config: RunConfig, *, resumes: bool = False) -> "RunDirectory":
        """Claims `run.dir` or, if that is null, a new directory under `run.root`.

        Args:
            resumes: True to accept a directory that already holds a run; call `resume` next.

        Raises:
            ConfigError: the directory already holds a run, or another launch is using it.
            EnvironmentProblem: the directory cannot be created or written.
        """
        if config.run.dir is not None:
            return _claim(Path(config.run.dir).absolute(), config, resumes=resumes)
        path = stem = Path(config.run.root).absolute() / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        while True:
            try:
                return _claim(path, config, must_be_new=True)
            except FileExistsError:  # another launch in the same second
                path = next_free(stem)

    def resume(self, config: RunConfig, layout: Layout) -> Resumption | None:
        """Chooses the checkpoint to start from, moves the files of earlier launches away, and writes
        `resume.json` for the workers.

        If the same launch calls this again for a restart, it takes the newest checkpoint that was saved
        since.

        Returns:
            The checkpoint; None if the run starts without one.

        Raises:
            ConfigError: as for `canzona_cli.launch.resume.choose_resumption`.
            CheckpointInvalid: as for `choose_resumption`.
            EnvironmentProblem: files cannot be moved or written.
        """
        in_this_directory = replace(config, run=replace(config.run, dir=str(self.path)))
        checkpoint = choose_resumption(in_this_directory, layout, is_restart=self._resumed)
        try:
            if self._used:
                resumes_here = checkpoint is not None and checkpoint.of_this_run
                self.notes = tuple(set_aside(self.files, checkpoint if resumes_here else None))
            self.files.ranks.mkdir(mode=0o755, exist_ok=True)
            self.files.logs.mkdir(mode=0o755, exist_ok=True)
            if checkpoint is not None:
                save(self.files.resume, resume_point(self.files, checkpoint, config))
        except OSError as error:
            raise _not_writable_error(self.path, config, error.strerror or str(error)) from None
        self._used = self._resumed = True
        self.earlier = None
        if checkpoint is not None and not checkpoint.weights_only:
            self.earlier = EarlierSteps(
                step=checkpoint.step,
                origin=checkpoint.origin,
                samples=checkpoint.samples_needed(config, layout),
                metrics=read_lines(self.files.metrics, StepMetrics)[0],
                validations=read_lines(self.files.validation, ValidationLoss)[0],
            )
        return checkpoint

    @contextmanager
    def record_failure(self, resume_command: str | None = None) -> Iterator[None]:
        """Writes `result.json` if the block raises an exception, unless the supervisor has written that file.

        Args:
            resume_command: the command that resumes the run.
        """
        try:
            yield
        except BaseException as error:
            if not self.files.result.exists():
                if isinstance(error, KeyboardInterrupt):
                    outcome = early_stop_outcome(self.files, error)
                else:
                    reported = error if isinstance(error, CanzonaError) else machine_error(error)
                    code = ExitCode.CRASH if reported is None else reported.exit_code
                    outcome = failed_outcome(redact(f"{type(error).__name__}: {error}"), code)
                with suppress(OSError):  # the original error matters more than a full disk
                    go_on = resume_command if outcome.resumable else None
                    save(self.files.result, replace(outcome, go_on=go_on).result)
            raise

    def write_inputs(
        self,
        *,
        config_yaml: str,
        layout: Layout,
        corpus: PreparedCorpus,
        command: LaunchCommand,
        plan: str | None = None,
        predicted: Prediction | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Writes the files that the workers read, and the files that a user needs to repeat the run.

        Args:
            plan: the text of the plan that the run executes; None for a run without a plan.
            predicted: the prediction of a step; None if nothing was predicted.
            routing: the parameters that are updated as matrices, and those that AdamW updates; None writes no
                routing.json.

        Raises:
            EnvironmentProblem: a file cannot be written, for example on a full disk.
        """
        try:
            write_text_atomic(self.files.config, config_yaml)
            save(self.files.layout, layout)
            save(self.files.corpus, corpus)
            if plan is not None:
                write_text_atomic(self.files.plan, plan)
            if predicted is not None:
                save(self.files.predicted, predicted)
            if routing is not None:
                save(self.files.routing, routing)
            write_json_atomic(self.files.environment, describe_environment())
            write_text_atomic(self.files.command, command.shell() + "\n")
        except OSError as error:
            fix = "free some space, or run.dir=DIR on another disk"
            raise write_error("run.dir", str(self.path), error, fix=fix, what="the run's files") from None


def check_free(config: RunConfig, *, resumes: bool = False) -> None:
    """Checks that a run directory can be written and, unless `resumes`, holds no run; raises the same errors
    as `RunDirectory.create`. Call this before any long preparation."""
    path = Path(config.run.dir or config.run.root).absolute()
    if config.run.dir is not None and not resumes and holds_run(RunFiles(path)):
        raise _already_used_error(path, config)
    existing = existing_folder(path)
    if not existing.is_dir():
        raise _not_writable_error(path, config, f"{existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _not_writable_error(path, config, f"{existing} does not allow writing")


def predict_here(config: RunConfig, layout: Layout, plan: Plan | None) -> Prediction:
    """Predicts the step time of a resolved run. For a calibrated profile, adds the reasons why the profile
    may not match this machine.

    Args:
        plan: the plan of a strategy that executes one; None for other strategies.
    """
    prediction = predict(config.setup, layout, plan)
    return replace(prediction, mismatches=profile_mismatches(config.cluster)) if prediction.calibrated else prediction


def describe_environment() -> dict[str, object]:
    """Returns facts about this launch for environment.json: versions, host, and the environment variables
    that may be recorded."""
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "versions": {name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        "git_revision": _git_revision(),
        "variables": {name: os.environ[name] for name in _RECORDED_VARIABLES if name in os.environ},
    }


def _claim(path: Path, config: RunConfig, *, must_be_new: bool = False, resumes: bool = False) -> RunDirectory:
    """Creates the directory if it does not exist, locks it and returns it."""
    files = RunFiles(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o755, exist_ok=not must_be_new)
        if (reason := unsafe_place(path)) is not None:
            raise _not_writable_error(path, config, reason)
        used = holds_run(files)
        if used and not resumes:
            raise _already_used_error(path, config)
        lock = _lock(files, config)
        if not used:
            files.ranks.mkdir(mode=0o755, exist_ok=True)
            files.logs.mkdir(mode=0o755, exist_ok=True)
        return RunDirectory(files, lock=lock, used=used)
    except FileExistsError as error:
        if must_be_new and path.is_dir():
            raise
        raise _not_writable_error(path, config, f"{error.filename or path} is in the way") from None
    except OSError as error:
        raise _not_writable_error(path, config, error.strerror or str(error)) from None


def _already_used_error(path: Path, config: RunConfig) -> ConfigError:
    result = "finished" if RunFiles(path).result.exists() else "unfinished or still running"
    reason = f"it already holds a run ({result}), and two runs cannot share a directory"
    fix = f"run.dir={next_free(path)}, or leave run.dir out: each run then gets its own directory"
    return ConfigError(Problem("run.dir", reason, fix, value=str(config.run.dir or path)))


def _not_writable_error(path: Path, config: RunConfig, reason: str) -> EnvironmentProblem:
    key = "run.root" if config.run.dir is None else "run.dir"
    reason = f"the run directory {path} cannot be created there: {reason}"
    return EnvironmentProblem(problem_with(config, key, reason, f"{key}=DIR with a directory you may write to"))


def _git_revision() -> str | None:
    """Returns the commit of the source tree that canzona runs from; None for an installed package, even if it
    lies inside a user's git repository."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    revision = tool_output("git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40")
    return None if revision is None else revision.strip()


def _lock(files: RunFiles, config: RunConfig) -> IO[str]:
    """Locks the run directory until the returned file is closed or this process ends.

    Raises:
        ConfigError: another launch holds the lock; the message names its process.
    """
    # O_NOFOLLOW, because a link could redirect the writing below to another file.
    handle = os.open(files.claim, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    lock = os.fdopen(handle, "r+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        host, _, pid = lock.read(200).strip().partition(" ")
        lock.close()
        path = str(config.run.dir or files.root)
        reason = f"process {pid or '(unknown)'} on {host or 'some machine'} is using it"
        fix = "wait for it, stop it with Ctrl-C there, or run.dir=DIR for another run"
        raise ConfigError(Problem("run.dir", reason, fix, value=path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
        # On a file system without locks (Lustre is often mounted that way), a second launch is not detected.
    lock.truncate(0)
    lock.write(f"{socket.gethostname()} {os.getpid()}\n")
    lock.flush()
    return lock


def unsafe_place(path: Path, *, user: int | None = None) -> str | None:
    """Returns the reason why a run must not write to the existing folder `path`; None if the folder is safe.

    Args:
        user: a numeric user id; None is the user of this process.

    Raises:
        OSError: the folder cannot be examined.
    """
    trusted = {os.geteuid() if user is None else user, 0}
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in trusted:
        return f"{path} is a link that another user created"
    if stat.S_IMODE(os.stat(path).st_mode) & stat.S_IWOTH:
        return f"every user of this machine may write to {path}, and could replace the run's files"
    # In a folder with the sticky bit, such as /tmp, users can only rename their own files.
    parent_mode = os.stat(path.parent).st_mode
    if parent_mode & stat.S_IWOTH and not parent_mode & stat.S_ISVTX:
        return f"every user of this machine may write to {path.parent}, and could replace the run's folder"
    return None
