"""Shards are safetensors files: the library itself reads back every bit, and their hash is that of the file."""

import json
import struct
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from canzona_cli.checkpoint.manifest import Buffer, StoredTensor
from canzona_cli.checkpoint.shard_file import read_table, write_shard
from tests.checkpoint.checkpoints import buffer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SHAPES = {"matrix": (3, 5), "vector": (7,), "number": (), "nothing": (0, 4), "cube": (2, 3, 2)}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_the_library_reads_back_every_bit_of_every_type_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"layers.0.{kind}/{code}": (code, (torch.randn(shape) * 9).to(dtype))
        for code, dtype in DTYPES.items()
        for kind, shape in SHAPES.items()
    }
    path = tmp_path / "rank-00003.safetensors"
    stored, table = write_shard(
        path, {name: buffer(code, tuple(t.shape), bits(t)) for name, (code, t) in tensors.items()}
    )
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, (code, tensor) in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bits(found) == bits(tensor), name
            assert table[name] == StoredTensor(file=path.name, dtype=code, shape=tuple(tensor.shape))
    content = path.read_bytes()
    assert (stored.bytes, stored.blake3) == (len(content), blake3(content).hexdigest())
    assert read_table(path) == ({name: (t.dtype, t.shape) for name, t in table.items()}, stored.bytes)


def test_data_is_aligned_whatever_stands_before_it(tmp_path: Path) -> None:
    for length in range(1, 66):
        path = tmp_path / f"{length}.safetensors"
        write_shard(path, {"b" * length: buffer("U8", (3,), b"abc"), "a": buffer("I64", (1,), bytes(8))})
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        assert (8 + size) % 64 == 0
        for name, entry in json.loads(content[8 : 8 + size]).items():
            assert entry["data_offsets"][0] % {"a": 8}.get(name, 1) == 0


def test_data_longer_than_one_write_is_whole_and_the_order_of_tensors_does_not_matter(tmp_path: Path) -> None:
    large = bytes(range(256)) * (70 * 1024)
    tensors = {"a": buffer("U8", (len(large),), large), "b": buffer("F32", (2,), b"12345678")}
    first, _ = write_shard(tmp_path / "1.safetensors", tensors)
    second, _ = write_shard(tmp_path / "2.safetensors", dict(reversed(tensors.items())))
    assert first == second
    with safe_open(tmp_path / "1.safetensors", "pt") as file:
        assert file.get_tensor("a").numpy().tobytes() == large


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (buffer("F32", (3,), bytes(11)), "has 12 bytes, not 11"),
        (buffer("C64", (1,), bytes(8)), "has no type C64"),
    ],
)
def test_a_buffer_that_is_not_what_it_says_is_not_written(tmp_path: Path, wrong: Buffer, said: str) -> None:
    with pytest.raises(ValueError, match=f"w: .*{said}"):
        write_shard(tmp_path / "x.safetensors", {"w": wrong})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "x.safetensors", {})
    assert (tmp_path / "x.safetensors").read_text() == "mine"


def file_of(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 40000) + b"[" * 40000,
        file_of([1, 2]),
        file_of({"a": 3}),
        file_of({"a": {"dtype": "U8", "shape": [4]}}),
        file_of({"a": {"dtype": "evil", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 5]}}, bytes(5)),
        file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, bytes(6)),
        file_of({k: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for k in "ab"}, bytes(4)),
    ],
)
def test_what_is_no_such_file_is_an_error_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_table(tmp_path / "x")
