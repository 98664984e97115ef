"""Puts away what an earlier launch left in a run directory, so that the files there are of one run again."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.reading import Unreadable, read_plain
from canzona_cli.launch.resume import Resumption
from canzona_cli.run.files import RunFiles, json_object, write_text_atomic


def set_aside(files: RunFiles, found: Resumption | None) -> list[str]:
    """Move what the earlier launches left into a new folder of `attempts`. The directory's lock is held.

    Args:
        found: the checkpoint of this directory that the run goes on from; its curve up to there stays. None: everything
            goes.

    Returns:
        What a person should know of it, a line each.

    Raises:
        OSError: something could not be moved; what has been stays moved.
    """
    folder = _new_folder(files.attempts)
    # The command goes first: other machines take its presence for an invitation.
    left = (
        *(files.command, files.result, files.stop, files.resume, files.config, files.layout, files.plan),
        *(files.environment, files.routing, files.kernels, files.predicted, files.breakdown, files.trace),
        *(files.timelines, files.profile, files.ranks, files.logs),
    )
    for path in left:
        _move(path, folder)
    store = CheckpointStore(files.checkpoints)
    store.clear_partials()
    if found is None:
        trained = files.metrics.exists()
        for path in (files.metrics, files.validation, files.events, files.checkpoints):
            _move(path, folder)
        return (
            [f"starts over: there was no checkpoint to continue from; the earlier files are in {folder}"]
            if trained
            else []
        )
    _cut(files.metrics, folder, lambda line: _step(line) <= found.step)
    _cut(files.validation, folder, lambda line: _step(line) <= found.step)
    _cut(files.events, folder, lambda line: _is_before(line, found))
    later = store.move_later(found.step, folder / "checkpoints")
    return [f"{', '.join(later)}: moved to {folder / 'checkpoints'}"] if later else []


def _new_folder(attempts: Path) -> Path:
    attempts.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in attempts.iterdir() if path.name.isdecimal()), default=0)
    folder = attempts / str(number)
    folder.mkdir()
    return folder


def _move(path: Path, folder: Path) -> None:
    if os.path.lexists(path):
        os.rename(path, folder / path.name)


def _cut(path: Path, folder: Path, keeps: Callable[[Mapping[str, object]], bool]) -> None:
    """Move the lines of a .jsonl file that are not kept, half a line of a killed writer among them."""
    try:
        text = read_plain(path, most=None).decode("utf-8", errors="replace")
    except Unreadable:
        return
    kept: list[str] = []
    cut: list[str] = []
    for line in text.splitlines(keepends=True):
        value = json_object(line.encode())
        (kept if value is not None and line.endswith("\n") and keeps(value) else cut).append(line)
    if cut:
        write_text_atomic(folder / path.name, "".join(cut))
        write_text_atomic(path, "".join(kept))


def _step(line: Mapping[str, object]) -> float:
    step = line.get("step")
    return step if isinstance(step, int) else float("inf")


def _is_before(line: Mapping[str, object], found: Resumption) -> bool:
    """Returns True if an event happened before the checkpoint's step was over. Most have no step; they have a time."""
    if "step" in line:
        return _step(line) <= found.step
    time = line.get("time")
    return isinstance(time, int | float) and time <= found.created
