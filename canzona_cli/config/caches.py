"""The folder for things that canzona can make again."""

import os
from pathlib import Path

from canzona_cli.config.schema import RunConfig


def cache_root(config: RunConfig) -> Path:
    """Returns the folder of corpora, indices and layouts: `data.cache_dir`,
    $CANZONA_CACHE or ~/.cache/canzona."""
    chosen = config.data.cache_dir or os.environ.get("CANZONA_CACHE") or "~/.cache/canzona"
    return Path(chosen).expanduser().absolute()
