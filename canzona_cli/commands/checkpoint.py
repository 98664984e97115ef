"""`canzona checkpoint`: lists, verifies and shows checkpoints; imports from and exports to Hugging Face and
Megatron."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from canzona_cli.commands.output import AsJson, RecipesDirs, overrides_argument
from canzona_cli.commands.output import show as show_page

JSON_VERSION = 1
"""The version of the JSON of `import` and `export`. New fields do not change it."""
app = typer.Typer(no_args_is_help=True, add_completion=False)

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_OR_CHECKPOINT]",
        help="A run directory or one of its checkpoints. [default: the last saved run in ./runs]",
        show_default=False,
    ),
]


@app.callback()
def checkpoint() -> None:
    """List, verify and show checkpoints; import from and export to Hugging Face and Megatron."""


@app.command("list")
def list_(where: Where = None, as_json: AsJson = False) -> None:
    """List checkpoints and show which are complete.

    Reads only manifests and file sizes; `canzona checkpoint verify` reads everything.
    """
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.report.checkpoint import CheckpointListView

    listing = CheckpointListView(choose(where))
    show_page(listing.as_json() if as_json else listing)


@app.command()
def verify(where: Where = None, as_json: AsJson = False) -> None:
    """Check every byte of checkpoints against the recorded hashes.

    Verifies one checkpoint, or all checkpoints of a run. Reports every missing, truncated or damaged file;
    the exit code is 5 if there are any.
    """
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.checkpoint.verify import limit_problems
    from canzona_cli.errors import CheckpointInvalid, ExitCode
    from canzona_cli.report.checkpoint import verify_all

    verified = verify_all(choose(where).require_any())
    show_page(verified.as_json() if as_json else verified)
    if verified.problems:
        if as_json:
            raise typer.Exit(ExitCode.CHECKPOINT)
        raise CheckpointInvalid(*limit_problems(verified.problems))


@app.command()
def show(where: Where = None, as_json: AsJson = False) -> None:
    """Show what the newest or a given checkpoint contains."""
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.errors import CheckpointInvalid
    from canzona_cli.report.checkpoint import CheckpointView

    checkpoint = choose(where).newest
    if checkpoint.manifest is None:
        raise CheckpointInvalid(*checkpoint.problems)
    content = CheckpointView(checkpoint=checkpoint, manifest=checkpoint.manifest)
    show_page(content.as_json() if as_json else content)


@app.command("import", short_help="Import from Hugging Face or Megatron.")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A Hugging Face folder with safetensors, or a Megatron checkpoint (torch_dist)."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="RUN", help="The run directory to create; it must be empty or not exist.")
    ],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("A recipe and overrides with the same model as DIR. [default: derived from DIR]"),
    ] = None,
    recipes_dir: RecipesDirs = None,
    as_json: AsJson = False,
) -> None:
    """Import the weights of a Hugging Face folder as step 0, or a Megatron checkpoint at its own step.

    The new checkpoint has fp32 masters, so training can start from its weights with any layout and optimizer.
    If a Megatron checkpoint has the state of Muon or AdamW, the state is imported too, and training can
    continue.
    """
    from canzona_cli.checkpoint.staging import check_empty, stage_folder
    from canzona_cli.commands.output import progress, warn_about
    from canzona_cli.config.recipes import display_path
    from canzona_cli.huggingface.folder import compose_from_folder, is_hugging_face, open_folder
    from canzona_cli.model.families import parameter_count
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.files import RunFiles
    from canzona_cli.run.words import count

    check_empty(out, key="--out")
    if not is_hugging_face(folder):
        from canzona_cli.torch_dist.folder import is_torch_dist

        if is_torch_dist(folder):
            _import_from_megatron(folder, out, overrides or (), recipes_dir or (), as_json=as_json)
            return
    pretrained = open_folder(folder, key="DIR")
    composed = compose_from_folder(pretrained, overrides or (), recipes_dir or ())
    config = composed.config
    pretrained.check(config.model)
    warn_about(composed)
    from canzona_cli.huggingface.weights import import_weights  # imports torch

    parameters = parameter_count(config.model).total
    with bar_of_bytes("importing", 4 * parameters) as on_bytes, stage_folder(out, key="--out") as run:
        name = import_weights(pretrained, config, RunFiles(run), on_bytes=on_bytes).name
    checkpoint = RunFiles(out).checkpoints / name
    if as_json:
        show_page({"version": JSON_VERSION, "checkpoint": str(checkpoint.absolute()), "parameters": parameters})
        return
    typer.echo(f"Wrote {display_path(checkpoint)}: {count(parameters)} parameters in fp32.")
    progress(
        f"Train from it with: canzona train recipe=RECIPE run.dir={display_path(out)}, or init={display_path(out)}"
    )


def _import_from_megatron(
    folder: Path, out: Path, overrides: Sequence[str], recipes_dirs: Sequence[Path], *, as_json: bool
) -> None:
    from canzona_cli.checkpoint.staging import stage_folder
    from canzona_cli.commands.output import progress, warn_about
    from canzona_cli.config.recipes import display_path
    from canzona_cli.model.families import parameter_count
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.files import RunFiles
    from canzona_cli.run.words import count
    from canzona_cli.torch_dist.folder import TorchDistFolder
    from canzona_cli.torch_dist.importing import import_torch_dist, plan_import

    source = plan_import(TorchDistFolder(folder, key="DIR"), overrides, recipes_dirs)
    warn_about(source.composed)
    for note in source.notes:
        progress(f"note: {note}")
    parameters = parameter_count(source.config.model).total
    with bar_of_bytes("importing", source.bytes) as on_bytes, stage_folder(out, key="--out") as run:
        name = import_torch_dist(source, RunFiles(run), on_bytes=on_bytes).name
    checkpoint, step = RunFiles(out).checkpoints / name, source.progress.step
    if as_json:
        facts = {"parameters": parameters, "step": step, "optimizer_state": source.kind}
        show_page({"version": JSON_VERSION, "checkpoint": str(checkpoint.absolute()), **facts})
        return
    state = f" and the state of {source.kind} at step {step:,}" if source.kind else ""
    typer.echo(f"Wrote {display_path(checkpoint)}: {count(parameters)} parameters in fp32{state}.")
    progress(f"Continue training with: canzona resume {display_path(out)} gpus=N cluster=NAME data.path=PREFIX")


@app.command(short_help="Export to Hugging Face or Megatron.")
def export(
    where: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to create; it must be empty or not exist.")],
    to: Annotated[
        Literal["hf", "megatron"], typer.Option(help="The format: Hugging Face, or Megatron's torch_dist.")
    ] = "hf",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="The type of Hugging Face weights. [default: the run's train.precision]"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="The step of the checkpoint. [default: the newest]", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="A folder with the tokenizer to include. [default: the run's]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export weights to a Hugging Face folder, or weights and optimizer state to a Megatron checkpoint.

    Verifies every byte of the checkpoint first. The folder, which transformers or Megatron-LM can read, is
    written under a temporary name next to OUT and then renamed, so it is never incomplete. A Megatron
    checkpoint gets the state of Muon and AdamW, but not of other optimizers.
    """
    from canzona_cli.checkpoint.manifest import tensor_bytes
    from canzona_cli.checkpoint.staging import check_empty
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.commands.output import progress
    from canzona_cli.commands.verified import verify_run
    from canzona_cli.config.recipes import display_path
    from canzona_cli.errors import Problem, refuse
    from canzona_cli.huggingface.folder import DTYPES
    from canzona_cli.model.families import parameter_count
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.words import plural, size

    check_empty(out, key="OUT")
    if to == "megatron":
        given = {"--dtype": dtype, "--tokenizer": tokenizer}
        reason, fix = "Megatron's checkpoints have the run's precision and no tokenizer", "leave it out, or use --to hf"
        refuse(Problem(key=key, value=value, reason=reason, fix=fix) for key, value in given.items() if value)
        _export_to_megatron(where, out, step, as_json=as_json)
        return
    checkpoint = choose(where).find(step)
    manifest, config, tokenizer_files = verify_run(checkpoint, tokenizer)
    from canzona_cli.checkpoint.reader import Reader  # imports torch
    from canzona_cli.huggingface.weights import export_weights

    kind = dtype or config.train.precision
    total = tensor_bytes(DTYPES[kind][0], (parameter_count(config.model).total,))
    with bar_of_bytes("exporting", total) as on_bytes, Reader(checkpoint.path, manifest, config.model) as reader:
        written = export_weights(
            reader, out, dtype=kind, seq_length=config.train.seq_length, extra_files=tokenizer_files, on_bytes=on_bytes
        )
    if as_json:
        facts = {
            "step": checkpoint.step,
            "dtype": kind,
            "tokenizer": tokenizer_files.tokenizer or None,
            **asdict(written),
        }
        show_page({"version": JSON_VERSION, "folder": str(out.absolute()), **facts})
        return
    typer.echo(
        f"Wrote {display_path(out)}: step {checkpoint.step:,}, {size(written.bytes)} in "
        f"{plural(written.files, 'file')}."
    )
    if not tokenizer_files.tokenizer:
        progress("note: the run's tokenizer is unknown; --tokenizer DIR adds one")


def _export_to_megatron(where: Path, out: Path, step: int | None, *, as_json: bool) -> None:
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.commands.output import progress
    from canzona_cli.commands.verified import verify_run
    from canzona_cli.config.recipes import display_path
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.words import size

    checkpoint = choose(where).find(step)
    manifest, config, _ = verify_run(checkpoint, None)
    from canzona_cli.checkpoint.reader import Reader  # imports torch
    from canzona_cli.torch_dist.exporting import export_torch_dist

    with (
        bar_of_bytes("exporting", manifest.bytes) as on_bytes,
        Reader(checkpoint.path, manifest, config.model) as reader,
    ):
        written = export_torch_dist(reader, out, config=config, manifest=manifest, on_bytes=on_bytes)
    if as_json:
        show_page({"version": JSON_VERSION, "folder": str(out.absolute()), **asdict(written)})
        return
    state = f" with the state of {written.optimizer_state}" if written.optimizer_state else ""
    typer.echo(f"Wrote {display_path(out)}: iteration {written.iteration:,}{state}, {size(written.bytes)}.")
    if not written.optimizer_state:
        progress(f"note: only weights were exported: Megatron cannot store the state of {manifest.optimizer}")
