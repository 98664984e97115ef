"""One writer at a time for one place on the disk."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.2


class Busy(Exception):
    """Another process holds the lock."""


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`, which exists only meanwhile. The kernel lets go of it when the process dies.

    Args:
        path: the lock file; its folder exists.
        on_wait: called about five times a second while another process holds it; None: do not wait.

    Raises:
        Busy: held by another process and `on_wait` is None.
        OSError: the folder cannot be written, or its file system knows no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _try_lock(descriptor):
                if on_wait is None:
                    raise Busy
                on_wait()
                time.sleep(_POLL_S)
                continue
            # The previous holder may have removed the file between our open and our lock; then we hold
            # nothing.
            if not _is_same_file(descriptor, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def lock_path(prefix: Path) -> Path:
    """The lock of the pair at `prefix`."""
    return prefix.with_name(f".{prefix.name}.lock")
