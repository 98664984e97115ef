"""A folder that is there whole or not at all, whatever happens while it is written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canzona_cli.config.reading import Unreadable, read_plain
from canzona_cli.data.locks import Busy, exclusive
from canzona_cli.errors import ConfigError, Problem, unwritable
from canzona_cli.run.files import sync_folder


@contextmanager
def staged(out: Path, *, key: str) -> Iterator[Path]:
    """A hidden folder beside `out`, which takes its name when the block is over.

    Files in it must be on the disk by then. What a kill leaves of it, the next one for the same place removes.

    Args:
        key: what the user named the place by.

    Raises:
        ConfigError: there is something already, or somebody else is writing there.
        EnvironmentProblem: it cannot be written.
    """
    place = Path(os.path.abspath(out))
    check_empty(place, key=key)
    partial = place.with_name(f".{place.name}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(place.with_name(f".{place.name}.lock")):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(mode=0o755)
            try:
                yield partial
                sync_folder(partial)
                os.rename(partial, place)  # over an empty folder too, and over nothing else
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(place.parent)
    except Busy:
        fix = "wait for it, or name another place"
        raise ConfigError(Problem(key=key, value=out, reason="is being written by another process", fix=fix)) from None
    except OSError as error:
        raise unwritable(key, out, error, fix="make room there, or name a place that can be written") from None


def check_empty(place: Path, *, key: str) -> None:
    """Raises ConfigError for a place that has something: what is there is never mixed with anything, nor replaced."""
    if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
        fix = "name a folder that does not exist yet, or an empty one"
        raise ConfigError(Problem(key=key, value=place, reason="there is something already", fix=fix))


def copy_file(source: Path, target: Path) -> None:
    """A new copy, on the disk; of a link, of its target.

    Raises:
        ConfigError: it is no plain file, cannot be read, or is larger than any that lies beside weights.
        OSError: it cannot be written.
    """
    try:
        content = read_plain(source)
    except Unreadable as error:
        fix = "remove it, or download it again"
        raise ConfigError(Problem(key=source.name, value=source, reason=str(error), fix=fix)) from None
    with target.open("xb") as writing:
        writing.write(content)
        writing.flush()
        os.fsync(writing.fileno())
