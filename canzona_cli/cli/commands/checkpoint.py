"""`canzona checkpoint`: lists and verifies checkpoints; imports from and exports to Hugging Face and Megatron."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from canzona_cli.checkpoint.commit import check_empty
from canzona_cli.checkpoint.store import choose
from canzona_cli.cli.commands.output import AsJson, RecipesDirs, RunOrCheckpoint, Step, key_values, show
from canzona_cli.core.errors import CheckpointInvalid, ExitCode, Problem, refuse

app = typer.Typer(no_args_is_help=True, add_completion=False)

Where = Annotated[
    Path | None,
    Argument(
        metavar="[RUN_OR_CHECKPOINT]",
        help="A run directory or one of its checkpoints. "
        "[default: this directory if it is a run, else the last saved run in ./runs]",
        show_default=False,
    ),
]


@app.command("list")
def list_(where: Where = None, as_json: AsJson = False) -> None:
    """List checkpoints and show which are complete.

    Reads only manifests and file sizes; `canzona checkpoint verify` reads everything.
    """
    from canzona_cli.cli.views.checkpoint import CheckpointListView

    listing = CheckpointListView(choose(where))
    show(listing.as_json() if as_json else listing)


@app.command()
def verify(where: Where = None, as_json: AsJson = False) -> None:
    """Check every byte of checkpoints against the recorded hashes.

    Verifies one checkpoint, or all checkpoints of a run. Reports every missing, truncated or damaged file;
    the exit code is 5 if there are any.
    """
    from canzona_cli.checkpoint.verify import limit_problems
    from canzona_cli.cli.views.checkpoint import verify_all

    verified = verify_all(choose(where).require_any())
    show(verified.as_json() if as_json else verified)
    if verified.problems:
        if as_json:
            raise typer.Exit(ExitCode.CHECKPOINT)
        raise CheckpointInvalid(*limit_problems(verified.problems))


@app.command("import", short_help="Import from Hugging Face or Megatron.")
def import_(
    folder: Annotated[
        Path,
        Argument(metavar="DIR", help="A Hugging Face folder with safetensors, or a Megatron checkpoint (torch_dist)."),
    ],
    out: Annotated[Path, Option(metavar="RUN", help="The run directory to create; it must be empty or not exist.")],
    overrides: Annotated[
        list[str] | None, key_values("A recipe and overrides with the same model as DIR. [default: derived from DIR]")
    ] = None,
    recipes_dir: RecipesDirs = None,
    as_json: AsJson = False,
) -> None:
    """Import the weights of a Hugging Face folder as step 0, or a Megatron checkpoint at its own step.

    The new checkpoint has fp32 masters, so training can start from its weights with any layout and optimizer.
    If a Megatron checkpoint has the state of Muon or AdamW, the state is imported too, and training can
    continue.
    """
    from canzona_cli.checkpoint.huggingface.folder import is_hugging_face
    from canzona_cli.cli.commands.checkpoint_files import import_hugging_face, import_megatron

    check_empty(out, key="--out")
    megatron = False
    if not is_hugging_face(folder):
        from canzona_cli.checkpoint.torch_dist.folder import is_torch_dist  # imports torch

        megatron = is_torch_dist(folder)
    (import_megatron if megatron else import_hugging_face)(
        folder, out, overrides or (), recipes_dir or (), as_json=as_json
    )


@app.command(short_help="Export to Hugging Face or Megatron.")
def export(
    where: RunOrCheckpoint,
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to create; it must be empty or not exist.")],
    to: Annotated[Literal["hf", "megatron"], Option(help="The format: Hugging Face, or Megatron's torch_dist.")] = "hf",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        Option(help="The type of Hugging Face weights. [default: the run's train.precision]"),
    ] = None,
    step: Step = None,
    ema: Annotated[bool, Option("--ema", help="Export the average of the weights (train.ema).")] = False,
    tokenizer: Annotated[
        Path | None, Option(metavar="DIR", help="A folder with the tokenizer to include. [default: the run's]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export weights to a Hugging Face folder, or weights and optimizer state to a Megatron checkpoint.

    Verifies every byte of the checkpoint first. The folder, which transformers or Megatron-LM can read, is
    written under a temporary name next to OUT and then renamed, so it is never incomplete. A Megatron
    checkpoint gets the state of Muon and AdamW, but not of other optimizers.
    """
    from canzona_cli.cli.commands.checkpoint_files import export_hugging_face, export_megatron

    check_empty(out, key="OUT")
    if to == "hf":
        export_hugging_face(choose(where).find(step), out, dtype, tokenizer, ema=ema, as_json=as_json)
        return
    ignored_options = {"--dtype": dtype, "--tokenizer": tokenizer, "--ema": ema}
    reason = "Megatron's checkpoints have the run's precision and state, and no tokenizer"
    fix = "leave it out, or use --to hf"
    refuse(Problem(key=key, value=value, reason=reason, fix=fix) for key, value in ignored_options.items() if value)
    export_megatron(choose(where).find(step), out, as_json=as_json)
