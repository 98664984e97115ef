"""The screens of `canzona data`: the progress of `prepare` (a bar in a terminal, lines in a pipe) and its
result, and the documents that `show` prints."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from canzona_cli.cli.views.page import joined
from canzona_cli.data.build import BuiltPair, OnProgress
from canzona_cli.data.build import Progress as BuildProgress
from canzona_cli.data.indexed import Sidecar
from canzona_cli.data.prepare import train_command
from canzona_cli.data.view import DataView, UnknownTokens, count_unknown
from canzona_cli.records.words import clean, count, plural, size

_LINE_INTERVAL_S = 5.0
_MOST_NAMES = 3


@contextmanager
def preparation_progress() -> Iterator[OnProgress]:
    """Shows the progress of a build on standard error, so that standard output has only the result; yields a
    function to call with each progress report."""
    console = Console(stderr=True, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=None, facts="")
        (task,) = bar.tasks
        printed = 0.0

        def show(progress: BuildProgress) -> None:
            nonlocal printed
            is_new_stage = progress.stage != task.description
            if is_new_stage:
                bar.reset(task.id, description=progress.stage)
            # Set directly, because `update` would read a total of None as "unchanged", not as "unknown".
            task.total = None if _is_learning(progress) else progress.total
            bar.update(task.id, completed=progress.done, facts=_facts(progress, task.speed or 0.0))
            if not console.is_terminal and (is_new_stage or time.monotonic() - printed >= _LINE_INTERVAL_S):
                printed = time.monotonic()
                percentage = f" {progress.done / progress.total:.0%}" if progress.total else ""
                facts = "" if is_new_stage else f" {task.fields['facts']}"
                console.print(f"{progress.stage}{percentage}{facts}", soft_wrap=True)

        yield show


def _facts(progress: BuildProgress, bytes_per_s: float) -> str:
    if progress.stage == "write":
        return f"{count(progress.tokens)} tokens"
    total = f" of {size(progress.total)}" if progress.total else ""
    parts = [f"{size(progress.done)}{total}"]
    if progress.tokens:
        parts.append(f"{count(progress.tokens)} tokens")
    if bytes_per_s > 0:
        parts.append(f"{size(bytes_per_s)}/s")
    if _is_learning(progress):
        parts = [f"{size(progress.done)} read, learning"]
    return ", ".join(parts)


def _is_learning(progress: BuildProgress) -> bool:
    """Returns True once the sample has been read; after that, learning the vocabulary reports no progress."""
    return progress.stage == "learn vocabulary" and progress.done == progress.total


def print_prepared(built: BuiltPair) -> None:
    """Prints the files that a build wrote, the documents that it dropped, notes, and the command to train on
    the data."""
    console = Console(highlight=False)
    files = [("file", f"{path} ({size(path.stat().st_size)})") for path in built.files]
    _print_rows(console, [*_facts_of(built.sidecar), *files])
    command = train_command(built)
    for note in [*_unknown_notes(count_unknown(built.prefix)), *_notes(built, command)]:
        console.print(joined((f"{'note':<11}", "yellow"), note), soft_wrap=True)
    console.print(Text("\nTrain on this data (with any recipe whose vocabulary covers the ids):"))
    console.print(Text(f"  {command}", style="bold"), soft_wrap=True)


def _facts_of(sidecar: Sidecar) -> Iterator[tuple[str, str]]:
    """Yields (label, value) rows about the inputs, documents, tokens and tokenizer of prepared data."""
    text = f"{size(sidecar.text_bytes)} of text ({sidecar.text_bytes:,} bytes)"
    yield "inputs", f"{plural(sidecar.input_count, 'input')}, {text}"
    documents = f"{sidecar.documents:,}"
    if sidecar.sequences > sidecar.documents:
        documents += f" in {sidecar.sequences:,} sequences (long documents are cut at line ends)"
    yield "documents", documents
    if sidecar.dropped:
        yield "dropped", _dropped(sidecar)
    per_token = sidecar.text_bytes / sidecar.tokens
    ids = f"{sidecar.dtype}, largest id {sidecar.max_token_id:,}"
    yield "tokens", f"{sidecar.tokens:,} ({per_token:.2f} bytes per token), {ids}"
    yield "tokenizer", f"{sidecar.tokenizer}, {sidecar.vocab_size:,} ids, {sidecar.eod} ends a document"


def _print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    for label, value in rows:
        # Not wrapped, so that a path can be copied or taken from piped output.
        console.print(joined((f"{label:<11}", "dim"), value), soft_wrap=True)


_BAR = 30
"""The width of the histogram's longest bar, in characters."""
_LINES = 3
"""The most lines of a document that are shown without `--verbose`."""


def print_data(shown: DataView, *, verbose: bool) -> None:
    """Prints a prepared data set: its facts, the lengths of its documents, and the texts that were read.

    Args:
        verbose: True to print all the text that was read of each document, not only its first lines.
    """
    console = Console(highlight=False)
    pair, lengths = shown.pair, shown.lengths
    unknown = [*_unknown_notes(shown.unknown)]
    if shown.sidecar is not None:
        _print_rows(console, _facts_of(shown.sidecar))
    else:
        facts = f"{pair.tokens:,}, {pair.dtype}; prepared by another tool, so the tokenizer is not known"
        _print_rows(console, [("documents", f"{pair.documents:,}"), ("tokens", facts)])
    if (held_out := shown.held_out) is not None:
        drawn = f"{plural(held_out.documents, 'document')}, {held_out.tokens:,} tokens"
        _print_rows(console, [("held out", f"{drawn}, with data.validation_fraction={held_out.share:g}")])
    spread = f"{lengths.least:,} to {lengths.most:,}, median {lengths.median:,}, mean {lengths.mean:,.0f}"
    _print_rows(console, [("lengths", f"{spread}, 90% up to {lengths.p90:,} tokens")])
    _print_rows(console, [("unknown", text) for text in unknown])
    largest = max(documents for _, documents in lengths.histogram)
    for most, documents in lengths.histogram:
        bar = "█" * -(-_BAR * documents // largest)
        console.print(f"{'':<11}up to {most:>11,}  {bar:<{_BAR}}  {documents:,}", soft_wrap=True)
    for document in shown.documents:
        text = clean(document.text, newlines=True)
        is_cut = document.cut
        if not verbose:
            lines = [line for line in text.splitlines() if line.strip()]
            width = console.width - 1
            is_cut |= len(lines) > _LINES or any(len(line) > width for line in lines[:_LINES])
            text = "\n".join(f"{line[:width]}…" if len(line) > width else line for line in lines[:_LINES])
        beginning = ", beginning" if is_cut else ""
        tokens = plural(document.tokens, "token")
        console.print(Text(f"\ndocument {document.number}: {tokens}{beginning}", style="bold"))
        if text:
            console.print(Text(text), soft_wrap=True)


def _dropped(sidecar: Sidecar) -> str:
    """Returns how many documents were dropped and why, such as `3: 2 empty, 1 not JSON (a.jsonl:7)`."""
    counts = ", ".join(f"{amount:,} {reason}" for reason, amount in sidecar.dropped.items())
    total = sum(sidecar.dropped.values())
    bad = total - sidecar.dropped.get("empty", 0) - sidecar.dropped.get("binary file", 0)
    named = ", ".join(f"{line.path}:{line.line}" for line in sidecar.bad_lines[:_MOST_NAMES])
    more = f" and {bad - _MOST_NAMES:,} more, listed in the .json" if bad > _MOST_NAMES else ""
    return f"{total:,}: {counts}" + (f" ({named}{more})" if named else "")


def _unknown_notes(unknown: UnknownTokens | None) -> Iterator[str]:
    if unknown is not None and unknown.tokens:
        share = f"{unknown.share:.1%}" if unknown.share >= 0.001 else "less than 0.1%"
        tokens = f"{unknown.tokens:,} of {unknown.counted:,} tokens ({share})"
        yield f"{tokens} stand for text that the tokenizer does not know, and which is lost; --tokenizer bpe loses none"


def _notes(built: BuiltPair, command: str) -> Iterator[str]:
    sidecar = built.sidecar
    if sidecar.replaced:
        yield f"{sidecar.replaced:,} invalid characters (not UTF-8) were replaced by U+FFFD or '?'"
    if built.skipped:
        names = ", ".join(built.skipped[:_MOST_NAMES])
        more = f" and {len(built.skipped) - _MOST_NAMES:,} more" if len(built.skipped) > _MOST_NAMES else ""
        yield f"{plural(len(built.skipped), 'file')} skipped because they are not text: {names}{more}"
    if built.vocabulary_sampled:
        yield "the vocabulary was trained on a 64 MiB sample, the same sample in every run"
    requested = built.requested_vocab_size
    if sidecar.tokenizer_kind == "bpe" and requested and sidecar.vocab_size < requested:
        yield f"the text yields a vocabulary of only {sidecar.vocab_size:,} entries; {requested:,} were requested"
    if "train.eval_interval=0" in command:
        yield "there are too few documents to hold any out for validation; --document line makes each line a document"
