"""Names the files of a run directory, and writes them so that no reader sees an incomplete file.

The launcher and every worker use this module, so it imports nothing slow.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from canzona_cli.core.reading import Unreadable, expanded, parse_json, read_plain
from canzona_cli.core.writing import NOT_UTF8, write_text_atomic
from canzona_cli.records.words import json_text, jsonable

StopReason = Literal["interrupted", "preempted"]


def cache_root() -> Path:
    """Returns the folder of prepared corpora and sample indices. canzona can create all files in it again."""
    return expanded(os.environ.get("CANZONA_CACHE") or "~/.cache/canzona").absolute()


def sweep_root(root: Path | str, name: str) -> Path:
    """Returns the directory that contains the runs of a sweep.

    Args:
        root: the value of `run.root`.
        name: the start time of the sweep, or its Slurm job ID.
    """
    return Path(root) / f"sweep-{name}"


def sweep_file(root: Path) -> Path:
    """Returns the path of the plan of a sweep (`SweepPlan`) in its directory."""
    return root / "sweep.json"


class RunFiles:
    """The paths of the files in one run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.claim = root / "run.lock"
        """The file that a launch locks while it uses the directory."""
        self.config = root / "config.yaml"
        self.layout = root / "layout.json"
        self.resume = root / "resume.json"
        """The checkpoint from which this launch starts; absent if there is none."""
        self.corpus = root / "corpus.json"
        self.plan = root / "plan.json"
        """The plan that the run executes; absent for strategies other than canzona, paper and asc."""
        self.routing = root / "routing.json"
        """The parameters that the optimizer updates as matrices, and the parameters that AdamW updates."""
        self.command = root / "command.txt"
        self.environment = root / "environment.json"
        self.metrics = root / "metrics.jsonl"
        self.validation = root / "validation.jsonl"
        self.events = root / "events.jsonl"
        self.breakdown = root / "breakdown.json"
        self.predicted = root / "predicted.json"
        """The predicted time of a step, written before training."""
        self.timelines = root / "timeline"
        """The timelines of a few steps, a file for each rank."""
        self.profile = root / "profile"
        """The traces of torch's profiler."""
        self.result = root / "result.json"
        self.ranks = root / "ranks"
        self.trackers = root / "trackers"
        """The progress of each tracker."""
        self.logs = root / "logs"
        self.checkpoints = root / "checkpoints"
        self.huggingface = root / "huggingface"
        """The settings and tokenizer of the Hugging Face folder that the initial weights came from; absent
        for other weights."""
        self.attempts = root / "attempts"
        """The files of earlier launches in this directory: attempts/1 and so on."""
        self.stop = root / "stop"
        """The request to stop after the current step; absent until a stop is requested."""

    def rank(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05d}.json"

    def timeline(self, rank: int) -> Path:
        return self.timelines / f"rank-{rank:05d}.json"

    def rank_profile(self, rank: int) -> Path:
        return self.profile / f"rank-{rank}.json"

    def tracker(self, name: str) -> Path:
        return self.trackers / f"{name}.json"

    def tracker_log(self, name: str) -> Path:
        """Returns the path of the log of a tracker's process."""
        return self.logs / f"{name}.log"

    def request_stop(self, reason: StopReason = "interrupted") -> None:
        """Asks the workers to stop after their current step.

        Args:
            reason: the status with which the run ends; `preempted` if it will be started again.

        Raises:
            OSError: the request cannot be written.
        """
        try:
            write_json_atomic(self.stop, {"reason": reason})
        except OSError:  # a full disk often has room for an empty file
            self.stop.touch()

    def stop_reason(self) -> StopReason:
        """Reads why the workers must stop; `interrupted` if the file has no valid reason."""
        return "preempted" if (read_json(self.stop) or {}).get("reason") == "preempted" else "interrupted"

    def stop_requested(self) -> bool:
        """Returns True if the stop file exists. Rank 0 calls this between steps (about a microsecond) and
        broadcasts the result."""
        return self.stop.exists()

    def node_logs(self, node_rank: int | str) -> Path:
        """Returns the folder in which torchrun writes the output of one machine's workers."""
        return self.logs / f"node-{node_rank}"

    def agent_log(self, node_rank: int) -> Path:
        """Returns the path of the log with torchrun's own output on one machine."""
        return self.logs / f"node-{node_rank}.log"

    def worker_log(self, node_rank: int, local_rank: int) -> Path | None:
        """Returns the newest log of a worker's standard error; None before the worker has started.

        torchrun writes it to `<run id>_<random>/attempt_0/<local rank>/`.
        """
        logs = self.node_logs(node_rank).glob(f"*/attempt_*/{local_rank}/stderr.log")
        return max(logs, key=lambda log: log.stat().st_mtime, default=None)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk.

    Raises:
        OSError: the folder cannot be flushed, as on some network file systems.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder next to `folder`, and renames it to `folder` after the block. If the block fails, the
    hidden folder is removed.

    The caller holds a lock. The block has to sync the files that it writes to the disk. If the process is killed, the
    next call removes the hidden folder.

    Raises:
        OSError: the folder cannot be made, or `folder` is anything but an empty folder.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o755)
    try:
        yield partial
        sync_folder(partial)
        os.rename(partial, folder)  # replaces an empty folder, and fails for anything else
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def write_json_atomic(path: Path, value: Mapping[str, object]) -> None:
    """Writes `value` to `path` as JSON, atomically. NaN and infinity become null, as JSON does not have
    them."""
    write_text_atomic(path, json_text(value) + "\n")


def write_json_or_overwrite(path: Path, value: Mapping[str, object]) -> None:
    """Writes JSON atomically; on a full disk, overwrites the existing file, which already has disk blocks.

    While the file is overwritten, a reader may see an incomplete file.

    Raises:
        OSError: overwriting failed as well.
    """
    try:
        write_json_atomic(path, value)
    except OSError:
        text = _json_line(value)
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            if os.write(descriptor, text) < len(text):
                raise
            os.ftruncate(descriptor, len(text))
        finally:
            os.close(descriptor)


def _json_line(value: Mapping[str, object]) -> bytes:
    return (json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False) + "\n").encode(errors=NOT_UTF8)


def append_json_line(path: Path, value: Mapping[str, object]) -> None:
    """Appends one line to a .jsonl file with a single write, so that readers see complete lines and writers
    do not interleave.

    Raises:
        OSError: the line could not be written, or the file is a symbolic link. A partly written line is
            removed again, unless another writer has appended to the file meanwhile.
    """
    line = _json_line(value)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        written = os.write(descriptor, line)
        if written < len(line):  # the disk became full during the write
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:  # if another writer has appended, this line stays incomplete
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def try_append_json_line(path: Path, value: Mapping[str, object]) -> OSError | None:
    """Appends a line whose loss must not end a run; returns the error if it cannot be written, else None."""
    try:
        append_json_line(path, value)
    except OSError as error:
        return error
    return None


def read_json(path: Path) -> dict[str, object] | None:
    """Reads the JSON object in `path`; returns None if the file or the object cannot be read."""
    try:
        return json_object(read_plain(path))
    except Unreadable:
        return None


def json_object(text: bytes) -> dict[str, object] | None:
    """Parses a JSON object; returns None if `text` is not one."""
    try:
        value = parse_json(text)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None
