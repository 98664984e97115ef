"""`canzona checkpoint`: lists, verifies and shows checkpoints; imports and exports Hugging Face folders."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from canzona_cli.commands.output import AsJson, RecipesDirs, overrides_argument
from canzona_cli.commands.output import show as show_page

JSON_VERSION = 1
"""The version of the JSON of `import` and `export`; added fields do not change it."""
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
    """List, verify and show checkpoints; import from and export to Hugging Face."""


@app.command("list")
def list_(where: Where = None, as_json: AsJson = False) -> None:
    """List checkpoints and whether each is complete.

    Reads only manifests and file sizes; `canzona checkpoint verify` reads the content.
    """
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.report.checkpoint import Listing

    listing = Listing(choose(where))
    show_page(listing.as_json() if as_json else listing)


@app.command()
def verify(where: Where = None, as_json: AsJson = False) -> None:
    """Compare every byte of checkpoints with their hashes.

    Verifies one checkpoint, or all checkpoints of a run. Reports each missing, truncated or damaged file; the
    exit code is 5 if there is one.
    """
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.checkpoint.verify import shortened
    from canzona_cli.errors import CheckpointInvalid, ExitCode
    from canzona_cli.report.checkpoint import verify_all

    verified = verify_all(choose(where).required())
    show_page(verified.as_json() if as_json else verified)
    if verified.problems:
        if as_json:
            raise typer.Exit(ExitCode.CHECKPOINT)
        raise CheckpointInvalid(*shortened(verified.problems))


@app.command()
def show(where: Where = None, as_json: AsJson = False) -> None:
    """Show what the newest or a given checkpoint contains."""
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.errors import CheckpointInvalid
    from canzona_cli.report.checkpoint import Content

    checkpoint = choose(where).newest
    if checkpoint.manifest is None:
        raise CheckpointInvalid(*checkpoint.problems)
    content = Content(checkpoint=checkpoint, manifest=checkpoint.manifest)
    show_page(content.as_json() if as_json else content)


@app.command("import")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A Hugging Face folder of a Qwen3 or Llama model with safetensors.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="RUN", help="The run directory to create; it must be empty or not exist.")
    ],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("The recipe that must match the model. [default: derived from its config.json]"),
    ] = None,
    recipes_dir: RecipesDirs = None,
    as_json: AsJson = False,
) -> None:
    """Import weights of a Hugging Face folder as step 0.

    The checkpoint has fp32 masters and no optimizer state, so training can start from it with any layout and
    optimizer.
    """
    from canzona_cli.commands.output import progress, warn_about
    from canzona_cli.config.recipes import shown
    from canzona_cli.huggingface.folder import open_folder, recipe_of
    from canzona_cli.huggingface.weights import check_empty, staged
    from canzona_cli.model.families import parameter_count
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.files import RunFiles
    from canzona_cli.run.words import count

    check_empty(out, key="--out")
    pretrained = open_folder(folder, key="DIR")
    composed = recipe_of(pretrained, overrides or (), recipes_dir or ())
    config = composed.config
    pretrained.check(config.model)
    warn_about(composed)
    from canzona_cli.huggingface.weights import import_weights  # imports torch

    parameters = parameter_count(config.model).total
    with bar_of_bytes("importing", 4 * parameters) as on_bytes, staged(out, key="--out") as run:
        name = import_weights(pretrained, config, RunFiles(run), on_bytes=on_bytes).name
    checkpoint = RunFiles(out).checkpoints / name
    if as_json:
        show_page({"version": JSON_VERSION, "checkpoint": str(checkpoint.absolute()), "parameters": parameters})
        return
    typer.echo(f"Wrote {shown(checkpoint)}: {count(parameters)} parameters in fp32.")
    progress(f"Train from it with: canzona train recipe=RECIPE run.dir={shown(out)}, or init={shown(out)}")


@app.command()
def export(
    where: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run directory or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to create; it must be empty or not exist.")],
    to: Annotated[Literal["hf"], typer.Option(help="The format: Hugging Face.")] = "hf",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="The type of the weights. [default: the run's train.precision]"),
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
    """Export weights to a Hugging Face folder.

    Verifies every byte of the checkpoint first. The folder, which transformers can read, is written under a
    temporary name next to OUT and then renamed, so it is never incomplete.
    """
    from canzona_cli.checkpoint.manifest import tensor_bytes
    from canzona_cli.checkpoint.store import choose
    from canzona_cli.commands.output import progress
    from canzona_cli.commands.verified import verified_run
    from canzona_cli.config.recipes import shown
    from canzona_cli.huggingface.folder import DTYPES
    from canzona_cli.huggingface.weights import check_empty
    from canzona_cli.model.families import parameter_count
    from canzona_cli.report.checkpoint import bar_of_bytes
    from canzona_cli.run.words import plural, size

    check_empty(out, key="OUT")
    checkpoint = choose(where).at(step)
    manifest, config, tokenizer_files = verified_run(checkpoint, tokenizer)
    from canzona_cli.checkpoint.reader import Reader  # imports torch
    from canzona_cli.huggingface.weights import export_weights

    kind = dtype or config.train.precision
    total = tensor_bytes(DTYPES[kind][0], (parameter_count(config.model).total,))
    with bar_of_bytes("exporting", total) as on_bytes, Reader(checkpoint.path, manifest, config.model) as reader:
        written = export_weights(
            reader, out, dtype=kind, seq_length=config.train.seq_length, beside=tokenizer_files, on_bytes=on_bytes
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
        f"Wrote {shown(out)}: step {checkpoint.step:,}, {size(written.bytes)} in {plural(written.files, 'file')}."
    )
    if not tokenizer_files.tokenizer:
        progress("note: no tokenizer is known for this run; --tokenizer DIR adds one")
