"""The contents of a checkpoint, and the names of the folders in a store of them. No torch: commands do without it.

A checkpoint is a folder `step-00000030`: safetensors files, one per rank that writes something, `config.yaml` and
`layout.json` of the run, and `manifest.json`, written last. Tensors are named in model space (`layers.3.q/master`,
`layers.3.q/momentum_buffer`, `embedding.word_embeddings.weight/exp_avg`), whole or in pieces that say where they lie in
it, so that no rank, no stage and no fragment of the run that wrote them matters to the one that reads them. Visible
folders are whole, hidden ones are on their way in or out.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from canzona_cli.fields import Count, CountOrZero, Finite, Range, Ranks

FORMAT: Final = "canzona-checkpoint"
VERSION: Final = 2
READABLE: Final = (1, VERSION)
"""Versions of a manifest that can be read. In version 1 every tensor was whole."""
MANIFEST: Final = "manifest.json"
NO_OPTIMIZER: Final = "none"
"""`Header.optimizer` of weights that no run has saved: masters, and no state beside them."""

_STEP = re.compile(r"step-(\d{8,15})")
_HIDDEN = re.compile(r"\.(step-\d{8,15})\.(partial|replaced|removed)")

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """The guards' memory of losses, so that a resumed run is judged as the unbroken one; nats per token."""

    first: Finite | None = None
    """The loss of the first step."""
    smooth: Finite | None = None
    """Exponential mean of the last steps."""
    best: Finite | None = None
    """The least that mean has been."""
    excess: Finite = 0.0
    """The sum of the amounts by which losses have been too high, in limits."""
    since: CountOrZero = 0
    """The first step of that."""
    first_validation: Finite | None = None
    sound: CountOrZero = 0
    """The step of the last validation that was not worse than the first."""
    worse: CountOrZero = 0
    """Validations since, which were."""
    usual: tuple[Finite, ...] = ()
    """Recent losses that are part of no spike."""
    high: tuple[Finite, ...] = ()
    """Losses of the spike that goes on."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run."""

    step: CountOrZero
    samples: CountOrZero
    """Sequences consumed; where the data order goes on."""
    tokens: Annotated[int, Range(at_least=0, at_most=10**18)]
    skipped: CountOrZero = 0
    """Steps so far that changed nothing because their gradients were not finite."""
    fallbacks: CountOrZero = 0
    """Matrix updates so far that were replaced by what their optimizer does when it fails."""
    losses: LossMemory = LossMemory()


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    bytes: Annotated[int, Range(at_least=0, at_most=10**18)]
    blake3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, end), row by row, of a rectangle of a unit."""

    unit: str
    row: CountOrZero
    col: CountOrZero
    rows: Count
    cols: Count
    start: CountOrZero
    end: CountOrZero

    @property
    def elements(self) -> int:
        return self.end - self.start

    def name(self, field: str) -> str:
        """The name it is stored under: `layers.3.q/master@0.0.512`."""
        return f"{self.unit}/{field}@{self.row}.{self.col}.{self.start}"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The place of a tensor, or of a piece of one."""

    file: str
    dtype: str
    """The type as safetensors call it: F32, BF16, I64, U8, ..."""
    shape: tuple[CountOrZero, ...]
    piece: Piece | None = None
    """The part of the whole that it is, flat; None if it is the whole."""

    def whole(self, stored: str) -> str:
        """Name of the whole tensor, `layers.3.q/master`, by the name that this one is stored under."""
        return stored if self.piece is None else stored.rpartition("@")[0]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The contents of a manifest besides its tables."""

    progress: Progress
    optimizer: str
    strategy: str
    splitting: str
    world_size: Ranks
    created: Annotated[float, Range(at_least=0, below=253_402_300_800)]
    """Seconds since 1970; before the year 10000."""
    canzona: str
    """Version of the program that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Header):
    """The content of `manifest.json`."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """All files but the manifest itself."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """State other than tensors, by name as tensors are: `layers.3.q/step`."""

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest itself."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A tensor's bytes in host memory, C order, little endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Callable[[], Iterator[memoryview]]
    """Unsigned bytes, or what reads them piece by piece when they are to be written."""
    piece: Piece | None = None
    """The piece of the `StoredTensor` it becomes."""

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes; a piece is good until the next is asked for."""
        return self.data() if callable(self.data) else iter((self.data,))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's share of a checkpoint; empty where other ranks write everything."""

    tensors: Mapping[str, Buffer]
    scalars: Mapping[str, Scalar]


def step_name(step: int) -> str:
    """`step-00000030`; sorts by step below a hundred million."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other name."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(step := int(match[1])) != name:
        return None
    return step


def hidden_name(name: str) -> tuple[str, str] | None:
    """The checkpoint and the state (`partial`, `replaced`, `removed`) of a hidden folder; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return None if match is None or step_of(match[1]) is None else (match[1], match[2])


def partial_path(store_root: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of `step` is being written."""
    return store_root / f".{step_name(step)}.partial"


def replaced_path(checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint while another of its step takes its name; readers look there too."""
    return checkpoint.with_name(f".{checkpoint.name}.replaced")


def removed_path(checkpoint: Path) -> Path:
    """Returns the folder in which a checkpoint is deleted, so that none is ever seen half removed."""
    return checkpoint.with_name(f".{checkpoint.name}.removed")
