"""Reads a checkpoint's tensors by the model's names: whole tensors, or any rectangle of a unit.

Stored pieces are assembled as needed. Does not import Megatron, so that weights can be read without it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from canzona_cli.checkpoint.contents import AVERAGE, MASTER, RANDOM
from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Piece, Scalar
from canzona_cli.checkpoint.verify import problem_of
from canzona_cli.core.errors import CheckpointInvalid, Problem
from canzona_cli.core.model.geometry import Block, stored_blocks, unit_shape
from canzona_cli.core.optimizers.muon_facts import DISTRUSTED
from canzona_cli.core.setup import ModelConfig


class Reader:
    """A reader of a checkpoint's stored tensors and scalars, and of any part of a unit (a tensor in model
    space, see `model.geometry`), regardless of the tensors in which the unit is stored.

    Files are memory-mapped, and only the requested parts are read. The pages that are read count as memory of this
    process, so files are mapped anew after some bytes; after more if there are more tensors, as with many experts,
    because a file's list of tensors is read each time.
    """

    def __init__(self, folder: Path, manifest: Manifest, model: ModelConfig) -> None:
        self._folder, self._manifest, self.model = folder, manifest, model
        self._files: dict[str, safe_open] = {}
        self._mapped_bytes, self._most_mapped = 0, (1 << 15) * len(manifest.tensors)
        self._sources: dict[str, list[tuple[str, Block]]] = defaultdict(list)
        """The tensors that contain parts of each unit, as pairs of a tensor's name and the block that it
        contains."""
        self._fields: dict[str, list[str]] = defaultdict(list)
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        """The pieces of each tensor that is stored in pieces, each with the name under which it is stored."""
        for stored, tensor in manifest.tensors.items():
            full_name, shape = tensor.whole_name(stored), tensor.shape
            name, _, field = full_name.rpartition("/")
            if tensor.piece is not None:
                self._pieces[full_name].append((stored, tensor.piece))
                if len(self._pieces[full_name]) > 1:
                    continue
                shape = unit_shape(name, model)
            self._fields[name].append(field)
            if field == MASTER:
                for block in stored_blocks(name, shape, model):
                    self._sources[block.unit].append((name, block))
        self._scalars: dict[str, dict[str, Scalar]] = defaultdict(dict)
        for stored, value in manifest.scalars.items():
            name, _, key = stored.rpartition("/")
            self._scalars[name][key] = value

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def fields(self, name: str) -> list[str]:
        """Returns the fields stored under a name; empty if nothing is stored under that name."""
        return self._fields.get(name, [])

    def unit_fields(self, unit: str) -> list[str]:
        """Returns the fields of the first tensor in which a unit is stored.

        Raises:
            CheckpointInvalid: the unit is not stored.
        """
        name, _ = self._stored(unit)[0]
        return self.fields(name)

    def tensor(self, name: str, field: str) -> torch.Tensor:
        """Reads a complete tensor, and assembles it from its pieces if necessary.

        Raises:
            CheckpointInvalid: the tensor or a piece is not stored, or its values cannot be used.
        """
        stored = f"{name}/{field}"
        if stored in self._pieces:
            shape = unit_shape(name, self.model)
            tensor = self._from_pieces(name, field, 0, shape[0] if len(shape) > 1 else 1).view(shape)
        else:
            tensor = self._open(stored).get_tensor(stored)  # type: ignore[no-untyped-call]
        return self._check_values(name, field, tensor)

    def master(self, unit: str, rows: range | None = None, field: str = MASTER) -> torch.Tensor:
        """Reads a unit's fp32 master weight, or with the field `AVERAGE` the weight's average.

        Args:
            rows: the rows of a matrix, or the elements of a vector, to read; None for all.

        Raises:
            CheckpointInvalid: a part is not stored, or values are not finite.
        """
        shape = unit_shape(unit, self.model)
        rows = range(shape[0]) if rows is None else rows
        if len(shape) == 1:
            return self.region(unit, field, range(1), rows).view(-1)
        return self.region(unit, field, rows, range(shape[1]))

    def piece(self, piece: Piece, field: str) -> torch.Tensor:
        """Reads the elements of a piece as a flat tensor.

        Raises:
            CheckpointInvalid: see `region`.
        """
        first_row, end_row = piece.start // piece.cols, -(-piece.end // piece.cols)
        rows = range(piece.row + first_row, piece.row + end_row)
        cols = range(piece.col, piece.col + piece.cols)
        skipped = first_row * piece.cols
        return self.region(piece.unit, field, rows, cols).reshape(-1)[piece.start - skipped : piece.end - skipped]

    def block(self, block: Block, field: str) -> torch.Tensor:
        """Reads a block of a unit as a (rows, columns) tensor.

        Raises:
            CheckpointInvalid: see `region`.
        """
        rows = range(block.unit_row, block.unit_row + block.rows)
        return self.region(block.unit, field, rows, range(block.unit_col, block.unit_col + block.cols))

    def region(self, unit: str, field: str, rows: range, cols: range) -> torch.Tensor:
        """Reads a rectangle of a unit into host memory as a (rows, columns) tensor.

        Raises:
            CheckpointInvalid: a part is not stored, or its values cannot be used.
        """
        parts = []
        for name, block in self._stored(unit):
            start, end = max(rows.start, block.unit_row), min(rows.stop, block.unit_row + block.rows)
            if start < end:
                part = self._rows(name, field, block.row + start - block.unit_row, end - start)
                parts.append(part[:, cols.start : cols.stop])
        region = torch.cat(parts) if len(parts) > 1 else next(iter(parts), torch.empty(0, 0))
        if region.shape != (len(rows), len(cols)):
            raise CheckpointInvalid(missing_tensor(f"{unit}/{field}"))
        return self._check_values(unit, field, region)

    def step(self, unit: str) -> float | None:
        """Returns the number of AdamW steps that is stored for a unit; None if there is none."""
        steps = self.scalars(unit).get("step")
        return float(steps) if isinstance(steps, int | float) else None

    def scalars(self, name: str) -> dict[str, Scalar]:
        """Returns the scalars stored under a name, by key."""
        return self._scalars.get(name, {})

    def marks(self, units: Iterable[str]) -> dict[str, Scalar]:
        """Returns the scalar `distrusted` for a matrix that consists of these units: the largest value among
        the tensors in which the units are stored; empty if no tensor has this scalar.

        Raises:
            CheckpointInvalid: a unit is not stored.
        """
        names = {name for unit in units for name, _ in self._stored(unit)}
        marks = [value for name in names if isinstance(value := self.scalars(name).get(DISTRUSTED), int)]
        return {DISTRUSTED: max(marks)} if marks else {}

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Reads the random states that a rank of the saving run had, by generator."""
        name = f"{RANDOM}{rank:05d}"
        return {field: self.tensor(name, field) for field in self.fields(name)}

    def problem(self, reason: str) -> Problem:
        """Returns the problem to report for stored state that cannot be used."""
        return problem_of(self._folder, MANIFEST, reason)

    def _check_values(self, name: str, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor unchanged, after checking that training can resume with its values.

        Masters and averages must be finite. Optimizer state must not contain NaN, except for a user's own optimizer.

        Raises:
            CheckpointInvalid: the values do not satisfy these conditions.
        """
        weights = field in (MASTER, AVERAGE)
        if weights and tensor.numel() and all(bound.isfinite() for bound in torch.aminmax(tensor)):
            return tensor  # the usual case; isfinite() of all elements would need more memory
        bad = ~tensor.isfinite() if weights else tensor.isnan()
        if (weights or self._manifest.optimizer != "custom") and bool(bad.any()):
            kind = "infinite or NaN" if weights else "NaN"
            reason = f"{int(bad.sum()):,} of {tensor.numel():,} elements read from {name}/{field} are {kind}"
            raise CheckpointInvalid(self.problem(reason))
        return tensor

    def _stored(self, unit: str) -> Sequence[tuple[str, Block]]:
        """Returns the tensors in which a unit is stored, each with the block of the unit that it contains, in
        the order of rows."""
        if unit not in self._sources:
            raise CheckpointInvalid(missing_tensor(unit))
        return sorted(self._sources[unit], key=lambda source: source[1].unit_row)

    def _rows(self, name: str, field: str, row: int, count: int) -> torch.Tensor:
        """Reads `count` rows, starting at `row`, of a tensor as a (count, columns) tensor."""
        stored = f"{name}/{field}"
        if stored in self._pieces:
            return self._from_pieces(name, field, row, count)
        entry = self._manifest.tensors.get(stored)
        if entry is not None and len(entry.shape) == 1:
            return self.tensor(name, field).view(1, -1)
        return self._slice(stored, row, row + count)

    def _from_pieces(self, name: str, field: str, row: int, count: int) -> torch.Tensor:
        """Reads `count` rows, starting at `row`, of a unit that is stored in pieces, as a (count, columns)
        tensor."""
        shape = unit_shape(name, self.model)
        region = torch.empty(count, shape[-1])
        missing = region.numel()
        for stored, piece in self._pieces[f"{name}/{field}"]:
            start = max(piece.start, (row - piece.row) * piece.cols)
            end = min(piece.end, (row + count - piece.row) * piece.cols)
            if start < end and piece.col + piece.cols <= shape[-1]:
                data = self._slice(stored, start - piece.start, end - piece.start)
                top, bottom = start // piece.cols, -(-end // piece.cols)
                target = region[piece.row + top - row : piece.row + bottom - row, piece.col : piece.col + piece.cols]
                # A piece may start or end within a row, so it is written into a flat copy of all its rows.
                flat = target.clone(memory_format=torch.contiguous_format).view(-1)
                flat[start - top * piece.cols : end - top * piece.cols] = data
                target.copy_(flat.view_as(target))
                missing -= len(data)
        if missing:
            raise CheckpointInvalid(missing_tensor(f"{name}/{field}"))
        return region

    def _slice(self, stored: str, start: int, end: int) -> torch.Tensor:
        part: torch.Tensor = self._open(stored).get_slice(stored)[start:end]  # type: ignore[no-untyped-call]
        self._mapped_bytes += part.nbytes
        return part

    def _open(self, stored: str) -> safe_open:
        """Returns the mapped file that contains a stored tensor; raises CheckpointInvalid if it is not
        stored."""
        if stored not in self._manifest.tensors:
            raise CheckpointInvalid(missing_tensor(stored))
        file = self._manifest.tensors[stored].file
        if self._mapped_bytes > self._most_mapped:
            self._files.clear()
            self._mapped_bytes = 0
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]


def missing_tensor(name: str) -> Problem:
    """Returns the problem to report for a tensor that the run needs and the checkpoint does not have."""
    reason = "the checkpoint does not have this tensor: another model or optimizer wrote it"
    fix = "resume with the recipe that the run was started with, or start a new run with run.dir=DIR"
    return Problem(key="checkpoint.resume", value=name, reason=reason, fix=fix)
