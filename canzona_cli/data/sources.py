"""Reads text: plain or JSONL, also compressed.

`Reader` gives out a source as pieces. A piece is a document or, if the document is long, a part of it cut at a line
end: Megatron holds out and shuffles what it calls sequences, and with each document one sequence a single large file
could be neither split nor shuffled, nor held in memory.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from canzona_cli.errors import ConfigError, Problem

InputFormat = Literal["auto", "text", "jsonl"]
DocumentUnit = Literal["file", "line"]

_OPENERS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_UNREAD = {b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd-compressed", b"PK\x03\x04": "a zip archive"}
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_UTF8_BOM = b"\xef\xbb\xbf"
_SNIFF = 8192
_MAX_BAD_LINES = 5
_LINES_TO_SEARCH = 10_000

MIN_PIECE, MAX_PIECE, STREAM_PIECE = 4 << 10, 1 << 20, 64 << 10


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing to read."""

    label: str
    """What messages and the sidecar call it."""
    path: Path | None
    """None: standard input."""
    format: InputFormat
    """auto only for standard input, decided by its first byte."""
    size: int | None
    """Bytes on disk; None when unknown beforehand."""
    from_folder: bool = False
    """Found by walking a folder rather than named, so a binary file is passed over instead of refused."""


class Piece(NamedTuple):
    """A document, or part of a long one."""

    data: bytes
    last: bool
    """Whether the document ends here."""


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """What was read from one source: evidence of what a corpus was made from."""

    path: str
    bytes: int
    sha256: str


def piece_bytes(sources: Sequence[Source]) -> int:
    """Longest piece for these inputs: about 1/256 of them, so that a held-out share of 1% can be cut off."""
    if any(source.size is None for source in sources):
        return STREAM_PIECE
    return min(MAX_PIECE, max(MIN_PIECE, sum(source.size or 0 for source in sources) // 256))


@dataclass(kw_only=True)
class Reader:
    """Reads sources as pieces and counts what it reads.

    Args:
        piece: longest piece, bytes.
        document: what one document of a plain text is; a line of JSONL always is one.
        text_key: the field of a JSONL object that holds its text.
    """

    piece: int
    document: DocumentUnit = "file"
    text_key: str = "text"
    bytes_read: int = 0
    """Of the files as they are on disk, so that progress is honest for compressed ones."""
    text_bytes: int = 0
    empty: int = 0
    """Documents without text, left out."""
    unencodable: int = 0
    """Lone surrogates of JSON escapes, replaced by `?`."""
    skipped: list[str] = field(default_factory=list)
    """Binary files found in folders, left out."""
    records: list[InputRecord] = field(default_factory=list)

    def read(self, source: Source) -> Iterator[Piece]:
        """The pieces of one source, in order.

        Raises:
            ConfigError: unreadable, damaged, binary or malformed input, with file and line.
        """
        try:
            raw = _Counted(open_source(source), self)
            with _buffered(raw) as buffered:
                yield from self._pieces(source, buffered)
                while buffered.read(1 << 20):  # bytes that a decompressor leaves unread still count for the hash
                    pass
        except _DAMAGED as error:
            raise input_error(
                source.label, f"damaged or cut short: {error}", "fetch or compress it again; gzip -t checks it"
            ) from error
        except OSError as error:
            raise input_error(source.label, f"cannot be read: {error.strerror or error}", "") from error
        self.records.append(InputRecord(path=source.label, bytes=raw.count, sha256=raw.digest.hexdigest()))

    def _pieces(self, source: Source, stream: io.BufferedReader) -> Iterator[Piece]:
        head = stream.peek(_SNIFF)[:_SNIFF]
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
        if opener is not None:
            stream = _buffered(opener(stream))
            head = stream.peek(_SNIFF)[:_SNIFF]
        if b"\0" in head or any(head.startswith(magic) for magic in _UNREAD):
            if not source.from_folder:
                raise _binary(source.label, head)
            self.skipped.append(source.label)
            return
        if head.startswith(_UTF8_BOM):
            stream.read(len(_UTF8_BOM))
        is_jsonl = source.format == "jsonl" or (source.format == "auto" and head.lstrip().startswith(b"{"))
        if is_jsonl:
            documents = self._jsonl(source.label, stream)
        elif self.document == "line":
            documents = (line.rstrip(b"\r\n") for line in stream)
        else:
            yield from self._counted(cut_stream(stream, self.piece))
            return
        for text in documents:
            if 0 < len(text) <= self.piece:
                self.text_bytes += len(text)
                yield Piece(text, last=True)
            else:
                yield from self._counted(cut_stream(io.BytesIO(text), self.piece))

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        any_piece = False
        for piece in pieces:
            any_piece = True
            self.text_bytes += len(piece.data)
            yield piece
        self.empty += not any_piece

    def _jsonl(self, label: str, stream: BinaryIO) -> Iterator[bytes]:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                text = _text_of(line, self.text_key)
            except ValueError as error:
                raise ConfigError(*self._bad_lines(label, number, error, stream)) from error
            try:
                yield text.encode()
            except UnicodeEncodeError:
                self.unencodable += 1
                yield text.encode(errors="replace")

    def _bad_lines(self, label: str, number: int, error: ValueError, stream: BinaryIO) -> list[Problem]:
        """The first bad line and the next few, to show a systematic mistake without reading on for hours."""
        found = [(number, str(error))]
        for line_number, line in enumerate(stream, number + 1):
            if len(found) == _MAX_BAD_LINES or line_number > number + _LINES_TO_SEARCH:
                break
            if line.isspace():
                continue
            try:
                _text_of(line, self.text_key)
            except ValueError as again:
                found.append((line_number, str(again)))
        fix = "use --text-key NAME for another field, or --format text to take the lines as they are"
        return [Problem(key="INPUT", value=f"{label}:{at}", reason=reason, fix=fix) for at, reason in found]


def open_source(source: Source) -> io.BufferedReader:
    """The bytes of a source as they are on disk. Closing it leaves standard input open."""
    if source.path is None:
        return open(0, "rb", closefd=False)
    return open(source.path, "rb")


def _buffered(raw: object) -> io.BufferedReader:
    return io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20)


class _Counted(io.RawIOBase):
    """A raw file that counts and hashes what goes by."""

    def __init__(self, raw: io.BufferedReader, reader: Reader) -> None:
        self._raw = raw
        self._reader = reader
        self.digest = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        # On a pipe this returns what is there, so a slow producer still moves the progress display.
        size = self._raw.readinto1(view)
        self.digest.update(view[:size])
        self.count += size
        self._reader.bytes_read += size
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def cut_stream(stream: BinaryIO, size: int) -> Iterator[Piece]:
    """The content of `stream` in pieces of at most `size` bytes that end at a line end where there is one."""
    pending = b""
    while block := stream.read(size):
        pending += block
        while len(pending) > size:
            cut = _cut_point(pending, size)
            yield Piece(pending[:cut], last=False)
            pending = pending[cut:]
    if pending:
        yield Piece(pending, last=True)


def _cut_point(data: bytes, size: int) -> int:
    """Where to cut within (size / 2, size]: after a line, else after a word, else between two UTF-8 characters."""
    for separator in (b"\n", b" "):
        found = data.rfind(separator, size // 2, size)
        if found >= 0:
            return found + 1
    for cut in range(size, max(size - 4, 0), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return size


def _text_of(line: bytes, key: str) -> str:
    """The text of one JSONL line.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, not an object with a field {key!r}")
    if key not in record:
        names = ", ".join(repr(name) for name in list(record)[:8]) or "nothing"
        raise ValueError(f"has no field {key!r}; it has {names}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"field {key!r} is a {type(text).__name__}, not text")
    return text


def _binary(label: str, head: bytes) -> ConfigError:
    what = next((name for magic, name in _UNREAD.items() if head.startswith(magic)), "binary (it has NUL bytes)")
    fixes = {
        "zstd-compressed": "zstdcat FILE | canzona data prepare - ...",
        "Parquet": "turn it into JSONL first, for example with duckdb or pyarrow",
    }
    return input_error(label, f"not text: {what}", fixes.get(what, "give text as UTF-8, or JSONL"))


def input_error(value: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key="INPUT", value=value, reason=reason, fix=fix))
