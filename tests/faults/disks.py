"""Disks that fail in the ways real ones do: full, read-only. Mounted for a test where that is allowed."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[bool]:
    """Mount a disk in memory of so many KiB on `folder`; False where this user may not mount."""
    folder.mkdir(exist_ok=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "canzona-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True, check=False).returncode != 0:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(folder: Path, *, mounted: bool) -> Iterator[None]:
    """Nothing can be written in `folder`: a remounted disk, or else a folder without permission to.

    Permissions do not bind root, who is nobody meanwhile and may then not even be able to read.
    """
    user, mode = os.geteuid(), folder.stat().st_mode
    if mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        folder.chmod(0o555)
        os.seteuid(_NOBODY if user == 0 else user)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        else:
            os.seteuid(user)
            folder.chmod(mode)
