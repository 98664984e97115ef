"""Checks a checkpoint's manifest against the settings of its run: the names, types and shapes of tensors.

`canzona_cli.checkpoint.verify` ensures that the files agree with the manifest, so these checks need only the
manifest. They are made before workers start, weights are exported or text is generated (`saved_run`), by
`canzona checkpoint verify` (`verify_chosen`), and by the workers (`content_problems`). The values of tensors
are checked when they are read.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Final

from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Piece, Scalar, StoredTensor
from canzona_cli.checkpoint.store import ChosenCheckpoints, StoredCheckpoint
from canzona_cli.checkpoint.verify import (
    OnBytes,
    fallback_fix,
    foreign_files,
    limit_problems,
    problem_of,
    read_manifest,
    table_problems,
    verify,
    verify_file,
)
from canzona_cli.config.compose import load_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CanzonaError, CheckpointInvalid, ConfigError, Problem, refuse
from canzona_cli.core.model.families import (
    EMBEDDING,
    FINAL_BIAS,
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    family_of,
    layer_models,
)
from canzona_cli.core.model.geometry import unit_shapes, whole_shape
from canzona_cli.core.optimizers.facts import MOMENTS, MOMENTUM
from canzona_cli.core.optimizers.muon_facts import DISTRUSTED, STANDARD_STEPS
from canzona_cli.core.setup import ModelConfig
from canzona_cli.records.codec import load
from canzona_cli.records.corpus import DATA_FILE, DataPlan

MASTER: Final = "master"
"""The field with the fp32 weights."""
AVERAGE: Final = "ema"
"""The field with the average of the fp32 weights."""
GROUP: Final = "group:"
"""The key prefix of values from an optimizer's parameter group, which all matrices of the group share."""
ELEMENTWISE: Final = ("adamw", "muon")
"""The optimizers whose state is elementwise, so that a run can resume with another splitting."""
RANDOM: Final = "random."
"""The name prefix of a rank's random states."""
_LIKE_WEIGHTS: Final = (MASTER, AVERAGE, MOMENTUM, *MOMENTS)
"""The fields that have the same shape as the weight."""
_ORTHOGONALISED: Final = ("muon", "normuon")
"""The optimizers that store `distrusted` for a matrix after an untrusted update in Gram form."""
_RANDOM_TYPES: Final = ("U8", "I64", "F64")
_LAYER: Final = re.compile(r"layers\.(\d+)\.\S+")
_HEAD: Final = re.compile(r"[qkv]\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of verifying a checkpoint, that is, of hashing its files and comparing its tensors with the
    model."""

    checkpoint: StoredCheckpoint
    bytes: int
    """The number of bytes that were hashed."""
    seconds: float
    problems: tuple[Problem, ...]
    foreign: tuple[str, ...]
    """The names of files in the folder that do not belong to the checkpoint."""


def content_problems(folder: Path, manifest: Manifest, model: ModelConfig) -> list[Problem]:
    """Returns a problem for each entry of a checkpoint's manifest that does not belong to the model, and for
    each tensor whose pieces do not cover it exactly. Does not open the checkpoint's other files."""
    reasons = list(_reasons(manifest, model))
    if not reasons:
        return []
    # All problems have the same fix. It is determined only once, because this reads other folders.
    first_problem = problem_of(folder, MANIFEST, reasons[0])
    return [replace(first_problem, reason=reason) for reason in reasons]


def _reasons(manifest: Manifest, model: ModelConfig) -> Iterator[str]:
    """Yields the reasons of the problems that `content_problems` returns."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for stored, tensor in manifest.tensors.items():
        full_name = tensor.whole_name(stored)
        name, _, field = full_name.rpartition("/")
        if reason := _tensor_problem(name, field, tensor, manifest, model):
            yield f"tensors.{stored}: {reason}"
        elif tensor.piece is not None:
            pieces[full_name].append(tensor.piece)
    for full_name, parts in pieces.items():
        if full_name in manifest.tensors or not _cover_exactly(
            parts, *_rectangle(whole_shape(full_name.rpartition("/")[0], model))
        ):
            yield f"tensors.{full_name}: its pieces overlap or leave gaps"
    for stored, value in manifest.scalars.items():
        if reason := _scalar_problem(stored, value, manifest):
            yield f"scalars.{stored}: {reason}"


def _tensor_problem(name: str, field: str, tensor: StoredTensor, manifest: Manifest, model: ModelConfig) -> str:
    """Returns the reason why a tensor does not belong to the model and its optimizer; empty if it does."""
    if name.startswith(RANDOM):
        is_state = tensor.dtype in _RANDOM_TYPES and len(tensor.shape) == 1 and tensor.piece is None
        return "" if is_state else f"{tensor.dtype} {tensor.shape} is not the state of a random generator"
    if not _is_in_model(name, model):
        return "the model has no weight of this name"
    shape = whole_shape(name, model)
    kind = _optimizer_kind(name, manifest.optimizer)
    if field != MASTER and kind is None:
        return ""
    if field not in _LIKE_WEIGHTS and kind != "matrix":
        return "no optimizer keeps this state for the weight"
    if tensor.dtype != "F32":
        return f"it is {tensor.dtype}, but masters and their optimizer state are F32"
    if field not in _LIKE_WEIGHTS:
        return "" if tensor.piece is None else "it is not elementwise, so it cannot be stored in pieces"
    if tensor.piece is None:
        return "" if tensor.shape == shape else f"its shape is {tensor.shape}, but the model's is {shape}"
    rows, cols = _rectangle(shape)
    piece = tensor.piece
    is_inside = piece.unit == name and piece.row + piece.rows <= rows and piece.col + piece.cols <= cols
    return "" if is_inside else f"its piece is not inside the model's shape {shape}"


def _optimizer_kind(name: str, optimizer: str) -> str | None:
    """Returns the kind of optimizer that keeps state for a weight: `element` for AdamW and other optimizers
    with elementwise state, `matrix` for the run's optimizer of matrices, and None for a user's own optimizer,
    which may keep any state."""
    if name.endswith(("weight", "bias")) or optimizer in ELEMENTWISE:
        return "element"
    return None if optimizer == "custom" else "matrix"


def _is_in_model(name: str, model: ModelConfig) -> bool:
    """Returns True if the model has a weight of this name in some splitting."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        known = {EMBEDDING, OUTPUT, FINAL_NORM.removeprefix("decoder.")}
        known |= {POSITIONS} if model.positions else set()
        known |= {FINAL_BIAS.removeprefix("decoder.")} if model.layernorm else set()
        return name in known
    kinds = layer_models(model)
    if int(layer[1]) >= len(kinds):
        return False
    part = name.split(".", 2)[2]
    is_known = part in _layer_names(kinds[int(layer[1])])
    if head := _HEAD.fullmatch(part):
        is_known = int(head[1]) < (model.num_attention_heads if part.startswith("q") else model.num_query_groups)
    return is_known


@lru_cache(maxsize=8)
def _layer_names(model: ModelConfig) -> frozenset[str]:
    """Returns the names of a layer's units, and of its matrices in all splittings except the splitting by heads. All
    layers of `model` are like it."""
    weights = family_of(model).weights(model)
    return frozenset([*unit_shapes(model), *(f"{weight.unit_prefix}{weight.kind}" for weight in weights)])


def _rectangle(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the number of rows and columns of a shape; a vector counts as one row."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])


def _cover_exactly(pieces: Sequence[Piece], all_rows: int, all_cols: int) -> bool:
    """Returns True if the pieces cover an (all_rows, all_cols) tensor exactly once.

    Only one arrangement is accepted: the rows are divided into bands, each band by columns into rectangles,
    and each rectangle into consecutive runs of elements.
    """
    rectangles: dict[tuple[int, int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        rectangles[piece.row, piece.rows, piece.col, piece.cols].append((piece.start, piece.end))
    for (_, rows, _, cols), runs in rectangles.items():
        if not _are_consecutive(runs, rows * cols):
            return False
    bands = [list(band) for _, band in groupby(sorted(rectangles), key=lambda rectangle: rectangle[:2])]
    bands_are_complete = all(
        _are_consecutive([(col, col + cols) for _, _, col, cols in band], all_cols) for band in bands
    )
    return bands_are_complete and _are_consecutive([(band[0][0], band[0][0] + band[0][1]) for band in bands], all_rows)


def _are_consecutive(runs: Sequence[tuple[int, int]], end: int) -> bool:
    """Returns True if the (start, end) runs cover 0 to `end` without gaps or overlaps."""
    reached = 0
    for run_start, run_end in sorted(runs):
        if run_start != reached:
            return False
        reached = run_end
    return reached == end


def _scalar_problem(stored: str, value: Scalar, manifest: Manifest) -> str:
    """Returns the reason why a scalar cannot be state of the saved optimizer; empty if it can."""
    key = stored.rpartition("/")[2]
    if manifest.optimizer == "custom":
        reserved = [f"{GROUP}{name}" for name in ("params", "lr", "weight_decay")]
        return "canzona sets this value itself" if key in reserved else ""
    if key == DISTRUSTED and manifest.optimizer in _ORTHOGONALISED:
        is_count = isinstance(value, int) and 0 < value <= STANDARD_STEPS
        return "" if is_count else f"{value} is not a number of steps up to {STANDARD_STEPS}"
    if key != "step":
        return f"{manifest.optimizer} does not keep this number"
    last_step = manifest.progress.step
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= last_step or value % 1:
        return f"{value} is not a number of steps up to {last_step}"
    return ""


def saved_run(checkpoint: Path) -> tuple[Manifest, RunConfig]:
    """Reads a checkpoint's manifest and the settings of the run that saved it, and checks both without
    reading tensors.

    Raises:
        CheckpointInvalid: a file is missing or has the wrong size, a file that was read is damaged, the
            settings are not valid, or the listed tensors do not belong to the model.
    """
    manifest = read_manifest(checkpoint)
    problems: list[Problem | None] = []
    for name in ("config.yaml", "layout.json"):
        if (entry := manifest.files.get(name)) is None:
            problems.append(Problem(key=f"{checkpoint.name}/{name}", reason="the manifest does not list this file"))
        else:
            problems.append(verify_file(checkpoint, name, entry))
    refuse([problem for problem in problems if problem is not None], CheckpointInvalid)
    with as_checkpoint_errors(checkpoint):
        config = load_resolved(checkpoint / "config.yaml")
    mismatches = table_problems(checkpoint, manifest, [*manifest.files])
    mismatches += content_problems(checkpoint, manifest, config.model)
    refuse(limit_problems(mismatches), CheckpointInvalid)
    return manifest, config


def saved_data(checkpoint: Path, manifest: Manifest) -> DataPlan | None:
    """Reads the data plan of a checkpoint; returns None if it has none, because its weights were imported.

    Raises:
        CheckpointInvalid: the file is missing or damaged.
    """
    if (entry := manifest.files.get(DATA_FILE)) is None:
        return None
    if (problem := verify_file(checkpoint, DATA_FILE, entry)) is not None:
        raise CheckpointInvalid(problem)
    with as_checkpoint_errors(checkpoint):
        return load(checkpoint / DATA_FILE, DataPlan, key=DATA_FILE, fix="")


@contextmanager
def as_checkpoint_errors(checkpoint: Path) -> Iterator[None]:
    """Turns a ConfigError that is raised inside the block into CheckpointInvalid, because the cause is in the
    saved settings."""
    try:
        yield
    except ConfigError as error:
        fix = fallback_fix(checkpoint)
        raise CheckpointInvalid(
            *(replace(problem, key=f"{checkpoint.name}: {problem.key}", fix=fix) for problem in error.problems)
        ) from None


def saved_config(folder: Path, manifest: Manifest) -> RunConfig | None:
    """Returns the settings of the run that saved a checkpoint; None if they are missing or damaged, or cannot
    be read."""
    entry = manifest.files.get("config.yaml")
    if entry is None or verify_file(folder, "config.yaml", entry) is not None:
        return None
    try:
        return load_resolved(folder / "config.yaml")
    except (CanzonaError, OSError):
        return None


def verify_chosen(chosen: ChosenCheckpoints, on_bytes: OnBytes) -> tuple[tuple[Verified, ...], tuple[str, ...]]:
    """Hashes all files of every chosen checkpoint, and compares the manifests with the saved models.

    Returns:
        The results, and the names of the checkpoints that were removed during verification.

    Raises:
        CheckpointInvalid: all chosen checkpoints were removed during verification.
    """
    verified = {checkpoint.name: _verify_checkpoint(checkpoint, on_bytes) for checkpoint in chosen.checkpoints}
    results = tuple(result for result in verified.values() if result is not None)
    removed = tuple(name for name, result in verified.items() if result is None)
    if not results:
        raise CheckpointInvalid(*(Problem(key=name, reason="was removed while it was verified") for name in removed))
    return results, removed


def _verify_checkpoint(checkpoint: StoredCheckpoint, on_bytes: OnBytes) -> Verified | None:
    """Verifies a checkpoint; returns None if it is removed during verification."""
    counts: list[int] = []  # a list, because several threads may append to it safely
    began = time.perf_counter()

    def count(hashed_bytes: int) -> None:
        counts.append(hashed_bytes)
        on_bytes(hashed_bytes)

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
