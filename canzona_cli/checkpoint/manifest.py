"""What a checkpoint consists of. No torch: commands list, show and verify checkpoints without it.

A checkpoint is a folder `step-00000030`: safetensors files, one per rank that writes something, `config.yaml` and
`layout.json` of the run, and `manifest.json`, written last. Tensors are whole and named in model space
(`layers.3.q/master`, `layers.3.q/momentum_buffer`, `embedding.word_embeddings.weight/exp_avg`), so that no rank, no
stage and no fragment of the run that wrote them matters to the one that reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

FORMAT: Final = "canzona-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run had come."""

    step: int
    samples: int
    """Sequences consumed; where the data order goes on."""
    tokens: int
    skipped: int = 0
    """Steps so far that changed nothing because their gradients were not finite."""
    fallbacks: int = 0
    """Matrix updates so far that were replaced by what their optimizer does when it fails."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    bytes: int
    blake3: str


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies."""

    file: str
    dtype: str
    """As safetensors call it: F32, BF16, I64, U8, ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a manifest says beside its tables."""

    progress: Progress
    optimizer: str
    strategy: str
    splitting: str
    world_size: int
    created: float
    """Seconds since 1970."""
    canzona: str
    """Version of the program that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Header):
    """The content of `manifest.json`."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """All files but the manifest itself."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """State that is no tensor, by name as tensors are: `layers.3.q/step`."""

    @property
    def bytes(self) -> int:
        """Of all files but the manifest itself."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A tensor's bytes in host memory, C order, little endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Of unsigned bytes."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank writes of a checkpoint; nothing in it where other ranks write everything."""

    tensors: Mapping[str, Buffer]
    scalars: Mapping[str, Scalar]
