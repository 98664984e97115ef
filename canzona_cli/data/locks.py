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
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    raise Busy from None
                on_wait()
                time.sleep(_POLL_S)
                continue
            # The holder before us may have removed the file between our open and our lock: then we hold nothing.
            if os.fstat(file.fileno()).st_nlink > 0:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def lock_path(prefix: Path) -> Path:
    """The lock of the pair at `prefix`."""
    return prefix.with_name(f".{prefix.name}.lock")
