"""Parts of a pair: cut by what the inputs are alone, made in any order by any process, each finished or not there.

A finished part is a pair of its own, with what was counted in place of the sidecar; it is named by a hash of all that
its tokens depend on, so that whoever prepares the same again takes it as it is.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from canzona_cli.data import parquet
from canzona_cli.data.indexed import PairWriter, inspect_pair
from canzona_cli.data.sidecar import FORMAT, sidecar_path
from canzona_cli.data.sources import DocumentUnit, Piece, Reader, Source, input_error, splits
from canzona_cli.data.tally import Tally
from canzona_cli.data.tokenizers import Tokenizer
from canzona_cli.errors import ConfigError
from canzona_cli.run.codec import load_if_sound, plain

MOST_PARTS: Final = 4096
BATCH_BYTES: Final = 2 << 20
"""Text tokenised in one call: enough for every core, little enough that Ctrl-C acts at once."""
_BATCH_PIECES: Final = 8192

smallest_part = 16 << 20
"""Bytes of input that are worth a part."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that the tokens depend on but the inputs."""

    tokenizer: Tokenizer
    piece: int
    document: DocumentUnit
    text_key: str
    max_bad: int

    def reader(self) -> Reader:
        return Reader(piece=self.piece, document=self.document, text_key=self.text_key, max_bad=self.max_bad)

    def fingerprint(self) -> str:
        """The same for the same tokens and counts."""
        tokenizer = self.tokenizer
        settings = [
            FORMAT,
            tokenizer.kind,
            tokenizer.eod,
            tokenizer.to_json(),
            self.piece,
            self.document,
            self.text_key,
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some whole sources, or one cut of one."""

    sources: tuple[Source, ...]
    bytes: int
    """The bytes on disk; 0 if unknown."""

    def name(self, fingerprint: str) -> str:
        """That of its files."""
        inputs = []
        for source in self.sources:
            status = None if source.path is None else source.path.stat()
            place = None if source.path is None else str(source.path.absolute())
            version = None if status is None else (status.st_size, status.st_mtime_ns, status.st_ino)
            inputs.append((source.label, place, version, source.format, source.cut))
        return hashlib.sha256(json.dumps([fingerprint, inputs]).encode()).hexdigest()[:24]


def cut_into_parts(sources: Sequence[Source], document: DocumentUnit) -> list[Part]:
    """The parts of these inputs, in order; a single one where they are little, or come through a pipe.

    Raises:
        ConfigError: a Parquet file is damaged.
    """
    total = sum(source.size or 0 for source in sources)
    wanted = max(smallest_part, total // MOST_PARTS)
    if any(source.size is None for source in sources):
        return [Part(sources=tuple(sources), bytes=total)]
    parts: list[Part] = []
    group: list[Source] = []

    def close() -> None:
        if group:
            parts.append(Part(sources=tuple(group), bytes=sum(source.size or 0 for source in group)))
            group.clear()

    for source in sources:
        cuts = _cuts(source, document, wanted)
        if len(cuts) > 1:
            close()
            share = (source.size or 0) // len(cuts)
            parts += [Part(sources=(replace(source, cut=cut),), bytes=share) for cut in cuts]
            continue
        group.append(source)
        if sum(one.size or 0 for one in group) >= wanted:
            close()
    close()
    return parts


def _cuts(source: Source, document: DocumentUnit, wanted: int) -> list[tuple[int, int]]:
    size = source.size or 0
    if source.path is None or size < 2 * wanted:
        return []
    if source.format == "parquet":
        try:
            return parquet.cuts(source.path, size, wanted)
        except parquet.DamagedParquet as error:
            raise input_error(source.label, f"damaged or cut short: {error}", "fetch or make it again") from error
    if not splits(source, document):
        return []
    return [(begin, min(begin + wanted, size)) for begin in range(0, size, wanted)]


def tokenise(
    sources: Iterable[Source], reader: Reader, tokenizer: Tokenizer, writer: PairWriter, on_batch: Callable[[], None]
) -> Tally:
    """Write all documents of these sources; what was counted.

    Raises:
        ConfigError: unreadable, damaged or binary input.
        TooManyBadLines: the reader's tally has them.
    """
    replaced = tokenizer.replaced
    for batch in _batches(piece for source in sources for piece in reader.read(source)):
        writer.add(tokenizer.encode_batch([piece.data for piece in batch]), [piece.last for piece in batch])
        on_batch()
    reader.tally.replaced += tokenizer.replaced - replaced
    reader.tally.max_token_id, reader.tally.documents = writer.max_token_id, writer.documents
    return reader.tally


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    yield batch


def make_part(part: Part, prefix: Path, recipe: Recipe) -> Tally:
    """Tokenise a part into a finished pair.

    Raises:
        ConfigError, TooManyBadLines: as `tokenise`; nothing is left of it.
    """
    tokenizer = recipe.tokenizer
    with PairWriter(prefix, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod) as writer:
        tally = tokenise(part.sources, recipe.reader(), tokenizer, writer, lambda: None)
        writer.finish()
        writer.publish((sidecar_path(prefix), json.dumps(plain(tally))))
    return tally


def finished_part(prefix: Path) -> Tally | None:
    """Returns the counts of a part; None if it is not finished."""
    tally = load_if_sound(sidecar_path(prefix), Tally)
    try:
        if tally is not None and tally.documents:  # without any, its pair is none, and nobody asks for it
            inspect_pair(prefix)
    except ConfigError:
        return None
    return tally
