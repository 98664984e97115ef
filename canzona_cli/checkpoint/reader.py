"""Reads a checkpoint in model space: whole tensors, or any rows of a unit, whatever they are stored in.

Nothing of Megatron: commands that only want the weights do without it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from canzona_cli.checkpoint.contents import MASTER, RANDOM
from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Piece, Scalar
from canzona_cli.checkpoint.verify import problem_of
from canzona_cli.config.schema import ModelConfig
from canzona_cli.errors import CheckpointInvalid, Problem
from canzona_cli.model.geometry import Block, stored_blocks, unit_shape
from canzona_cli.optimizers.muon_facts import DISTRUSTED


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A block of a unit within a stored tensor."""

    name: str
    block: Block


class Reader:
    """A reader of parts of units, whatever tensors they are stored in.
    It maps files and reads only what is needed."""

    def __init__(self, folder: Path, manifest: Manifest, model: ModelConfig) -> None:
        self._folder, self._manifest, self.model = folder, manifest, model
        self._files: dict[str, safe_open] = {}
        self._sources: dict[str, list[_Source]] = defaultdict(list)
        self._fields: dict[str, list[str]] = defaultdict(list)
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        """The stored name and the piece, for each piece of a whole, by the whole's name."""
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
        self.unmap()

    def unmap(self) -> None:
        """Closes the files, because their pages count as this process's memory. Reading opens them again."""
        self._files.clear()

    def fields(self, name: str) -> list[str]:
        """Lists the fields stored under a name; empty if there is no such name."""
        return self._fields.get(name, [])

    def unit_fields(self, unit: str) -> list[str]:
        """Lists the fields of the tensor that a unit is stored in.

        Raises:
            CheckpointInvalid: it is not stored.
        """
        return self.fields(self._stored(unit)[0].name)

    def whole(self, name: str, field: str) -> torch.Tensor:
        """Reads a stored tensor as it is.

        Raises:
            CheckpointInvalid: it is not stored, or not all of it.
        """
        if f"{name}/{field}" in self._pieces:
            shape = unit_shape(name, self.model)
            whole = self._from_pieces(name, field, 0, shape[0] if len(shape) > 1 else 1).view(shape)
            return self._sound(name, field, whole)
        tensor: torch.Tensor = self._open(f"{name}/{field}").get_tensor(f"{name}/{field}")  # type: ignore[no-untyped-call]
        return self._sound(name, field, tensor)

    def master(self, unit: str) -> torch.Tensor:
        """Reads a unit's whole fp32 weight in its own shape.

        Raises:
            CheckpointInvalid: a part of it is not stored, or it is not finite.
        """
        if self.fields(unit):  # without a second copy, which the rows of a region are
            return self.whole(unit, MASTER)
        shape = unit_shape(unit, self.model)
        return self.region(unit, MASTER, row=0, rows=shape[0], col=0, cols=shape[1])

    def master_rows(self, unit: str, rows: range) -> torch.Tensor:
        """Reads rows of a unit's fp32 weight, or elements of a vector.

        Raises:
            CheckpointInvalid: as of `master`.
        """
        shape = unit_shape(unit, self.model)
        if len(shape) == 1:
            return self.master(unit)[rows.start : rows.stop]
        return self.region(unit, MASTER, row=rows.start, rows=len(rows), col=0, cols=shape[1])

    def region(self, unit: str, field: str, *, row: int, rows: int, col: int, cols: int) -> torch.Tensor:
        """Reads a rectangle of a unit, (rows, cols), to the host.

        Raises:
            CheckpointInvalid: a part of it is not stored.
        """
        region = torch.empty(rows, cols)
        missing = rows
        for source in self._stored(unit):
            block = source.block
            first, last = max(row, block.unit_row), min(row + rows, block.unit_row + block.rows)
            if first >= last:
                continue
            at = block.row + first - block.unit_row
            region[first - row : last - row] = self._rows(source.name, field, at, last - first)[:, col : col + cols]
            missing -= last - first
        if missing:
            raise CheckpointInvalid(lacking(f"{unit}/{field}"))
        return self._sound(unit, field, region)

    def step(self, unit: str) -> float | None:
        """Returns how many steps AdamW has made with a unit."""
        steps = self.scalars(unit).get("step")
        return float(steps) if isinstance(steps, int | float) else None

    def scalars(self, name: str) -> dict[str, Scalar]:
        """Returns state other than tensors, by key."""
        return self._scalars.get(name, {})

    def marks(self, units: Iterable[str]) -> dict[str, Scalar]:
        """Returns the largest `distrusted` of the tensors that these units are stored in.

        Raises:
            CheckpointInvalid: one is not stored.
        """
        wholes = {source.name for unit in units for source in self._stored(unit)}
        marks = [value for name in wholes if isinstance(value := self.scalars(name).get(DISTRUSTED), int)]
        return {DISTRUSTED: max(marks)} if marks else {}

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Reads the random states of a rank of the run that saved."""
        name = f"{RANDOM}{rank:05d}"
        return {field: self.whole(name, field) for field in self.fields(name)}

    def problem(self, reason: str) -> Problem:
        """Returns the problem of something that is stored and cannot be used."""
        return problem_of(self._folder, MANIFEST, reason)

    def _sound(self, name: str, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor if training can resume with it: weights are finite,
        and our optimizers keep no NaN."""
        if field == MASTER and tensor.numel() and all(bound.isfinite() for bound in torch.aminmax(tensor)):
            return tensor  # without what isfinite() needs: another tensor as large
        bad = ~tensor.isfinite() if field == MASTER else tensor.isnan()
        if (field == MASTER or self._manifest.optimizer != "custom") and bool(bad.any()):
            what = "infinite or no numbers" if field == MASTER else "no numbers"
            reason = f"{int(bad.sum()):,} of the {tensor.numel():,} elements read of {name}/{field} are {what}"
            raise CheckpointInvalid(self.problem(reason))
        return tensor

    def _stored(self, unit: str) -> Sequence[_Source]:
        if unit not in self._sources:
            raise CheckpointInvalid(lacking(unit))
        return self._sources[unit]

    def _rows(self, name: str, field: str, row: int, rows: int) -> torch.Tensor:
        stored = f"{name}/{field}"
        if stored in self._pieces:
            return self._from_pieces(name, field, row, rows)
        if stored not in self._manifest.tensors:
            raise CheckpointInvalid(lacking(stored))
        if len(self._manifest.tensors[stored].shape) == 1:
            return self.whole(name, field).view(1, -1)
        part: torch.Tensor = self._open(stored).get_slice(stored)[row : row + rows]  # type: ignore[no-untyped-call]
        return part

    def _from_pieces(self, name: str, field: str, row: int, rows: int) -> torch.Tensor:
        """Reads rows of a unit that is stored in pieces, (rows, columns)."""
        shape = unit_shape(name, self.model)
        region = torch.empty(rows, shape[-1])
        missing = region.numel()
        for stored, piece in self._pieces[f"{name}/{field}"]:
            first = max(piece.start, (row - piece.row) * piece.cols)
            last = min(piece.end, (row + rows - piece.row) * piece.cols)
            if first < last and piece.col + piece.cols <= shape[-1]:
                part = trimmed(replace(piece, row=piece.row - row, start=first, end=last))
                data: torch.Tensor = self._open(stored).get_slice(stored)[first - piece.start : last - piece.start]  # type: ignore[no-untyped-call]
                paste(region, part, data)
                missing -= part.elements
        if missing:
            raise CheckpointInvalid(lacking(f"{name}/{field}"))
        return region

    def _open(self, stored: str) -> safe_open:
        if stored not in self._manifest.tensors:
            raise CheckpointInvalid(lacking(stored))
        file = self._manifest.tensors[stored].file
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]


def lacking(what: str) -> Problem:
    """Returns the problem of a name that a checkpoint of this model would have."""
    reason = "the checkpoint does not have it: it was written by another model or optimizer"
    fix = "resume with the recipe that the run was started with, or start a new run with run.dir=DIR"
    return Problem(key="checkpoint.resume", value=what, reason=reason, fix=fix)


def paste(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    """Write a piece's elements (flat) to their place in the whole, (rows, columns)."""
    for region, part in _runs(whole, piece, data):
        region.copy_(part)


def cut(region: torch.Tensor, piece: Piece, out: torch.Tensor) -> None:
    """Read a piece's elements into `out` (flat).

    Args:
        region: the rectangle's rows that have elements of the piece, from the first such row on, all its
            columns.
    """
    for part_of_region, part in _runs(region, replace(trimmed(piece), row=0, col=0), out):
        part.copy_(part_of_region)


def trimmed(piece: Piece) -> Piece:
    """Returns the same elements as a piece of only those rows that hold some of them."""
    above = piece.start // piece.cols
    return replace(
        piece,
        row=piece.row + above,
        rows=-(-piece.end // piece.cols) - above,
        start=piece.start - above * piece.cols,
        end=piece.end - above * piece.cols,
    )


def _runs(whole: torch.Tensor, piece: Piece, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Splits a flat piece into at most three rectangles (end of a row, whole rows, start of a row),
    with their data."""
    rectangle = whole[piece.row : piece.row + piece.rows, piece.col : piece.col + piece.cols]
    cols, position = piece.cols, 0
    flat = data.reshape(-1)
    at = piece.start
    while at < piece.end:
        row, col = divmod(at, cols)
        if col == 0 and piece.end - at >= cols:
            rows = (piece.end - at) // cols
            size = rows * cols
            yield rectangle[row : row + rows], flat[position : position + size].view(rows, cols)
        else:
            size = min(cols - col, piece.end - at)
            yield rectangle[row, col : col + size], flat[position : position + size]
        at, position = at + size, position + size
