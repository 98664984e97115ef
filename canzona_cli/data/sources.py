"""Reads text: plain, JSONL or Parquet, also compressed.

`Reader` gives out a source, or a cut of one, as pieces. A piece is a document or, if the document is long, a part of it
cut at a line end: Megatron holds out and shuffles what it calls sequences, and with each document one sequence a single
large file could be neither split nor shuffled, nor held in memory.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from canzona_cli.data import parquet
from canzona_cli.data.tally import BadLine, InputRecord, Tally
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem

InputFormat = Literal["auto", "text", "jsonl", "parquet"]
DocumentUnit = Literal["file", "line"]


def _zstd(raw: BinaryIO) -> object:
    if sys.version_info >= (3, 14):
        from compression.zstd import ZstdFile
    else:
        from backports.zstd import ZstdFile
    return ZstdFile(raw)


_OPENERS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstd,
}
_UNREAD = {b"PAR1": "Parquet", b"PK\x03\x04": "a zip archive"}
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, parquet.DamagedParquet)
_UTF8_BOM = b"\xef\xbb\xbf"
_SNIFF = 8192
MOST_BAD_SHOWN = 5
"""Bad lines in an error message."""
_LINES_TO_SEARCH = 10_000

LONGEST_LINE = 128 << 20
"""Bytes. A longer line is left out as one without text: read as JSON it takes several times as much memory."""

MIN_PIECE, MAX_PIECE, STREAM_PIECE = 4 << 10, 1 << 20, 64 << 10


@dataclass(frozen=True, kw_only=True)
class Source:
    """One thing to read, or a cut of it."""

    label: str
    """The name in messages and in the sidecar."""
    path: Path | None
    """None: standard input."""
    format: InputFormat
    """auto only for standard input, decided by its first byte."""
    size: int | None
    """Bytes on disk; None when unknown beforehand."""
    from_folder: bool = False
    """Found by walking a folder rather than named, so a binary file is passed over instead of refused."""
    cut: tuple[int, int] | None = None
    """The lines of a file that begin in these bytes, or the row groups of Parquet; end exclusive. None: all."""


class Piece(NamedTuple):
    """A document, or part of a long one."""

    data: bytes
    last: bool
    """True if the document ends here."""


class TooManyBadLines(Exception):
    """More than the reader may leave out."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally


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
        document: what one document of a plain text is; a line of JSONL or a row of Parquet always is one.
        text_key: the field of a JSONL object, or column of Parquet, that holds its text.
        max_bad: lines without such a text to leave out.
    """

    piece: int
    document: DocumentUnit = "file"
    text_key: str = "text"
    max_bad: int = 0
    bytes_read: int = 0
    """The bytes of the files as they are on disk, so that progress is honest for compressed ones."""
    tally: Tally = field(default_factory=Tally)
    _give_up: int | None = None
    """The line at which to look for no more bad ones."""

    def read(self, source: Source) -> Iterator[Piece]:
        """The pieces of one source, in order.

        Raises:
            ConfigError: unreadable, damaged or binary input.
            TooManyBadLines: once a few of them are known.
        """
        self._give_up = None
        try:
            if source.format == "parquet":
                yield from self._parquet(source)
            elif source.cut is not None:
                yield from self._cut(source)
            else:
                raw = _Counted(open_source(source), self)
                with _buffered(raw) as buffered:
                    yield from self._pieces(source, buffered)
                    while buffered.read(1 << 20):  # bytes that a decompressor leaves unread still count for the hash
                        pass
                record = InputRecord(path=source.label, bytes=raw.count, sha256=raw.digest.hexdigest())
                self.tally.records.append(record)
        except _damaged() as error:
            raise input_error(
                source.label, f"damaged or cut short: {error}", "fetch or make it again; gzip -t or zstd -t checks it"
            ) from error
        except ModuleNotFoundError as error:
            raise EnvironmentProblem(package_problem(source.label, error.name or "a package")) from error
        except OSError as error:
            raise input_error(source.label, f"cannot be read: {error.strerror or error}", "") from error
        if self._give_up is not None:
            raise TooManyBadLines(self.tally)

    def _pieces(self, source: Source, stream: io.BufferedReader) -> Iterator[Piece]:
        head = stream.peek(_SNIFF)[:_SNIFF]
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
        if opener is not None:
            stream = _buffered(opener(stream))
            head = stream.peek(_SNIFF)[:_SNIFF]
        if b"\0" in head or any(head.startswith(magic) for magic in _UNREAD):
            if not source.from_folder:
                raise _binary(source.label, head)
            self.tally.skipped.append(source.label)
            return
        if head.startswith(_UTF8_BOM):
            stream.read(len(_UTF8_BOM))
        if source.format == "jsonl" or (source.format == "auto" and head.lstrip().startswith(b"{")):
            yield from self._documents(self._jsonl(source.label, _lines(stream)))
        elif self.document == "line":
            yield from self._documents(self._plain(source.label, _lines(stream)))
        else:
            yield from self._counted(cut_stream(stream, self.piece))

    def _cut(self, source: Source) -> Iterator[Piece]:
        """Opens a part of a plain file of lines."""
        assert source.path is not None
        assert source.cut is not None
        if source.cut[0] == 0:
            self.tally.records.append(_record(source))
        with open(source.path, "rb", buffering=1 << 20) as stream:
            lines = self._lines_in(stream, *source.cut)
            if source.format == "jsonl":
                yield from self._documents(self._jsonl(source.label, lines))
            else:
                yield from self._documents(self._plain(source.label, lines))

    def _lines_in(self, stream: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
        number, position = 0, begin
        if begin > 0:
            stream.seek(begin - 1)
            position += _pass_over(stream, end - begin + 1) - 1  # the rest of a line that begins before the cut
        elif stream.read(len(_UTF8_BOM)) == _UTF8_BOM:
            position = len(_UTF8_BOM)
        else:
            stream.seek(0)
        lines = _lines(stream)
        while position < end and (line := next(lines, None)) is not None:
            position = stream.tell() if len(line) > LONGEST_LINE else position + len(line)
            self.bytes_read += len(line)
            number += 1
            yield line
        self.tally.lines = number

    def _parquet(self, source: Source) -> Iterator[Piece]:
        if source.path is None:
            fix = "name the file: Parquet is read from its end"
            raise input_error(source.label, "Parquet cannot be read from a pipe", fix)
        if source.cut is None or source.cut[0] == 0:
            self.tally.records.append(_record(source))

        def texts() -> Iterator[bytes]:
            assert source.path is not None
            for rows in parquet.texts(source.path, self.text_key, source.cut):
                for number, text in enumerate(rows.texts, rows.first):
                    if self._enough(number):
                        return
                    if text is not None:
                        yield text
                    else:
                        self._bad(BadLine(path=source.label, line=number, kind="no text", detail=" in this row"))
                self.bytes_read += int(rows.share * (source.size or 0))

        yield from self._documents(texts())

    def _documents(self, documents: Iterable[bytes]) -> Iterator[Piece]:
        for text in documents:
            if 0 < len(text) <= self.piece:
                self.tally.text_bytes += len(text)
                yield Piece(text, last=True)
            else:
                yield from self._counted(cut_stream(io.BytesIO(text), self.piece))

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        any_piece = False
        for piece in pieces:
            any_piece = True
            self.tally.text_bytes += len(piece.data)
            yield piece
        self.tally.empty += not any_piece

    def _jsonl(self, label: str, lines: Iterable[bytes]) -> Iterator[bytes]:
        for number, line in enumerate(lines, 1):
            if self._enough(number):
                return
            if self._too_long(label, number, line) or line.isspace():
                continue
            try:
                text = _text_of(line, self.text_key)
            except _BadText as error:
                self._bad(BadLine(path=label, line=number, kind=error.kind, detail=error.detail))
            else:
                yield self._encoded(text)

    def _plain(self, label: str, lines: Iterable[bytes]) -> Iterator[bytes]:
        for number, line in enumerate(lines, 1):
            if self._enough(number):
                return
            if not self._too_long(label, number, line):
                yield line.rstrip(b"\r\n")

    def _too_long(self, label: str, number: int, line: bytes) -> bool:
        if len(line) <= LONGEST_LINE:
            return False
        self._bad(BadLine(path=label, line=number, kind="too long", detail=f": more than {LONGEST_LINE >> 20} MiB"))
        return True

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:  # a lone surrogate of a JSON escape
            self.tally.replaced += 1
            return text.encode(errors="replace")

    def _bad(self, line: BadLine) -> None:
        self.tally.add_bad(line)
        if self.tally.bad > self.max_bad and self._give_up is None:
            self._give_up = line.line + _LINES_TO_SEARCH

    def _enough(self, number: int) -> bool:
        """Returns True to stop at a line: a few after the first bad one too many show a systematic mistake."""
        if self._give_up is None:
            return False
        return number > self._give_up or self.tally.bad >= self.max_bad + MOST_BAD_SHOWN


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; of one that is too long, one byte more than is allowed."""
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            _pass_over(stream)
        yield line


def _pass_over(stream: BinaryIO, most: int = sys.maxsize) -> int:
    """Read on behind the end of the line, or about `most` bytes; bytes read."""
    passed = 0
    while passed < most and (some := stream.readline(_SNIFF)):
        passed += len(some)
        if some.endswith(b"\n"):
            break
    return passed


def splits(source: Source, document: DocumentUnit) -> bool:
    """Returns True if a file can be read from the middle, line by line."""
    if (
        source.path is None
        or source.format not in ("jsonl", "text")
        or (source.format == "text" and document == "file")
    ):
        return False
    with open(source.path, "rb") as stream:
        head = stream.read(_SNIFF)
    return b"\0" not in head and not any(head.startswith(magic) for magic in (*_OPENERS, *_UNREAD))


def package_problem(label: str, module: str) -> Problem:
    """That what reads an input is not installed."""
    reason, fix = f"{module}, which reads it, is not installed", "pip install 'canzona[data]'"
    return Problem(key="INPUT", value=label, reason=reason, fix=fix)


def _record(source: Source) -> InputRecord:
    """Records a whole file, whatever part of it is read."""
    assert source.path is not None
    with open(source.path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return InputRecord(path=source.label, bytes=stream.tell(), sha256=digest)


def _damaged() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a damaged input raises; those of .zst only if one has been opened."""
    modules = (sys.modules.get(name) for name in ("compression.zstd", "backports.zstd"))
    return (*_DAMAGED, *(module.ZstdError for module in modules if module is not None))


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
    """Returns where to cut within (size / 2, size]: after a line, else a word, else between two UTF-8 characters."""
    for separator in (b"\n", b" "):
        found = data.rfind(separator, size // 2, size)
        if found >= 0:
            return found + 1
    for cut in range(size, max(size - 4, 0), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return size


class _BadText(ValueError):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind + detail)
        self.kind, self.detail = kind, detail


def _text_of(line: bytes, key: str) -> str:
    """The text of one JSONL line.

    Raises:
        _BadText: what is wrong with the line, in words.
    """
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f" (byte 0x{line[error.start]:02x} at column {error.start + 1})"
        raise _BadText("not UTF-8", detail) from error
    except json.JSONDecodeError as error:
        raise _BadText("not JSON", f": {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # a thousand brackets; an integer of more digits than Python reads
        raise _BadText("not JSON", ": nested too deeply, or a number too long") from error
    if not isinstance(record, dict):
        raise _BadText("not an object", f" with a field {key!r} but a {type(record).__name__}")
    if key not in record:
        names = ", ".join(repr(name) for name in list(record)[:8]) or "nothing"
        raise _BadText(f"no field {key!r}", f"; it has {names}")
    text = record[key]
    if not isinstance(text, str):
        raise _BadText("no text", f": field {key!r} is a {type(text).__name__}")
    return text


def _binary(label: str, head: bytes) -> ConfigError:
    what = next((name for magic, name in _UNREAD.items() if head.startswith(magic)), "binary (it has NUL bytes)")
    fixes = {"Parquet": "call it .parquet, or say --format parquet"}
    return input_error(label, f"not text: {what}", fixes.get(what, "give text as UTF-8, or JSONL"))


def input_error(value: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key="INPUT", value=value, reason=reason, fix=fix))
