"""Copies what a checkpoint must hold to host memory, so that it can be written while training goes on.

Weights are not saved: they are their masters, rounded. In model space (`canzona_cli.model.geometry`), every
element by one rank that holds it: hosts write the matrices they host, and what is spread over ranks,
fragments of shared matrices among it, is written in pieces.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from canzona_cli.checkpoint.contents import GROUP, MASTER, RANDOM
from canzona_cli.checkpoint.manifest import Buffer, Piece, Scalar, Shard
from canzona_cli.config.schema import ModelConfig
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.masters import HeldFragment
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.megatron.holdings import Held, held
from canzona_cli.megatron.model import Trainee
from canzona_cli.megatron.parallel import World, gather
from canzona_cli.model.families import EMBEDDING
from canzona_cli.model.geometry import Block, fragment_blocks, matrix_blocks, unit_shape

_LOG = logging.getLogger(__name__)

PINNED_SHARE = 0.5
"""The share of a machine's memory that its ranks together may pin for saves;
nobody else can use pinned pages."""
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


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's share of what is to be saved, in bytes."""

    wholes: Mapping[str, int]
    """The tensors that the rank holds all of, by name."""
    pieces: tuple[tuple[Piece, int], ...]
    """The pieces that it holds; pairs, because ranks exchange this as JSON, whose keys are text."""


@dataclass(frozen=True, kw_only=True)
class Writers:
    """The writer of each tensor or piece; the same on every rank."""

    wholes: Mapping[str, int]
    pieces: Mapping[Piece, int]


class Snapshots:
    """The snapshots of one rank, taken into buffers that the first one allocates and the later ones reuse."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._buffers: dict[str, torch.Tensor] = {}
        self._holding: Holding | None = None
        self._writers: Writers | None = None
        self._warned = False

    def take(self) -> Shard:
        """Copies the state between two steps. Collective.

        What the last call returned must have been written by now: its memory is used again.

        Raises:
            ConfigError: a user's own optimizer keeps what a file cannot hold.
        """
        world, model = self._trainee.world, self._trainee.config.model
        wholes = _wholes(self._trainee)
        pieces = held_pieces(held(self._trainee.optimizer, self._trainee.chunks), model, world)
        pieces += shared_pieces(self._trainee)
        if not world.is_first_stage and model.tied_embeddings:
            # The last stage's copy of tied embeddings.
            pieces = [held_piece for held_piece in pieces if held_piece.piece.unit != EMBEDDING]
        writers = self._agree(_holding(wholes, pieces))
        scalars: dict[str, Scalar] = {}
        saved: dict[str, Buffer] = {}
        for name, state in wholes.items():
            if writers.wholes[name] == world.rank:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        saved[f"{name}/{key}"] = self._copy(f"{name}/{key}", value)
                    else:
                        scalars[f"{name}/{key}"] = value
        for key, state_of_rank in random_states().items():
            name = f"{RANDOM}{world.rank:05d}/{key}"
            saved[name] = self._copy(name, state_of_rank)
        for held_piece in pieces:
            piece, shape = held_piece.piece, unit_shape(held_piece.piece.unit, model)
            if writers.pieces[piece] != world.rank:
                continue
            if piece.row == piece.col == piece.start == 0:
                if held_piece.held.step is not None:
                    scalars[f"{piece.unit}/step"] = held_piece.held.step
                if isinstance(held_piece.held, HeldFragment):
                    scalars |= {f"{piece.unit}/{key}": value for key, value in held_piece.held.marks.items()}
            for field, value in _fields_of(held_piece.held).items():
                part = value.reshape(-1)[held_piece.offset : held_piece.offset + piece.elements]
                if piece.elements == prod(shape):
                    name = f"{piece.unit}/{field}"
                    saved[name] = self._copy(name, part.view(shape))
                else:
                    name = piece.name(field)
                    saved[name] = self._copy(name, part, piece)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        for stale in self._buffers.keys() - saved.keys():
            del self._buffers[stale]
        return Shard(tensors=saved, scalars=scalars)

    def _agree(self, holding: Holding) -> Writers:
        """Agrees on who writes what; repeated only when a rank's holdings have changed,
        as in the first step."""
        changed = torch.full((1,), float(holding != self._holding), device=self._trainee.world.device)
        torch.distributed.all_reduce(changed, op=torch.distributed.ReduceOp.MAX)
        if self._writers is None or any(self._trainee.timer.read(changed)):
            everyone = gather(holding)
            units = {piece.unit for other in everyone for piece, _ in other.pieces}
            self._writers = share(
                everyone, {unit: prod(unit_shape(unit, self._trainee.config.model)) for unit in units}
            )
            self._holding = holding
        return self._writers

    def _copy(self, name: str, tensor: torch.Tensor, piece: Piece | None = None) -> Buffer:
        """Copies a tensor to the host; from a GPU the copy arrives later."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = self._new_buffer(tensor)
        buffer.copy_(tensor.detach(), non_blocking=True)
        data = memoryview(buffer.reshape(-1).view(torch.uint8).numpy())
        return Buffer(dtype=DTYPES[buffer.dtype], shape=tuple(buffer.shape), data=data, piece=piece)

    def _new_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocates host memory, pinned up to `PINNED_SHARE`: a GPU writes to pinned memory itself."""
        pinned = self._trainee.world.device.type == "cuda"
        if pinned:
            ranks = self._trainee.world.world_size // (self._trainee.config.cluster.nodes or 1)
            held = sum(buffer.nbytes for buffer in self._buffers.values())
            pinned = held + tensor.nbytes <= PINNED_SHARE * psutil.virtual_memory().total / ranks
            if not pinned and not self._warned:
                self._warned = True
                _LOG.warning(
                    "saves stand in training's way longer: the state of %d ranks is more than %.0f%% of this machine's "
                    "memory, and what is beyond that is copied without being pinned",
                    ranks,
                    100 * PINNED_SHARE,
                )
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


class Kept(Protocol):
    """A master with its state, of a part of the model: Megatron's `Held`, or a `HeldFragment`."""

    @property
    def master(self) -> torch.Tensor: ...

    @property
    def state(self) -> Mapping[str, object]: ...

    @property
    def step(self) -> float | None:
        """Returns the steps it has made; None if no optimizer counts them."""

    def replace_state(self, tensors: dict[str, torch.Tensor], step: float | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HeldPiece:
    """A piece of a unit, and where it lies in what an optimizer holds here."""

    piece: Piece
    held: Kept
    offset: int
    """First element within the held master and its state, flat."""


def held_pieces(items: list[Held], model: ModelConfig, world: World) -> list[HeldPiece]:
    """Divides what an optimizer holds into pieces of units."""
    pieces = []
    for item in items:
        for block in fragment_blocks(item.parameter, item.shape, model, tp=world.layout.tp, rank=world.tp_rank):
            first = block.row * block.cols
            start, end = max(item.start, first), min(item.end, first + block.rows * block.cols)
            if start < end:
                piece = _piece(block, start - first, end - first)
                pieces.append(HeldPiece(piece=piece, held=item, offset=start - item.start))
    return pieces


def _piece(block: Block, start: int, end: int) -> Piece:
    """Returns elements `start` to `end` of a block as a piece."""
    return Piece(
        unit=block.unit,
        row=block.unit_row,
        col=block.unit_col,
        rows=block.rows,
        cols=block.cols,
        start=start,
        end=end,
    )


def shared_pieces(trainee: Trainee) -> list[HeldPiece]:
    """Divides this rank's fragments of shared matrices into pieces of units."""
    if not isinstance(trainee.optimizer, CanzonaOptimizer):
        return []
    pieces, world = [], trainee.world
    for item in trainee.optimizer.matrices.fragments:
        blocks = matrix_blocks(item.matrix, trainee.config.model, tp=world.layout.tp, rank=world.tp_rank)
        for block in blocks:
            piece = _piece(block, 0, block.rows * block.cols)
            pieces.append(HeldPiece(piece=piece, held=item, offset=block.row * block.cols))
    return pieces


def _fields_of(item: Kept) -> dict[str, torch.Tensor]:
    """Returns the master and all state of the same length, by name."""
    elementwise = {
        key: value
        for key, value in item.state.items()
        if isinstance(value, torch.Tensor) and value.numel() == item.master.numel() and value.dim() > 0
    }
    return {MASTER: item.master.detach(), **elementwise}


def _wholes(trainee: Trainee) -> dict[str, dict[str, torch.Tensor | Scalar]]:
    """Collects masters and state of the matrices this rank updates, by name and key."""
    if not isinstance(trainee.optimizer, CanzonaOptimizer):
        return {}
    wholes: dict[str, dict[str, torch.Tensor | Scalar]] = {}
    for name, saved in trainee.optimizer.matrices.state_dict().items():
        assert isinstance(saved, dict)
        wholes[name] = {MASTER: saved["master"]}
        for key, value in saved["state"].items():
            wholes[name][key] = _storable(name, key, value)
        wholes[name] |= {f"{GROUP}{key}": value for key, value in saved["group"].items()}
    return wholes


def _storable(name: str, key: object, value: object) -> torch.Tensor | Scalar:
    if isinstance(key, str) and key != MASTER and "/" not in key and not key.startswith(GROUP):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in DTYPES:
            return value
        if value is None or isinstance(value, bool | int | float | str):
            return value
    reason = f"the optimizer keeps a {type(value).__name__} for {name} under this key, which a checkpoint cannot store"
    fix = "keep dense tensors, numbers or text, under text keys without a slash and other than `master`"
    raise ConfigError(Problem(key="optimizer.source", value=str(key), reason=reason, fix=fix))


def _holding(wholes: Mapping[str, Mapping[str, torch.Tensor | Scalar]], pieces: list[HeldPiece]) -> Holding:
    """Describes this rank's holdings for the other ranks."""
    return Holding(
        wholes={
            name: sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor)) for name, state in wholes.items()
        },
        pieces=tuple(
            (item.piece, sum(value.itemsize for value in _fields_of(item.held).values()) * item.piece.elements)
            for item in pieces
        ),
    )


def share(holdings: Sequence[Holding], elements: Mapping[str, int]) -> Writers:
    """Assigns each tensor and piece to one of its holders: to the one with least to write so far.

    Args:
        holdings: every rank's share.
        elements: the number of elements of every unit that comes in pieces.

    Raises:
        ValueError: the pieces of a unit do not make it up.
    """
    load = [0] * len(holdings)
    """The bytes that each rank writes."""
    wholes = _shared([holding.wholes for holding in holdings], load)
    pieces = _shared([dict(holding.pieces) for holding in holdings], load)
    made_up: dict[str, int] = defaultdict(int)
    for piece in pieces:
        made_up[piece.unit] += piece.elements
    for unit, count in made_up.items():
        if count != elements[unit]:
            raise ValueError(f"{unit} has {elements[unit]} elements, but its pieces do not add up to that")
    return Writers(wholes=wholes, pieces=pieces)


def _shared[T](held: Sequence[Mapping[T, int]], load: list[int]) -> dict[T, int]:
    """Chooses a writer for each item, and adds its size to `load`."""
    holdings: dict[T, tuple[int, list[int]]] = {}
    for rank, sizes in enumerate(held):
        for item, size in sizes.items():
            holdings.setdefault(item, (size, []))[1].append(rank)
    writers: dict[T, int] = {}
    # What has one holder first: the rest evens it out.
    for item, (size, holders) in sorted(holdings.items(), key=lambda entry: (len(entry[1][1]), str(entry[0]))):
        writers[item] = min(holders, key=lambda rank: (load[rank], rank))
        load[writers[item]] += size
    return writers


_PYTHON_VERSION = 3  # of the tuple random.getstate() returns
_MEGATRON = "megatron."


def random_states() -> dict[str, torch.Tensor]:
    """Copies the random states of torch (host and device), Megatron's tracker,
    Python and numpy to host tensors."""
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


def check_random_states(states: dict[str, torch.Tensor]) -> None:
    """Compares `states` with those of this process, and tries them on generators that nobody uses.

    Raises:
        Exception: they are no such states; the kind depends on the generator. Megatron's are of another
        length on another device.
    """
    for name, current in random_states().items():
        if name != "cuda" and not name.startswith(_MEGATRON):
            state = states[name]
            if state.dtype != current.dtype or (state.shape != current.shape and name != "python_gauss"):
                raise ValueError(f"{name} is no state of a random generator")
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_of_python(states))
    np.random.RandomState().set_state(_of_numpy(states))


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restores what `random_states` copied; skips a device's state if there is no such device."""
    torch.set_rng_state(states["torch"])
    random.setstate(_of_python(states))
    np.random.set_state(_of_numpy(states))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_MEGATRON): state for name, state in states.items() if name.startswith(_MEGATRON)}
    get_cuda_rng_tracker().set_states(tracked)


def _of_python(states: dict[str, torch.Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    gauss = states["python_gauss"].tolist()
    return _PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _of_numpy(states: dict[str, torch.Tensor]) -> tuple[str, npt.NDArray[np.uint32], int, int, float]:
    *keys, position, has_gauss = states["numpy"].tolist()
    return "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(states["numpy_gauss"].item())
