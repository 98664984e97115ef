"""Searches for layouts, remembered from one command to the next.

A file is named after everything its search depended on, the code included. A search still checks what it reads against
its run, for files are copied, renamed and edited. One that is damaged is as if it were not there; a folder that cannot
be written to costs time and nothing else.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import canzona_cli
from canzona_cli.config.caches import cache_root
from canzona_cli.config.schema import RunConfig
from canzona_cli.run.codec import load_if_sound, save

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ASKED: Final = ("gpus", "model", "train", "optimizer", "engine", "cluster", "parallel")
"""The parts of a run that a layout may depend on."""
CODE: Final = ("config", "model", "costs", "planner", "simulate", "cluster")
"""The folders whose code may."""
KEPT: Final = 500
"""Files; the oldest go."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The place for the result of one search."""

    path: Path

    @classmethod
    def of(cls, config: RunConfig, count: int) -> "Cache":
        """Returns the cache of the search for the `count` best layouts."""
        asked = asdict(config)
        key = json.dumps([_code(), count, {name: asked[name] for name in ASKED}], sort_keys=True, default=str)
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        return cls(path=cache_root(config) / "layouts" / f"{name}.json")

    def read[T](self, kind: type[T]) -> T | None:
        """The result; None where it is not known."""
        return load_if_sound(self.path, kind)

    def write(self, found: "DataclassInstance") -> None:
        """Remember a result, if that is possible."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save(self.path, found, indented=False)
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-KEPT]:
                file.unlink(missing_ok=True)


@cache
def _code() -> str:
    """Hash of the sources that decide."""
    root, digest = Path(canzona_cli.__file__).parent, hashlib.sha256()
    for folder in CODE:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
