"""Builds one pair: reads sources, tokenises them, writes `<prefix>.bin`, `.idx`, `.json` and the tokenizer used.

Everything grows under temporary names while the prefix is locked, and gets its name at the end, so an interrupted or
failed build leaves an older pair untouched. Of much input it leaves finished parts, in a hidden folder beside the pair,
for the build after it; the pair is the same, byte for byte, however often that was and however many processes made it.
"""

import errno
import hashlib
import os
import platform
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from canzona_cli import __version__
from canzona_cli.data.bpe import SAMPLE_BYTES, train_bpe
from canzona_cli.data.indexed import PairWriter, bin_path, idx_path, inspect_pair, temporary
from canzona_cli.data.parts import Part, Recipe, cut_into_parts, finished_part, tokenise
from canzona_cli.data.sidecar import Sidecar, dump_sidecar, saved_tokenizer_path, sidecar_path
from canzona_cli.data.sources import (
    MOST_BAD_SHOWN,
    DocumentUnit,
    Reader,
    Source,
    TooManyBadLines,
    open_source,
    piece_bytes,
)
from canzona_cli.data.tally import Tally
from canzona_cli.data.tokenizers import ByteTokenizer, Tokenizer, load_json_tokenizer
from canzona_cli.data.workers import Job, made
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem, unwritable
from canzona_cli.run.machine import cores

Stage = Literal["read input", "learn vocabulary", "tokenise", "write"]

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
    """Processes or, where there is too little input for several, threads of the tokenizer; None: one per core."""

    @property
    def bpe_entries(self) -> int:
        return self.vocab_size or DEFAULT_VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished pair, and what happened while it was made."""

    prefix: Path
    sidecar: Sidecar
    skipped: tuple[str, ...]
    """Binary files in folders, left out."""
    parts: int
    reused: int
    """Parts that an earlier build, which did not come to its end, had made."""
    vocabulary_sampled: bool
    """True if a bpe learnt from a sample rather than from everything."""
    asked_vocab_size: int | None
    """The vocabulary size asked of a bpe; a small corpus yields fewer."""

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
    with (
        _disk_errors(prefix),
        _bad_lines_told(settings.max_bad),
        _spooled(sources, prefix, settings, on_progress) as readable,
    ):
        piece = piece_bytes(sources)
        tokenizer, sampled = _make_tokenizer(readable, piece, settings, on_progress)
        recipe = Recipe(
            tokenizer=tokenizer,
            piece=piece,
            document=settings.document,
            text_key=settings.text_key,
            max_bad=settings.max_bad,
        )
        parts = cut_into_parts(readable, settings.document)
        with PairWriter(prefix, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod) as writer:
            if len(parts) == 1:
                tally, reused = _in_one_go(parts[0], recipe, writer, on_progress), 0
            else:
                workers = settings.workers or cores()
                tally, reused = _in_parts(parts, recipe, parts_folder(prefix), writer, workers, on_progress)
            if writer.documents == 0:
                raise ConfigError(
                    Problem(key="INPUT", reason="the inputs contain no text", fix="name files that are not empty")
                )
            on_progress(Progress(stage="write", done=0, total=None, tokens=writer.tokens, documents=writer.documents))
            writer.finish()
            saved = tokenizer.to_json()
            sidecar = _describe(tokenizer, saved, tally, writer, settings)
            companions = [(sidecar_path(prefix), dump_sidecar(sidecar))]
            if saved is not None:
                companions.insert(0, (saved_tokenizer_path(prefix), saved))
            writer.publish(*companions)
            if saved is None:
                saved_tokenizer_path(prefix).unlink(missing_ok=True)  # of the pair this one replaces
            shutil.rmtree(parts_folder(prefix), ignore_errors=True)
    return Built(
        prefix=prefix,
        sidecar=sidecar,
        skipped=tuple(tally.skipped),
        parts=len(parts),
        reused=reused,
        vocabulary_sampled=sampled,
        asked_vocab_size=settings.bpe_entries if settings.tokenizer == "bpe" else None,
    )


def parts_folder(prefix: Path) -> Path:
    """Returns the folder in which finished parts wait for the others."""
    return prefix.with_name(f".{prefix.name}.parts")


def _in_one_go(part: Part, recipe: Recipe, writer: PairWriter, on_progress: OnProgress) -> Tally:
    reader, total = recipe.reader(), _total(part.sources)

    def on_batch() -> None:
        facts = {"tokens": writer.tokens, "documents": writer.documents}
        on_progress(Progress(stage="tokenise", done=reader.bytes_read, total=total, **facts))

    return tokenise(part.sources, reader, recipe.tokenizer, writer, on_batch)


def _in_parts(
    parts: Sequence[Part], recipe: Recipe, folder: Path, writer: PairWriter, workers: int, on_progress: OnProgress
) -> tuple[Tally, int]:
    """Make what is missing of the parts, and append them in their order; what was counted, and how many were there.

    Raises:
        TooManyBadLines: in all parts up to the first after which there are too many.
    """
    folder.mkdir(exist_ok=True)
    fingerprint = recipe.fingerprint()
    jobs = [Job(part=part, prefix=folder / part.name(fingerprint)) for part in parts]
    known = {job.prefix: tally for job in jobs if (tally := finished_part(job.prefix)) is not None}
    for path in folder.iterdir():  # of other settings or inputs, or begun when a build was killed
        if path.with_suffix("") not in known:
            path.unlink()
    reused, read = len(known), sum(job.part.bytes for job in jobs if job.prefix in known)
    total, lines, appended = Tally(), Counter[str](), 0

    def append() -> None:
        """Those that are there, up to the first that is not."""
        nonlocal appended
        while appended < len(jobs) and (found := known.pop(jobs[appended].prefix, None)) is not None:
            job = jobs[appended]
            label = job.part.sources[0].label
            total.add(found, lines_before=lines[label])
            lines[label] += found.lines
            if total.bad > recipe.max_bad:
                raise TooManyBadLines(total)
            if found.documents:
                writer.append(inspect_pair(job.prefix), max_token_id=found.max_token_id)
            appended += 1
        facts = {"tokens": writer.tokens, "documents": writer.documents}
        on_progress(Progress(stage="tokenise", done=read, total=sum(job.part.bytes for job in jobs), **facts))

    missing = [job for job in jobs if job.prefix not in known]
    append()
    for job, tally in made(missing, recipe, workers=workers):
        known[job.prefix] = tally
        read += job.part.bytes
        append()
    return total, reused


def _make_tokenizer(
    sources: Sequence[Source], piece: int, settings: BuildSettings, on_progress: OnProgress
) -> tuple[Tokenizer, bool]:
    if settings.tokenizer == "byte":
        return ByteTokenizer(), False
    if settings.tokenizer != "bpe":
        return load_json_tokenizer(settings.tokenizer, settings.eod), False
    total = _total(sources) or 0
    reader = Reader(piece=piece, document=settings.document, text_key=settings.text_key, max_bad=settings.max_bad)
    # Each piece is taken with the probability that fills the sample; a fixed seed keeps the vocabulary reproducible.
    # Compressed inputs hold more text than their size says, so the sample is also cut at its full size.
    chance, choose = min(1.0, SAMPLE_BYTES / max(total, 1)), random.Random(0)
    taken, left_out = 0, False

    def sample() -> Iterator[bytes]:
        nonlocal taken, left_out
        for data, _ in chain.from_iterable(reader.read(source) for source in sources):
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


def _total(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _describe(
    tokenizer: Tokenizer, saved: str | None, tally: Tally, writer: PairWriter, settings: BuildSettings
) -> Sidecar:
    inputs = hashlib.sha256("".join(f"{record.sha256}\n" for record in tally.records).encode())
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
        text_bytes=tally.text_bytes,
        replaced=tally.replaced,
        dropped=tally.dropped,
        bad_lines=tuple(tally.bad_lines),
        inputs_sha256=inputs.hexdigest(),
        inputs=tuple(tally.records[:_INPUTS_KEPT]),
        input_count=len(tally.records),
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


@contextmanager
def _bad_lines_told(most: int) -> Iterator[None]:
    try:
        yield
    except TooManyBadLines as error:
        fix = "use --text-key NAME for another field, or --format text to take lines as they are; to leave them out, "
        fix += f"--max-bad {max(10, 2 * error.tally.bad)}" if most == 0 else "a higher --max-bad"
        shown = error.tally.bad_lines[:MOST_BAD_SHOWN]
        raise ConfigError(
            *(Problem(key="INPUT", value=f"{at.path}:{at.line}", reason=at.kind + at.detail, fix=fix) for at in shown)
        ) from None


def disk_problem(prefix: Path, error: OSError) -> EnvironmentProblem:
    """The problem to show for an OSError while writing at `prefix`."""
    fix = "choose a writable folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = 0
        with suppress(OSError):
            free = shutil.disk_usage(prefix.parent).free
        kept = "the same command goes on from the parts that are finished"
        left = kept if parts_folder(prefix).exists() else "nothing was left behind"
        fix = f"make room ({free / 2**20:,.0f} MiB free there) or choose another disk; {left}"
    return unwritable("--output", str(prefix), error, fix=fix)
