"""A checkpoint as a Hugging Face folder: sharded safetensors, a piece of one tensor in memory at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from canzona_cli.checkpoint.manifest import Buffer
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.shard_file import tensor_bytes, write_shard
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.huggingface.beside import Beside
from canzona_cli.huggingface.config_json import FILE, config_json
from canzona_cli.huggingface.folder import DTYPES, INDEX, WEIGHTS, Dtype
from canzona_cli.huggingface.names import tensor_names
from canzona_cli.huggingface.staging import copy_file, staged
from canzona_cli.huggingface.streaming import raw_bytes, row_ranges
from canzona_cli.model.geometry import unit_shape
from canzona_cli.run.files import write_json_atomic, write_text_atomic

SHARD_BYTES: Final = 5_000_000_000
"""Of one file, as published checkpoints have it; a larger tensor has a file of its own."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    files: int
    """Of weights."""
    tensors: int
    bytes: int
    """Of all weights."""


def export_weights(
    reader: Reader,
    out: Path,
    *,
    dtype: Dtype,
    seq_length: int,
    beside: Beside,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads: whole, or not at all.

    Args:
        reader: of a checkpoint that has been verified.
        out: does not exist, or is empty.
        dtype: of the weights; fp32 is the masters, bit by bit.
        seq_length: tokens of the sequences that the model was trained on.
        beside: further files.
        on_bytes: told how many further bytes have been written.

    Raises:
        ConfigError: the model is no Qwen3 of Hugging Face; the place has something; a weight is too large for fp16.
        CheckpointInvalid: the checkpoint lacks a weight, or has one that is no number.
        EnvironmentProblem: it cannot be written.
    """
    model, (code, name_of_type) = reader.model, DTYPES[dtype]
    kind: torch.dtype = getattr(torch, name_of_type)
    longest = beside.settings.get("max_position_embeddings")
    positions = max(seq_length, longest) if isinstance(longest, int) else seq_length
    settings = config_json(model, dtype=name_of_type, max_positions=positions)
    sizes = {name: tensor_bytes(code, unit_shape(unit, model)) for unit, name in tensor_names(model).items()}
    units = {name: unit for unit, name in tensor_names(model).items()}
    shards = _shards(sizes, shard_bytes)
    files = {name: _file(number, len(shards)) for number, names in enumerate(shards) for name in names}
    with staged(out, key="OUT") as folder:
        for number, names in enumerate(shards):
            tensors = {
                name: Buffer(
                    dtype=code,
                    shape=unit_shape(units[name], model),
                    data=partial(_read, reader, units[name], kind, on_bytes),
                )
                for name in names
            }
            write_shard(folder / _file(number, len(shards)), tensors, metadata={"format": "pt"})
        if len(shards) > 1:
            total = {"total_size": sum(sizes.values())}
            write_json_atomic(folder / INDEX, {"metadata": total, "weight_map": files})
        write_json_atomic(folder / FILE, {**beside.settings, **settings})
        for name, text in beside.texts.items():
            write_text_atomic(folder / name, text)
        for path in beside.copies:
            copy_file(path, folder / path.name)
    return Exported(files=len(shards), tensors=len(sizes), bytes=sum(sizes.values()))


def _shards(sizes: Mapping[str, int], most: int) -> Sequence[Sequence[str]]:
    """Names of the tensors of each file, in order; each has at most `most` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _file(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _read(reader: Reader, unit: str, kind: torch.dtype, on_bytes: Callable[[int], None]) -> Iterator[memoryview]:
    """A weight as the bytes of its type."""
    for rows in row_ranges(unit_shape(unit, reader.model)):
        data = reader.master_rows(unit, rows).to(kind)
        if kind is torch.float16 and not bool(data.isfinite().all()):
            reason = "has weights beyond 65,504, the largest number of fp16"
            raise ConfigError(Problem(key="--dtype", value="fp16", reason=f"{unit} {reason}", fix="--dtype bf16"))
        on_bytes(data.nbytes)
        yield raw_bytes(data)
        del data  # before the next is read
        reader.unmap()
