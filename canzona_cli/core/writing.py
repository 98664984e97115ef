"""Writes files whole or not at all, and locks paths so that only one process at a time writes to them."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

NOT_UTF8: Final = "backslashreplace"
"""How characters that are not valid in UTF-8 are written."""


def write_text_atomic(path: Path, text: str) -> None:
    """Writes `text` to `path` as `write_atomic` does. Characters that are not valid in UTF-8 are written as
    escapes.

    Raises:
        OSError: the file cannot be written; no temporary file is left behind.
    """
    write_atomic(path, text.encode(errors=NOT_UTF8))


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` to `path` atomically: it is on disk before the file gets its name.

    Other users can read the file if the umask allows it, but never write it.

    Raises:
        OSError: the file cannot be written; no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        write_new(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_POLL_S = 0.2


class Busy(Exception):
    """The error raised if another process holds the lock."""


@contextmanager
def exclusive_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Locks the file `path` during the block, and removes it afterwards.

    If the process dies, the kernel releases the lock.

    Args:
        path: the lock file; its folder must exist.
        on_wait: called about five times per second while another process holds the lock; None to fail instead
            of waiting.

    Raises:
        Busy: another process holds the lock, and `on_wait` is None.
        OSError: the folder cannot be written, or its file system does not support locks.
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
            # The previous holder may have removed the file after this process opened it. Then the lock is on
            # a file that no other process can open.
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


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that does not exist yet, not even as a link, and syncs it to the disk.

    Uses only system calls, because a test kills the process at each of them.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
