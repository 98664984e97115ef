"""`canzona data prepare`: text, JSONL or the standard library to Megatron's .bin/.idx."""

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
            "input, or stdlib for the Python standard library's sources.",
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
            help="byte: one token per byte. bpe: a byte-pair encoding learnt from the inputs, of 64 MiB at most. "
            "PATH: a tokenizer.json, or a Hugging Face folder that has one.",
        ),
    ] = "byte",
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="Entries of a bpe, at least 257. [default: 16384]")
    ] = None,
    eod: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="End-of-document token of a tokenizer.json. [default: the eos_token of the tokenizer_config.json "
            "beside it, or one of the usual names]",
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet"],
        typer.Option(help="auto: .jsonl, .ndjson and .parquet by name, the rest is text; standard input by its start."),
    ] = "auto",
    text_key: Annotated[
        str, typer.Option(metavar="NAME", help="The field of a JSONL line, or column of Parquet, that holds its text.")
    ] = "text",
    document: Annotated[
        Literal["file", "line"],
        typer.Option(help="What counts as a document in plain text. Every JSONL line or Parquet row is one."),
    ] = "file",
    max_bad: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Lines or rows without a text to leave out, counted and named, before it ends."
        ),
    ] = 0,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes. [default: one per core]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing PREFIX.")] = False,
) -> None:
    """Turn text into token files that `canzona train data=prepared data.path=PREFIX` reads.

    An existing PREFIX stays until the new one is complete. If it fails or is killed, the same command
    continues after the input files that were finished, and makes the same files byte for byte.
    """
    import signal

    from canzona_cli.data.prepare import PrepareRequest
    from canzona_cli.data.prepare import prepare as run
    from canzona_cli.report.data import preparation_progress, print_prepared

    # After a closed terminal or a scheduler's kill, clean up as after Ctrl-C.
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
