"""The manifest of a checkpoint, and the names of the folders in a store of checkpoints.

A checkpoint is a folder `step-00000030`: one safetensors file for each rank that writes tensors,
`config.yaml`, `layout.json` and, if there is a plan, `plan.json` of the run, and `manifest.json`, written
last. Tensors have the names of the model, not of any rank (`layers.3.q/master`,
`layers.3.q/momentum_buffer`, `embedding.word_embeddings.weight/exp_avg`). Each tensor is stored whole or in
pieces with their positions, so a run with another layout can read it. Visible folders are complete
checkpoints; hidden folders are checkpoints that are being written, replaced or removed.

This module does not import torch, so that commands start fast.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from canzona_cli.core.fields import Count, CountOrZero, Finite, Range, Ranks
from canzona_cli.core.reading import other_version, parse

FORMAT: Final = "canzona-checkpoint"
VERSION: Final = 2
MANIFEST: Final = "manifest.json"
NO_OPTIMIZER: Final = "none"
"""The value of `Header.optimizer` in a checkpoint of imported weights, which has masters but no optimizer
state."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""The bytes of an element, by safetensors' name of its type."""

_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""The names allowed for files of a checkpoint. Other names could point outside the folder or be hidden."""
_HASH = re.compile(r"[0-9a-f]{64}")
_STEP = re.compile(r"step-(\d{8,15})")
_HIDDEN = re.compile(r"\.(step-\d{8,15})\.(partial|replaced|removed)")

Scalar = bool | int | float | str | None
Hidden = Literal["partial", "replaced", "removed"]
"""The state of a hidden folder.

partial: the checkpoint is being written.
replaced: a newer checkpoint of the same step is taking its name; until then, readers use this folder.
removed: the checkpoint is being deleted; it is hidden so that readers never see half of it.
"""


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """The losses that the guard against divergence (`training.guards`) remembers, in nats per token. They are saved so
    that it treats a resumed run like an uninterrupted one."""

    first: Finite | None = None
    """The loss of the first step that was not skipped."""
    smooth: Finite | None = None
    """The exponential moving average of the losses."""
    best: Finite | None = None
    """The lowest value of `smooth` so far."""
    excess: Finite = 0.0
    """The accumulated excess of losses over 1.1 times the divergence limit, in multiples of the limit; lower
    losses reduce it."""
    since: CountOrZero = 0
    """The step at which `excess` last rose from zero; not used while `excess` is zero."""
    first_validation: Finite | None = None
    """The first finite validation loss."""
    sound: CountOrZero = 0
    """The step of the last acceptable validation."""
    worse: CountOrZero = 0
    """The number of validations since step `sound`, all of which were too high."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run: its counters, and the losses that its guard remembers."""

    step: CountOrZero
    samples: CountOrZero
    """The number of sequences consumed, which is the position in the data order."""
    tokens: Annotated[int, Range(at_least=0, at_most=10**18)]
    skipped: CountOrZero = 0
    """The number of steps so far that were skipped because their gradients were not finite."""
    fallbacks: CountOrZero = 0
    """The number of matrix updates so far that were not finite or needed their optimizer's fallback."""
    losses: LossMemory = LossMemory()


BEGINNING: Final = Progress(step=0, samples=0, tokens=0)
"""The progress of a run before its first step."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """The size and the hash of a checkpoint's file."""

    bytes: Annotated[int, Range(at_least=0, at_most=10**18)]
    blake3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a unit (`model.geometry`): the elements [start, end), in row-major order, of the rectangle
    of `rows` rows and `cols` columns that begins at (`row`, `col`)."""

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
        """Returns the name under which a field of this piece is stored: `layers.3.q/master@0.0.512`."""
        return f"{self.unit}/{field}@{self.row}.{self.col}.{self.start}"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The manifest's entry for a stored tensor, which is a complete tensor or a piece of a tensor."""

    file: str
    dtype: str
    """The type as safetensors names it: F32, BF16, I64, U8, ..."""
    shape: tuple[CountOrZero, ...]
    piece: Piece | None = None
    """The piece that this entry stores as a flat tensor; None for a whole tensor."""

    def whole_name(self, stored: str) -> str:
        """Returns the name of the complete tensor, `layers.3.q/master`.

        Args:
            stored: the name under which this entry is stored; for a piece it ends with `@` and the position.
        """
        return stored if self.piece is None else stored.rpartition("@")[0]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The fields of a manifest, except for its tables of files, tensors and scalars."""

    progress: Progress
    optimizer: str
    strategy: str
    splitting: str
    world_size: Ranks
    created: Annotated[float, Range(at_least=0, below=253_402_300_800)]
    """The time of the save, in seconds since 1970; before the year 10000."""
    canzona: str
    """The version of canzona that wrote the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Header):
    """The contents of `manifest.json`."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """All files except the manifest itself."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """The state that is not stored as tensors, named like tensors: `layers.3.q/step`."""

    @property
    def bytes(self) -> int:
        """The total size of all files except the manifest itself."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A tensor to write to a file, as row-major, little-endian bytes in host memory."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Callable[[], Iterator[memoryview]]
    """The bytes, or a function that yields them in chunks while the file is written."""
    piece: Piece | None = None
    """The value of `StoredTensor.piece`."""

    def chunks(self) -> Iterator[memoryview]:
        """Yields the bytes in chunks. Each view is valid until the next one is requested."""
        return self.data() if callable(self.data) else iter((self.data,))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tensors and scalars that one rank writes into a checkpoint."""

    tensors: Mapping[str, Buffer]
    scalars: Mapping[str, Scalar]


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint, `step-00000030`. Up to step 99,999,999, the alphabetical order
    of names is the order of steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step in a checkpoint's name; None if this is not the name of a checkpoint."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(step := int(match[1])) != name:
        return None
    return step


def hidden_name(name: str) -> tuple[str, str] | None:
    """Splits the name of a hidden folder into the checkpoint's name and the state (`Hidden`); returns None
    for other names."""
    match = _HIDDEN.fullmatch(name)
    return None if match is None or step_of(match[1]) is None else (match[1], match[2])


def partial_path(store_root: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of `step` is being written."""
    return hidden_path(store_root / step_name(step), "partial")


def hidden_path(checkpoint: Path, state: Hidden) -> Path:
    """Returns the path that the folder `checkpoint` has while it is in this hidden state."""
    return checkpoint.with_name(f".{checkpoint.name}.{state}")


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def manifest_text(manifest: Manifest) -> str:
    """Returns the text of `manifest.json`.

    The first line contains the SHA-256 of the rest. Infinities are written as `Infinity`, an extension of
    JSON.
    """
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    tables = [_table(name, values.pop(name)) for name in ("files", "tensors", "scalars")]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
    body = "\n".join(lines) + "\n" + ",\n".join(tables) + "\n}\n"
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n{body}'


def _table(name: str, entries: Mapping[str, object]) -> str:
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entries.items()))
    return f'"{name}": {{\n{rows}\n}}' if rows else f'"{name}": {{}}'


def parse_manifest(text: bytes) -> Manifest:
    """Parses and checks the text of a `manifest.json`.

    Raises:
        ValueError: the text is not a valid manifest; the message is for the user.
    """
    first_line = _FIRST_LINE.match(text)
    if first_line is None:
        raise ValueError("damaged: its first line is not the first line of a manifest")
    body = memoryview(text)[first_line.end() :]
    if hashlib.sha256(body).hexdigest() != first_line[1].decode():
        raise ValueError("damaged: its content does not match the hash in its first line")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError("it is not the manifest of a checkpoint")
    if value.get("version") != VERSION:
        raise ValueError(f"it {other_version(value.get('version'), VERSION)}")
    manifest = parse(Manifest, text, strict=True)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Checks the properties of a manifest that its types do not guarantee: file names, hashes, the sizes of
    tensors and files, and the consistency of pieces.

    Raises:
        ValueError: a check fails; the message is for the user.
    """
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"files.{name!r}: not a valid file name in a checkpoint")
        if not _HASH.fullmatch(file.blake3):
            raise ValueError(f"files.{name}: not a hash")
    tensor_sizes = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        if tensor.file not in tensor_sizes:
            raise ValueError(f"tensors.{name}: its file {tensor.file} is not listed under files")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"tensors.{name}: {tensor.dtype} {tensor.shape} is not a tensor's type and shape")
        if not _is_consistent(name, tensor):
            raise ValueError(f"tensors.{name}: its name, shape and piece do not match")
        tensor_sizes[tensor.file] += tensor_bytes(tensor.dtype, tensor.shape)
    for name, needed in tensor_sizes.items():
        if needed > manifest.files[name].bytes:
            raise ValueError(f"files.{name}: smaller than the tensors it should contain")


def _is_consistent(name: str, tensor: StoredTensor) -> bool:
    """Returns True if an entry stores a complete tensor, or a piece that agrees with the entry's name and
    shape."""
    piece = tensor.piece
    if piece is None:
        return True
    is_inside = piece.start < piece.end <= piece.rows * piece.cols
    is_named = name == piece.name(tensor.whole_name(name).rpartition("/")[2])
    return is_inside and is_named and tensor.shape == (piece.elements,)
