"""A cache of layout searches, so that a run starts at once if its layout has been searched for before."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Final

from canzona_cli.config.schema import RunConfig
from canzona_cli.core import errors
from canzona_cli.core.reading import Damaged, Unreadable, parse, read_plain
from canzona_cli.core.setup import Setup
from canzona_cli.core.simulate.search import LayoutSearch
from canzona_cli.core.writing import write_text_atomic

MAX_FILES: Final = 500
"""The maximum number of search results in the cache folder; older results are deleted."""


class RememberedLayouts:
    """The results of searches, each in a file whose name is a hash of everything on which the result depends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, config: RunConfig) -> "RememberedLayouts":
        """Returns the cache of a run (`data.cache_dir`)."""
        return cls(config.data.cache_root / "layouts")

    def file(self, setup: Setup, count: int) -> Path:
        """Returns the file for the result of a search for `count` layouts."""
        parts = {name: value for name, value in asdict(setup).items() if name not in ("name", "schedule")}
        key = json.dumps([_code_hash(), count, parts], sort_keys=True, default=str)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def recall(self, setup: Setup, count: int) -> LayoutSearch | None:
        """Returns the result of an earlier search; None if there is none that can be read."""
        try:
            return parse(LayoutSearch, read_plain(self.file(setup, count)))
        except (Damaged, Unreadable):
            return None

    def keep(self, setup: Setup, count: int, result: LayoutSearch) -> None:
        """Writes a result and deletes the oldest results; does nothing if the folder is not writable."""
        file = self.file(setup, count)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(file, json.dumps(asdict(result)))
            files = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
            for old in files[:-MAX_FILES]:
                old.unlink(missing_ok=True)


@cache
def _code_hash() -> str:
    """Returns a hash of the core's sources, on which a search may depend."""
    digest = hashlib.sha256()
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
