"""Loads a checkpoint into a run of any layout, strategy or plan: each rank reads what it updates, and nothing else.

Weights are made from masters by the very path an update takes: rounded, sent to the tensor-parallel ranks, gathered
over the data-parallel ones.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open

from canzona_cli.checkpoint.manifest import Manifest, Piece, Scalar
from canzona_cli.checkpoint.pieces import cut, paste, trimmed
from canzona_cli.checkpoint.random_states import set_random_states
from canzona_cli.checkpoint.snapshot import GROUP, MASTER, HeldPiece, held_pieces
from canzona_cli.checkpoint.verify import read_manifest, table_problems, verify_file
from canzona_cli.config.schema import ModelConfig
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.engine.masters import MasterOptimizer
from canzona_cli.errors import CheckpointInvalid, Problem
from canzona_cli.megatron.holdings import gather_parameters, held, masters_to_model
from canzona_cli.megatron.messages import gather
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.trainee import Trainee
from canzona_cli.model.geometry import Block, stored_blocks, unit_shape
from canzona_cli.model.matrix import Matrix

ELEMENTWISE = ("adamw", "muon")
"""Optimizers whose state is elementwise, so that it can be cut and put together differently."""


def verify_together(world: World, folder: Path) -> Manifest:
    """Hash every file of a checkpoint, the ranks sharing the work, before anybody opens one. Collective.

    Raises:
        CheckpointInvalid: on all ranks together, with every file that is not what the manifest says.
    """
    problems: list[Problem] = []
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
    except CheckpointInvalid as error:
        problems += error.problems
    if manifest is not None:
        own = sorted(manifest.files)[world.rank :: world.world_size]
        for name in own:
            problem = verify_file(folder, name, manifest.files[name])
            problems += [] if problem is None else [problem]
        if not problems:
            problems += table_problems(folder, manifest, own)
    _refuse_together(problems)
    assert manifest is not None
    return manifest


@torch.no_grad()
def restore(trainee: Trainee, folder: Path, manifest: Manifest, *, weights_only: bool = False) -> None:
    """Weights, masters, optimizer state, schedule and random states, as they were when the checkpoint was taken.

    Random states are a rank's own: with another number of ranks they stay as they are after start-up. Collective.

    Args:
        weights_only: weights and masters alone; whatever optimizer they are of, and however it split them.

    Raises:
        CheckpointInvalid: on all ranks together: something that is needed is not in it.
    """
    world, config = trainee.world, trainee.config
    problems: list[Problem] = []
    try:
        with Reader(folder, manifest, config.model) as reader:
            pieces = held_pieces(held(trainee.optimizer, trainee.model), config.model, world)
            for _, of_one in groupby(pieces, key=lambda found: id(found.held)):
                _restore_held(list(of_one), reader, weights_only=weights_only)
            if isinstance(trainee.optimizer, CanzonaOptimizer):
                _restore_matrices(trainee.optimizer.matrices, reader, manifest, weights_only=weights_only)
            same = manifest.world_size == world.world_size and not weights_only
            states = reader.random_states(world) if same else {}
    except CheckpointInvalid as error:
        problems += error.problems
    _refuse_together(problems)
    masters_to_model(trainee.optimizer)
    if isinstance(trainee.optimizer, CanzonaOptimizer):
        trainee.optimizer.matrices.publish()
    gather_parameters(trainee.model)
    if not weights_only:
        trainee.schedule.step(increment=manifest.progress.step - trainee.schedule.num_steps)
    if states:
        set_random_states(states)


@dataclass(frozen=True, kw_only=True)
class _Problems:
    """What one rank has found, as it tells the others."""

    problems: tuple[Problem, ...]


def _refuse_together(problems: list[Problem]) -> None:
    """Raise CheckpointInvalid on all ranks if any of them has problems, each problem once. Collective."""
    everyone = gather(_Problems(problems=tuple(problems)))
    if found := {(problem.key, problem.reason): problem for theirs in everyone for problem in theirs.problems}:
        raise CheckpointInvalid(*found.values())


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A block of a unit within a stored tensor."""

    name: str
    block: Block


class Reader:
    """Reads parts of units, whatever tensors they are stored in. Maps files and reads only what is asked for."""

    def __init__(self, folder: Path, manifest: Manifest, model: ModelConfig) -> None:
        self._folder, self._manifest, self.model = folder, manifest, model
        self._files: dict[str, safe_open] = {}
        self._sources: dict[str, list[_Source]] = defaultdict(list)
        self._fields: dict[str, list[str]] = defaultdict(list)
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        """By whole's name: what it is stored as, where it is stored in pieces."""
        for stored, tensor in manifest.tensors.items():
            whole, shape = tensor.whole(stored), tensor.shape
            name, _, field = whole.rpartition("/")
            if tensor.piece is not None:
                self._pieces[whole].append((stored, tensor.piece))
                if len(self._pieces[whole]) > 1:
                    continue
                shape = unit_shape(name, model)
            self._fields[name].append(field)
            if field == MASTER:
                for block in stored_blocks(name, shape, model):
                    self._sources[block.unit].append(_Source(name=name, block=block))
        self._scalars: dict[str, dict[str, Scalar]] = defaultdict(dict)
        for stored, value in manifest.scalars.items():
            name, _, key = stored.rpartition("/")
            self._scalars[name][key] = value

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def fields(self, name: str) -> list[str]:
        """Scalars stored under a name; none if there is no such name."""
        return self._fields.get(name, [])

    def unit_fields(self, unit: str) -> list[str]:
        """Of a unit, whatever it is stored in.

        Raises:
            CheckpointInvalid: it is not stored.
        """
        return self.fields(self._stored(unit)[0].name)

    def whole(self, name: str, field: str) -> torch.Tensor:
        """A stored tensor as it is.

        Raises:
            CheckpointInvalid: it is not stored, or not all of it.
        """
        if f"{name}/{field}" in self._pieces:
            shape = unit_shape(name, self.model)
            return self._from_pieces(name, field, 0, shape[0] if len(shape) > 1 else 1).view(shape)
        tensor: torch.Tensor = self._open(f"{name}/{field}").get_tensor(f"{name}/{field}")  # type: ignore[no-untyped-call]
        return tensor

    def region(self, unit: str, field: str, *, row: int, rows: int, col: int, cols: int) -> torch.Tensor:
        """A rectangle of a unit, (rows, cols), on the host.

        Raises:
            CheckpointInvalid: a part of it is not stored.
        """
        found = torch.empty(rows, cols)
        missing = rows
        for source in self._stored(unit):
            block = source.block
            first, last = max(row, block.unit_row), min(row + rows, block.unit_row + block.rows)
            if first >= last:
                continue
            at = block.row + first - block.unit_row
            found[first - row : last - row] = self._rows(source.name, field, at, last - first)[:, col : col + cols]
            missing -= last - first
        if missing:
            raise CheckpointInvalid(_lacking(f"{unit}/{field}"))
        return found

    def step(self, unit: str) -> float | None:
        """Steps AdamW had made of a unit."""
        found = self.scalars(unit).get("step")
        return float(found) if isinstance(found, int | float) else None

    def scalars(self, name: str) -> dict[str, Scalar]:
        """State other than tensors, by key."""
        return self._scalars.get(name, {})

    def random_states(self, world: World) -> dict[str, torch.Tensor]:
        name = f"random.{world.rank:05d}"
        return {field: self.whole(name, field) for field in self.fields(name)}

    def _stored(self, unit: str) -> Sequence[_Source]:
        if unit not in self._sources:
            raise CheckpointInvalid(_lacking(unit))
        return self._sources[unit]

    def _rows(self, name: str, field: str, row: int, rows: int) -> torch.Tensor:
        stored = f"{name}/{field}"
        if stored in self._pieces:
            return self._from_pieces(name, field, row, rows)
        if stored not in self._manifest.tensors:
            raise CheckpointInvalid(_lacking(stored))
        if len(self._manifest.tensors[stored].shape) == 1:
            return self.whole(name, field).view(1, -1)
        part: torch.Tensor = self._open(stored).get_slice(stored)[row : row + rows]  # type: ignore[no-untyped-call]
        return part

    def _from_pieces(self, name: str, field: str, row: int, rows: int) -> torch.Tensor:
        """Rows of a unit that is stored in pieces, (rows, columns)."""
        shape = unit_shape(name, self.model)
        found = torch.empty(rows, shape[-1])
        missing = found.numel()
        for stored, piece in self._pieces[f"{name}/{field}"]:
            first = max(piece.start, (row - piece.row) * piece.cols)
            last = min(piece.end, (row + rows - piece.row) * piece.cols)
            if first < last and piece.col + piece.cols <= shape[-1]:
                wanted = trimmed(replace(piece, row=piece.row - row, start=first, end=last))
                data: torch.Tensor = self._open(stored).get_slice(stored)[first - piece.start : last - piece.start]  # type: ignore[no-untyped-call]
                paste(found, wanted, data)
                missing -= wanted.elements
        if missing:
            raise CheckpointInvalid(_lacking(f"{name}/{field}"))
        return found

    def _open(self, stored: str) -> safe_open:
        if stored not in self._manifest.tensors:
            raise CheckpointInvalid(_lacking(stored))
        file = self._manifest.tensors[stored].file
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]


def _restore_held(pieces: list[HeldPiece], reader: Reader, *, weights_only: bool) -> None:
    """A master and its state from the parts of units it consists of."""
    item = pieces[0].held
    fields = [MASTER] if weights_only else reader.unit_fields(pieces[0].piece.unit)
    read = {field: torch.empty(item.master.numel()) for field in fields}
    for found in pieces:
        piece = found.piece
        first, last = piece.start // piece.cols, -(-piece.end // piece.cols)
        for field, target in read.items():
            region = reader.region(
                piece.unit, field, row=piece.row + first, rows=last - first, col=piece.col, cols=piece.cols
            )
            cut(region, piece, target[found.offset : found.offset + piece.elements])
    item.master.copy_(read.pop(MASTER).view(item.master.shape))
    step = None if weights_only else reader.step(pieces[0].piece.unit)
    if read or step is not None:
        item.replace_state({key: value.to(item.master.device) for key, value in read.items()}, step)


def _restore_matrices(optimizer: MasterOptimizer, reader: Reader, manifest: Manifest, *, weights_only: bool) -> None:
    """The matrices canzona updates here."""
    state: dict[str, Mapping[str, object]] = {}
    problems: list[Problem] = []
    for group in optimizer.groups:
        for matrix in group.hosted:
            fields = reader.fields(matrix.name)
            if fields:
                wanted = [MASTER] if weights_only else fields
                tensors = {field: reader.whole(matrix.name, field) for field in wanted}
            elif weights_only or manifest.optimizer in ELEMENTWISE:
                tensors = _from_units(matrix, reader, weights_only=weights_only)
            else:
                problems.append(_other_splitting(matrix, manifest))
                continue
            if tuple(tensors[MASTER].shape) != (matrix.rows, matrix.cols):
                problems.append(_lacking(f"{matrix.name}/{MASTER} of shape {(matrix.rows, matrix.cols)}"))
                continue
            master = tensors.pop(MASTER)
            if weights_only:
                optimizer.masters[matrix.index].copy_(master)
                continue
            device = optimizer.masters[matrix.index].device
            kept = {key: tensor.to(device) if tensor.dim() else tensor for key, tensor in tensors.items()}
            scalars = reader.scalars(matrix.name)
            state[matrix.name] = {
                "master": master,
                "state": {**kept, **{key: value for key, value in scalars.items() if not key.startswith(GROUP)}},
                "group": {k.removeprefix(GROUP): value for k, value in scalars.items() if k.startswith(GROUP)},
            }
    if problems:
        raise CheckpointInvalid(*problems)
    if not weights_only:
        optimizer.load_state_dict(state)


def _from_units(matrix: Matrix, reader: Reader, *, weights_only: bool) -> dict[str, torch.Tensor]:
    """State of a matrix that was split differently when it was saved."""
    model = reader.model
    blocks = stored_blocks(matrix.name, (matrix.rows, matrix.cols), model)
    tensors = {}
    for field in [MASTER] if weights_only else reader.unit_fields(blocks[0].unit):
        whole = torch.empty(matrix.rows, matrix.cols)
        for block in blocks:
            whole[block.row : block.row + block.rows] = reader.region(
                block.unit, field, row=block.unit_row, rows=block.rows, col=0, cols=block.cols
            )
        tensors[field] = whole
    return tensors


def _lacking(what: str) -> Problem:
    reason = "the checkpoint does not have it: it was written by another model or optimizer"
    fix = "resume with the recipe that the run was started with, or start a new run with run.dir=DIR"
    return Problem(key="checkpoint.resume", value=what, reason=reason, fix=fix)


def _other_splitting(matrix: Matrix, manifest: Manifest) -> Problem:
    reason = (
        f"{manifest.optimizer} keeps state of whole matrices, and the checkpoint's are split as {manifest.splitting}"
    )
    fix = f"engine.splitting={manifest.splitting}"
    return Problem(key="engine.splitting", value=matrix.name, reason=reason, fix=fix)
