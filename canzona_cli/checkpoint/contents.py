"""Checks a checkpoint against the run that saved it: its settings, and names, types,
shapes and places in its model.

The manifest has all of it, and the files' own tables agree with it (`canzona_cli.checkpoint.verify`), so a
checkpoint is judged as a whole before a tensor of it is opened: by the launcher before it starts workers
(`saved_run`), by `canzona checkpoint verify` (`verify_chosen`), and by the workers themselves
(`content_problems`). What tensors hold, NaN among them, is seen where they are read.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Piece, Scalar, StoredTensor
from canzona_cli.checkpoint.store import Chosen, StoredCheckpoint
from canzona_cli.checkpoint.verify import (
    OnBytes,
    foreign_files,
    problem_of,
    read_manifest,
    shortened,
    table_problems,
    verify,
    verify_file,
    way_out,
)
from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import ModelConfig, RunConfig
from canzona_cli.errors import CanzonaError, CheckpointInvalid, ConfigError, Problem, refuse
from canzona_cli.model.families import EMBEDDING, OUTPUT, family_of
from canzona_cli.model.geometry import whole_shape
from canzona_cli.optimizers.muon_facts import DISTRUSTED

MASTER: Final = "master"
GROUP: Final = "group:"
"""The prefix of keys that hold numbers of a whole parameter group."""
ELEMENTWISE: Final = ("adamw", "muon")
"""Optimizers whose state is elementwise, so that it can be cut and put together differently."""
RANDOM: Final = "random."
"""The prefix of the names of a rank's random states."""
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The keys of state that has an element for each element of the weight."""
_ORTHOGONALISED: Final = ("muon", "normuon")
"""The optimizers that may stop trusting the Gram form for a matrix."""
_RANDOM_TYPES: Final = ("U8", "I64", "F64")
_LAYER: Final = re.compile(r"layers\.(\d+)\.\S+")
_HEAD: Final = re.compile(r"[qkv]\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A checkpoint whose bytes have all been hashed and whose tables have been compared with its model."""

    checkpoint: StoredCheckpoint
    bytes: int
    """The bytes that were read."""
    seconds: float
    problems: tuple[Problem, ...]
    foreign: tuple[str, ...]
    """Names in its folder that are not part of it."""


def content_problems(folder: Path, manifest: Manifest, model: ModelConfig) -> list[Problem]:
    """Lists what is wrong with the tables of a checkpoint's manifest; opens no other file."""
    reasons = list(_reasons(manifest, model))
    if not reasons:
        return []
    first = problem_of(folder, MANIFEST, reasons[0])  # its way out, which other folders are read for, is that of all
    return [replace(first, reason=reason) for reason in reasons]


def _reasons(manifest: Manifest, model: ModelConfig) -> Iterator[str]:
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for stored, tensor in manifest.tensors.items():
        whole = tensor.whole(stored)
        name, _, field = whole.rpartition("/")
        wrong = _wrong_tensor(name, field, tensor, manifest, model)
        if wrong:
            yield f"tensors.{stored}: {wrong}"
        elif tensor.piece is not None:
            pieces[whole].append(tensor.piece)
    for whole, parts in pieces.items():
        if whole in manifest.tensors or not _tiled(parts, *_rectangle(whole_shape(whole.rpartition("/")[0], model))):
            yield f"tensors.{whole}: its pieces overlap, or leave gaps"
    for stored, value in manifest.scalars.items():
        if wrong := _wrong_scalar(stored, value, manifest):
            yield f"scalars.{stored}: {wrong}"


def _wrong_tensor(name: str, field: str, tensor: StoredTensor, manifest: Manifest, model: ModelConfig) -> str:
    if name.startswith(RANDOM):
        known = tensor.dtype in _RANDOM_TYPES and len(tensor.shape) == 1 and tensor.piece is None
        return "" if known else f"{tensor.dtype} {tensor.shape} is no state of a random generator"
    if not _in_model(name, model):
        return "the model has nothing of that name"
    shape = whole_shape(name, model)
    owner = _own_optimizers(name, manifest.optimizer)
    if field != MASTER and owner is None:
        return ""
    if field not in (MASTER, *_MOMENTS) and owner != "matrix":
        return "no optimizer keeps that"
    if tensor.dtype != "F32":
        return f"it is {tensor.dtype}, and all that is kept of a weight is F32"
    if field not in (MASTER, *_MOMENTS):
        return "" if tensor.piece is None else "it is no element of a weight, so it has no pieces"
    if tensor.piece is None:
        return "" if tensor.shape == shape else f"it is {tensor.shape}, and the model has {shape}"
    rows, cols = _rectangle(shape)
    piece = tensor.piece
    inside = piece.unit == name and piece.row + piece.rows <= rows and piece.col + piece.cols <= cols
    return "" if inside else f"its piece is not inside of the model's {shape}"


def _own_optimizers(name: str, optimizer: str) -> str | None:
    """Returns who keeps state for a weight: AdamW and its like (element), the matrices' optimizer (matrix),
    or one that may keep anything (None)."""
    if name.endswith("weight") or optimizer in ELEMENTWISE:
        return "element"
    return None if optimizer == "custom" else "matrix"


def _in_model(name: str, model: ModelConfig) -> bool:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name in (EMBEDDING, OUTPUT) or name.endswith("norm.weight")
    part = name.split(".", 2)[2]
    kinds = {kind for weight in family_of(model).weights(model) for kind in weight.kinds}
    known = part in kinds or part.endswith("norm.weight")
    if head := _HEAD.fullmatch(part):
        of_queries = part.startswith("q")
        known = int(head[1]) < (model.num_attention_heads if of_queries else model.num_query_groups)
    return known and int(layer[1]) < model.num_layers


def _rectangle(shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns; a vector is one row."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])


def _tiled(pieces: Sequence[Piece], all_rows: int, all_cols: int) -> bool:
    """Returns True if pieces cover a whole exactly once: bands of rows, cut into columns,
    in consecutive runs."""
    rectangles: dict[tuple[int, int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        rectangles[piece.row, piece.rows, piece.col, piece.cols].append((piece.start, piece.end))
    for (_, rows, _, cols), runs in rectangles.items():
        if not _consecutive(runs, rows * cols):
            return False
    bands = [list(band) for _, band in groupby(sorted(rectangles), key=lambda rectangle: rectangle[:2])]
    across = all(_consecutive([(col, col + cols) for _, _, col, cols in band], all_cols) for band in bands)
    return across and _consecutive([(band[0][0], band[0][0] + band[0][1]) for band in bands], all_rows)


def _consecutive(runs: Sequence[tuple[int, int]], end: int) -> bool:
    """Returns True if runs follow one another without gaps, from 0 to `end`."""
    reached = 0
    for first, last in sorted(runs):
        if first != reached:
            return False
        reached = last
    return reached == end


def _wrong_scalar(stored: str, value: Scalar, manifest: Manifest) -> str:
    key = stored.rpartition("/")[2]
    if manifest.optimizer == "custom":
        reserved = key.removeprefix(GROUP) in ("params", "lr", "weight_decay")
        return "canzona sets that itself" if key.startswith(GROUP) and reserved else ""
    if key == DISTRUSTED and manifest.optimizer in _ORTHOGONALISED:
        return "" if isinstance(value, int) and value > 0 else f"{value} is not a number of steps"
    if key != "step":
        return f"{manifest.optimizer} keeps no such number"
    counted = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not counted or not 0 <= float(value or 0) <= manifest.progress.step or float(value or 0) % 1:
        return f"{value} is not a number of steps up to {manifest.progress.step}"
    return ""


def saved_run(checkpoint: Path) -> tuple[Manifest, RunConfig]:
    """Reads a checkpoint's manifest and the settings of its run; of big files only the headers.

    Raises:
        CheckpointInvalid: it is damaged, or holds what no run of its model saves, as far as that shows.
    """
    manifest = read_manifest(checkpoint)
    problems: list[Problem | None] = []
    for name in ("config.yaml", "layout.json"):
        if (entry := manifest.files.get(name)) is None:
            problems.append(Problem(key=f"{checkpoint.name}/{name}", reason="the manifest does not list this file"))
        else:
            problems.append(verify_file(checkpoint, name, entry))
    refuse([problem for problem in problems if problem is not None], CheckpointInvalid)
    with of_checkpoint(checkpoint):
        saved = load_resolved(checkpoint / "config.yaml")
    wrong = table_problems(checkpoint, manifest, [*manifest.files])
    wrong += content_problems(checkpoint, manifest, saved.model)
    refuse(shortened(wrong), CheckpointInvalid)
    return manifest, saved


@contextmanager
def of_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Turns errors in reading the saved run into errors of the checkpoint, rather than of what was typed."""
    try:
        yield
    except ConfigError as error:
        fix = way_out(checkpoint)
        raise CheckpointInvalid(
            *(replace(problem, key=f"{checkpoint.name}: {problem.key}", fix=fix) for problem in error.problems)
        ) from None


def saved_config(folder: Path, manifest: Manifest) -> RunConfig | None:
    """Reads the settings of the run that saved it; None if they cannot be read or do not match the manifest."""
    entry = manifest.files.get("config.yaml")
    if entry is None or verify_file(folder, "config.yaml", entry) is not None:
        return None
    try:
        return load_resolved(folder / "config.yaml")
    except (CanzonaError, OSError):
        return None


def verify_chosen(chosen: Chosen, on_bytes: OnBytes) -> tuple[tuple[Verified, ...], tuple[str, ...]]:
    """Hashes all files of every chosen checkpoint.

    Returns:
        The verified checkpoints, and the names of those that were removed meanwhile.

    Raises:
        CheckpointInvalid: all have been removed.
    """
    verified = {checkpoint.name: _verified(checkpoint, on_bytes) for checkpoint in chosen.checkpoints}
    left = tuple(result for result in verified.values() if result is not None)
    removed = tuple(name for name, result in verified.items() if result is None)
    if not left:
        raise CheckpointInvalid(*(Problem(key=name, reason="has been removed meanwhile") for name in removed))
    return left, removed


def _verified(checkpoint: StoredCheckpoint, on_bytes: OnBytes) -> Verified | None:
    """Hashes all files of a checkpoint; None if it is removed meanwhile."""
    counts: list[int] = []  # appending is safe from several threads
    began = time.perf_counter()

    def count(done: int) -> None:
        counts.append(done)
        on_bytes(done)

    foreign: tuple[str, ...] = ()
    try:
        manifest, problems = verify(checkpoint.path, on_bytes=count)
        foreign = foreign_files(checkpoint.path, manifest)
        if (config := saved_config(checkpoint.path, manifest)) is not None:
            problems += content_problems(checkpoint.path, manifest, config.model)
    except FileNotFoundError:
        return None
    except CheckpointInvalid as error:
        problems = list(error.problems)
    if not checkpoint.path.exists():
        return None
    seconds = time.perf_counter() - began
    return Verified(
        checkpoint=checkpoint, bytes=sum(counts), seconds=seconds, problems=tuple(problems), foreign=foreign
    )
