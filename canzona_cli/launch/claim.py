"""Claiming a run directory: nobody else may put files or links in it, and one launch at a time works there."""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import IO

from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.files import RunFiles

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors of file systems without locks."""


def hold(files: RunFiles, config: RunConfig) -> IO[str]:
    """Hold the directory until the returned file is closed or this process ends: of two launches, one gets it.

    Raises:
        ConfigError: names the process that has it.
    """
    # No link is followed: the file is written to.
    handle = os.open(files.claim, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    lock = os.fdopen(handle, "r+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        host, _, pid = lock.read(200).strip().partition(" ")
        lock.close()
        place = str(config.run.dir or files.root)
        reason = f"process {pid or '(unknown)'} on {host or 'some machine'} is training in it"
        fix = "wait for it, stop it with Ctrl-C there, or run.dir=DIR for another run"
        raise ConfigError(Problem(key="run.dir", value=place, reason=reason, fix=fix)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
        # A file system without locks (Lustre is often mounted so): nothing is known of a second launch.
    lock.truncate(0)
    lock.write(f"{socket.gethostname()} {os.getpid()}\n")
    lock.flush()
    return lock


def unsafe_place(path: Path, *, user: int | None = None) -> str | None:
    """Says why a run should not write to the folder `path`, which exists; None when nothing speaks against it.

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
