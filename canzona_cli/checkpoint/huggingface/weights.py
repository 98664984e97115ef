"""Imports weights from Hugging Face folders, and exports weights to such folders. Only a part of one tensor
is in memory at a time.

An import writes a checkpoint of step 0, with fp32 masters and without optimizer state, from which a run with
any layout, optimizer or splitting can start. An export writes one or several safetensors files.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from canzona_cli.checkpoint.commit import stage_folder, write_checkpoint
from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.checkpoint.huggingface.folder import (
    DTYPES,
    EXTRA_FILES,
    INDEX,
    WEIGHTS,
    Dtype,
    ExtraFiles,
    FolderTensor,
    HuggingFaceFolder,
)
from canzona_cli.checkpoint.huggingface.foreign import FILE, config_json, tensor_names
from canzona_cli.checkpoint.manifest import NO_OPTIMIZER, Buffer, Progress, Shard, tensor_bytes
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.shard_file import raw_bytes, write_shard
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.model.families import family_of
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.core.reading import Unreadable, read_plain
from canzona_cli.core.writing import write_new, write_text_atomic
from canzona_cli.records.files import RunFiles, sync_folder, write_json_atomic

PIECE_BYTES: Final = 8 << 20
"""The maximum size of the part of a tensor that is in memory at a time, in bytes of fp32."""


def row_ranges(shape: Sequence[int]) -> Iterator[range]:
    """Yields consecutive ranges of a tensor's rows, each of at most `PIECE_BYTES` bytes or of one row."""
    most_rows = max(1, PIECE_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for start in range(0, shape[0], most_rows):
        yield range(start, min(start + most_rows, shape[0]))


def import_weights(
    source: HuggingFaceFolder, config: RunConfig, files: RunFiles, *, on_bytes: Callable[[int], None] = lambda _: None
) -> Path:
    """Writes a folder's weights as a checkpoint of step 0 into a run directory, and copies the folder's other
    files.

    The other files are copied first, to the run's `huggingface` folder. The checkpoint becomes visible only
    when it is complete.

    Args:
        config: The configuration of the run. The folder must contain its model (`HuggingFaceFolder.check`).
        on_bytes: Called with the size of each part that has been read, in bytes of fp32.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: Weights are not finite, a file cannot be read, or a tied output layer differs from the
            embedding.
        SaveFailed: The checkpoint cannot be written.
        OSError: Another file cannot be written.
    """
    _check_tied(source, config)
    files.huggingface.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in (FILE, *EXTRA_FILES):
        copy = files.huggingface / name
        if (source.path / name).is_file():
            copy.unlink(missing_ok=True)  # an earlier import that was killed may have left the file
            copy_file(source.path / name, copy)
    sync_folder(files.huggingface)
    parts: dict[Path, dict[str, Buffer]] = defaultdict(dict)
    for unit, name in tensor_names(config.model).items():
        stored = source.tensors[name]
        shape = unit_shape(unit, config.model)
        read_masters = partial(_read_masters, stored, name, shape[0], on_bytes)
        parts[stored.file][f"{unit}/{MASTER}"] = Buffer(dtype="F32", shape=shape, data=read_masters)
    shards = [Shard(tensors=tensors, scalars={}) for tensors in parts.values()]
    return write_checkpoint(files, shards, config, Progress(step=0, samples=0, tokens=0), optimizer=NO_OPTIMIZER)


def _read_masters(
    stored: FolderTensor, name: str, padded_rows: int, on_bytes: Callable[[int], None]
) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, converted to fp32, a range of rows at a time. Rows of a padded vocabulary are
    copies of the last one, which no token's id asks for.

    Raises:
        ConfigError: the tensor cannot be read, or is not finite.
    """
    for rows in row_ranges(stored.shape):
        data = _read_rows(stored, name, rows).to(torch.float32)
        # The extremes are checked first, because isfinite() of all elements needs more memory.
        if not all(bound.isfinite() for bound in torch.aminmax(data)):
            bad = int((~data.isfinite()).sum())
            reason = f"from row {rows[0]:,} on, {bad:,} of {data.numel():,} elements are infinite or NaN"
            raise ConfigError(Problem(key=name, value=stored.file, reason=reason, fix="download it again"))
        on_bytes(data.nbytes)
        yield raw_bytes(data)
        if rows.stop == stored.shape[0] < padded_rows:
            yield raw_bytes(data[-1:].repeat(padded_rows - rows.stop, 1))
        del data  # so that the next rows are read into freed memory


def _read_rows(stored: FolderTensor, name: str, rows: range) -> torch.Tensor:
    """Reads rows of a tensor in the type that it has in the file; raises ConfigError if safetensors cannot
    read them."""
    try:
        # Opened for each read, because the pages that are read from a mapped file become memory of this
        # process.
        with safe_open(stored.file, framework="pt") as file:
            if (place := stored.stacked) is not None:
                stack = file.get_slice(place.name)
                stacked: torch.Tensor = stack[place.expert, place.row + rows.start : place.row + rows.stop]
                return stacked
            data: torch.Tensor = file.get_slice(name)[rows.start : rows.stop]
    except SafetensorError as error:  # although `read_table` accepted the header; or the file has changed
        reason = f"safetensors cannot read it: {error}"
        raise ConfigError(Problem(key=name, value=stored.file, reason=reason, fix="download it again")) from None
    return data


def _check_tied(folder: HuggingFaceFolder, config: RunConfig) -> None:
    """Checks that a tied output layer equals the embedding if the folder stores both. Some published folders
    do, although transformers ignores a tied output layer.

    Raises:
        ConfigError: the output layer and the embedding differ.
    """
    output = family_of(config.model).foreign.output
    if not config.model.tied_embeddings or output not in folder.tensors:
        return
    [embedding, *_] = tensor_names(config.model).values()
    input_tensor, output_tensor = folder.tensors[embedding], folder.tensors[output]
    is_equal = input_tensor.shape == output_tensor.shape and all(
        torch.equal(_read_rows(input_tensor, embedding, rows).float(), _read_rows(output_tensor, output, rows).float())
        for rows in row_ranges(input_tensor.shape)
    )
    if not is_equal:
        reason = f"differs from {embedding}, although the embeddings are tied"
        fix = "tie_word_embeddings in its config.json should probably be false"
        raise ConfigError(Problem(key=output, value=output_tensor.file, reason=reason, fix=fix))


SHARD_BYTES: Final = 5_000_000_000
"""The maximum size of the tensors in an exported file, in bytes. Only a single tensor may be larger."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The numbers of files, tensors and bytes that an export wrote."""

    files: int
    """The number of safetensors files."""
    tensors: int
    bytes: int
    """The total size of the tensors."""


def export_weights(
    reader: Reader,
    out: Path,
    *,
    dtype: Dtype,
    seq_length: int,
    extra_files: ExtraFiles,
    field: str = MASTER,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` can read. The folder becomes visible only
    when it is complete.

    Args:
        reader: The reader of a verified checkpoint.
        out: The folder to write; it must be empty or not exist.
        dtype: The type of the weights; fp32 writes the masters unchanged.
        seq_length: The length of the sequences that the model was trained on, in tokens.
        extra_files: The files to write in addition to weights and settings.
        field: The field to export; `AVERAGE` for the average of the weights.
        shard_bytes: The maximum size of the tensors in a file, in bytes.
        on_bytes: Called with the number of bytes of each part that is about to be written.

    Raises:
        ConfigError: `out` is not empty or another process is writing there, a weight is too large for fp16,
            or a file to copy cannot be read.
        CheckpointInvalid: The checkpoint lacks a weight, or a weight is not finite.
        EnvironmentProblem: The folder cannot be written.
    """
    model, (code, dtype_name) = reader.model, DTYPES[dtype]
    torch_dtype: torch.dtype = getattr(torch, dtype_name)
    imported_length = extra_files.settings.get("max_position_embeddings")
    positions = max(seq_length, imported_length) if isinstance(imported_length, int) else seq_length
    settings = config_json(model, dtype=dtype_name, max_positions=positions)
    sizes = {name: tensor_bytes(code, unit_shape(unit, model)) for unit, name in tensor_names(model).items()}
    units = {name: unit for unit, name in tensor_names(model).items()}
    shards = _shards(sizes, shard_bytes)
    files = {name: _file(index, len(shards)) for index, names in enumerate(shards) for name in names}
    with stage_folder(out, key="OUT") as folder:
        for index, names in enumerate(shards):
            tensors = {
                name: Buffer(
                    dtype=code,
                    shape=unit_shape(units[name], model),
                    data=partial(_read_rounded, reader, units[name], field, torch_dtype, on_bytes),
                )
                for name in names
            }
            write_shard(folder / _file(index, len(shards)), tensors, metadata={"format": "pt"})
        if len(shards) > 1:
            total = {"total_size": sum(sizes.values())}
            write_json_atomic(folder / INDEX, {"metadata": total, "weight_map": files})
        write_json_atomic(folder / FILE, {**extra_files.settings, **settings})
        for name, text in extra_files.texts.items():
            write_text_atomic(folder / name, text)
        for path in extra_files.copies:
            copy_file(path, folder / path.name)
    return Exported(files=len(shards), tensors=len(sizes), bytes=sum(sizes.values()))


def _shards(sizes: Mapping[str, int], most_bytes: int) -> Sequence[Sequence[str]]:
    """Divides tensors among files, in order. Each file has at most `most_bytes` bytes of tensors, or a single
    tensor."""
    shards: list[list[str]] = [[]]
    shard_size = 0
    for name, size in sizes.items():
        if shards[-1] and shard_size + size > most_bytes:
            shards.append([])
            shard_size = 0
        shards[-1].append(name)
        shard_size += size
    return shards


def _file(index: int, count: int) -> str:
    """Returns the name of one of `count` files of weights."""
    return WEIGHTS if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _read_rounded(
    reader: Reader, unit: str, field: str, kind: torch.dtype, on_bytes: Callable[[int], None]
) -> Iterator[memoryview]:
    """Yields the bytes of a weight, rounded to the type `kind`, a range of rows at a time.

    Raises:
        ConfigError: the weight is too large for fp16.
        CheckpointInvalid: the weight is not stored, or is not finite.
    """
    for rows in row_ranges(unit_shape(unit, reader.model)):
        data = reader.master(unit, rows, field).to(kind)
        if kind is torch.float16 and not bool(data.isfinite().all()):
            reason = "has weights beyond 65,504, the largest fp16 number"
            raise ConfigError(Problem(key="--dtype", value="fp16", reason=f"{unit} {reason}", fix="--dtype bf16"))
        on_bytes(data.nbytes)
        yield raw_bytes(data)
        del data  # so that the next rows are read into freed memory


def copy_file(source: Path, target: Path) -> None:
    """Copies a file to a new file, and syncs the copy to the disk. If the source is a link, its target is
    copied.

    Raises:
        ConfigError: the source is not a regular file, cannot be read, or is larger than
            `reading.LARGEST`.
        OSError: the target exists already or cannot be written.
    """
    try:
        content = read_plain(source)
    except Unreadable as error:
        fix = "remove it, or download it again"
        raise ConfigError(Problem(key=source.name, value=source, reason=str(error), fix=fix)) from None
    write_new(target, content)
