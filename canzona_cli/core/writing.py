"""Writes files whole or not at all."""

import os
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
