"""The cache folder, for files that canzona can create again."""

import os
from pathlib import Path

from canzona_cli.config.schema import RunConfig


def cache_root(config: RunConfig) -> Path:
    """Returns the folder of cached corpora, sample indices and searched layouts.

    It is the first that is set of `data.cache_dir` and $CANZONA_CACHE, else ~/.cache/canzona.
    """
    chosen = config.data.cache_dir or os.environ.get("CANZONA_CACHE") or "~/.cache/canzona"
    return Path(chosen).expanduser().absolute()
