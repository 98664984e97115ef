"""One launch at a time in a run directory."""

import errno
import fcntl
import os
import socket
from typing import IO

from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.files import RunFiles

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system says that has no locks."""


def hold(files: RunFiles, config: RunConfig) -> IO[str]:
    """Hold the directory until the returned file is closed or this process has gone: of two launches, one gets it.

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
        raise ConfigError(
            Problem(
                key="run.dir",
                value=str(config.run.dir or files.root),
                reason=f"process {pid or '(unknown)'} on {host or 'some machine'} is training in it",
                fix="wait for it, stop it with Ctrl-C there, or run.dir=DIR for another run",
            )
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
        # A file system without locks (Lustre is often mounted so): nothing is known of a second launch.
    lock.truncate(0)
    lock.write(f"{socket.gethostname()} {os.getpid()}\n")
    lock.flush()
    return lock
