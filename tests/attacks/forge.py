"""Checkpoints that somebody changed who knows the format: all sizes and hashes are right, and the content is not."""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from canzona_cli.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Buffer,
    Manifest,
    Piece,
    Scalar,
    StoredFile,
    StoredTensor,
    manifest_text,
    parse_manifest,
)
from canzona_cli.checkpoint.shard_file import write_shard

Q, L, EMBEDDING = "layers.0.q", "layers.0.q/L", "embedding.word_embeddings.weight"


@dataclass(kw_only=True)
class Content:
    """All that a checkpoint says, to be changed at will."""

    manifest: Manifest
    tensors: dict[str, Buffer]
    files: dict[str, str]
    """The file of each tensor, by name."""
    scalars: dict[str, Scalar]

    def put(self, name: str, data: np.ndarray, *, dtype: str | None = None, piece: Piece | None = None) -> None:
        """Store other elements under a name; of a type that numpy lacks, their bytes."""
        named = dtype or {"f": "F", "i": "I", "u": "U"}[data.dtype.kind] + str(8 * data.itemsize)
        raw = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        size = math.prod(data.shape) * ITEM_BYTES[named]
        self.tensors[name] = Buffer(dtype=named, shape=data.shape, data=raw[:size], piece=piece)
        self.files.setdefault(name, next(iter(self.files.values())))

    def array(self, name: str) -> np.ndarray:
        """The fp32 elements of a tensor; a copy."""
        found = self.tensors[name]
        assert found.dtype == "F32"
        return np.frombuffer(b"".join(found.chunks()), dtype=np.float32).reshape(found.shape).copy()

    def pieces(self, whole: str) -> list[str]:
        """Returns the names under which a tensor that is spread over ranks is stored, from its first element on."""
        return sorted(
            (name for name in self.tensors if name.startswith(f"{whole}@")),
            key=lambda name: [int(part) for part in name.rpartition("@")[2].split(".")],
        )


def read(folder: Path) -> Content:
    """Everything in a checkpoint, by its files alone."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    tensors: dict[str, Buffer] = {}
    for name in {tensor.file for tensor in manifest.tensors.values()}:
        raw = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for stored, entry in json.loads(raw[8 : 8 + length]).items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            told = manifest.tensors[stored]
            tensors[stored] = Buffer(
                dtype=told.dtype, shape=told.shape, data=memoryview(raw)[start:end], piece=told.piece
            )
    places = {name: tensor.file for name, tensor in manifest.tensors.items()}
    return Content(manifest=manifest, tensors=tensors, files=places, scalars=dict(manifest.scalars))


def write(folder: Path, content: Content, texts: Mapping[str, bytes]) -> None:
    """A checkpoint of it, with all sizes and hashes as they must be."""
    folder.mkdir(parents=True)
    files: dict[str, StoredFile] = {}
    table: dict[str, StoredTensor] = {}
    for name in sorted(set(content.files.values())):
        own = {stored: buffer for stored, buffer in content.tensors.items() if content.files[stored] == name}
        files[name], part = write_shard(folder / name, own)
        table |= part
    for name, text in texts.items():
        (folder / name).write_bytes(text)
        files[name] = StoredFile(bytes=len(text), blake3=blake3(text).hexdigest())
    seal(folder, replace(content.manifest, files=files, tensors=table, scalars=content.scalars))


def seal(folder: Path, manifest: Manifest) -> None:
    """The manifest with a hash that is its own."""
    (folder / MANIFEST).write_text(manifest_text(manifest))


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change one file's bytes, and what the manifest says of them."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    raw = change((folder / name).read_bytes())
    (folder / name).write_bytes(raw)
    seal(
        folder,
        replace(manifest, files={**manifest.files, name: StoredFile(bytes=len(raw), blake3=blake3(raw).hexdigest())}),
    )


def header(raw: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", raw[:8])
    value = json.loads(raw[8 : 8 + length])
    change(value)
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def copied(source: Path, target: Path) -> Path:
    """A checkpoint of the same step beside the original, its small files linked."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def forged(source: Path, root: Path, change: Callable[[Content], None]) -> Path:
    """A changed copy of a checkpoint, under the same name in a folder of its own."""
    content = read(source)
    change(content)
    texts = {name: (source / name).read_bytes() for name in content.manifest.files if not name.endswith(".safetensors")}
    folder = root / source.name
    write(folder, content, texts)
    return folder


Change = Callable[[Content], None]


def _retyped(name: str, dtype: str) -> Change:
    """Another type of as many elements."""

    def change(content: Content) -> None:
        shape = content.tensors[name].shape
        raw = np.zeros(math.prod(shape) * ITEM_BYTES[dtype], dtype=np.uint8)
        content.tensors[name] = Buffer(dtype=dtype, shape=shape, data=memoryview(raw))

    return change


def _changed(name: str, do: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda content: content.put(name, do(content.array(name)), piece=content.tensors[name].piece)


def _with(value: float, place: int = 3) -> Callable[[np.ndarray], np.ndarray]:
    def do(data: np.ndarray) -> np.ndarray:
        data.reshape(-1)[place] = value
        return data

    return do


def _without(name: str) -> Change:
    def change(content: Content) -> None:
        del content.tensors[name], content.files[name]

    return change


def _counted(name: str, value: Scalar) -> Change:
    def change(content: Content) -> None:
        content.scalars[name] = value

    return change


def _uncounted(name: str) -> Change:
    def change(content: Content) -> None:
        del content.scalars[name]

    return change


def _piece(whole: str, do: Callable[[Piece], Piece]) -> Change:
    """One of a tensor's pieces says that it lies somewhere else."""

    def change(content: Content) -> None:
        stored = content.pieces(whole)[0]
        old = content.tensors.pop(stored)
        assert old.piece is not None
        piece = do(old.piece)
        name = piece.name(whole.rpartition("/")[2])
        content.tensors[name] = Buffer(dtype=old.dtype, shape=old.shape, data=old.data, piece=piece)
        content.files[name] = content.files.pop(stored)

    return change


def _numpy_reads_beyond(content: Content) -> None:
    data = np.frombuffer(b"".join(content.tensors["random.00001/numpy"].chunks()), dtype=np.int64).copy()
    data[-2] = 10**6
    content.put("random.00001/numpy", data)


def _random_gone(content: Content) -> None:
    for name in [name for name in content.tensors if name.startswith("random.00001/")]:
        _without(name)(content)


def _longer(data: np.ndarray) -> np.ndarray:
    return np.concatenate([data, data[:1]])


KINDS: Mapping[str, tuple[Change, str]] = {
    "a master of half precision": (_retyped(f"{Q}/master", "F16"), "it is F16"),
    "a master of double precision": (_retyped(f"{Q}/master", "F64"), "it is F64"),
    "a master that is missing": (_without(f"{Q}/master"), "does not have this"),
    "a master of three dimensions": (_changed(f"{Q}/master", lambda data: data[None]), "but the model's is"),
    "a master that is turned": (_changed(f"{Q}/master", lambda data: data.T), "but the model's is"),
    "a master with NaN": (_changed(f"{Q}/master", _with(math.nan)), "1 of "),
    "a moment of another shape": (_changed(f"{Q}/exp_avg_sq", _longer), "but the model's is"),
    "a moment with NaN": (_changed(f"{Q}/exp_avg", _with(math.nan)), "1 of "),
    "a factor of another shape": (_changed(L, _longer), "the optimizer keeps fp32"),
    "a basis that is missing": (_without(f"{Q}/Q_R"), "Q_R is missing"),
    "state that no optimizer has": (
        lambda content: content.put(f"{Q}/evil", np.ones(3, np.float32)),
        "evil is not part of the optimizer state",
    ),
    "state of AdamW that it has not": (
        lambda content: content.put("final_layernorm.weight/evil", np.ones(64, np.float32)),
        "no optimizer keeps this state for the weight",
    ),
    "a negative step": (_counted(f"{Q}/step", -7), "-7 is not a number of steps"),
    "a step of the future": (_counted(f"{Q}/step", 10**6), "1000000 is not a number of steps"),
    "a step that is NaN": (_counted(f"{Q}/step", math.nan), "nan is not a number of steps"),
    "a step that is missing": (_uncounted(f"{Q}/step"), "step is not a number of steps"),
    "a negative step of AdamW": (_counted(f"{EMBEDDING}/step", -7), "-7 is not a number of steps"),
    "a learning rate": (_counted(f"{Q}/group:lr", 5.0), "does not keep this number"),
    "a weight the model has not": (
        lambda content: content.put("layers.7.q/master", content.array(f"{Q}/master")),
        "the model has no weight of this name",
    ),
    "a piece over another one": (
        _piece(f"{EMBEDDING}/exp_avg", lambda p: replace(p, start=p.start + 1, end=p.end + 1)),
        "overlap or leave gaps",
    ),
    "a piece outside of its weight": (
        _piece(f"{EMBEDDING}/master", lambda p: replace(p, row=10**6)),
        "not inside the model's shape",
    ),
    "a generator that reads beyond its words": (_numpy_reads_beyond, "state position must be"),
    "a generator of another length": (
        lambda content: content.put("random.00000/torch", np.zeros(10, np.uint8)),
        "RNG state",
    ),
    "a rank without generators": (_random_gone, "KeyError"),
}
"""The changes, each with a part of the message about it."""


def odd_header(folder: Path) -> None:
    """Metadata that is no text: JSON takes it, the safetensors library does not."""
    name = min(file for file in os.listdir(folder) if file.endswith(".safetensors"))
    rewrite(folder, name, lambda raw: header(raw, lambda value: value.update(__metadata__={"a": 1})))
