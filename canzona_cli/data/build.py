"""Builds one pair: reads sources, tokenises them, writes `<prefix>.bin`, `.idx`,
`.json` and the tokenizer used.

Everything grows under temporary names while the prefix is locked, and gets its name at the end, so an
interrupted or failed build leaves an older pair untouched. Of much input it leaves what it has of the inputs
that are finished, for the build after it; the pair is the same, byte for byte, however often that was and
however many processes made it.
"""

import hashlib
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from canzona_cli import __version__
from canzona_cli.data.encode import Encoded, Recipe, in_order
from canzona_cli.data.indexed import PairWriter, Written, bin_path, can_continue, idx_path
from canzona_cli.data.reading import Batch, DocumentUnit, Reader, ReadSettings, open_source, piece_bytes, pieces
from canzona_cli.data.sidecar import InputRecord, Sidecar, Tally, dump_sidecar, saved_tokenizer_path, sidecar_path
from canzona_cli.data.sources import Source
from canzona_cli.data.tokenizers import SAMPLE_BYTES, ByteTokenizer, Tokenizer, load_json_tokenizer, train_bpe
from canzona_cli.errors import ConfigError, Problem, unwritable
from canzona_cli.run.codec import load_if_sound, save
from canzona_cli.run.machine import cores

Stage = Literal["read input", "learn vocabulary", "tokenise", "write"]

LARGE = 16 << 20
"""Bytes of input after which a build notes how far it is; twice as many are worth a pool of processes."""
_MOST_NOTES = 64
_MOST_BAD_SHOWN = 5
_MOST_INPUTS = 1000
DEFAULT_VOCAB_SIZE = 16384


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a build."""

    stage: Stage
    done: int
    """Bytes of input, as they are on disk."""
    total: int | None
    """None when the inputs' size is unknown."""
    tokens: int = 0
    documents: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The settings by which a pair is made from sources."""

    tokenizer: str = "byte"
    """byte, bpe, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Entries of a bpe; None: `DEFAULT_VOCAB_SIZE`. The other tokenizers have their own size."""
    eod: str | None = None
    """The end-of-document token of a tokenizer.json; None: found by its usual names."""
    document: DocumentUnit = "file"
    text_key: str = "text"
    max_bad: int = 0
    """Lines without a text to leave out; one more ends the build."""
    workers: int | None = None
    """Processes or, where there is too little input for several, threads of the tokenizer;
    None: one per core."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished pair, and what happened while it was made."""

    prefix: Path
    sidecar: Sidecar
    skipped: tuple[str, ...]
    """Binary files in folders, left out."""
    already_there: int
    """Inputs that an earlier build, which did not come to its end, had finished."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in pair_files(self.prefix) if path.exists())


def pair_files(prefix: Path) -> tuple[Path, ...]:
    """Every file a build may leave at `prefix`."""
    return bin_path(prefix), idx_path(prefix), sidecar_path(prefix), saved_tokenizer_path(prefix)


def build_pair(sources: Sequence[Source], prefix: Path, settings: BuildSettings, on_progress: OnProgress) -> Built:
    """Make the pair `prefix` from `sources`, replacing what is there. The caller holds the prefix's lock.

    Raises:
        ConfigError: bad input or tokenizer, or no text at all.
        OSError: the disk is full or cannot be written.
    """
    if settings.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(settings.workers)  # read when the tokenizer's thread pool starts
    read = ReadSettings(piece=piece_bytes(sources), document=settings.document, text_key=settings.text_key)
    with ExitStack() as stack:
        if settings.tokenizer == "bpe":
            sources = [_readable_twice(source, prefix, stack, on_progress) for source in sources]
        tokenizer = _tokenizer(sources, read, settings, on_progress)
        recipe = Recipe(tokenizer=tokenizer, read=read)
        done = _finished_inputs(prefix, recipe, sources)
        after = None if done is None else done.written
        writer = stack.enter_context(
            PairWriter(prefix, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, after=after)
        )
        tally = _tokenise(sources, recipe, done, writer, settings, on_progress)
        written = writer.written
        if written.documents == 0:
            reason, fix = "the inputs contain no text", "name files that are not empty"
            raise ConfigError(Problem(key="INPUT", reason=reason, fix=fix))
        facts = {"tokens": written.tokens, "documents": written.documents}
        on_progress(Progress(stage="write", done=0, total=None, **facts))
        sidecar = _describe(sources, tokenizer, tally, writer, settings)
        writer.publish({saved_tokenizer_path(prefix): tokenizer.to_json(), sidecar_path(prefix): dump_sidecar(sidecar)})
        _finished_path(prefix).unlink(missing_ok=True)
    already_there = 0 if done is None else done.inputs
    return Built(prefix=prefix, sidecar=sidecar, skipped=tuple(tally.skipped), already_there=already_there)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The first inputs of a build, whose tokens are on the disk as a whole."""

    inputs: int
    fingerprint: str
    """The hash of these inputs and of how they were tokenised."""
    written: Written
    tally: Tally


def _finished_path(prefix: Path) -> Path:
    """The file that says which inputs of an unfinished build are finished."""
    return prefix.with_name(f".{prefix.name}.finished")


def _finished_inputs(prefix: Path, recipe: Recipe, sources: Sequence[Source]) -> Finished | None:
    """The inputs that an earlier build of the same finished before it was killed or failed; None for none."""
    done = load_if_sound(_finished_path(prefix), Finished)
    if (
        done is not None
        and done.inputs <= len(sources)
        and done.fingerprint == recipe.fingerprint(sources[: done.inputs])
        and can_continue(prefix, done.written, recipe.tokenizer.vocab_size)
    ):
        return done
    _finished_path(prefix).unlink(missing_ok=True)
    return None


def _tokenise(
    sources: Sequence[Source],
    recipe: Recipe,
    done: Finished | None,
    writer: PairWriter,
    settings: BuildSettings,
    on_progress: OnProgress,
) -> Tally:
    """Write all documents, after each input of some size also how far that is; count what was read."""
    tally, inputs = (Tally(), 0) if done is None else (done.tally, done.inputs)
    writer.keep = done is not None
    total = _total(sources)
    reader = Reader(settings=recipe.read, bytes_read=_total(sources[:inputs]) or 0)
    read = noted = reader.bytes_read
    parallel = total is not None and total - reader.bytes_read >= 2 * LARGE
    workers = (settings.workers or cores()) if parallel else 1
    items = chain.from_iterable(map(reader.read, sources[inputs:]))
    for result in in_order(items, recipe, workers):
        if isinstance(result, Encoded):
            tally.add(result.tally)
            writer.add(result.tokens, result.lengths, result.last)
            _refuse_bad_lines(tally, settings.max_bad)
        else:
            tally.add(result)
            read += sources[inputs].size or 0
            inputs += 1
            if total is not None and read - noted >= max(LARGE, total // _MOST_NOTES):
                writer.sync()
                written, fingerprint = writer.written, recipe.fingerprint(sources[:inputs])
                finished = Finished(inputs=inputs, fingerprint=fingerprint, written=written, tally=tally)
                save(_finished_path(writer.prefix), finished, indented=False)
                writer.keep, noted = True, read
        facts = {"tokens": writer.written.tokens, "documents": writer.written.documents}
        on_progress(Progress(stage="tokenise", done=reader.bytes_read, total=total, **facts))
    return tally


def _tokenizer(
    sources: Sequence[Source], read: ReadSettings, settings: BuildSettings, on_progress: OnProgress
) -> Tokenizer:
    """Loads the tokenizer, or trains a bpe on the sources."""
    if settings.tokenizer == "byte":
        return ByteTokenizer()
    if settings.tokenizer != "bpe":
        return load_json_tokenizer(settings.tokenizer, settings.eod)
    total = _total(sources) or 0
    reader = Reader(settings=read)
    # Each piece is taken with the probability that fills the sample; a fixed seed keeps the vocabulary
    # reproducible. Compressed inputs hold more text than their size says, so the sample is also cut at its
    # full size.
    chance, choose = min(1.0, SAMPLE_BYTES / max(total, 1)), random.Random(0)

    def texts() -> Iterator[bytes]:
        tally = Tally()
        for item in chain.from_iterable(map(reader.read, sources)):
            if isinstance(item, Batch):
                yield from (piece.data for piece in pieces(item, read, tally))
                _refuse_bad_lines(tally, settings.max_bad)

    def sample() -> Iterator[bytes]:
        taken = 0
        for data in texts():
            if taken + len(data) > SAMPLE_BYTES:
                break
            if choose.random() < chance:
                taken += len(data)
                yield data
            on_progress(Progress(stage="learn vocabulary", done=reader.bytes_read, total=total))
        on_progress(Progress(stage="learn vocabulary", done=total, total=total))

    return train_bpe(sample(), settings.vocab_size or DEFAULT_VOCAB_SIZE, workers=settings.workers)


def _readable_twice(source: Source, prefix: Path, stack: ExitStack, on_progress: OnProgress) -> Source:
    """Copies a pipe to the disk until `stack` closes: it is read for the vocabulary and again for the ids."""
    if source.size is not None:
        return source
    on_progress(Progress(stage="read input", done=0, total=None))
    folder = stack.enter_context(TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}."))
    copy = Path(folder) / "input"
    with open_source(source) as stream, copy.open("wb") as out:
        shutil.copyfileobj(stream, out)
    return replace(source, path=copy, size=copy.stat().st_size)


def _total(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _describe(
    sources: Sequence[Source], tokenizer: Tokenizer, tally: Tally, writer: PairWriter, settings: BuildSettings
) -> Sidecar:
    written, saved = writer.written, tokenizer.to_json()
    return Sidecar(
        tokenizer_kind=tokenizer.kind,
        tokenizer=tokenizer.name,
        tokenizer_sha256=None if saved is None else hashlib.sha256(saved.encode()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        tokens=written.tokens,
        documents=written.documents,
        sequences=written.sequences,
        max_token_id=written.max_token_id,
        dtype=writer.dtype.__name__,
        text_bytes=tally.text_bytes,
        replaced=tally.replaced,
        dropped=tally.dropped,
        bad_lines=tuple(tally.bad_lines),
        inputs=tuple(InputRecord(path=source.label, bytes=source.size) for source in sources[:_MOST_INPUTS]),
        input_count=len(sources),
        document=settings.document,
        text_key=settings.text_key,
        python=platform.python_version(),
        canzona=__version__,
    )


@contextmanager
def disk_errors(prefix: Path) -> Iterator[None]:
    """Turns an OSError while a pair is written into an error for the user."""
    try:
        yield
    except OSError as error:
        raise unwritable("--output", str(prefix), error, fix="choose a writable folder with enough room") from error


def _refuse_bad_lines(tally: Tally, most: int) -> None:
    """Raise a ConfigError that names the first lines without a text,
    if there are more than may be left out."""
    if tally.bad <= most:
        return
    fix = "use --text-key NAME for another field, or --format text to take lines as they are; to leave them out, "
    fix += f"--max-bad {max(10, 2 * tally.bad)}" if most == 0 else "a higher --max-bad"
    shown = tally.bad_lines[:_MOST_BAD_SHOWN]
    raise ConfigError(
        *(Problem(key="INPUT", value=f"{at.path}:{at.line}", reason=at.kind + at.detail, fix=fix) for at in shown)
    )
