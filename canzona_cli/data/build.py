"""Builds one pair: reads sources, tokenises them, writes `<prefix>.bin`, `.idx`, `.json` and the tokenizer used.

Everything grows under temporary names while the prefix is locked, and gets its name at the end, so an interrupted or
failed build leaves nothing behind and an older pair untouched.
"""

import errno
import hashlib
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from canzona_cli import __version__
from canzona_cli.data.bpe import SAMPLE_BYTES, train_bpe
from canzona_cli.data.indexed import PairWriter, bin_path, idx_path, temporary
from canzona_cli.data.sidecar import Sidecar, dump_sidecar, saved_tokenizer_path, sidecar_path
from canzona_cli.data.sources import DocumentUnit, Piece, Reader, Source, open_source, piece_bytes
from canzona_cli.data.tokenizers import ByteTokenizer, Tokenizer, load_json_tokenizer
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem, unwritable

Stage = Literal["read input", "learn vocabulary", "tokenise", "write"]

_BATCH_BYTES = 2 << 20
"""Text tokenised in one call: enough for every core, little enough that Ctrl-C acts at once."""
_BATCH_PIECES = 8192
_INPUTS_KEPT = 1000
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
    """How to make a pair from sources."""

    tokenizer: str = "byte"
    """byte, bpe, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Entries of a bpe; None: `DEFAULT_VOCAB_SIZE`. The other tokenizers have their own size."""
    eod: str | None = None
    """The end-of-document token of a tokenizer.json; None: found by its usual names."""
    document: DocumentUnit = "file"
    text_key: str = "text"
    workers: int | None = None
    """Threads of the tokenizer; None: one per core."""

    @property
    def bpe_entries(self) -> int:
        return self.vocab_size or DEFAULT_VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished pair, and what happened while it was made."""

    prefix: Path
    sidecar: Sidecar
    empty: int
    """Documents without text, left out."""
    skipped: tuple[str, ...]
    """Binary files in folders, left out."""
    vocabulary_sampled: bool
    """Whether a bpe learnt from a sample rather than from everything."""
    asked_vocab_size: int | None
    """For a bpe; a small corpus yields fewer."""

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
        EnvironmentProblem: the disk is full or cannot be written.
    """
    if settings.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(settings.workers)  # read when the tokenizer's thread pool starts
    with _disk_errors(prefix), _spooled(sources, prefix, settings, on_progress) as readable:
        piece = piece_bytes(sources)
        tokenizer, sampled = _make_tokenizer(readable, piece, settings, on_progress)
        reader = Reader(piece=piece, document=settings.document, text_key=settings.text_key)
        with PairWriter(prefix, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod) as writer:
            _tokenise(readable, reader, tokenizer, writer, on_progress)
            if writer.documents == 0:
                raise ConfigError(
                    Problem(key="INPUT", reason="the inputs contain no text", fix="name files that are not empty")
                )
            on_progress(Progress(stage="write", done=0, total=None, tokens=writer.tokens, documents=writer.documents))
            writer.finish()
            saved = tokenizer.to_json()
            sidecar = _describe(tokenizer, saved, reader, writer, settings)
            companions = [(sidecar_path(prefix), dump_sidecar(sidecar))]
            if saved is not None:
                companions.insert(0, (saved_tokenizer_path(prefix), saved))
            writer.publish(*companions)
            if saved is None:
                saved_tokenizer_path(prefix).unlink(missing_ok=True)  # of the pair this one replaces
    return Built(
        prefix=prefix,
        sidecar=sidecar,
        empty=reader.empty,
        skipped=tuple(reader.skipped),
        vocabulary_sampled=sampled,
        asked_vocab_size=settings.bpe_entries if settings.tokenizer == "bpe" else None,
    )


def _make_tokenizer(
    sources: Sequence[Source], piece: int, settings: BuildSettings, on_progress: OnProgress
) -> tuple[Tokenizer, bool]:
    if settings.tokenizer == "byte":
        return ByteTokenizer(), False
    if settings.tokenizer != "bpe":
        return load_json_tokenizer(settings.tokenizer, settings.eod), False
    total = _total(sources) or 0
    reader = Reader(piece=piece, document=settings.document, text_key=settings.text_key)
    # Each piece is taken with the probability that fills the sample; a fixed seed keeps the vocabulary reproducible.
    # Compressed inputs hold more text than their size says, so the sample is also cut at its full size.
    chance, choose = min(1.0, SAMPLE_BYTES / max(total, 1)), random.Random(0)
    taken, left_out = 0, False

    def sample() -> Iterator[bytes]:
        nonlocal taken, left_out
        for data, _ in _all_pieces(sources, reader):
            if taken + len(data) > SAMPLE_BYTES:
                left_out = True
                break
            if choose.random() < chance:
                taken += len(data)
                yield data
            else:
                left_out = True
            on_progress(Progress(stage="learn vocabulary", done=reader.bytes_read, total=total))
        on_progress(Progress(stage="learn vocabulary", done=total, total=total))

    tokenizer = train_bpe(sample(), settings.bpe_entries, workers=settings.workers)
    return tokenizer, left_out


def _tokenise(
    sources: Sequence[Source], reader: Reader, tokenizer: Tokenizer, writer: PairWriter, on_progress: OnProgress
) -> None:
    total = _total(sources)
    batch: list[Piece] = []
    size = 0

    def flush() -> None:
        nonlocal size
        writer.add(tokenizer.encode_batch([piece.data for piece in batch]), [piece.last for piece in batch])
        batch.clear()
        size = 0
        done = reader.bytes_read
        on_progress(
            Progress(stage="tokenise", done=done, total=total, tokens=writer.tokens, documents=writer.documents)
        )

    for piece in _all_pieces(sources, reader):
        batch.append(piece)
        size += len(piece.data)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            flush()
    flush()


def _all_pieces(sources: Sequence[Source], reader: Reader) -> Iterator[Piece]:
    return chain.from_iterable(reader.read(source) for source in sources)


def _total(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _describe(
    tokenizer: Tokenizer, saved: str | None, reader: Reader, writer: PairWriter, settings: BuildSettings
) -> Sidecar:
    inputs = hashlib.sha256("".join(f"{record.sha256}\n" for record in reader.records).encode())
    return Sidecar(
        tokenizer_kind=tokenizer.kind,
        tokenizer=tokenizer.name,
        tokenizer_sha256=None if saved is None else hashlib.sha256(saved.encode()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        tokens=writer.tokens,
        documents=writer.documents,
        sequences=writer.sequences,
        max_token_id=writer.max_token_id,
        dtype=writer.dtype.__name__,
        text_bytes=reader.text_bytes,
        replaced=tokenizer.replaced + reader.unencodable,
        inputs_sha256=inputs.hexdigest(),
        inputs=tuple(reader.records[:_INPUTS_KEPT]),
        input_count=len(reader.records),
        document=settings.document,
        text_key=settings.text_key,
        python=platform.python_version(),
        canzona=__version__,
    )


@contextmanager
def _spooled(
    sources: Sequence[Source], prefix: Path, settings: BuildSettings, on_progress: OnProgress
) -> Iterator[list[Source]]:
    """The sources; pipes are copied to disk first if they must be read twice, for the vocabulary and for the ids."""
    if settings.tokenizer != "bpe" or all(source.size is not None for source in sources):
        yield list(sources)
        return
    spools: list[Path] = []
    readable: list[Source] = []
    try:
        for source in sources:
            if source.size is not None:
                readable.append(source)
                continue
            spools.append(temporary(prefix.with_name(f"{prefix.name}.input{len(spools)}")))
            size = _copy(source, spools[-1], on_progress)
            readable.append(replace(source, path=spools[-1], size=size))
        yield readable
    finally:
        for spool in spools:
            spool.unlink(missing_ok=True)


def _copy(source: Source, target: Path, on_progress: OnProgress) -> int:
    done = 0
    with open_source(source) as stream, open(target, "wb") as out:
        while block := stream.read1(1 << 20):
            out.write(block)
            done += len(block)
            on_progress(Progress(stage="read input", done=done, total=None))
    return done


@contextmanager
def _disk_errors(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_problem(prefix, error) from error


def disk_problem(prefix: Path, error: OSError) -> EnvironmentProblem:
    """The problem to show for an OSError while writing at `prefix`."""
    fix = "choose a writable folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = 0
        with suppress(OSError):
            free = shutil.disk_usage(prefix.parent).free
        fix = f"make room ({free / 2**20:,.0f} MiB free there) or choose another disk; nothing was left behind"
    return unwritable("--output", str(prefix), error, fix=fix)
