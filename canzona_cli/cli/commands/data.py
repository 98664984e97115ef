"""`canzona data`: converts text, JSONL, Parquet or the standard library's sources to Megatron's .bin/.idx,
and shows such data as text."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from canzona_cli.core.reading import expanded

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        Argument(
            metavar="INPUT",
            help="Files, globs or folders of UTF-8 text, JSONL or Parquet (also .gz, .bz2, .xz, .zst); '-' for "
            "standard input; stdlib for the sources of the Python standard library.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, Option("--output", "-o", metavar="PREFIX", help="Write PREFIX.bin, PREFIX.idx and PREFIX.json.")
    ],
    tokenizer: Annotated[
        str,
        Option(
            metavar="byte|bpe|PATH",
            help="byte: one token per byte. bpe: a byte-pair encoding trained on the inputs. PATH: a tokenizer.json, "
            "or a Hugging Face folder that has one.",
        ),
    ] = "byte",
    vocab_size: Annotated[
        int | None, Option(metavar="N", help="Vocabulary size of bpe, at least 257. [default: 16384]")
    ] = None,
    eod: Annotated[
        str | None,
        Option(
            metavar="TOKEN",
            help="End-of-document token of a tokenizer.json. [default: the eos_token of the tokenizer_config.json "
            "next to it, or a token with a common name]",
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet"],
        Option(
            help="auto: .jsonl, .ndjson and .parquet by name, other files as text, except .json, .csv and .tsv, which "
            "need a choice; standard input by its first bytes."
        ),
    ] = "auto",
    text_key: Annotated[
        str, Option(metavar="NAME", help="The field or column that contains the text; NAME.NAME for a nested one.")
    ] = "text",
    template: Annotated[
        str,
        Option(
            metavar="TEXT",
            help="Make a document from several fields: '{question}\\n{answer}'; or from the messages in the list "
            "that --text-key names: '{role}: {content}\\n'.",
            show_default=False,
        ),
    ] = "",
    document: Annotated[
        Literal["file", "line"],
        Option(
            help="Make each plain text file, or each of its lines, a document. In JSONL and Parquet, each "
            "line or row is always a document."
        ),
    ] = "file",
    max_bad: Annotated[
        int,
        Option(
            metavar="N", help="How many lines or rows without text to skip and report; with more, the command fails."
        ),
    ] = 0,
    workers: Annotated[int | None, Option(metavar="N", help="Threads that tokenise. [default: one per core]")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing PREFIX.")] = False,
) -> None:
    """Tokenise text for `canzona train data=prepared data.path=PREFIX`.

    An existing PREFIX is replaced only when the new one is complete.
    """
    import signal

    from canzona_cli.cli.views.data import preparation_progress, print_prepared
    from canzona_cli.data.prepare import PrepareRequest
    from canzona_cli.data.prepare import prepare as run

    # A closed terminal and a scheduler's SIGTERM clean up like Ctrl-C.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    request = PrepareRequest(
        inputs=tuple(inputs),
        output=output,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eod=eod,
        format=format,
        document=document,
        text_key=text_key,
        template=template,
        max_bad=max_bad,
        workers=workers,
        overwrite=overwrite,
    )
    with preparation_progress() as on_progress:
        built = run(request, on_progress)
    print_prepared(built)


@app.command("show")
def show_data(
    prefix: Annotated[Path, Argument(metavar="PREFIX", help="The data: PREFIX.bin and PREFIX.idx.")],
    documents: Annotated[int, Option(min=0, metavar="N", help="Number of documents to show.")] = 2,
    tokens: Annotated[int, Option(min=1, metavar="N", help="Maximum number of tokens to show of each.")] = 100,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show all lines of each text, not only the first three.")
    ] = False,
) -> None:
    """Show the documents' lengths and the first documents as text."""
    from canzona_cli.cli.views.data import print_data
    from canzona_cli.data.view import view

    shown = view(expanded(prefix).absolute(), documents=documents, tokens=tokens)
    print_data(shown, verbose=verbose)
