"""`manifest.json` as text: every bit of it is covered by the hash in its first line.

    {"sha256": "<of all bytes below this line>",
    "format": "canzona-checkpoint",
    ...

It is JSON as a whole; an entry of a table is a line, so that `grep` and `diff` can be used on it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from canzona_cli.checkpoint.manifest import FORMAT, MANIFEST, READABLE, VERSION, Manifest, StoredTensor
from canzona_cli.checkpoint.shard_file import ITEM_BYTES, tensor_bytes
from canzona_cli.run.codec import parse

_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")


def manifest_text(manifest: Manifest) -> str:
    """The text of `manifest.json`. Infinite scalars appear as Python and JavaScript call them."""
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    tables = [_table(name, values.pop(name)) for name in ("files", "tensors", "scalars")]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
    body = "\n".join(lines) + "\n" + ",\n".join(tables) + "\n}\n"
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n{body}'


def _table(name: str, entries: Mapping[str, object]) -> str:
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entries.items()))
    return f'"{name}": {{\n{rows}\n}}' if rows else f'"{name}": {{}}'


def parse_manifest(text: bytes) -> Manifest:
    """Parses what `manifest_text` wrote.

    Raises:
        ValueError: what is wrong with it, in words for the user.
    """
    first = _FIRST_LINE.match(text)
    if first is None:
        raise ValueError("damaged: its first line does not begin a manifest")
    body = memoryview(text)[first.end() :]
    if hashlib.sha256(body).hexdigest() != first[1].decode():
        raise ValueError("damaged: its content does not match the hash in its first line")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError("it is not the manifest of a checkpoint")
    if value.get("version") not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ValueError(f"it has version {value.get('version')!r}; this canzona reads versions {known}")
    manifest = parse(Manifest, text, strict=True)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Checks what types do not say: names stay inside the folder, sizes are sizes, tensors lie in files that exist."""
    for name, file in manifest.files.items():
        check_file_name(name)
        if not _HASH.fullmatch(file.blake3):
            raise ValueError(f"files.{name}: not a hash")
    held = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        if tensor.file not in held:
            raise ValueError(f"tensors.{name}: it is in {tensor.file}, which is not among the files")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"tensors.{name}: {tensor.dtype} {tensor.shape} is not a type and shape of a tensor")
        if not _fits(name, tensor):
            raise ValueError(f"tensors.{name}: it is no piece of a tensor")
        held[tensor.file] += tensor_bytes(tensor.dtype, tensor.shape)
    for name, wanted in held.items():
        if wanted > manifest.files[name].bytes:
            raise ValueError(f"files.{name}: smaller than the tensors it should contain")


def _fits(name: str, tensor: StoredTensor) -> bool:
    """Returns True if the entries of a piece go together."""
    piece = tensor.piece
    if piece is None:
        return True
    inside = piece.start < piece.end <= piece.rows * piece.cols
    named = name == piece.name(tensor.whole(name).rpartition("/")[2])
    return inside and named and tensor.shape == (piece.elements,)


def check_file_name(name: str) -> None:
    """Raises ValueError for what could lie outside a checkpoint's folder, be hidden in it, or be its manifest."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"files.{name!r}: not a valid file name in a checkpoint")
