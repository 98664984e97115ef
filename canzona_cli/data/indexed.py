"""Writes and checks Megatron's indexed datasets, `<prefix>.bin` and `<prefix>.idx`, and `<prefix>.json`, the record
of a pair's inputs and settings; without importing torch.

The format is that of `megatron.core.datasets.indexed_dataset`, version 1. The .bin contains only token ids. The .idx
contains, little-endian: 9 bytes `MMIDIDX\\0\\0`, u64 version, u8 dtype code, u64 number of sequences, u64 number of
document indices, then the i32 lengths of all sequences, their i64 byte offsets, and the i64 document indices: 0, and
for each document the number of sequences up to its end.
"""

import hashlib
import json
import os
import shlex
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np
import numpy.typing as npt

from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.data.tokenizers import TokenArray, TokenizerKind, token_dtype
from canzona_cli.records.codec import load
from canzona_cli.records.files import sync_folder

Lengths = npt.NDArray[np.int32]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_CODES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

_SCAN_TOKENS = 16 << 20
_HASHED_BLOCK = 64 << 10
_HASHED_BLOCKS = 1024
_PREPARE_AGAIN = "prepare it again with canzona data prepare ... --overwrite"


def bin_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.bin`."""
    return prefix.with_name(prefix.name + ".bin")  # not with_suffix, because prefixes may contain dots


def idx_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.idx`."""
    return prefix.with_name(prefix.name + ".idx")


def lock_path(prefix: Path) -> Path:
    """Returns the path of the lock file for the prepared data at `prefix` (`PREFIX.bin` and `PREFIX.idx`)."""
    return prefix.with_name(f".{prefix.name}.lock")


def temporary_path(path: Path) -> Path:
    """Returns the hidden path in the same folder where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.tmp")


class PairWriter:
    """A writer of one pair. It streams documents into temporary files, which `publish` renames.

    The caller must hold the prefix's lock. Leaving the `with` block removes the remaining temporary files. The
    parts of the index are streamed to the disk too, so memory does not depend on the number of documents.

    Args:
        prefix: the pair's path without extension; its folder must exist.
        vocab_size: the vocabulary size, which determines the type of the ids.
        eod: the id written after every document.
    """

    def __init__(self, prefix: Path, *, vocab_size: int, eod: int) -> None:
        self.prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self.item_bytes = np.dtype(self.dtype).itemsize
        self.tokens = self.documents = self.sequences = self.max_token_id = 0
        self._eod = eod
        self._document_tokens = 0
        self._temporaries = [*_unfinished_files(prefix), temporary_path(idx_path(prefix))]
        self._open = ExitStack()

    def __enter__(self) -> Self:
        # A buffer of 4 MiB turns many small documents into few large writes.
        files = (path.open("wb", buffering=4 << 20) for path in _unfinished_files(self.prefix))
        self._bin, self._lengths, self._ends = map(self._open.enter_context, files)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # flushing to a full disk fails again, but the files still have to be removed
            self._open.close()
        for path in self._temporaries:
            path.unlink(missing_ok=True)

    def add(self, tokens: TokenArray, lengths: Lengths, last: npt.NDArray[np.bool_]) -> None:
        """Appends sequences, with an eod after the last sequence of each document. Documents without tokens
        are not written.

        Args:
            tokens: the ids of all sequences, concatenated; eod is not included.
            lengths: the number of tokens of each sequence, shape [sequences].
            last: True for each sequence that is the last of its document, shape [sequences].
        """
        assert tokens.dtype == self.dtype, (tokens.dtype, self.dtype)
        if not len(lengths):
            return
        token_ends = np.cumsum(lengths, dtype=np.int64)  # the number of tokens up to the end of each sequence
        last_sequences = np.flatnonzero(last)
        # The sequences that end a document with tokens, counting the document's tokens from earlier calls.
        ending = last_sequences[np.diff(token_ends[last_sequences], prepend=-self._document_tokens) > 0]
        document_start = int(token_ends[last_sequences[-1]]) if len(last_sequences) else -self._document_tokens
        self._document_tokens = int(token_ends[-1]) - document_start
        stored = lengths.astype("<i4")
        stored[ending] += 1
        ends = np.cumsum(stored > 0)[ending] + self.sequences
        block = np.insert(tokens, token_ends[ending], self._eod)
        self._bin.write(block.data)
        stored = stored[stored > 0]
        self._lengths.write(stored.data)
        self._ends.write(ends.astype("<i8").data)
        self.tokens += len(block)
        self.documents += len(ends)
        self.sequences += len(stored)
        self.max_token_id = max(self.max_token_id, int(block.max(initial=0)))

    def finish(self) -> None:
        """Writes the index and syncs both files to the disk, still under their temporary names."""
        assert self._document_tokens == 0, "the last document has no end"
        _sync(self._bin)
        self._open.close()
        code = next(code for code, name in _DTYPE_CODES.items() if name == np.dtype(self.dtype).name)
        with (
            open(temporary_path(idx_path(self.prefix)), "wb") as index,
            open(self._lengths.name, "rb") as lengths,
            open(self._ends.name, "rb") as document_ends,
        ):
            index.write(_HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
            shutil.copyfileobj(lengths, index, 4 << 20)
            lengths.seek(0)
            offset = 0
            while block := lengths.read(4 << 20):
                ends_in_block = np.cumsum(np.frombuffer(block, dtype="<i4"), dtype=np.int64) * self.item_bytes
                index.write((np.concatenate(([0], ends_in_block[:-1])) + offset).astype("<i8").data)
                offset += int(ends_in_block[-1])
            index.write(bytes(8))  # the first document starts at sequence 0
            shutil.copyfileobj(document_ends, index, 4 << 20)
            _sync(index)

    def publish(self, *companions: tuple[Path, str]) -> None:
        """Renames the finished files to their final names. The .idx comes last, so that it exists only with a
        complete .bin.

        If a rename fails, the files that were already renamed are removed, and no usable pair is left.

        Args:
            companions: the (path, text) of further files of the pair, which are written before the .idx is
                renamed.
        """
        for path, text in companions:
            self._temporaries.append(temporary_path(path))
            with open(temporary_path(path), "w", encoding="utf-8") as stream:
                stream.write(text)
                _sync(stream)
        # The old .idx is removed first, so that it never describes the new .bin.
        idx_path(self.prefix).unlink(missing_ok=True)
        placed: list[Path] = []
        try:
            for final in (bin_path(self.prefix), *(path for path, _ in companions), idx_path(self.prefix)):
                placed.append(final)
                os.replace(temporary_path(final), final)
        except BaseException:
            for final in placed:
                final.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # some network file systems cannot sync a folder
            sync_folder(self.prefix.parent)


def _unfinished_files(prefix: Path) -> tuple[Path, Path, Path]:
    """Returns the temporary files of an unfinished pair: token ids, sequence lengths and document ends."""
    names = (bin_path(prefix).name, f"{prefix.name}.lengths", f"{prefix.name}.ends")
    ids, lengths, ends = (temporary_path(prefix.with_name(name)) for name in names)
    return ids, lengths, ends


def _sync(stream: object) -> None:
    stream.flush()  # type: ignore[attr-defined]
    os.fsync(stream.fileno())  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PairInfo:
    """The contents of an intact pair, according to its index."""

    prefix: Path
    tokens: int
    documents: int
    sequences: int
    """The number of sequences. Megatron's GPTDataset splits and shuffles by sequence, and a long document may
    have several."""
    dtype: str
    lengths: npt.NDArray[np.int32] = field(repr=False, compare=False)
    """The number of tokens of each sequence, shape [sequences]."""
    document_ends: npt.NDArray[np.int64] = field(repr=False, compare=False)
    """The number of sequences up to the end of each document, shape [documents]."""

    def scan_max_token_id(self, on_progress: Callable[[float], None] | None = None) -> int:
        """Returns the largest id in the .bin, which is read once, 16 Mi tokens at a time.

        Args:
            on_progress: called with the finished share, 0 to 1.

        Raises:
            ConfigError: there is a negative id, which no embedding has.
        """
        ids = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")
        largest = 0
        for start in range(0, self.tokens, _SCAN_TOKENS):
            chunk = ids[start : start + _SCAN_TOKENS]
            if chunk.min() < 0:
                reason = f"it contains the negative token id {chunk.min()}"
                raise ConfigError(_problem(bin_path(self.prefix), reason, "prepare it again"))
            largest = max(largest, int(chunk.max()))
            if on_progress is not None:
                on_progress(min(1.0, (start + _SCAN_TOKENS) / self.tokens))
        return largest

    def fingerprint(self) -> str:
        """Returns a hash of the .idx and of the token ids: all of them up to 64 MiB, and 1,024 evenly spaced
        blocks of 64 KiB of a longer .bin, so that the hash of any data is computed in a moment."""
        digest = hashlib.sha256(np.memmap(idx_path(self.prefix), dtype=np.uint8, mode="r"))
        size = bin_path(self.prefix).stat().st_size
        if size == 0:
            return digest.hexdigest()
        ids = np.memmap(bin_path(self.prefix), dtype=np.uint8, mode="r")
        distance = max(_HASHED_BLOCK, (size - _HASHED_BLOCK) // (_HASHED_BLOCKS - 1))
        for start in range(0, size, distance):
            digest.update(ids[start : start + _HASHED_BLOCK])
        return digest.hexdigest()

    def scan_path(self, cache_root: Path, what: str) -> Path:
        """Returns the file of the cache for a result of reading all tokens. It is another file once one of the pair
        has changed."""
        states = [(path, path.stat()) for path in (bin_path(self.prefix), idx_path(self.prefix))]
        facts = [f"{path}\0{state.st_size}\0{state.st_mtime_ns}" for path, state in states]
        return cache_root / "scans" / hashlib.sha256("\0".join([*facts, what]).encode()).hexdigest()[:24]

    def split_at(self, validation_fraction: float) -> int:
        """Returns the number of sequences for training if the last ones are held out.

        Megatron holds out complete sequences from the end, and rounds the number of the others to the nearest
        integer (`BlendedMegatronDatasetBuilder`). With few long sequences a split may therefore be empty.
        """
        return round((1.0 - validation_fraction) * float(self.sequences))


def inspect_pair(prefix: Path) -> PairInfo:
    """Reads the index of a pair and checks, without reading tokens, that both files are complete and belong
    together.

    Raises:
        ConfigError: files are missing or damaged. The key of the problems is `data.path`.
    """
    bare = prefix.with_name(prefix.name.removesuffix(".bin").removesuffix(".idx")) if prefix.name else prefix
    if bare != prefix and bin_path(bare).is_file() and not bin_path(prefix).is_file():
        reason = "is only one file of the pair; give the common prefix of both"
        raise ConfigError(_problem(prefix, reason, f"data.path={bare}"))
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing and prefix.is_file():
        output = f"data/{prefix.stem}"
        prepare = shlex.join(["canzona", "data", "prepare", str(prefix), "--output", output])
        raise ConfigError(_problem(prefix, "is not prepared data", f"run {prepare}; then data.path={output}"))
    refuse(_missing_problem(prefix, path) for path in missing)
    try:
        raw = np.memmap(idx_path(prefix), dtype=np.uint8, mode="r") if idx_path(prefix).stat().st_size else None
        return _inspect(prefix, b"" if raw is None else memoryview(raw))
    except OSError as error:
        raise ConfigError(_problem(error.filename or idx_path(prefix), f"cannot be read: {error.strerror}")) from error


def _inspect(prefix: Path, raw: memoryview | bytes) -> PairInfo:
    """Checks `raw`, the bytes of an index, and that its sequence lengths, byte offsets and document ends are
    consistent with each other and the .bin; returns the contents of the pair."""
    if reason := _header_fault(raw):
        raise ConfigError(_problem(idx_path(prefix), reason, _PREPARE_AGAIN))
    _, _, code, sequences, indices = _HEADER.unpack(raw[: _HEADER.size])
    dtype = np.dtype(_DTYPE_CODES[code])
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=_HEADER.size)
    offsets = np.frombuffer(raw, dtype="<i8", count=sequences, offset=_HEADER.size + 4 * sequences)
    ends = np.frombuffer(raw, dtype="<i8", count=indices, offset=_HEADER.size + 12 * sequences)
    problems: list[Problem] = []
    tokens = int(lengths.sum(dtype=np.int64))
    size, expected = bin_path(prefix).stat().st_size, tokens * dtype.itemsize
    last_byte = int((offsets + lengths.astype(np.int64) * dtype.itemsize).max())
    if int(lengths.min()) < 0 or int(offsets.min()) < 0 or last_byte > expected:
        problems.append(_problem(idx_path(prefix), "damaged: it points outside its .bin", _PREPARE_AGAIN))
    elif size != expected:
        state = "truncated" if size < expected else "longer than its index says, so it belongs to another index"
        problems.append(_problem(bin_path(prefix), f"{state}: {size:,} bytes instead of {expected:,}", _PREPARE_AGAIN))
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(lengths) or bool((np.diff(ends) < 0).any()):
        problems.append(_problem(idx_path(prefix), "damaged: its document boundaries are out of order", _PREPARE_AGAIN))
    refuse(problems)
    return PairInfo(
        prefix=prefix,
        tokens=tokens,
        documents=len(ends) - 1,
        sequences=len(lengths),
        dtype=dtype.name,
        lengths=lengths,
        document_ends=ends[1:],
    )


def _header_fault(raw: memoryview | bytes) -> str:
    """Returns the reason why an index cannot be used, judging by its header and its length; empty if it can
    be used."""
    if not len(raw):
        return "it is empty"
    if bytes(raw[: len(MAGIC)]) != MAGIC:
        return "it is not a Megatron index (does not start with MMIDIDX)"
    if len(raw) < _HEADER.size:
        return f"truncated: {len(raw)} bytes, but the header alone has {_HEADER.size}"
    _, version, code, sequences, indices = _HEADER.unpack(raw[: _HEADER.size])
    if version != VERSION:
        return f"index version {version}; Megatron-core reads version {VERSION}"
    if code not in _DTYPE_CODES:
        return f"its .bin does not contain integers, according to its type code ({code})"
    expected = _HEADER.size + 12 * sequences + 8 * indices
    # Multimodal datasets append one byte per sequence, which a text run ignores.
    if len(raw) not in (expected, expected + sequences):
        state = "truncated" if len(raw) < expected else "damaged"
        return f"{state}: {len(raw):,} bytes, but {expected:,} according to its header"
    return "" if sequences else "it contains no documents"


def _missing_problem(prefix: Path, path: Path) -> Problem:
    near = sorted(prefix.parent.glob(f"{prefix.name}*.idx")) if prefix.name else []
    if near:
        # Megatron's preprocessing tool appends `_text_document` to the name in its options.
        return _problem(path, "no such file", f"did you mean data.path={near[0].with_suffix('')}?")
    if path == idx_path(prefix) and bin_path(prefix).is_file():
        reason = "no such file; without it the pair is incomplete"
        return _problem(path, reason, "wait until the data have been prepared, or prepare them again")
    return _problem(path, "no such file", "create it with canzona data prepare FILES --output PREFIX")


def _problem(path: Path, reason: str, fix: str = "") -> Problem:
    return Problem("data.path", reason, fix, value=str(path))


FORMAT: Literal[1] = 1
_MOST_BAD_LINES: Final = 100


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """The path, size and hash of one input of a corpus."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line of JSONL or row of Parquet without usable text."""

    path: str
    line: int
    """The number of the line or row, counted from 1."""
    kind: str
    """The category under which the line is counted: `not JSON`."""
    detail: str
    """The rest of the message: `: Expecting value at column 5`."""


@dataclass(kw_only=True)
class Tally:
    """The counts of text read and skipped so far."""

    text_bytes: int = 0
    """The bytes of the documents after decompression."""
    empty: int = 0
    """The number of documents without text, which were skipped."""
    replaced: int = 0
    """The number of invalid characters that were replaced by U+FFFD or `?`."""
    bad_kinds: dict[str, int] = field(default_factory=dict)
    """The number of skipped lines for each reason."""
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first hundred lines that were skipped."""
    skipped: list[str] = field(default_factory=list)
    """The binary files in folders, which were skipped."""
    records: list[InputRecord] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """The number of lines that were skipped."""
        return sum(self.bad_kinds.values())

    @property
    def dropped(self) -> dict[str, int]:
        """The number of skipped documents, lines and files for each reason, omitting zeros."""
        reasons = {"empty": self.empty, **self.bad_kinds, "binary file": len(self.skipped)}
        return {reason: count for reason, count in reasons.items() if count}

    def add_bad(self, line: BadLine) -> None:
        """Counts a skipped line, and keeps it if it is one of the first hundred."""
        self.bad_kinds[line.kind] = self.bad_kinds.get(line.kind, 0) + 1
        if len(self.bad_lines) < _MOST_BAD_LINES:
            self.bad_lines.append(line)


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The contents of `<prefix>.json`, which describes one prepared pair."""

    format: Literal[1] = FORMAT
    tokenizer_kind: TokenizerKind
    tokenizer: str
    tokenizer_sha256: str | None
    """The hash of `<prefix>.tokenizer.json`; None for the byte tokenizer, which has no such file."""
    vocab_size: int
    """One more than the largest id that the tokenizer can produce."""
    eod: int
    """The id that ends every document."""
    tokens: int
    documents: int
    sequences: int
    max_token_id: int
    """The largest token id in the pair."""
    dtype: str
    text_bytes: int
    """The bytes of the documents after decompression."""
    replaced: int
    """The number of invalid characters that were replaced."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """The number of skipped empty documents, bad lines and binary files in folders, for each reason. Nothing
    else is skipped, not even duplicate documents."""
    bad_lines: tuple[BadLine, ...] = ()
    """The first hundred bad lines."""
    inputs_sha256: str
    """The hash of the inputs' hashes, in order."""
    inputs: tuple[InputRecord, ...]
    """The first thousand inputs."""
    input_count: int
    """The number of all inputs."""
    document: str
    text_key: str
    template: str = ""
    python: str
    canzona: str


def sidecar_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.json`."""
    return prefix.with_name(prefix.name + ".json")


def saved_tokenizer_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.tokenizer.json`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def dump_sidecar(sidecar: Sidecar) -> str:
    """Returns the JSON text of `<prefix>.json`, which `load_sidecar` reads."""
    text = json.dumps(asdict(sidecar), indent=1, ensure_ascii=False)
    # File names that are not UTF-8 contain surrogates, which are written as JSON escapes.
    return text.encode(errors="backslashreplace").decode() + "\n"


def load_sidecar(pair: PairInfo) -> Sidecar | None:
    """Returns the sidecar of an intact pair; None if there is none, because another tool made the pair.

    Raises:
        ConfigError: the sidecar is damaged or describes another pair. The key of the problem is `data.path`.
    """
    path = sidecar_path(pair.prefix)
    if not path.is_file():
        return None
    fix = f"prepare the data again with --overwrite, or remove {path} if another tool made the pair"
    sidecar = load(path, Sidecar, key="data.path", value=str(path), fix=fix)
    described = (sidecar.tokens, sidecar.documents, sidecar.sequences, sidecar.dtype)
    if described != (pair.tokens, pair.documents, pair.sequences, pair.dtype):
        reason = f"it describes {sidecar.tokens:,} tokens in {sidecar.documents:,} documents, but its pair has "
        reason += f"{pair.tokens:,} in {pair.documents:,}"
        raise ConfigError(Problem("data.path", reason, fix, value=str(path)))
    return sidecar
