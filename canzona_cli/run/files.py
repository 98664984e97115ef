"""The files of a run directory: their names, and writing them so that no reader ever sees half a file.

The launcher and every worker use this module, so it imports nothing slow.
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from canzona_cli.config.reading import Unreadable, parse_json, read_plain
from canzona_cli.run.words import json_text, jsonable

StopReason = Literal["interrupted", "preempted"]
_NOT_UTF8: Final = "backslashreplace"


def sweep_root(root: Path | str, name: str) -> Path:
    """The directory that the runs of a sweep lie in.

    Args:
        root: `run.root`.
        name: when the sweep began, or the job that it is.
    """
    return Path(root) / f"sweep-{name}"


class RunFiles:
    """The paths of everything in one run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.claim = root / "run.lock"
        """Created exclusively by the launch that owns the directory."""
        self.config = root / "config.yaml"
        self.layout = root / "layout.json"
        self.resume = root / "resume.json"
        """The checkpoint that this launch resumes from; absent where it starts at the first step."""
        self.corpus = root / "corpus.json"
        self.plan = root / "plan.json"
        """The plan that strategies canzona, paper and asc execute; the others have none."""
        self.routing = root / "routing.json"
        """The parameters that the optimizer updates as matrices, and those that AdamW updates."""
        self.kernels = root / "kernels.json"
        """The kernels that multiply to symmetric results."""
        self.command = root / "command.txt"
        self.environment = root / "environment.json"
        self.metrics = root / "metrics.jsonl"
        self.validation = root / "validation.jsonl"
        self.events = root / "events.jsonl"
        self.breakdown = root / "breakdown.json"
        self.predicted = root / "predicted.json"
        """The predicted step time, written before it was measured."""
        self.timelines = root / "timeline"
        """A few steps of every rank, moment by moment."""
        self.trace = root / "trace.json"
        """All timelines, measured and planned, as a Chrome trace."""
        self.profile = root / "profile"
        """Traces of torch's profiler."""
        self.result = root / "result.json"
        self.ranks = root / "ranks"
        self.trackers = root / "trackers"
        """The progress of each tracker."""
        self.logs = root / "logs"
        self.checkpoints = root / "checkpoints"
        self.huggingface = root / "huggingface"
        """Settings and tokenizer of the folder that the run's first weights are from;
        absent where they are random."""
        self.attempts = root / "attempts"
        """The files of earlier launches in this directory: attempts/1 and so on."""
        self.stop = root / "stop"
        """Exists once somebody asked the run to stop at its next step boundary."""

    def rank(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05d}.json"

    def timeline(self, rank: int) -> Path:
        return self.timelines / f"rank-{rank:05d}.json"

    def rank_profile(self, rank: int) -> Path:
        return self.profile / f"rank-{rank}.json"

    def tracker(self, name: str) -> Path:
        return self.trackers / f"{name}.json"

    def tracker_log(self, name: str) -> Path:
        """The output of the tracker's process, its package's included."""
        return self.logs / f"{name}.log"

    def request_stop(self, reason: StopReason = "interrupted") -> None:
        """Ask the workers to stop after the step they are in.

        Args:
            reason: the name of the run's end: preempted where somebody will start it again.
        """
        try:
            write_json_atomic(self.stop, {"reason": reason})
        except OSError:  # a full disk often has room for an empty file
            self.stop.touch()

    def stop_reason(self) -> StopReason:
        """Reads why the workers shall stop; a file without a reason means that somebody asked."""
        return "preempted" if (read_json(self.stop) or {}).get("reason") == "preempted" else "interrupted"

    def stop_requested(self) -> bool:
        """Looks for the stop file. Rank 0 asks between two steps (about a microsecond) and tells the other ranks."""
        return self.stop.exists()

    def node_logs(self, node_rank: int | str) -> Path:
        """The folder that torchrun of one machine writes to, its workers' output included."""
        return self.logs / f"node-{node_rank}"

    def agent_log(self, node_rank: int) -> Path:
        """torchrun's own output on one machine."""
        return self.logs / f"node-{node_rank}.log"

    def worker_log(self, node_rank: int, local_rank: int) -> Path | None:
        """The error output of one worker; None before it has started.

        torchrun puts it under `<run id>_<random>/attempt_0/<local rank>/`.
        """
        logs = self.node_logs(node_rank).glob(f"*/attempt_*/{local_rank}/stderr.log")
        return max(logs, key=lambda log: log.stat().st_mtime, default=None)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step, on disk before it is visible under its name.

    Colleagues may read it as far as the umask lets them; nobody else may write it. A name in it that is not
    UTF-8 has escapes, as JSON has them.

    Raises:
        OSError: the folder cannot be written; no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # exclusive: no link is followed
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=_NOT_UTF8) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk.

    Raises:
        OSError: among others where a network file system cannot.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomic(path: Path, value: Mapping[str, object]) -> None:
    """Replace `path` by `value` as JSON. NaN and infinity become null: they are not JSON."""
    write_text_atomic(path, json_text(value) + "\n")


def write_json_or_overwrite(path: Path, value: Mapping[str, object]) -> None:
    """`write_json_atomic`; on a full disk, write over the file that is there, whose blocks are taken already.

    A reader of that moment may see half of it.

    Raises:
        OSError: that does not help either.
    """
    try:
        write_json_atomic(path, value)
    except OSError:
        text = _line(value)
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            if os.write(handle, text) < len(text):
                raise
            os.ftruncate(handle, len(text))
        finally:
            os.close(handle)


def _line(value: Mapping[str, object]) -> bytes:
    return (json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False) + "\n").encode(errors=_NOT_UTF8)


def append_json_line(path: Path, value: Mapping[str, object]) -> None:
    """Add one line to a .jsonl file with a single write,
    so that a reader sees whole lines and writers do not mix.

    Raises:
        OSError: the line is not in the file, nor is a part of it; or the file is a link.
    """
    line = _line(value)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        written = os.write(handle, line)
        if written < len(line):  # the disk became full in the middle of it
            end = os.lseek(handle, 0, os.SEEK_CUR)
            if os.fstat(handle).st_size == end:  # else somebody has written behind it, and one line is broken
                os.ftruncate(handle, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def try_append_json_line(path: Path, value: Mapping[str, object]) -> OSError | None:
    """`append_json_line` for what is not worth ending a run for: why it failed, if it did."""
    try:
        append_json_line(path, value)
    except OSError as error:
        return error
    return None


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`; None when there is no such file or no such object in it."""
    try:
        return json_object(read_plain(path))
    except Unreadable:
        return None


def json_object(text: bytes) -> dict[str, object] | None:
    """The JSON object in a file or a line; None where it is none."""
    try:
        value = parse_json(text)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None
