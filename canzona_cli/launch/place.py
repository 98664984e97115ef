"""Whether a run directory is a safe place: nobody else may put files or links where a run writes its own."""

import os
import stat
from pathlib import Path


def unsafe_place(path: Path, *, user: int | None = None) -> str | None:
    """Why a run should not write to the folder `path`, which exists; None when nothing speaks against it.

    Args:
        user: numeric id; None: whoever runs this process.

    Raises:
        OSError: the folder cannot be looked at.
    """
    own = {os.geteuid() if user is None else user, 0}
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in own:
        return f"{path} is a link that another user created"
    if stat.S_IMODE(os.stat(path).st_mode) & stat.S_IWOTH:
        return f"every user of this machine may write to {path}, and could replace the run's files"
    # In a folder like /tmp, whose sticky bit is set, nobody can rename what is not theirs.
    above = os.stat(path.parent).st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        return f"every user of this machine may write to {path.parent}, and could replace the run's folder"
    return None
