"""Writes and checks safetensors files. A file consists of the header's length (8 bytes), the header (JSON),
and the tensors without gaps.

The safetensors library's own writer needs all tensors in memory, and neither hashes nor syncs the file.
"""

import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from canzona_cli.checkpoint.manifest import ITEM_BYTES, Buffer, StoredFile, StoredTensor, tensor_bytes

if TYPE_CHECKING:
    import torch

LARGEST_HEADER: Final = 100_000_000
"""The largest header that the safetensors library accepts, in bytes."""

_ALIGNMENT = 64
_CHUNK = 8 << 20


def raw_bytes(tensor: "torch.Tensor") -> memoryview:
    """Returns the bytes of a CPU tensor in row-major order, for the data of a `Buffer`."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def write_shard(
    path: Path, tensors: Mapping[str, Buffer], *, metadata: Mapping[str, str] | None = None
) -> tuple[StoredFile, dict[str, StoredTensor]]:
    """Writes and hashes a new safetensors file, and syncs it to the disk.

    Args:
        tensors: the tensors by name. Their memory is not copied and must not change during the call. Buffers
            with a function are read in chunks, one tensor after another.
        metadata: the header's `__metadata__`; None to leave it out.

    Returns:
        The size and hash of the file, and its table of tensors.

    Raises:
        OSError: the file could not be written. A part of it may be left.
        ValueError: a buffer's size does not match its type and shape, or safetensors does not have the type.
    """
    # There are no gaps between tensors. With larger elements first, every tensor is aligned to its element
    # size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_item_bytes(*item), item[0])))
    header = _header(ordered, metadata)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(max_workers=1) as hash_thread:
            file = _HashedFile(descriptor, hash_thread)
            file.add(header)
            for name, buffer in ordered.items():
                offset = file.bytes
                for data in buffer.chunks():
                    file.add(data)
                _check_size(name, buffer, file.bytes - offset)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    table = {
        name: StoredTensor(file=path.name, dtype=buffer.dtype, shape=tuple(buffer.shape), piece=buffer.piece)
        for name, buffer in ordered.items()
    }
    return StoredFile(bytes=file.bytes, blake3=file.hasher.hexdigest()), table


def _item_bytes(name: str, buffer: Buffer) -> int:
    """Returns the bytes of an element, and checks the buffer before anything is written.

    Raises:
        ValueError: safetensors does not have the type, or the size of data in memory does not match the
            shape.
    """
    if buffer.dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: safetensors has no type {buffer.dtype}")
    if not callable(buffer.data):
        _check_size(name, buffer, buffer.data.nbytes)
    return ITEM_BYTES[buffer.dtype]


def _check_size(name: str, buffer: Buffer, size: int) -> None:
    expected = tensor_bytes(buffer.dtype, buffer.shape)
    if size != expected:
        raise ValueError(f"{name}: {buffer.dtype} {tuple(buffer.shape)} has {expected} bytes, not {size}")


def _header(ordered: Mapping[str, Buffer], metadata: Mapping[str, str] | None) -> memoryview:
    """Returns the header's length followed by its JSON, padded so that the first tensor is aligned."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, buffer in ordered.items():
        end = offset + tensor_bytes(buffer.dtype, buffer.shape)
        entries[name] = {"dtype": buffer.dtype, "shape": list(buffer.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return memoryview(struct.pack("<Q", len(text)) + text)


class _HashedFile:
    """A file that is being written and hashed at the same time."""

    def __init__(self, descriptor: int, hash_thread: ThreadPoolExecutor) -> None:
        self.hasher = blake3()
        self.bytes = 0
        self._descriptor, self._hash_thread = descriptor, hash_thread
        self._flushed_bytes = 0
        """The number of bytes that the kernel has been asked to write to the disk."""

    def add(self, data: memoryview) -> None:
        """Writes the data while another thread hashes it; both release the GIL. Does not keep a reference to
        the data."""
        write_failed = Event()
        hashed = self._hash_thread.submit(_hash, self.hasher, data, write_failed)
        try:
            for chunk in _chunks(data):
                self._write(chunk)
        except BaseException:
            write_failed.set()
            raise
        hashed.result()

    def _write(self, rest: memoryview) -> None:
        while rest:
            count = os.write(self._descriptor, rest)
            rest = rest[count:]
            self.bytes += count
        if (new_bytes := self.bytes - self._flushed_bytes) >= _CHUNK:
            # The kernel starts to write these pages to the disk now, instead of all pages at the fsync.
            os.posix_fadvise(self._descriptor, self._flushed_bytes, new_bytes, os.POSIX_FADV_DONTNEED)
            self._flushed_bytes = self.bytes


def _hash(hasher: blake3, data: memoryview, write_failed: Event) -> None:
    for chunk in _chunks(data):
        if write_failed.is_set():
            break
        hasher.update(chunk)


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


def read_table(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], int]:
    """Reads the type and shape of every tensor from the header of a safetensors file.

    Returns:
        The type and shape of each tensor by name, and the size in bytes that the file should have.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a valid safetensors file; the message is for the user.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a safetensors file: it is not a regular file")
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(LARGEST_HEADER, os.fstat(file.fileno()).st_size - 8):
            raise ValueError("not a safetensors file: the length of its header is impossible")
        text = file.read(length)
    try:
        entries = json.loads(text.decode())  # json.loads(bytes) would also accept UTF-16, unlike the library
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):  # as the library requires
            raise TypeError
        table = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        for numbers in (*offsets.values(), *(shape for _, shape in table.values())):
            if not all(type(number) is int and number >= 0 for number in numbers):  # the library rejects 2.0
                raise TypeError
        spans = sorted((start, stop, tensor_bytes(*table[name])) for name, (start, stop) in offsets.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("not a safetensors file: its header cannot be read") from None
    end = 0
    for start, stop, expected in spans:
        if start != end or stop - start != expected:
            raise ValueError("not a safetensors file: its tensors overlap or leave gaps")
        end = stop
    return table, 8 + length + end
