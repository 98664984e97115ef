"""`canzona data prepare`: converts text, JSONL, Parquet or the standard library's sources to Megatron's
.bin/.idx."""

from typing import Annotated, Literal

import typer

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare text for training."""


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, globs or folders of UTF-8 text, JSONL or Parquet (also .gz, .bz2, .xz, .zst), - for standard "
            "input, or stdlib for the sources of the Python standard library.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="PREFIX", help="Write PREFIX.bin, PREFIX.idx and PREFIX.json."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="byte|bpe|PATH",
            help="byte: one token per byte. bpe: a byte-pair encoding trained on the inputs. PATH: a tokenizer.json, "
            "or a Hugging Face folder that has one.",
        ),
    ] = "byte",
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="Vocabulary size of bpe, at least 257. [default: 16384]")
    ] = None,
    eod: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="End-of-document token of a tokenizer.json. [default: the eos_token of the tokenizer_config.json "
            "next to it, or a common name]",
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet"],
        typer.Option(
            help="auto: .jsonl, .ndjson and .parquet by name, all else is text; standard input by its first bytes."
        ),
    ] = "auto",
    text_key: Annotated[
        str, typer.Option(metavar="NAME", help="The JSONL field or Parquet column that contains the text.")
    ] = "text",
    document: Annotated[
        Literal["file", "line"],
        typer.Option(help="What is a document in plain text. Each JSONL line or Parquet row is a document."),
    ] = "file",
    max_bad: Annotated[
        int,
        typer.Option(
            metavar="N", help="How many lines or rows without a text to skip and report; one more is an error."
        ),
    ] = 0,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes. [default: one per core]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing PREFIX.")] = False,
) -> None:
    """Tokenise text for `canzona train data=prepared data.path=PREFIX`.

    An existing PREFIX is replaced only when the new one is complete. After a failure or a kill, the same
    command resumes after the last finished input file, and writes exactly the same bytes as an uninterrupted
    run.
    """
    import signal

    from canzona_cli.data.prepare import PrepareRequest
    from canzona_cli.data.prepare import prepare as run
    from canzona_cli.report.data import preparation_progress, print_prepared

    # Clean up after a closed terminal or a scheduler's SIGTERM as after Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    request = PrepareRequest(
        inputs=tuple(inputs),
        output=output,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eod=eod,
        format=format,
        document=document,
        text_key=text_key,
        max_bad=max_bad,
        workers=workers,
        overwrite=overwrite,
    )
    with preparation_progress() as on_progress:
        built = run(request, on_progress)
    print_prepared(built)
