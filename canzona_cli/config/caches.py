"""Where canzona keeps what it can make again."""

import os
from pathlib import Path

from canzona_cli.config.schema import RunConfig


def cache_root(config: RunConfig) -> Path:
    """Of prepared corpora, sample indices and layouts: `data.cache_dir`, else $CANZONA_CACHE, else ~/.cache/canzona."""
    chosen = config.data.cache_dir or os.environ.get("CANZONA_CACHE") or "~/.cache/canzona"
    return Path(chosen).expanduser().absolute()
