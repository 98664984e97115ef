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
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # exclusive: no link is followed
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
