"""Measures how fast a machine writes checkpoints."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.commit import begin, write_part
from canzona_cli.checkpoint.manifest import Buffer, Shard
from canzona_cli.core.errors import SaveFailed
from canzona_cli.core.host import existing_folder

BYTES: Final = 256 << 20
"""The size of the checkpoint that is written."""


def checkpoint_rate(folder: Path, ranks: int) -> float | None:
    """Returns the GB/s at which the ranks of one machine together write a checkpoint: as a save does, with hashes,
    until the disk has it. Returns None if it cannot be written.

    Args:
        folder: where runs are, or will be; only its file system matters.
    """
    size = BYTES // ranks
    buffer = Buffer(dtype="U8", shape=(size,), data=memoryview(os.urandom(size)))
    try:
        with tempfile.TemporaryDirectory(prefix=".canzona-", dir=existing_folder(folder)) as temporary:
            partial = begin(Path(temporary), 1)
            started = time.perf_counter()
            with ThreadPoolExecutor(ranks) as pool:
                saves = [
                    pool.submit(write_part, partial, rank, Shard(tensors={f"rank{rank}/bytes": buffer}, scalars={}))
                    for rank in range(ranks)
                ]
            for save in saves:
                save.result()
            return ranks * size / (time.perf_counter() - started) / 1e9
    except (OSError, SaveFailed):
        return None
