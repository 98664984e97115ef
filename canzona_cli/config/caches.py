"""The folder for cached files, which canzona can create again."""

import os
from pathlib import Path

from canzona_cli.config.schema import RunConfig


def cache_root(config: RunConfig) -> Path:
    """Returns the folder of cached corpora, sample indices and searched layouts: `data.cache_dir`, or else
    $CANZONA_CACHE, or else ~/.cache/canzona."""
    chosen = config.data.cache_dir or os.environ.get("CANZONA_CACHE") or "~/.cache/canzona"
    return Path(chosen).expanduser().absolute()
