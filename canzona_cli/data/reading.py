"""Reads text: plain, JSONL or Parquet, compressed or not.

`Reader` reads a source in batches of pieces, about 2 MiB each. A piece is a document, or a part of a long document
that ends at a line end if possible. Each piece becomes one of the sequences that Megatron splits and shuffles. If each
document were one sequence, a single large file could not be split, shuffled or held in memory.

Templates make one document from several fields of a JSONL object, or from the messages of a chat:

    {question}\\n{answer}\\n          fields of the object
    {meta.title}\\n{body}            a field of a nested object
    {role}: {content}\\n             once for each message, if the field of --text-key is a list of messages

`\\n` and `\\t` are written as two characters each, because shells pass them that way. Like all other text, the text of
a template never becomes a special token.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, BinaryIO, Final, Literal, NamedTuple, cast

from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.data.indexed import BadLine, InputRecord, Tally
from canzona_cli.data.sources import Source, input_error, json_array_error

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

DocumentUnit = Literal["file", "line"]


def _open_zstd(raw: BinaryIO) -> object:
    from pyarrow import CompressedInputStream

    return CompressedInputStream(raw, "zstd")


_OPENERS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
_UNREAD = {b"PAR1": "Parquet", b"PK\x03\x04": "a zip archive"}
_UTF8_BOM = b"\xef\xbb\xbf"
_SNIFF = 8192
_BATCH_BYTES: Final = 2 << 20
"""The bytes of text tokenised in one call: enough to use all cores, few enough for Ctrl-C to act at once."""
_BATCH_ITEMS: Final = 8192
_PARQUET_ROWS: Final = 128

LONGEST_LINE = 128 << 20
"""The maximum length of a line in bytes. Longer lines are skipped, because parsing a line takes several times
as much memory."""

MIN_PIECE, MAX_PIECE, STREAM_PIECE = 4 << 10, 1 << 20, 64 << 10


class Piece(NamedTuple):
    """A document, or a part of a long document."""

    data: bytes
    last: bool
    """True if the document ends with this piece."""


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """The settings for cutting bytes into documents and pieces."""

    piece: int
    """The maximum length of a piece in bytes."""
    document: DocumentUnit = "file"
    """The part of plain text that is a document. A line of JSONL or a row of Parquet is always a document."""
    text_key: str = "text"
    """The field of a JSONL object, or the column of Parquet, with the text."""
    template: str = ""
    """The template that converts JSONL objects to text (`canzona_cli.data.reading`); empty to use only the
    field `text_key`."""


def piece_bytes(sources: Sequence[Source]) -> int:
    """Returns the maximum length of a piece in bytes: 1/256 of these inputs, but 4 KiB to 1 MiB, so that 1%
    of the text can be held out; 64 KiB if the size of an input is unknown."""
    if any(source.size is None for source in sources):
        return STREAM_PIECE
    return min(MAX_PIECE, max(MIN_PIECE, sum(source.size or 0 for source in sources) // 256))


@dataclass(kw_only=True)
class Reader:
    """A reader that turns sources into pieces of text, and counts and hashes what it reads."""

    settings: ReadSettings
    tally: Tally = field(default_factory=Tally)
    bytes_read: int = 0
    """The bytes read so far before decompression, so that the progress of compressed files is correct."""

    def read(self, source: Source) -> Iterator[list[Piece]]:
        """Reads one source: yields its pieces in order, in batches, some of which may be empty.

        Raises:
            ConfigError: the input is unreadable, damaged or binary.
            EnvironmentProblem: the package that reads this format is not installed.
        """
        try:
            if source.format == "parquet":
                yield from self._parquet_batches(source)
            else:
                raw = _CountingFile(open_source(source), self)
                with _buffer(raw) as buffered:
                    stream = _decompress(buffered)
                    yield from self._text_batches(source, stream)
                    while buffered.read(1 << 20):  # the hash includes bytes that a decompressor left unread
                        pass
                self._record(source, raw.count, raw.digest.hexdigest())
        except ModuleNotFoundError:
            raise EnvironmentProblem(package_problem(source.label)) from None
        except (OSError, EOFError, zlib.error, lzma.LZMAError, _DamagedParquet) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise input_error(source.label, f"cannot be read: {error.strerror}", "") from error
            fix = "download or create it again; gzip -t or zstd -t checks it"
            raise input_error(source.label, f"damaged or truncated: {error}", fix) from error

    def _record(self, source: Source, size: int, sha256: str) -> None:
        self.tally.records.append(InputRecord(path=source.label, bytes=size, sha256=sha256))

    def _text_batches(self, source: Source, stream: io.BufferedReader) -> Iterator[list[Piece]]:
        """Yields the batches of a file of text. A binary file is skipped if it was found in a folder;
        otherwise it is refused."""
        head = stream.peek(_SNIFF)[:_SNIFF]
        if b"\0" in head or any(head.startswith(magic) for magic in _UNREAD):
            if not source.from_folder:
                raise _binary_error(source.label, head)
            self.tally.skipped.append(source.label)
            return
        if head.startswith(_UTF8_BOM):
            stream.read(len(_UTF8_BOM))
            head = head.removeprefix(_UTF8_BOM)
        if source.format == "jsonl" and head.lstrip().startswith(b"["):
            raise json_array_error(source.label)
        if source.format == "jsonl" or (source.format == "auto" and head.lstrip().startswith(b"{")):
            yield from self._document_batches(source.label, "jsonl", _read_lines(stream))
        elif self.settings.document == "line":
            yield from self._document_batches(source.label, "lines", _read_lines(stream))
        elif stream.peek(1):
            for batch in _in_batches(cut_stream(stream, self.settings.piece), lambda piece: len(piece.data)):
                self.tally.text_bytes += sum(len(piece.data) for piece in batch)
                yield batch
        else:
            self.tally.empty += 1

    def _parquet_batches(self, source: Source) -> Iterator[list[Piece]]:
        """Yields the batches of a Parquet file, and records its size and hash."""
        if source.path is None:
            fix = "give the path of the file, because Parquet is read from its end"
            raise input_error(source.label, "Parquet cannot be read from a pipe", fix)
        with open(source.path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            size = stream.tell()
        self._record(source, size, digest)
        bytes_before = self.bytes_read
        form: Literal["rows", "jsonl"] = "jsonl" if self.settings.template else "rows"
        yield from self._document_batches(source.label, form, self._parquet_texts(source.path))
        self.bytes_read = bytes_before + size

    def _parquet_texts(self, path: Path) -> Iterator[bytes | None]:
        """Yields the texts of a Parquet column, and None for each null. Texts are bytes, because they may not
        be valid UTF-8. With a template, yields rows as JSON.

        Raises:
            ConfigError: there is no such column, or it is not a column of text.
            _DamagedParquet: the file cannot be read.
        """
        from pyarrow import ArrowException, large_binary
        from pyarrow.compute import struct_field
        from pyarrow.parquet import ParquetFile

        column, template = self.settings.text_key, self.settings.template
        try:
            with ParquetFile(path, memory_map=True) as file:
                fields = fields_of(template) if template else ()
                columns = _columns(path, file, column, fields)
                bytes_before = self.bytes_read
                file_bytes = path.stat().st_size
                all_rows = max(1, file.metadata.num_rows)
                rows = 0
                for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                    if template:
                        yield from (json.dumps(row, default=str).encode() for row in batch.to_pylist())
                    else:
                        inner = [] if column in file.schema_arrow.names else column.split(".")[1:]
                        texts = struct_field(batch.column(0), inner) if inner else batch.column(column)
                        yield from texts.cast(large_binary()).to_pylist()
                    rows += batch.num_rows
                    self.bytes_read = bytes_before + file_bytes * rows // all_rows
        except (ArrowException, UnicodeDecodeError) as error:
            raise _DamagedParquet(str(error).partition("\n")[0]) from error

    def _document_batches(
        self, label: str, form: Literal["lines", "jsonl", "rows"], items: Iterable[bytes | None]
    ) -> Iterator[list[Piece]]:
        """Yields the documents that lines or rows contain, in pieces; counts skipped ones."""
        number = 0
        for batch in _in_batches(items, lambda item: len(item or b"")):
            pieces: list[Piece] = []
            for item in batch:
                number += 1
                try:
                    text = self._document(item, form)
                except _BadText as error:
                    self.tally.add_bad(BadLine(path=label, line=number, kind=error.kind, detail=error.detail))
                    continue
                if text is not None:
                    self.tally.text_bytes += len(text)
                    self.tally.empty += not text
                    pieces += cut_stream(io.BytesIO(text), self.settings.piece)
            yield pieces

    def _document(self, item: bytes | None, form: str) -> bytes | None:
        """Returns the text of a line or row; None for a blank line in JSONL.

        Raises:
            _BadText: the line or row has no usable text.
        """
        if item is None:
            raise _BadText("no text", " in this row")
        if form == "rows":
            return item
        if len(item) > LONGEST_LINE:
            raise _BadText("too long", f": more than {LONGEST_LINE >> 20} MiB")
        if form == "lines":
            return item.rstrip(b"\r\n")
        if item.isspace():
            return None
        text = _jsonl_text(item, self.settings)
        try:
            return text.encode()
        except UnicodeEncodeError:  # a JSON escape can be half of a surrogate pair
            self.tally.replaced += 1
            return text.encode(errors="replace")


class _DamagedParquet(ValueError):
    """An error in a Parquet file, with pyarrow's message."""


def _decompress(stream: io.BufferedReader) -> io.BufferedReader:
    """Returns a stream of decompressed data, or `stream` itself if its first bytes show no compression."""
    head = stream.peek(_SNIFF)
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    return stream if opener is None else _buffer(opener(stream))


def _in_batches[T](items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the items in lists of about `_BATCH_BYTES` and at most `_BATCH_ITEMS` items."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += length(item)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a stream with their line ends. A line longer than `LONGEST_LINE` is cut off one
    byte after that length."""
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := stream.readline(_SNIFF)) and not rest.endswith(b"\n"):
                pass
        yield line


def package_problem(label: str) -> Problem:
    """Returns the problem of an input that needs pyarrow, which is not installed."""
    reason, fix = "needs pyarrow, which is not installed", "pip install 'canzona[data]'"
    return Problem("INPUT", reason, fix, value=label)


def open_source(source: Source) -> io.BufferedReader:
    """Opens a source without decompressing it. Closing the stream does not close standard input."""
    if source.size is None:
        return _buffer(io.FileIO(source.path or 0, closefd=source.path is not None))
    assert source.path is not None
    return open(source.path, "rb")


def _buffer(raw: object) -> io.BufferedReader:
    return io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20)


class _CountingFile(io.RawIOBase):
    """A raw file that counts and hashes the bytes read from it."""

    def __init__(self, raw: io.BufferedReader, reader: Reader) -> None:
        self._raw = raw
        self._reader = reader
        self.digest = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        # readinto1 returns the bytes that a pipe has at the moment, so progress is up to date even if the
        # producer is slow.
        size = self._raw.readinto1(view)
        self.digest.update(view[:size])
        self.count += size
        self._reader.bytes_read += size
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def cut_stream(stream: BinaryIO, size: int) -> Iterator[Piece]:
    """Yields the bytes of `stream` in pieces of at most `size` bytes that end at a line end if possible."""
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
    """Returns the position at which to cut: in the second half of the first `size` bytes, after the last line
    end or, without a line end, after the last space; without a space, between two UTF-8 characters."""
    for separator in (b"\n", b" "):
        position = data.rfind(separator, size // 2, size)
        if position >= 0:
            return position + 1
    for cut in range(size, max(size - 4, 0), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return size


class _BadText(ValueError):
    """An error for a line or row without usable text."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind + detail)
        self.kind, self.detail = kind, detail


def _jsonl_text(line: bytes, settings: ReadSettings) -> str:
    """Returns the text of one JSONL line.

    Raises:
        _BadText: the line has no usable text.
    """
    key = settings.text_key
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f" (byte 0x{line[error.start]:02x} at column {error.start + 1})"
        raise _BadText("not UTF-8", detail) from error
    except json.JSONDecodeError as error:
        raise _BadText("not JSON", f": {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # too many brackets, or an integer with too many digits for Python
        raise _BadText("not JSON", ": nested too deeply, or a number too long") from error
    if not isinstance(record, dict):
        raise _BadText("not an object", f" with a field {key!r} but a {type(record).__name__}")
    if settings.template:
        try:
            return fill(settings.template, record, key)
        except Unfilled as error:
            raise _BadText("does not fill --template", str(error)) from None
    value = value_of(record, key)
    if value is MISSING:
        raise _BadText(f"no field {key!r}", f"; it has {names_of(record)}")
    try:
        return text_of(value, key)
    except Unfilled as error:
        raise _BadText("no text", f"{error}") from None


CHAT: Final = "--template '{role}: {content}\\n'"
"""The option that reads chats."""
_CONVERT: Final = "convert it: iconv -f ISO-8859-1 -t UTF-8 FILE > NEW"
_OBJECTS: Final = "write one object per line; or use --format text, which takes lines as they are"
_FIXES: Final = {
    "not UTF-8": _CONVERT,
    "not JSON": _OBJECTS,
    "not an object": _OBJECTS,
    "too long": "cut the text into several lines",
    "does not fill --template": "name fields with text that every line has",
    "no text": "name a field with text with --text-key NAME, NAME.NAME for a nested one",
}


def fix_of(bad: BadLine, key: str) -> str:
    """Returns the fix of a line that has no usable text.

    Args:
        key: the field that was looked for.
    """
    if match := re.search(r"'([^']+)' \(a chat\)|field '([^']+)' is a list with a message", bad.detail):
        chat = match[1] or match[2]
        return CHAT if chat == key else f"--text-key {chat} {CHAT}"
    named = "name the field with --text-key NAME, NAME.NAME for a nested one, or join several with --template"
    return _FIXES.get(bad.kind, f"{named} '{{question}}\\n{{answer}}'")


def _binary_error(label: str, head: bytes) -> ConfigError:
    kind = next((name for magic, name in _UNREAD.items() if head.startswith(magic)), "binary (it has NUL bytes)")
    fixes = {"Parquet": "rename it to .parquet, or use --format parquet"}
    return input_error(label, f"not text: {kind}", fixes.get(kind, "give text as UTF-8, or JSONL"))


def _columns(path: Path, file: "ParquetFile", column: str, fields: Sequence[str]) -> list[str]:
    """Returns the columns of a Parquet file to read: the column of text, which may be a field of a nested one
    (`a.b`), or those of a template's fields, and the column of chats.

    Raises:
        ConfigError: there is no such column, there are several, or it does not contain text.
    """
    from pyarrow import types

    schema = file.schema_arrow
    kinds = dict(zip(schema.names, schema.types, strict=True))
    chats = [name for name, kind in kinds.items() if types.is_list(kind) and types.is_struct(kind.value_type)]
    wanted = list(dict.fromkeys([column, *fields]))
    tops = {name: name if name in schema.names else name.split(".")[0] for name in wanted}
    columns = [top for top in dict.fromkeys(tops.values()) if top in schema.names]
    kind = kinds.get(tops[column])
    for part in [] if column in schema.names else column.split(".")[1:]:
        found = kind is not None and types.is_struct(kind) and kind.get_field_index(part) >= 0
        kind = kind.field(part).type if kind is not None and found else None
    if repeated := [name for name in columns if schema.names.count(name) > 1]:
        reason = f"has several columns {repeated[0]!r}"
        fix = "write it again with a different name for each column"
    elif fields:
        if columns:
            return columns
        reason, fix = "has no column of the template's fields", f"its columns are {', '.join(schema.names[:20])}"
        fix = f"--text-key {chats[0]}" if chats else fix
    elif kind is None:
        reason = f"has no column {column!r}"
        fix = f"--text-key NAME, one of {', '.join(schema.names[:20])}; NAME.NAME for a nested one"
        fix = f"--text-key {chats[0]} {CHAT}" if chats else fix
    elif types.is_string(kind) or types.is_large_string(kind):
        return [column]
    else:
        reason = f"its column {column!r} contains {kind}, not text"
        fix = CHAT if column in chats else "--text-key NAME, a column with text; NAME.NAME for a nested one"
    raise ConfigError(Problem("INPUT", reason, fix, value=str(path)))


class Unfilled(ValueError):
    """An error for an object that cannot fill a template; the message gives the reason."""


def template_problem(template: str) -> str:
    """Returns the reason why a template cannot be used; empty for a valid template."""
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        return f"is not a template: {error}"
    names = [name for _, name, _, _ in parts if name is not None]
    if not names:
        return "names no field"
    formatted = any(spec or conversion for _, _, spec, conversion in parts)
    if formatted or not all(re.fullmatch(r"[\w-]+(\.[\w-]+)*", name) for name in names):
        return "may only have plain names in braces"
    return ""


def fields_of(template: str) -> tuple[str, ...]:
    """Returns the names of a template's fields."""
    return tuple(name for _, name, _, _ in Formatter().parse(template) if name is not None)


def fill(template: str, record: Mapping[str, object], key: str) -> str:
    """Returns the text of an object: the template filled with its fields, or with each message of its list
    `key`.

    Raises:
        Unfilled: a field is missing or has no text, or the list contains something other than messages.
    """
    parts = [(text.replace("\\n", "\n").replace("\\t", "\t"), name) for text, name, _, _ in Formatter().parse(template)]
    messages = value_of(record, key)
    return "".join(_fill_one(parts, fields) for fields in (messages if isinstance(messages, list) else [record]))


def _fill_one(parts: list[tuple[str, str | None]], fields: object) -> str:
    if not isinstance(fields, Mapping):
        raise Unfilled(f": a message is a {type(fields).__name__}")
    filled = []
    for text, name in parts:
        filled.append(text)
        if name is None:
            continue
        value = value_of(fields, name)
        if value is MISSING:
            raise Unfilled(f": no field {name!r}, only {names_of(fields)}")
        filled.append(str(value) if isinstance(value, int | float) else text_of(value, name))
    return "".join(filled)


MISSING: Final = object()
"""The value of a field that an object does not have."""


def value_of(record: Mapping[str, object], name: str) -> object:
    """Returns the value of a field, or of a field of a nested object: `a.b`; `MISSING` if there is none."""
    value: object = record
    for part in [name] if name in record else name.split("."):
        value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def text_of(value: object, name: str) -> str:
    """Returns a field's text: a text, or the texts of a message's content parts, joined.

    Raises:
        Unfilled: the field has no text, or a part that is not text, such as an image.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise Unfilled(f": field {name!r} is null")
    if not isinstance(value, list):
        raise Unfilled(f": field {name!r} is a {type(value).__name__}")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Unfilled(f": field {name!r} is a list with {'a message' if is_message(part) else repr(kind)}")
        texts.append(text)
    return "".join(texts)


def is_message(value: object) -> bool:
    """Returns True for an object that looks like a message of a chat."""
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def names_of(record: Mapping[str, object]) -> str:
    """Lists the fields of an object, and of its nested objects, for messages."""
    names = []
    for name, value in record.items():
        inner = [f"{name}.{part}" for part in value] if isinstance(value, Mapping) else []
        chat = " (a chat)" if isinstance(value, list) and value and is_message(value[0]) else ""
        names += [f"{part!r}{chat}" for part in inner or [name]]
    return ", ".join(names[:8]) or "nothing"
