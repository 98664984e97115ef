"""Exports a checkpoint to Megatron's format `torch_dist`, one tensor at a time: weights, and the masters and
the state of Muon or AdamW. Megatron-LM's `--load` continues from it."""

import io
import os
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from canzona_cli.checkpoint.commit import stage_folder
from canzona_cli.checkpoint.contents import ELEMENTWISE, MASTER
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.torch_dist.arguments import arguments_of, optimizer_groups, schedule_state
from canzona_cli.checkpoint.torch_dist.folder import COMMON, DTYPES, FORMAT, INDEX, TRACKER
from canzona_cli.checkpoint.torch_dist.names import (
    EXPERTS,
    LAYERS,
    Kind,
    Parameter,
    parameters,
    written_keys,
)
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.stored_state import SHARDING
from canzona_cli.core.errors import Problem, refuse
from canzona_cli.core.model.families import layer_models
from canzona_cli.core.setup import ModelConfig
from canzona_cli.core.writing import write_new, write_text_atomic
from canzona_cli.records.files import sync_folder, write_json_atomic

_FILE: Final = "__0_0.distcp"
_ATTENTION: Final = ("self_attention.core_attention", "self_attention.linear_qkv", "self_attention.linear_proj")
"""The modules of a layer's attention for which Megatron stores an object in addition to the weights, as it does for
those of feed-forward networks; an export writes empty objects."""
_NETWORK: Final = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class ExportedToMegatron:
    """The result of an export, with the numbers of tensors and bytes written."""

    iteration: int
    tensors: int
    bytes: int
    """The size of the tensors' file."""
    optimizer_state: Kind | None
    """The optimizer whose state is among the tensors; None for weights without state."""


class _Writer:
    """A writer of the file with tensors and objects, and of its index."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._table: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, key: str, tensor: torch.Tensor, whole: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        """Adds a chunk of a tensor."""
        offset, sizes = torch.Size(offsets), tensor.size()
        self._write(MetadataIndex(key, offset), tensor)
        self._chunks[key].append(ChunkStorageMetadata(offsets=offset, sizes=sizes))
        properties = TensorProperties(dtype=tensor.dtype)
        self._table[key] = TensorStorageMetadata(properties, torch.Size(whole), self._chunks[key])

    def add_object(self, key: str, content: object) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        self._table[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), buffer)

    def finish(self) -> tuple[bytes, int, int]:
        """Syncs the file; returns the index, the number of tensors and the size of the file."""
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = Metadata(state_dict_metadata=self._table, storage_data=self._places)
        index.mcore_data = {}  # type: ignore[attr-defined] # as Megatron writes it
        return pickle.dumps(index), len(self._chunks), size

    def _write(self, index: MetadataIndex, content: torch.Tensor | io.BytesIO) -> None:
        start = self._file.tell()
        if isinstance(content, io.BytesIO):
            self._file.write(content.getbuffer())
        else:
            torch.save(content, self._file)
        length = self._file.tell() - start
        self._places[index] = _StorageInfo(_FILE, start, length)


def export_torch_dist(
    reader: Reader,
    out: Path,
    *,
    config: RunConfig,
    manifest: Manifest,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ExportedToMegatron:
    """Writes a folder for Megatron-LM's `--load`. The folder appears only when it is complete.

    Args:
        reader: The reader of a verified checkpoint.
        out: The folder to write; it must be empty or not exist.
        config: The run that saved the checkpoint.

    Raises:
        ConfigError: `out` is not empty, or the model has parts of GPT-2.
        CheckpointInvalid: The checkpoint lacks a tensor, or has values that are not finite.
        EnvironmentProblem: The folder cannot be written.
    """
    reason = "canzona writes only models without parts of GPT-2 to this format"
    fix = "train it in Megatron's loop with canzona_cli.use_in_megatron_lm(), whose checkpoints are Megatron's"
    refuse(Problem(f"model.{key}", reason, fix, value=value) for key, value in config.model.parts_of_gpt2.items())
    kind = _kind(manifest)
    iteration = manifest.progress.step
    with stage_folder(out, key="OUT") as root:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir()
        writer = _Writer(folder / _FILE)
        steps = [_add(writer, reader, parameter, kind, config, on_bytes) for parameter in parameters(config.model)]
        for key in _empty_objects(config.model):
            writer.add_object(key, [None])
        index, tensors, size = writer.finish()
        write_new(folder / INDEX, index)
        common = io.BytesIO()
        torch.save(_common(config, manifest, kind, max(steps)), common)
        write_new(folder / COMMON, common.getvalue())
        write_json_atomic(folder / FORMAT, {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        sync_folder(folder)
        write_text_atomic(root / TRACKER, f"{iteration}")
    return ExportedToMegatron(iteration=iteration, tensors=tensors, bytes=size, optimizer_state=kind)


def _kind(manifest: Manifest) -> Kind | None:
    """Returns the optimizer whose state is in the checkpoint; None if there is no state or Megatron does not
    have the optimizer."""
    known: dict[str, Kind] = {name: name for name in ELEMENTWISE}
    return known.get(manifest.optimizer) if manifest.progress.step else None


def _add(
    writer: _Writer,
    reader: Reader,
    parameter: Parameter,
    kind: Kind | None,
    config: RunConfig,
    on_bytes: Callable[[int], None],
) -> float:
    """Adds a parameter with its master and its state; returns the number of AdamW's steps for the
    parameter."""
    fields = (MASTER, *parameter.state_fields(kind)) if kind else ()
    written = parameter.written_keys[0]
    lead, whole = parameter.place(written), parameter.whole_shape(written)
    offsets = (*lead, *(0 for _ in parameter.shape))
    weight_dtype = DTYPES["bfloat16" if config.train.precision == "bf16" else "float32"]
    for field in dict.fromkeys(("", *fields)):
        rows = torch.cat([reader.block(block, field or MASTER) for block in parameter.blocks])
        # Cloned, because torch.save writes the whole memory of a view.
        tensor = rows.view(*(1 for _ in lead), *parameter.shape).clone()
        for key in written_keys(parameter, field, kind):
            writer.add(key, tensor if field else tensor.to(weight_dtype), whole, offsets)
        on_bytes(rows.nbytes)
    return reader.step(parameter.blocks[0].unit) or 0.0


def _empty_objects(model: ModelConfig) -> Iterator[str]:
    """Yields the keys of the objects that Megatron expects in addition to the weights, each with its index and the
    number of such objects, first among layers, unless the key has the layer's index, and then among experts."""

    def shard(*places: tuple[int, int]) -> str:
        indices, counts = zip(*(places or ((0, 1),)), strict=True)
        return f"._extra_state/shard_{'.'.join(map(str, indices))}_{'.'.join(map(str, counts))}"

    for layer, kind in enumerate(layer_models(model)):
        equal = model.moe_layer_freq == 1
        prefix, place = (LAYERS, [(layer, model.num_layers)]) if equal else (f"{LAYERS}{layer}.", [])
        yield from (f"{prefix}{name}{shard(*place)}" for name in _ATTENTION)
        for name in _NETWORK:
            if not kind.num_experts:
                yield f"{prefix}mlp.{name}{shard(*place)}"
            for expert in range(kind.num_experts):
                yield f"{prefix}{EXPERTS}{name}{shard(*place, (expert, kind.num_experts))}"
    yield from (f"{name}{shard()}" for name in ("output_layer", "decoder.final_layernorm"))


def _common(config: RunConfig, manifest: Manifest, kind: Kind | None, step: float) -> Mapping[str, object]:
    """Returns the contents of `common.pt`, which all ranks read."""
    arguments = arguments_of(config, manifest.progress, has_state=kind is not None)
    common: dict[str, object] = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": manifest.progress.step,
        "content_metadata": {
            "distrib_optim_sharding_type": SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    if kind is not None:
        common["optimizer"] = optimizer_groups(config, kind, step)
        common["opt_param_scheduler"] = schedule_state(config, manifest.progress)
    return common
