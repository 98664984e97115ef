"""Builds one pair of files: reads sources, tokenises them, and writes `<prefix>.bin`, `.idx`, `.json` and the
tokenizer.

The files are written under temporary names while the prefix is locked, and renamed at the end, so a build
that is interrupted or fails before that leaves an older pair untouched.
"""

import errno
import hashlib
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from canzona_cli import __version__
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem, refuse, write_error
from canzona_cli.data.indexed import (
    PairWriter,
    Sidecar,
    Tally,
    bin_path,
    dump_sidecar,
    idx_path,
    saved_tokenizer_path,
    sidecar_path,
)
from canzona_cli.data.reading import (
    DocumentUnit,
    Reader,
    ReadSettings,
    fix_of,
    piece_bytes,
)
from canzona_cli.data.sources import Source
from canzona_cli.data.tokenizers import (
    SAMPLE_BYTES,
    ByteTokenizer,
    Tokenizer,
    load_json_tokenizer,
    train_bpe,
)

Stage = Literal["learn vocabulary", "tokenise", "write"]

_MAX_BAD_LINES_SHOWN = 5
_MAX_INPUTS_LISTED = 1000
DEFAULT_VOCAB_SIZE = 16384


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a build: its stage, and the counts so far."""

    stage: Stage
    done: int
    """The bytes of input that have been read, before decompression; 0 in the stage `write`."""
    total: int | None
    """The bytes of all inputs; None if unknown, and in the stage `write`."""
    tokens: int = 0
    documents: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The settings for building a pair from sources."""

    tokenizer: str = "byte"
    """The tokenizer: byte, bpe, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """The vocabulary size of a byte-pair encoding (bpe); None for `DEFAULT_VOCAB_SIZE`. Other tokenizers have
    a fixed size."""
    eod: str | None = None
    """The end-of-document token of a tokenizer.json; None to find it by its usual names."""
    document: DocumentUnit = "file"
    text_key: str = "text"
    template: str = ""
    """The template that turns JSONL objects into text; empty to use only the field `text_key`."""
    max_bad: int = 0
    """The number of lines without text that may be skipped; with more, the build fails."""
    workers: int | None = None
    """The number of the tokenizer's threads; None for one per core."""

    @property
    def bpe_entries(self) -> int:
        return self.vocab_size or DEFAULT_VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class BuiltPair:
    """A finished pair and facts about its build."""

    prefix: Path
    sidecar: Sidecar
    skipped: tuple[str, ...]
    """The binary files in folders, which were skipped."""
    vocabulary_sampled: bool
    """True if a bpe was trained on a sample of the text."""
    requested_vocab_size: int | None
    """The requested vocabulary size of a bpe, which a small corpus may not reach; None for other
    tokenizers."""

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in pair_files(self.prefix) if path.exists())


def pair_files(prefix: Path) -> tuple[Path, ...]:
    """Returns the paths of all files that a build may write at `prefix`."""
    return bin_path(prefix), idx_path(prefix), sidecar_path(prefix), saved_tokenizer_path(prefix)


def build_pair(sources: Sequence[Source], prefix: Path, settings: BuildSettings, on_progress: OnProgress) -> BuiltPair:
    """Builds the pair `prefix` from `sources` and replaces an existing pair. The caller must hold the
    prefix's lock.

    Raises:
        ConfigError: an input or the tokenizer is not valid, or there is no text at all.
        EnvironmentProblem: a package is not installed.
        OSError: the disk is full or not writable; see `disk_problem`.
    """
    if settings.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(settings.workers)  # read when the tokenizer's thread pool starts
    read_settings = ReadSettings(
        piece=piece_bytes(sources),
        document=settings.document,
        text_key=settings.text_key,
        template=settings.template,
    )
    tokenizer, sampled = _make_tokenizer(sources, read_settings, settings, on_progress)
    with PairWriter(prefix, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod) as writer:
        tally = _tokenise(sources, tokenizer, read_settings, writer, settings.max_bad, on_progress)
        if writer.documents == 0:
            reason, fix = "the inputs contain no text", "name files that are not empty"
            raise ConfigError(Problem("INPUT", reason, fix))
        counts = {"tokens": writer.tokens, "documents": writer.documents}
        on_progress(Progress(stage="write", done=0, total=None, **counts))
        writer.finish()
        tokenizer_json = tokenizer.to_json()
        sidecar = _describe(tokenizer, tokenizer_json, tally, writer, settings)
        companions = [(sidecar_path(prefix), dump_sidecar(sidecar))]
        if tokenizer_json is not None:
            companions.insert(0, (saved_tokenizer_path(prefix), tokenizer_json))
        writer.publish(*companions)
        if tokenizer_json is None:
            saved_tokenizer_path(prefix).unlink(missing_ok=True)  # the replaced pair may have had one
    return BuiltPair(
        prefix=prefix,
        sidecar=sidecar,
        skipped=tuple(tally.skipped),
        vocabulary_sampled=sampled,
        requested_vocab_size=settings.bpe_entries if settings.tokenizer == "bpe" else None,
    )


def _tokenise(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    read_settings: ReadSettings,
    writer: PairWriter,
    max_bad: int,
    on_progress: OnProgress,
) -> Tally:
    """Tokenises and writes all documents; returns the counts over all inputs. The tokenizer's threads share the texts
    of a batch among the cores."""
    total, reader = _total_bytes(sources), Reader(settings=read_settings)
    for batch in chain.from_iterable(map(reader.read, sources)):
        sequences = tokenizer.encode_batch([piece.data for piece in batch])
        tokens = np.concatenate([np.empty(0, writer.dtype), *sequences])
        lengths = np.asarray([sequence.size for sequence in sequences], dtype=np.int32)
        writer.add(tokens, lengths, np.asarray([piece.last for piece in batch], dtype=np.bool_))
        _refuse_bad_lines(reader.tally, max_bad, read_settings.text_key)
        counts = {"tokens": writer.tokens, "documents": writer.documents}
        on_progress(Progress(stage="tokenise", done=reader.bytes_read, total=total, **counts))
    reader.tally.replaced += tokenizer.replaced
    return reader.tally


def _make_tokenizer(
    sources: Sequence[Source], read_settings: ReadSettings, settings: BuildSettings, on_progress: OnProgress
) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer, and True if a bpe was trained on a sample of the text."""
    if settings.tokenizer == "byte":
        return ByteTokenizer(), False
    if settings.tokenizer != "bpe":
        return load_json_tokenizer(settings.tokenizer, settings.eod), False
    total = _total_bytes(sources) or 0
    reader = Reader(settings=read_settings)
    # Each piece is sampled with the probability that fills the sample on average. The fixed seed makes the
    # vocabulary reproducible. Compressed inputs contain more text than their size suggests, so the sample
    # also ends at SAMPLE_BYTES.
    probability = min(1.0, SAMPLE_BYTES / max(total, 1))
    randomness = random.Random(0)
    sample_bytes = 0
    is_sample = False

    def texts() -> Iterator[bytes]:
        for batch in chain.from_iterable(map(reader.read, sources)):
            yield from (piece.data for piece in batch)
            _refuse_bad_lines(reader.tally, settings.max_bad, read_settings.text_key)

    def sample() -> Iterator[bytes]:
        nonlocal sample_bytes, is_sample
        for data in texts():
            if sample_bytes + len(data) > SAMPLE_BYTES:
                is_sample = True
                break
            if randomness.random() < probability:
                sample_bytes += len(data)
                yield data
            else:
                is_sample = True
            on_progress(Progress(stage="learn vocabulary", done=reader.bytes_read, total=total))
        on_progress(Progress(stage="learn vocabulary", done=total, total=total))

    tokenizer = train_bpe(sample(), settings.bpe_entries)
    return tokenizer, is_sample


def _total_bytes(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _describe(
    tokenizer: Tokenizer, tokenizer_json: str | None, tally: Tally, writer: PairWriter, settings: BuildSettings
) -> Sidecar:
    inputs = hashlib.sha256("".join(f"{record.sha256}\n" for record in tally.records).encode())
    return Sidecar(
        tokenizer_kind=tokenizer.kind,
        tokenizer=tokenizer.name,
        tokenizer_sha256=None if tokenizer_json is None else hashlib.sha256(tokenizer_json.encode()).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        tokens=writer.tokens,
        documents=writer.documents,
        sequences=writer.sequences,
        max_token_id=writer.max_token_id,
        dtype=writer.dtype.__name__,
        text_bytes=tally.text_bytes,
        replaced=tally.replaced,
        dropped=tally.dropped,
        bad_lines=tuple(tally.bad_lines),
        inputs_sha256=inputs.hexdigest(),
        inputs=tuple(tally.records[:_MAX_INPUTS_LISTED]),
        input_count=len(tally.records),
        document=settings.document,
        text_key=settings.text_key,
        template=settings.template,
        python=platform.python_version(),
        canzona=__version__,
    )


def _refuse_bad_lines(tally: Tally, limit: int, key: str) -> None:
    """Checks that no more than `limit` lines were skipped.

    Raises:
        ConfigError: names the first lines that have no text.
    """
    if tally.bad <= limit:
        return
    skip = ""
    if tally.text_bytes:
        option = f"--max-bad {max(10, 2 * tally.bad)}" if limit == 0 else "a higher --max-bad"
        skip = f"; to skip these lines, use {option}"
    refuse(
        Problem("INPUT", bad.kind + bad.detail, fix_of(bad, key) + skip, value=f"{bad.path}:{bad.line}")
        for bad in tally.bad_lines[:_MAX_BAD_LINES_SHOWN]
    )


def disk_problem(prefix: Path, error: OSError) -> EnvironmentProblem:
    """Returns the error that the user sees for an OSError raised while writing the files of `prefix`."""
    fix = "choose a writable folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = 0
        with suppress(OSError):
            free = shutil.disk_usage(prefix.parent).free
        fix = f"make room ({free / 2**20:,.0f} MiB are free) or choose another disk; no files were left behind"
    return write_error("--output", str(prefix), error, fix=fix)
