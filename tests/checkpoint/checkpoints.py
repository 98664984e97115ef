"""Small checkpoints with known content, written by the code that writes real ones."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import Buffer, Header, Manifest, Progress, Scalar, Shard
from canzona_cli.checkpoint.store import CheckpointStore, StoredCheckpoint

RANKS = 3
"""The last of them has nothing to write."""
TEXTS = {"config.yaml": "name: qwen3-tiny\n", "layout.json": '{"tp": 1}\n'}


def buffer(dtype: str, shape: tuple[int, ...], data: bytes) -> Buffer:
    return Buffer(dtype=dtype, shape=shape, data=memoryview(data))


def header(step: int, *, samples: int | None = None) -> Header:
    """`samples` tells apart two checkpoints of one step."""
    return Header(
        progress=Progress(step=step, samples=32 * step if samples is None else samples, tokens=8192 * step),
        optimizer="muon",
        strategy="canzona",
        splitting="all",
        world_size=RANKS,
        created=1_700_000_000.0 + step,
        canzona="0.1.0",
    )


def shard(rank: int, step: int) -> Shard:
    """Two tensors and a number of each rank but the last; other bytes at every step."""
    if rank == RANKS - 1:
        return Shard(tensors={}, scalars={})
    seed = hashlib.sha256(f"{rank}/{step}".encode()).digest()
    tensors = {
        f"layers.{rank}.q/master": buffer("F32", (16, 8), seed * 16),
        f"layers.{rank}.q/momentum_buffer": buffer("F32", (16, 8), seed * 16),
    }
    scalars: dict[str, Scalar] = {f"layers.{rank}.q/step": step}
    return Shard(tensors=tensors, scalars=scalars)


def save(root: Path, step: int, *, samples: int | None = None, texts: Mapping[str, str] = TEXTS) -> Path:
    """A whole save by `RANKS` ranks in turn."""
    partial = begin(root, step)
    for rank in range(RANKS):
        write_part(partial, rank, shard(rank, step))
    return finish(partial, RANKS, header(step, samples=samples), texts, 5.0)


def names(store: CheckpointStore) -> list[str]:
    return [found.name for found in store.checkpoints()]


def manifest_of(found: StoredCheckpoint | None) -> Manifest:
    assert found is not None
    assert found.manifest is not None, found.problems
    return found.manifest
