"""Kills a process at every call to the operating system that a save or a removal makes, and looks at what is left.

Run as `python -m tests.faults.kill_points FOLDER SCENARIO`: prints, as JSON, what each kill left to be found. It is a
process of its own, because it forks once for each kill.
"""

import json
import mmap
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import verify
from tests.checkpoint.checkpoints import manifest_of, save

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "close")

BEFORE: dict[str, list[tuple[int, int | None]]] = {
    "first save": [],
    "save": [(10, None)],
    "save again": [(20, 1)],
    "removal": [(10, None), (20, None), (30, None)],
}
"""Checkpoints that are there: steps, and the samples that tell two of one step apart."""
ACTIONS: dict[str, Callable[[Path], object]] = {
    "first save": lambda root: save(root, 10),
    "save": lambda root: save(root, 20),
    "save again": lambda root: save(root, 20, samples=2),
    "removal": lambda root: CheckpointStore(root).retain(1, None),
}


def killed_at(stage: int | None, action: Callable[[], object]) -> int | None:
    """Runs `action` in a child that is killed at its call number `stage`, from 0 on, half way through if that writes.

    Returns:
        None when it was killed; the number of its calls when it came to its end.
    """
    made = mmap.mmap(-1, 8)  # both processes'
    child = os.fork()
    if not child:
        calls = 0

        def watched(name: str) -> Callable[..., object]:
            real: Callable[..., object] = getattr(os, name)

            def call(*arguments: object, **options: object) -> object:
                nonlocal calls
                if calls == stage:
                    if name == "write" and isinstance(arguments[1], bytes | memoryview):
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                made[:] = calls.to_bytes(8)
                return real(*arguments, **options)

            return call

        for name in CALLS:
            setattr(os, name, watched(name))
        try:
            action()
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"stage {stage}: {error!r}\n")
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the action itself failed")
    return int.from_bytes(made[:])


def left_behind(root: Path) -> dict[str, object]:
    """Returns what readers find now, and after the next launch has cleaned up and saved once more."""
    store = CheckpointStore(root)
    newest = store.latest()
    found: dict[str, object] = {
        "newest": None if newest is None else [newest.step, manifest_of(newest).progress.samples],
        "whole": newest is not None and verify(newest.path)[1] == [],
        "all": [[found.step, found.usable] for found in store.checkpoints()],
    }
    store.clear_partials()
    after = store.latest()
    found["same_after_clearing"] = after is not None and newest is not None and after.manifest == newest.manifest
    found["hidden"] = [name for name in os.listdir(root) if name.startswith(".")]
    save(root, 99)
    found["saves_again"] = [found.usable for found in store.checkpoints()][-1]
    return found


def main(folder: Path, scenario: str) -> None:
    """Prints a list with an entry for each kill."""
    origin = folder / "origin" / "checkpoints"
    origin.mkdir(parents=True)
    root = folder / "run" / "checkpoints"
    for step, samples in BEFORE[scenario]:
        save(origin, step, samples=samples)
    results: list[dict[str, object]] = []
    killed = True
    while killed:
        shutil.copytree(origin, root)
        killed = killed_at(len(results), lambda: ACTIONS[scenario](root)) is None
        results.append(left_behind(root))
        shutil.rmtree(root.parent)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
