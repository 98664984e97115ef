"""Copies the state for a checkpoint to host memory, so that it can be written while training continues.

Weights are not saved, because they can be made by rounding the masters. State is stored under the model's
names (`canzona_cli.core.model.geometry`). Of the ranks that have the same state, only one writes it. Hosts write
the matrices that they host; state that is spread over ranks, such as fragments of shared matrices, is written
in pieces.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import psutil
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from canzona_cli.checkpoint.contents import GROUP, MASTER, RANDOM
from canzona_cli.checkpoint.manifest import Buffer, Piece, Scalar, Shard
from canzona_cli.checkpoint.shard_file import raw_bytes
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.engine.masters import UpdatedMatrix
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.megatron.holdings import MasterRange, megatron_masters
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.core.model.families import EMBEDDING
from canzona_cli.core.model.geometry import Block, fragment_blocks, matrix_blocks, unit_shape
from canzona_cli.core.setup import ModelConfig

PINNED_SHARE = 0.5
"""The fraction of a node's memory that its ranks together may pin for saves. The system cannot swap out
pinned memory."""
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types of tensors that a checkpoint can store, with their names in safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a checkpoint that one rank writes: a matrix with its state, or a piece of a unit with its
    state."""

    name: str
    """The name of the matrix or the unit."""
    piece: Piece | None = None
    """The piece; None for a matrix."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The parts that one rank could write, as a record that the ranks exchange."""

    parts: tuple[Part, ...]
    bytes: tuple[int, ...]
    """The size of each part in bytes."""


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """The tensors and scalars of a part that this rank could write."""

    part: Part
    tensors: Mapping[str, torch.Tensor]
    """The tensors by stored name."""
    scalars: Mapping[str, Scalar]
    piece: Piece | None = None
    """The piece of a unit that each tensor contains; None for complete tensors."""


class Snapshots:
    """The snapshots of one rank's state. Later snapshots reuse the host buffers of earlier ones."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._buffers: dict[str, torch.Tensor] = {}
        self._holding: Holding | None = None
        self._writers: Mapping[Part, int] = {}

    def take(self) -> Shard:
        """Copies this rank's share of the state to host memory. All ranks have to call this between two
        steps.

        The copy overwrites the memory of the shard that the previous call returned, so that shard must
        already have been written to disk.

        Raises:
            ConfigError: a user's own optimizer keeps state that a checkpoint cannot store.
        """
        world = self._trainee.world
        contents = [*_matrices(self._trainee), *_pieces(self._trainee)]
        writers = self._agree_on_writers(contents)
        scalars: dict[str, Scalar] = {}
        saved: dict[str, Buffer] = {}
        for item in contents:
            if writers[item.part] == world.rank:
                scalars |= item.scalars
                saved |= {name: self._copy(name, tensor, item.piece) for name, tensor in item.tensors.items()}
        for key, state in random_states().items():
            name = f"{RANDOM}{world.rank:05d}/{key}"
            saved[name] = self._copy(name, state)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        for stale in self._buffers.keys() - saved.keys():
            del self._buffers[stale]
        return Shard(tensors=saved, scalars=scalars)

    def _agree_on_writers(self, contents: Sequence[_Contents]) -> Mapping[Part, int]:
        """Returns the rank that writes each part, with the same result on every rank. All ranks have to call
        this.

        The assignment is computed again only if the holdings of some rank have changed, for example after the
        first update has created state.
        """
        sizes = tuple(sum(tensor.nbytes for tensor in item.tensors.values()) for item in contents)
        holding = Holding(parts=tuple(item.part for item in contents), bytes=sizes)
        changed = torch.full((1,), float(holding != self._holding), device=self._trainee.world.device)
        torch.distributed.all_reduce(changed, op=torch.distributed.ReduceOp.MAX)
        if any(self._trainee.timer.read(changed)):
            self._writers = assign_writers(gather(holding, Holding), self._trainee.setup.model)
            self._holding = holding
        return self._writers

    def _copy(self, name: str, tensor: torch.Tensor, piece: Piece | None = None) -> Buffer:
        """Copies a tensor to its host buffer. Copies from a GPU may be asynchronous, so the caller
        must synchronise before it reads the buffer."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = self._new_buffer(tensor)
        buffer.copy_(tensor.detach(), non_blocking=True)
        return Buffer(dtype=DTYPES[buffer.dtype], shape=tuple(buffer.shape), data=raw_bytes(buffer), piece=piece)

    def _new_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocates host memory for a copy of the tensor. With GPUs the memory is pinned, up to a total of
        `PINNED_SHARE`, because copies from a GPU to pinned memory are asynchronous. Other copies pause
        training for longer."""
        pinned = self._trainee.world.device.type == "cuda"
        if pinned:
            ranks = self._trainee.world.world_size // (self._trainee.setup.cluster.nodes or 1)
            allocated = sum(buffer.nbytes for buffer in self._buffers.values())
            pinned = allocated + tensor.nbytes <= PINNED_SHARE * psutil.virtual_memory().total / ranks
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


@dataclass(frozen=True, kw_only=True)
class MasterPiece:
    """A piece of a unit, and its position in one of this rank's masters."""

    piece: Piece
    master: MasterRange | UpdatedMatrix
    offset: int
    """The index of the piece's first element in the flattened master and state."""


def master_pieces(trainee: Trainee) -> list[MasterPiece]:
    """Returns the masters of this rank, divided into pieces of units. The matrices that it hosts are not
    included."""
    world, model = trainee.world, trainee.setup.model
    pieces = []
    for item in megatron_masters(trainee.optimizer, trainee.chunks):
        tp, rank = world.cut(item.parameter, model)
        for block in fragment_blocks(item.parameter, item.shape, model, tp=tp, rank=rank):
            block_start = block.row * block.cols
            start, end = max(item.start, block_start), min(item.end, block_start + block.rows * block.cols)
            if start < end:
                piece = _piece(block, start - block_start, end - block_start)
                pieces.append(MasterPiece(piece=piece, master=item, offset=start - item.start))
    fragments = trainee.optimizer.matrices.fragments if isinstance(trainee.optimizer, CanzonaOptimizer) else ()
    for fragment in fragments:
        for block in matrix_blocks(fragment.matrix, model, tp=world.layout.tp, rank=world.tp_rank):
            piece = _piece(block, 0, block.rows * block.cols)
            pieces.append(MasterPiece(piece=piece, master=fragment, offset=block.row * block.cols))
    return pieces


def _piece(block: Block, start: int, end: int) -> Piece:
    """Returns the elements [start, end) of a block, in row-major order, as a piece."""
    row, col = block.unit_row, block.unit_col
    return Piece(unit=block.unit, row=row, col=col, rows=block.rows, cols=block.cols, start=start, end=end)


def _pieces(trainee: Trainee) -> Iterator[_Contents]:
    """Yields the masters and the elementwise state of `master_pieces`."""
    model = trainee.setup.model
    # With tied embeddings the last stage has a copy of the embedding, but the first stage writes it.
    skipped_unit = None if trainee.world.is_first_stage or not model.tied_embeddings else EMBEDDING
    for item in master_pieces(trainee):
        piece = item.piece
        shape = unit_shape(piece.unit, model)
        if piece.unit == skipped_unit:
            continue
        is_whole = piece.elements == prod(shape)
        tensors: dict[str, torch.Tensor] = {}
        for field, value in {MASTER: item.master.master.detach(), **item.master.state}.items():
            if isinstance(value, torch.Tensor) and value.numel() == item.master.master.numel() and value.dim() > 0:
                elements = value.reshape(-1)[item.offset : item.offset + piece.elements]
                if is_whole:
                    tensors[f"{piece.unit}/{field}"] = elements.view(shape)
                else:
                    tensors[piece.name(field)] = elements
        scalars: dict[str, Scalar] = {}
        if piece.row == piece.col == piece.start == 0:  # a unit's scalars are stored with its first piece
            if isinstance(item.master, UpdatedMatrix):
                scalars |= {f"{piece.unit}/{key}": value for key, value in item.master.marks.items()}
            elif item.master.step is not None:
                scalars[f"{piece.unit}/step"] = item.master.step
        part = Part(name=piece.unit, piece=piece)
        yield _Contents(part=part, tensors=tensors, scalars=scalars, piece=None if is_whole else piece)


def _matrices(trainee: Trainee) -> Iterator[_Contents]:
    """Yields the masters and state of the matrices that this rank hosts."""
    if not isinstance(trainee.optimizer, CanzonaOptimizer):
        return
    for name, saved in trainee.optimizer.matrices.state_dict().items():
        assert isinstance(saved, dict)
        values: dict[str, torch.Tensor | Scalar] = {MASTER: saved["master"]}
        values |= {key: _check_storable(name, key, value) for key, value in saved["state"].items()}
        values |= {f"{GROUP}{key}": value for key, value in saved["group"].items()}
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Scalar] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars[f"{name}/{key}"] = value
        yield _Contents(part=Part(name=name), tensors=tensors, scalars=scalars)


def _check_storable(name: str, key: object, value: object) -> torch.Tensor | Scalar:
    """Returns a value of an optimizer's state unchanged; raises ConfigError if a checkpoint cannot store
    it."""
    if isinstance(key, str) and key != MASTER and "/" not in key and not key.startswith(GROUP):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in DTYPES:
            return value
        if value is None or isinstance(value, bool | int | float | str):
            return value
    reason = f"the optimizer keeps a {type(value).__name__} for {name} under this key, which a checkpoint cannot store"
    fix = "keep dense tensors, numbers or text under text keys: no slash, not `master`, no prefix `group:`"
    raise ConfigError(Problem(key="optimizer.source", value=str(key), reason=reason, fix=fix))


def assign_writers(holdings: Sequence[Holding], model: ModelConfig) -> dict[Part, int]:
    """Assigns each part to one of the ranks that could write it: the rank with the fewest bytes to write so
    far.

    Args:
        holdings: the parts that each rank could write, by rank.

    Returns:
        The rank that writes each part.

    Raises:
        ValueError: the pieces of a unit do not add up to its number of elements.
    """
    holders: dict[Part, list[int]] = defaultdict(list)
    sizes: dict[Part, int] = {}
    for rank, holding in enumerate(holdings):
        for part, size in zip(holding.parts, holding.bytes, strict=True):
            holders[part].append(rank)
            sizes[part] = size
    elements: dict[str, int] = defaultdict(int)
    for part in holders:
        if part.piece is not None:
            elements[part.name] += part.piece.elements
    for unit, count in elements.items():
        if count != prod(unit_shape(unit, model)):
            raise ValueError(f"{unit} has {prod(unit_shape(unit, model))} elements, but its pieces have {count}")
    loads = [0] * len(holdings)  # the bytes that each rank writes
    writers: dict[Part, int] = {}
    # Matrices are assigned before pieces, and parts with fewer possible writers before others, because the
    # parts that come last can even out the loads.
    for part in sorted(holders, key=lambda part: (part.piece is not None, len(holders[part]), str(part))):
        writers[part] = min(holders[part], key=lambda rank: (loads[rank], rank))
        loads[writers[part]] += sizes[part]
    return writers


_PYTHON_VERSION = 3  # the version of the tuple that random.getstate() returns
_MEGATRON = "megatron."


def random_states() -> dict[str, torch.Tensor]:
    """Returns the random states of torch (host and device), Megatron's tracker, Python and numpy, as
    tensors."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
    states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_MEGATRON}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restores states that `random_states` has returned. The CUDA state is skipped if CUDA is not in use.

    Raises:
        Exception: a state is not valid. The type of the exception depends on the generator.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_MEGATRON): state for name, state in states.items() if name.startswith(_MEGATRON)}
    get_cuda_rng_tracker().set_states(tracked)


def _python_state(states: dict[str, torch.Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    gauss = states["python_gauss"].tolist()
    return _PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: dict[str, torch.Tensor]) -> tuple[str, npt.NDArray[np.uint32], int, int, float]:
    *keys, position, has_gauss = states["numpy"].tolist()
    return "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(states["numpy_gauss"].item())
