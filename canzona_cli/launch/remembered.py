"""A cache of layout searches, so that a run starts at once if its layout has been searched for before."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from canzona_cli.core.setup import RunConfig
from canzona_cli.records.codec import save

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECTIONS: Final = ("gpus", "model", "train", "optimizer", "engine", "cluster", "parallel")
"""The sections of a run's settings on which a search may depend."""
CODE: Final = ("config", "optimizers", "model", "costs", "planner", "simulate", "cluster")
"""The folders with code on which a search may depend."""
MAX_FILES: Final = 500
"""The maximum number of search results in the cache folder; older results are deleted."""


def search_file(config: RunConfig, count: int) -> Path:
    """Returns the file for the result of a search. Its name is a hash of everything on which the result
    depends.

    Args:
        count: the number of layouts that the search returns.
    """
    parts = asdict(config)
    key = json.dumps([_code_hash(), count, {name: parts[name] for name in SECTIONS}], sort_keys=True, default=str)
    return config.data.cache_root / "layouts" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def remember(file: Path, result: "DataclassInstance") -> None:
    """Writes a result and deletes the oldest results; does nothing if the folder is not writable."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        save(file, result, indented=False)
        files = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)


@cache
def _code_hash() -> str:
    """Returns a hash of the sources in the `CODE` folders."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in CODE:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
