"""Weights from a Hugging Face folder as the checkpoint of step 0: fp32 masters in model space, and no optimizer state.

Every layout, optimizer and splitting can start from it, as from the weights of any other run.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from canzona_cli.checkpoint.commit import abandon, begin, finish, write_part
from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.checkpoint.manifest import NO_OPTIMIZER, Buffer, Header, Progress, Shard
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.huggingface.config_json import FILE
from canzona_cli.huggingface.folder import BESIDE, HuggingFaceFolder, Stored
from canzona_cli.huggingface.names import tensor_names
from canzona_cli.huggingface.staging import copy_file
from canzona_cli.huggingface.streaming import raw_bytes, row_ranges
from canzona_cli.model.families import family_of
from canzona_cli.run.files import RunFiles, sync_folder

_PATIENCE_S: Final = 60.0
"""All parts are written before any is waited for."""
_ONE_PROCESS: Final = Layout(
    tp=1,
    pp=1,
    cp=1,
    dp=1,
    micro_batch_size=1,
    num_microbatches=1,
    global_batch_size=1,
    recompute="none",
    sequence_parallel=False,
)
"""What wrote it."""


def import_weights(
    found: HuggingFaceFolder, config: RunConfig, files: RunFiles, *, on_bytes: Callable[[int], None] = lambda _: None
) -> Path:
    """Write the checkpoint of step 0 into a run directory, and what lies beside the weights next to it.

    The checkpoint is there whole or not at all. A piece of one tensor is in memory at a time.

    Args:
        config: of the run; its model has been compared with the folder (`HuggingFaceFolder.check`).
        on_bytes: told how many further bytes of masters have been read.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: weights that are no numbers; a tied output layer that is not the embedding.
        SaveFailed: it cannot be written.
        OSError: what lies beside the weights cannot be copied.
    """
    _check_tied(found, config)
    files.huggingface.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in (FILE, *BESIDE):
        copy = files.huggingface / name
        if (found.path / name).is_file():
            copy.unlink(missing_ok=True)  # of an import that was killed
            copy_file(found.path / name, copy)
    sync_folder(files.huggingface)
    parts: dict[Path, dict[str, Buffer]] = defaultdict(dict)
    for unit, name in tensor_names(config.model).items():
        stored = found.tensors[name]
        read = partial(_read, stored, name, on_bytes)
        parts[stored.file][f"{unit}/{MASTER}"] = Buffer(dtype="F32", shape=stored.shape, data=read)
    folder = begin(files.checkpoints, 0)
    try:
        for number, tensors in enumerate(parts.values()):
            write_part(folder, number, Shard(tensors=tensors, scalars={}))
    except BaseException:
        abandon(folder)
        raise
    header = Header(
        progress=Progress(step=0, samples=0, tokens=0),
        optimizer=NO_OPTIMIZER,
        strategy=NO_OPTIMIZER,
        splitting="split",
        world_size=1,
        created=time.time(),
        canzona=version("canzona"),
    )
    texts = {"config.yaml": dump_resolved(config), "layout.json": json.dumps(asdict(_ONE_PROCESS))}
    return finish(folder, len(parts), header, texts, _PATIENCE_S)


def _read(stored: Stored, name: str, on_bytes: Callable[[int], None]) -> Iterator[memoryview]:
    """A tensor as the bytes of its master."""
    for rows in row_ranges(stored.shape):
        data = _rows(stored, name, rows).to(torch.float32)
        if not all(bound.isfinite() for bound in torch.aminmax(data)):  # isfinite() of all makes others as large
            bad = int((~data.isfinite()).sum())
            where = f"from row {rows[0]:,} on, {bad:,} of {data.numel():,} elements are infinite or no numbers"
            raise ConfigError(Problem(key=name, value=stored.file, reason=where, fix="download it again"))
        on_bytes(data.nbytes)
        yield raw_bytes(data)
        del data  # before the next is read


def _rows(stored: Stored, name: str, rows: range) -> torch.Tensor:
    try:
        with safe_open(stored.file, framework="pt") as file:  # anew: what a mapped file was read of counts as memory
            found: torch.Tensor = file.get_slice(name)[rows.start : rows.stop]
    except SafetensorError as error:  # of a header that only we can read, or that has just changed
        reason = f"safetensors cannot read it: {error}"
        raise ConfigError(Problem(key=name, value=stored.file, reason=reason, fix="download it again")) from None
    return found


def _check_tied(found: HuggingFaceFolder, config: RunConfig) -> None:
    """Some files have the output layer of tied embeddings a second time; transformers ignores it."""
    output = family_of(config.model).foreign.output
    if not config.model.tied_embeddings or output not in found.tensors:
        return
    [embedding, *_] = tensor_names(config.model).values()
    pair = [(found.tensors[name], name) for name in (embedding, output)]
    one, other = (stored.shape for stored, _ in pair)
    if one != other or not all(
        torch.equal(*(_rows(stored, name, rows).float() for stored, name in pair)) for rows in row_ranges(one)
    ):
        reason = f"differs from {embedding}, although the embeddings are tied"
        fix = "tie_word_embeddings of its config.json is probably false"
        raise ConfigError(Problem(key=output, value=found.tensors[output].file, reason=reason, fix=fix))
