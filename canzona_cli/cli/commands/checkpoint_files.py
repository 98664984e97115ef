"""Does the work of `canzona checkpoint import` and `export`; verifies checkpoints before their weights are
used.

This module is separate from the commands' options, so that help and completion do not need its imports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer

from canzona_cli.checkpoint.commit import bytes_written, stage_folder
from canzona_cli.checkpoint.contents import AVERAGE, MASTER, saved_run
from canzona_cli.checkpoint.huggingface.folder import (
    DTYPES,
    ExtraFiles,
    collect_extra_files,
    compose_from_folder,
    open_folder,
)
from canzona_cli.checkpoint.manifest import Manifest, tensor_bytes
from canzona_cli.checkpoint.store import StoredCheckpoint
from canzona_cli.checkpoint.verify import limit_problems, verify
from canzona_cli.cli.commands.output import progress, show, warn_about
from canzona_cli.cli.views.checkpoint import bar_of_bytes
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CheckpointInvalid, Problem, refuse
from canzona_cli.core.model.families import parameter_count
from canzona_cli.core.reading import display_path
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.files import RunFiles
from canzona_cli.records.words import count, plural, size

JSON_VERSION = 1
"""The version of the JSON of `import` and `export`. New fields do not change it."""


def import_hugging_face(
    folder: Path, out: Path, overrides: Sequence[str], recipes_dirs: Sequence[Path], *, as_json: bool
) -> None:
    """Imports the weights of a Hugging Face folder as the checkpoint of step 0."""
    pretrained = open_folder(folder, key="DIR")
    composed = compose_from_folder(pretrained, overrides, recipes_dirs)
    pretrained.check(composed.config.model)
    warn_about(composed)
    from canzona_cli.checkpoint.huggingface.weights import import_weights  # imports torch

    parameters = parameter_count(composed.config.model).total
    with bar_of_bytes("importing", 4 * parameters) as on_bytes, stage_folder(out, key="--out") as run:
        name = import_weights(pretrained, composed.config, RunFiles(run), on_bytes=on_bytes).name
        write_text_atomic(RunFiles(run).config, dump_resolved(composed.config))
    checkpoint = RunFiles(out).checkpoints / name
    _conclude(
        {"checkpoint": str(checkpoint.absolute()), "parameters": parameters},
        f"Wrote {display_path(checkpoint)}: {count(parameters)} parameters in fp32.",
        _next_command(out, composed.config, overrides),
        as_json=as_json,
    )


def import_megatron(
    folder: Path, out: Path, overrides: Sequence[str], recipes_dirs: Sequence[Path], *, as_json: bool
) -> None:
    """Imports a Megatron checkpoint, with its optimizer state if possible, at its own step."""
    from canzona_cli.checkpoint.torch_dist.folder import TorchDistFolder
    from canzona_cli.checkpoint.torch_dist.importing import import_torch_dist, plan_import

    source = plan_import(TorchDistFolder(folder, key="DIR"), overrides, recipes_dirs)
    warn_about(source.composed)
    for note in source.notes:
        progress(f"note: {note}")
    with bar_of_bytes("importing", source.bytes) as on_bytes, stage_folder(out, key="--out") as run:
        name = import_torch_dist(source, RunFiles(run), on_bytes=on_bytes).name
    checkpoint, step = RunFiles(out).checkpoints / name, source.progress.step
    parameters = parameter_count(source.config.model).total
    state = f" and the state of {source.kind} at step {step:,}" if source.kind else ""
    facts = {"parameters": parameters, "step": step, "optimizer_state": source.kind}
    _conclude(
        {"checkpoint": str(checkpoint.absolute()), **facts},
        f"Wrote {display_path(checkpoint)}: {count(parameters)} parameters in fp32{state}.",
        _next_command(out, source.config, overrides),
        as_json=as_json,
    )


def _next_command(out: Path, config: RunConfig, overrides: Sequence[str]) -> str:
    """Returns a sentence with the command that trains an imported run, and with the data that it reads."""
    typed = {key_of(override) for override in overrides}
    words = [f"{key}={value}" for key, value in (("gpus", "N"), ("cluster", "NAME")) if key not in typed]
    data = config.data.path or "the sets of data.blend"
    if config.data.source == "stdlib":
        words.append("data.path=PREFIX")
        data = "PREFIX.bin and PREFIX.idx, which `canzona data prepare` or Megatron's preprocessing writes"
    return f"Train it with: {' '.join(['canzona resume', display_path(out), *words])}\nIt reads {data}."


def export_hugging_face(
    checkpoint: StoredCheckpoint,
    out: Path,
    dtype: Literal["bf16", "fp16", "fp32"] | None,
    tokenizer: Path | None,
    *,
    ema: bool,
    as_json: bool,
) -> None:
    """Exports the weights of a checkpoint to a Hugging Face folder.

    Args:
        ema: True to export the average of the weights.
        dtype: the type of the weights; None for the run's precision.
        tokenizer: a folder with the tokenizer to include; None for the run's tokenizer.
    """
    manifest, config, extra_files = verify_run(checkpoint, tokenizer)
    field = AVERAGE if ema else MASTER
    if not any(tensor.whole_name(name).endswith(f"/{field}") for name, tensor in manifest.tensors.items()):
        reason = f"step {checkpoint.step:,} was saved without an average of the weights"
        refuse([Problem("--ema", reason, "leave it out; runs with train.ema=0.999, for example, save an average")])
    from canzona_cli.checkpoint.huggingface.weights import export_weights
    from canzona_cli.checkpoint.reader import Reader  # imports torch

    kind, length = dtype or config.train.precision, config.train.seq_length
    total = tensor_bytes(DTYPES[kind][0], (parameter_count(config.model).total,))
    with bar_of_bytes("exporting", total) as on_bytes, Reader(checkpoint.path, manifest, config.model) as reader:
        written = export_weights(
            reader, out, dtype=kind, seq_length=length, extra_files=extra_files, field=field, on_bytes=on_bytes
        )
    facts = {"step": checkpoint.step, "ema": ema, "dtype": kind, "tokenizer": extra_files.tokenizer or None}
    average = "the average of the weights at " if ema else ""
    amount = f"{size(written.bytes)} in {plural(written.files, 'file')}"
    _conclude(
        {"folder": str(out.absolute()), **facts, **asdict(written)},
        f"Wrote {display_path(out)}: {average}step {checkpoint.step:,}, {amount}.",
        "" if extra_files.tokenizer else "note: the run's tokenizer is unknown; --tokenizer DIR adds one",
        as_json=as_json,
    )


def export_megatron(checkpoint: StoredCheckpoint, out: Path, *, as_json: bool) -> None:
    """Exports the weights and, if possible, the optimizer state of a checkpoint to a Megatron checkpoint."""
    manifest, config, _ = verify_run(checkpoint, None)
    from canzona_cli.checkpoint.reader import Reader  # imports torch
    from canzona_cli.checkpoint.torch_dist.exporting import export_torch_dist

    total = manifest.bytes
    with bar_of_bytes("exporting", total) as on_bytes, Reader(checkpoint.path, manifest, config.model) as reader:
        written = export_torch_dist(reader, out, config=config, manifest=manifest, on_bytes=on_bytes)
    kind = written.optimizer_state
    state = f" with the state of {kind}" if kind else ""
    _conclude(
        {"folder": str(out.absolute()), **asdict(written)},
        f"Wrote {display_path(out)}: iteration {written.iteration:,}{state}, {size(written.bytes)}.",
        "" if kind else f"note: only weights were exported: Megatron cannot store the state of {manifest.optimizer}",
        as_json=as_json,
    )


def _conclude(content: Mapping[str, object], sentence: str, hint: str, *, as_json: bool) -> None:
    """Prints what was written: as JSON, or as a sentence and a hint, which may be empty."""
    if as_json:
        show({"version": JSON_VERSION, **content})
        return
    typer.echo(sentence)
    if hint:
        progress(hint)


def verify_run(checkpoint: StoredCheckpoint, tokenizer: Path | None) -> tuple[Manifest, RunConfig, ExtraFiles]:
    """Verifies every byte of a checkpoint; returns its manifest, the configuration of its run, and the
    tokenizer files.

    Args:
        tokenizer: a folder with the tokenizer to use; None for the run's tokenizer.

    Raises:
        CheckpointInvalid: the checkpoint is damaged.
        ConfigError: there is no such tokenizer.
    """
    refuse(checkpoint.problems, CheckpointInvalid)
    tokenizer_files = collect_extra_files(RunFiles(checkpoint.path.parent.parent), tokenizer)
    with bar_of_bytes("hashing", bytes_written(checkpoint.path)) as on_bytes:
        refuse(limit_problems(verify(checkpoint.path, on_bytes=on_bytes)[1]), CheckpointInvalid)
    return *saved_run(checkpoint.path), tokenizer_files
