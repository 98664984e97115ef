"""Megatron's indexed datasets, `<prefix>.bin` and `<prefix>.idx`, written and checked without importing torch.

The format is that of `megatron.core.datasets.indexed_dataset`, version 1. The .bin holds token ids and nothing else.
The .idx holds, little-endian: 9 bytes `MMIDIDX\\0\\0`, u64 version, u8 dtype code, u64 sequences, u64 document indices,
then i32 length of each sequence, i64 byte offset of each sequence, and i64 document indices: 0, and for each document
the number of sequences up to its end.
"""

import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from canzona_cli.data.tokenizers import TokenArray, token_dtype
from canzona_cli.errors import ConfigError, Problem, refuse
from canzona_cli.run.files import sync_folder

Lengths = npt.NDArray[np.int32]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_CODES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_SCAN_TOKENS = 16 << 20


def bin_path(prefix: Path) -> Path:
    """`<prefix>.bin`; prefixes may contain dots, so no `with_suffix`."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`<prefix>.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def temporary(path: Path) -> Path:
    """Returns the path where the content of `path` grows: hidden, in the same folder,
    never taken for data."""
    return path.with_name(f".{path.name}.tmp")


@dataclass(frozen=True, kw_only=True)
class Written:
    """The size of a pair, finished or growing."""

    tokens: int = 0
    documents: int = 0
    sequences: int = 0
    max_token_id: int = 0
    """The largest id that occurs."""


class PairWriter:
    """Streams documents into temporary files beside `<prefix>`; `publish` gives them their names.

    One writer per prefix at a time: callers hold the prefix's lock. Leaving the `with` block without
    `publish` removes the temporary files. The index grows on the disk too: memory does not depend on the
    number of documents.

    Args:
        prefix: the pair's path without extension; its folder exists.
        vocab_size: decides the width of ids.
        eod: id written after every document.
        after: append to temporary files of at least this size that an earlier writer left with `keep`.
    """

    def __init__(self, prefix: Path, *, vocab_size: int, eod: int, after: Written | None = None) -> None:
        self.prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self.written = after or Written()
        self.keep = False
        """Leave the temporary files of an unfinished pair on the disk."""
        self._eod = eod
        self._document_tokens = 0
        self._temporaries = [*_growing(prefix), temporary(idx_path(prefix))]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        streams = []
        for path, size in zip(_growing(self.prefix), _file_sizes(self.written, self.dtype), strict=True):
            # 4 MiB: documents are small and many, the disk wants few and large writes.
            stream = self._open.enter_context(path.open("ab", buffering=4 << 20))
            stream.truncate(size)
            streams.append(stream)
        self._bin, self._lengths, self._ends = streams
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # flushing to a full disk fails again; the files go anyway
            self._open.close()
        for path in () if self.keep else self._temporaries:
            path.unlink(missing_ok=True)

    def add(self, tokens: TokenArray, lengths: Lengths, last: npt.NDArray[np.bool_]) -> None:
        """Append sequences in one write.

        Args:
            tokens: all ids one after another, without eod.
            lengths: tokens of each sequence, shape [sequences].
            last: the document ends with that sequence, shape [sequences]. A document without tokens leaves no
                trace; any other gets the eod at its end.
        """
        assert tokens.dtype == self.dtype, (tokens.dtype, self.dtype)
        if not len(lengths):
            return
        reached = np.cumsum(lengths, dtype=np.int64)
        closing = np.flatnonzero(last)
        ending = closing[np.diff(reached[closing], prepend=-self._document_tokens) > 0]
        begun = int(reached[closing[-1]]) if len(closing) else -self._document_tokens
        self._document_tokens = int(reached[-1]) - begun
        stored = lengths.astype("<i4")
        stored[ending] += 1
        ends = np.cumsum(stored > 0)[ending] + self.written.sequences
        block = np.insert(tokens, reached[ending], self._eod)
        self._bin.write(block.data)
        stored = stored[stored > 0]
        self._lengths.write(stored.data)
        self._ends.write(ends.astype("<i8").data)
        self.written = Written(
            tokens=self.written.tokens + len(block),
            documents=self.written.documents + len(ends),
            sequences=self.written.sequences + len(stored),
            max_token_id=max(self.written.max_token_id, int(block.max(initial=0))),
        )

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        for stream in (self._bin, self._lengths, self._ends):
            _sync(stream)

    def _write_index(self) -> None:
        """Writes the index and brings both files to the disk, still under their temporary names."""
        assert self._document_tokens == 0, "the last document has no end"
        _sync(self._bin)
        self._open.close()
        code = next(code for code, name in _DTYPE_CODES.items() if name == np.dtype(self.dtype).name)
        written = self.written
        with (
            open(temporary(idx_path(self.prefix)), "wb") as index,
            open(self._lengths.name, "rb") as lengths,
            open(self._ends.name, "rb") as ends,
        ):
            index.write(_HEADER.pack(MAGIC, VERSION, code, written.sequences, written.documents + 1))
            shutil.copyfileobj(lengths, index, 4 << 20)
            lengths.seek(0)
            offset = 0
            while block := lengths.read(4 << 20):
                reached = np.cumsum(np.frombuffer(block, dtype="<i4"), dtype=np.int64) * np.dtype(self.dtype).itemsize
                index.write((np.concatenate(([0], reached[:-1])) + offset).astype("<i8").data)
                offset += int(reached[-1])
            index.write(bytes(8))  # the first document begins with the first sequence
            shutil.copyfileobj(ends, index, 4 << 20)
            _sync(index)

    def publish(self, companions: Mapping[Path, str | None]) -> None:
        """Finish the files and give them their names, the .idx last,
        so that an .idx exists only beside a whole .bin.

        Args:
            companions: the texts of further files of the pair; None: the one of an older pair goes.
        """
        self._write_index()
        new = {path: text for path, text in companions.items() if text is not None}
        for path, text in new.items():
            self._temporaries.append(temporary(path))
            with open(temporary(path), "w", encoding="utf-8") as stream:
                stream.write(text)
                _sync(stream)
        # An older pair stops being one before its .bin is replaced: never a new .bin under an old .idx.
        for path in (idx_path(self.prefix), *(path for path in companions if path not in new)):
            path.unlink(missing_ok=True)
        for path in (bin_path(self.prefix), *new, idx_path(self.prefix)):
            os.replace(temporary(path), path)
        self.keep = False
        with suppress(OSError):  # some network file systems cannot
            sync_folder(self.prefix.parent)


def can_continue(prefix: Path, written: Written, vocab_size: int) -> bool:
    """Tell whether the temporary files of an unfinished pair hold at least this much."""
    sizes = _file_sizes(written, token_dtype(vocab_size))
    return all(
        path.is_file() and path.stat().st_size >= size for path, size in zip(_growing(prefix), sizes, strict=True)
    )


def _growing(prefix: Path) -> tuple[Path, Path, Path]:
    """The temporary files of an unfinished pair: token ids,
    and the two parts that the .idx is put together from."""
    names = (bin_path(prefix).name, f"{prefix.name}.lengths", f"{prefix.name}.ends")
    ids, lengths, ends = (temporary(prefix.with_name(name)) for name in names)
    return ids, lengths, ends


def _file_sizes(written: Written, dtype: type[np.generic]) -> tuple[int, int, int]:
    """Bytes of the growing .bin, of the lengths and of the document ends."""
    return written.tokens * np.dtype(dtype).itemsize, 4 * written.sequences, 8 * written.documents


def _sync(stream: object) -> None:
    stream.flush()  # type: ignore[attr-defined]
    os.fsync(stream.fileno())  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PairInfo:
    """The contents of an intact pair."""

    prefix: Path
    tokens: int
    documents: int
    sequences: int
    """The sequences that Megatron's GPTDataset splits and shuffles; a long document may be several."""
    dtype: str
    lengths: npt.NDArray[np.int32] = field(repr=False, compare=False)
    """Tokens of each sequence, shape [sequences]."""

    def scan_max_token_id(self, on_progress: Callable[[float], None] | None = None) -> int:
        """Largest id in the .bin, in one pass of 16 Mi tokens at a time; tells the share done.

        Raises:
            ConfigError: a negative id, which no embedding can look up.
        """
        ids = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")
        largest = 0
        for start in range(0, self.tokens, _SCAN_TOKENS):
            chunk = ids[start : start + _SCAN_TOKENS]
            if chunk.min() < 0:
                raise _damaged(bin_path(self.prefix), f"it holds the negative token id {chunk.min()}")
            largest = max(largest, int(chunk.max()))
            if on_progress is not None:
                on_progress(min(1.0, (start + _SCAN_TOKENS) / self.tokens))
        return largest

    def split_tokens(self, validation_fraction: float) -> tuple[int, int]:
        """Tokens for training and for validation.

        Megatron holds out whole sequences from the end and rounds the cut to the nearest
        (`BlendedMegatronDatasetBuilder`), so a few long sequences may leave nothing.
        """
        cut = round((1.0 - validation_fraction) * float(self.sequences))
        held_out = int(self.lengths[cut:].sum(dtype=np.int64))
        return self.tokens - held_out, held_out


def inspect_pair(prefix: Path) -> PairInfo:
    """Read the index of a pair and check that both files are whole and belong together. Reads no token.

    Raises:
        ConfigError: key `data.path`; the files are missing or damaged.
    """
    refuse(_missing(prefix))
    index = idx_path(prefix)
    try:
        # An empty file cannot be mapped.
        raw = memoryview(np.memmap(index, np.uint8, "r")) if index.stat().st_size else memoryview(b"")
        size = bin_path(prefix).stat().st_size
    except OSError as error:
        raise ConfigError(_problem(index, f"cannot be read: {error.strerror}", "")) from error
    dtype, lengths, offsets, ends = _parts(index, raw)
    tokens = int(lengths.sum(dtype=np.int64))
    reach = int((offsets + lengths.astype(np.int64) * dtype.itemsize).max())
    if int(lengths.min()) < 0 or int(offsets.min()) < 0 or reach > tokens * dtype.itemsize:
        raise _damaged(index, "damaged: it points outside its .bin")
    if size != (expected := tokens * dtype.itemsize):
        state = "truncated" if size < expected else "longer than its index says, so it belongs to another"
        raise _damaged(bin_path(prefix), f"{state}: {size:,} bytes, the index calls for {expected:,}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(lengths) or bool((np.diff(ends) < 0).any()):
        raise _damaged(index, "damaged: its document boundaries are out of order")
    return PairInfo(
        prefix=prefix,
        tokens=tokens,
        documents=len(ends) - 1,
        sequences=len(lengths),
        dtype=dtype.name,
        lengths=lengths,
    )


def _parts(
    index: Path, raw: memoryview
) -> tuple[np.dtype[np.generic], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Reads an index: the type of its tokens, the sequences' lengths and byte offsets, the document boundaries."""
    if len(raw) < _HEADER.size or bytes(raw[: len(MAGIC)]) != MAGIC:
        raise _damaged(index, "it is not a Megatron index (does not start with MMIDIDX), or its beginning alone")
    _, version, code, sequences, indices = _HEADER.unpack(raw[: _HEADER.size])
    if version != VERSION:
        raise _damaged(index, f"index version {version}; Megatron-core reads version {VERSION}")
    if code not in _DTYPE_CODES:
        raise _damaged(index, f"its .bin holds numbers of another type than token ids (code {code})")
    expected = _HEADER.size + 12 * sequences + 8 * indices
    # Multimodal datasets append one byte per sequence, which a text run ignores.
    if len(raw) not in (expected, expected + sequences):
        state = "truncated" if len(raw) < expected else "damaged"
        raise _damaged(index, f"{state}: {len(raw):,} bytes where its header calls for {expected:,}")
    if sequences == 0:
        raise _damaged(index, "it holds no documents")
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=_HEADER.size)
    offsets = np.frombuffer(raw, dtype="<i8", count=sequences, offset=_HEADER.size + 4 * sequences)
    ends = np.frombuffer(raw, dtype="<i8", count=indices, offset=_HEADER.size + 12 * sequences)
    return np.dtype(_DTYPE_CODES[code]), lengths, offsets, ends


def _missing(prefix: Path) -> Iterator[Problem]:
    """Names the files of a pair that are not there, and the prefix that was probably meant."""
    bare = prefix.with_name(prefix.name.removesuffix(".bin").removesuffix(".idx")) if prefix.name else prefix
    for path in (bin_path(prefix), idx_path(prefix)):
        if path.is_file():
            continue
        # Megatron's own tool appends `_text_document` to the name it is given.
        near = sorted(prefix.parent.glob(f"{escape(bare.name)}*.idx")) if prefix.name else []
        fix = "make it with canzona data prepare FILES --output PREFIX"
        if path == idx_path(prefix) and bin_path(prefix).is_file():
            fix = "let the preparation of the .bin finish"
        yield _problem(path, "no such file", f"did you mean data.path={near[0].with_suffix('')}?" if near else fix)


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(_problem(path, reason, "prepare it again with canzona data prepare ... --overwrite"))


def _problem(path: Path, reason: str, fix: str) -> Problem:
    return Problem(key="data.path", value=str(path), reason=reason, fix=fix)
