"""One rank's file of a checkpoint, as safetensors: 8 bytes of length, a JSON header, the tensors without gaps.

Written by ourselves, because the library's own writer needs all tensors as one copy, knows no hash, and no fsync.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

from blake3 import blake3

from canzona_cli.checkpoint.manifest import Buffer, StoredFile, StoredTensor

ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""Bytes of an element, by safetensors' name of its type."""
LARGEST_HEADER: Final = 100_000_000
"""Bytes; safetensors' own limit."""

_ALIGNMENT = 64
_CHUNK = 8 << 20


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def write_shard(path: Path, tensors: Mapping[str, Buffer]) -> tuple[StoredFile, dict[str, StoredTensor]]:
    """Write a new safetensors file and have it on the disk. Nothing is copied, so the buffers must not change.

    Returns:
        Size and hash of the file, and its table of tensors.

    Raises:
        OSError: it could not be written; half a file may be left.
        ValueError: a buffer that is not as large as its type and shape say.
    """
    # Larger elements first: without gaps between tensors, that is what aligns each to its own element.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_item_bytes(*item), item[0])))
    pieces = [_header(ordered), *(buffer.data for buffer in ordered.values() if buffer.data.nbytes)]
    total = sum(len(piece) for piece in pieces)
    given_up = Event()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # Beside the writing, both without Python's lock.
        with ThreadPoolExecutor(max_workers=1) as hasher:
            digest = hasher.submit(_hash, pieces, given_up)
            try:
                _write(descriptor, pieces)
            except BaseException:
                given_up.set()
                raise
            os.fsync(descriptor)
            hashed = digest.result()
    finally:
        os.close(descriptor)
    table = {
        name: StoredTensor(file=path.name, dtype=buffer.dtype, shape=tuple(buffer.shape), piece=buffer.piece)
        for name, buffer in ordered.items()
    }
    return StoredFile(bytes=total, blake3=hashed), table


def _item_bytes(name: str, buffer: Buffer) -> int:
    if buffer.dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: safetensors has no type {buffer.dtype}")
    wanted = tensor_bytes(buffer.dtype, buffer.shape)
    if buffer.data.nbytes != wanted:
        raise ValueError(f"{name}: {buffer.dtype} {tuple(buffer.shape)} has {wanted} bytes, not {buffer.data.nbytes}")
    if buffer.data.nbytes != len(buffer.data):
        raise ValueError(f"{name}: its data is not a flat view of bytes")
    return ITEM_BYTES[buffer.dtype]


def _header(ordered: Mapping[str, Buffer]) -> memoryview:
    """The length and the JSON behind it, padded so that the first tensor is aligned."""
    entries, offset = {}, 0
    for name, buffer in ordered.items():
        end = offset + buffer.data.nbytes
        entries[name] = {"dtype": buffer.dtype, "shape": list(buffer.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return memoryview(struct.pack("<Q", len(text)) + text)


def _chunks(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK):
            yield piece[start : start + _CHUNK]


def _write(descriptor: int, pieces: Sequence[memoryview]) -> None:
    written = started = 0
    for chunk in _chunks(pieces):
        rest = chunk
        while rest:
            done = os.write(descriptor, rest)
            rest, written = rest[done:], written + done
        if written - started >= _CHUNK:
            # To the kernel: begin to write these pages to the disk, rather than all of them at the fsync.
            os.posix_fadvise(descriptor, started, written - started, os.POSIX_FADV_DONTNEED)
            started = written


def _hash(pieces: Sequence[memoryview], given_up: Event) -> str:
    hasher = blake3()
    for chunk in _chunks(pieces):
        if given_up.is_set():
            break
        hasher.update(chunk)
    return hasher.hexdigest()


def read_table(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], int]:
    """Names, types and shapes of the tensors in a safetensors file, by its header alone, and the bytes it should have.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, in words for the user.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(LARGEST_HEADER, os.fstat(file.fileno()).st_size - 8):
            raise ValueError("not a safetensors file: the length of its header is impossible")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):  # the library is as strict
            raise TypeError
        table = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        spans = sorted((*entry["data_offsets"], tensor_bytes(*table[name])) for name, entry in entries.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("not a safetensors file: its header cannot be read") from None
    end = 0
    for start, stop, wanted in spans:
        if start != end or stop - start != wanted:
            raise ValueError("not a safetensors file: its tensors overlap or leave gaps")
        end = stop
    return table, 8 + length + end
