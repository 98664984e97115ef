"""`canzona generate RUN`: generates text from a checkpoint with transformers."""

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from canzona_cli.checkpoint.store import StoredCheckpoint, choose
from canzona_cli.cli.commands.output import AsJson, RunOrCheckpoint, Step, progress
from canzona_cli.core.errors import EnvironmentProblem, Problem, refuse

if TYPE_CHECKING:
    from canzona_cli.checkpoint.huggingface.generating import SamplingSettings, Writer
    from canzona_cli.core.setup import Device

JSON_VERSION = 1


def generate(
    where: RunOrCheckpoint,
    prompt: Annotated[
        str | None, Option(metavar="TEXT", help="The text to continue; '' starts a new document.")
    ] = None,
    interactive: Annotated[
        bool, Option("--interactive", help="Read one prompt per line until the input ends.")
    ] = False,
    max_new_tokens: Annotated[int, Option(metavar="N", min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[
        float,
        Option(metavar="T", min=0, max=100, help="0: always the most likely token; 1: the model's probabilities."),
    ] = 0.0,
    top_p: Annotated[
        float,
        Option(metavar="P", min=0.001, max=1, help="Sample from the most likely tokens with this total probability."),
    ] = 1.0,
    seed: Annotated[int, Option(metavar="N", min=0, help="Random seed; the same seed gives the same text.")] = 0,
    step: Step = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto: a GPU if there is one.")] = "auto",
    tokenizer: Annotated[
        Path | None, Option(metavar="DIR", help="A folder with the tokenizer.json to use. [default: the run's]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text from a checkpoint with transformers (canzona[hf]).

    Continues the text of --prompt or, with --interactive, each line that is typed, without a chat template.
    """
    problems = []
    if interactive == (prompt is not None):
        reason = "cannot be combined with --prompt" if interactive else "is missing: there is no text to continue"
        key = "--interactive" if interactive else "--prompt"
        problems.append(Problem(key=key, reason=reason, fix="give either --prompt TEXT or --interactive"))
    if interactive and as_json:
        fix = "use --prompt TEXT with --json"
        problems.append(
            Problem(key="--json", reason="prints one object, but --interactive generates many texts", fix=fix)
        )
    if temperature == 0 and top_p < 1:
        reason = "affects sampling, but --temperature 0 does not sample"
        problems.append(Problem(key="--top-p", value=top_p, reason=reason, fix="add --temperature 1"))
    refuse(problems)
    _require_transformers()
    checkpoint = choose(where).find(step)
    atexit.register(_silence_teardown)
    writer = _writer(checkpoint, tokenizer, None if device == "auto" else device)
    from canzona_cli.checkpoint.huggingface.generating import SamplingSettings

    sampling = SamplingSettings(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    likeliest = "always the most likely token; --temperature T samples"
    how = f"step {checkpoint.step:,}: {f'sampled at temperature {temperature:g}' if temperature else likeliest}"
    if prompt is None:
        progress(how)
        _converse(writer, sampling)
        return
    if not as_json:
        progress(how)
        typer.echo(prompt, nl=False)
    written = writer.continue_text(prompt, sampling, stream=not as_json)
    if written.too_long:
        typer.echo("note: the text is longer than the sequences that the model was trained on", err=True)
    if as_json:
        from dataclasses import asdict

        from canzona_cli.cli.commands.output import show

        origin = {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "prompt": prompt}
        show({"version": JSON_VERSION, **origin, **asdict(sampling), **asdict(written)})


def _silence_teardown() -> None:
    """Discards further output to standard error, because libraries that transformers imports, such as Triton,
    report leaks of their bindings while Python shuts down."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _require_transformers() -> None:
    """Checks that transformers is installed.

    Raises:
        EnvironmentProblem: transformers is not installed.
    """
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        fix = "pip install 'canzona[hf]', or canzona checkpoint export, which does not need it, and another program"
        raise EnvironmentProblem(Problem(key="transformers", reason="is not installed here", fix=fix))


def _writer(checkpoint: "StoredCheckpoint", tokenizer: Path | None, device: "Device | None") -> "Writer":
    """Verifies every byte of a checkpoint and loads its model."""
    from canzona_cli.checkpoint.huggingface.folder import DTYPES
    from canzona_cli.checkpoint.manifest import tensor_bytes
    from canzona_cli.cli.commands.checkpoint_files import verify_run
    from canzona_cli.cli.views.checkpoint import bar_of_bytes
    from canzona_cli.core.model.families import parameter_count

    manifest, config, tokenizer_files = verify_run(checkpoint, tokenizer)
    from canzona_cli.checkpoint.huggingface.generating import Writer
    from canzona_cli.checkpoint.reader import Reader  # imports torch

    dtype = config.train.precision
    total = tensor_bytes(DTYPES[dtype][0], (parameter_count(config.model).total,))
    with bar_of_bytes("loading", total) as on_bytes, Reader(checkpoint.path, manifest, config.model) as reader:
        length = config.train.seq_length
        return Writer(reader, tokenizer_files, dtype=dtype, device=device, seq_length=length, on_bytes=on_bytes)


def _converse(writer: "Writer", sampling: "SamplingSettings") -> None:
    """Generates a text for every line of standard input."""
    shows_prompt = sys.stdin.isatty()
    while True:
        if shows_prompt:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        writer.continue_text(line.rstrip("\n"), sampling, stream=True)
