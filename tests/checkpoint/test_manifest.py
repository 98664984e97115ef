"""Manifests come back exactly; no changed bit goes unseen; no name in one leads out of its folder."""

import hashlib
import json
import math
from dataclasses import asdict, replace

import pytest

from canzona_cli.checkpoint.manifest import (
    Header,
    LossMemory,
    Manifest,
    Piece,
    Scalar,
    StoredFile,
    StoredTensor,
    manifest_text,
    parse_manifest,
)
from tests.checkpoint.checkpoints import header

HASH = "0f" * 32
PIECE = Piece(unit="layers.1.q", row=2, col=0, rows=2, cols=8, start=3, end=12)
FIELDS = {name: getattr(header(30), name) for name in Header.__dataclass_fields__}
MANIFEST = Manifest(
    **FIELDS,
    files={"rank-00000.safetensors": StoredFile(bytes=400, blake3=HASH)},
    tensors={
        "layers.0.q/master": StoredTensor(file="rank-00000.safetensors", dtype="F32", shape=(4, 8)),
        "layers.0.q/scale": StoredTensor(file="rank-00000.safetensors", dtype="BF16", shape=()),
        PIECE.name("master"): StoredTensor(file="rank-00000.safetensors", dtype="F32", shape=(9,), piece=PIECE),
    },
    scalars={"layers.0.q/step": 30},
)


def signed(value: dict[str, object]) -> bytes:
    """A manifest that somebody made, with the right hash."""
    body = json.dumps(value, indent=0)[2:].encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def plain(manifest: Manifest) -> dict[str, object]:
    value: dict[str, object] = json.loads(manifest_text(manifest))
    return {key: value for key, value in value.items() if key != "sha256"}


def test_a_manifest_comes_back_as_it_was_and_is_json() -> None:
    assert parse_manifest(manifest_text(MANIFEST).encode()) == MANIFEST
    assert parse_manifest(signed(plain(MANIFEST))) == MANIFEST
    counts = {"step": 30, "samples": 960, "tokens": 245760, "skipped": 0, "fallbacks": 0}
    assert plain(MANIFEST)["progress"] == {**counts, "losses": json.loads(json.dumps(asdict(LossMemory())))}


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, -(1 << 70), 1.0, 0.1, 5e-324, math.inf, -math.inf, math.nan, None, "", "é\n\x00", "1"]
)
def test_scalars_keep_their_value_and_their_type(value: Scalar) -> None:
    scalar = parse_manifest(manifest_text(replace(MANIFEST, scalars={"x": value})).encode()).scalars["x"]
    assert (repr(scalar), type(scalar)) == (repr(value), type(value))


def test_no_changed_bit_and_no_missing_byte_goes_unseen() -> None:
    text = manifest_text(MANIFEST).encode()
    for place in range(len(text)):
        flipped = (text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :] for bit in range(8))
        for damaged in (*flipped, text[:place], text[: place + 1] + text[place:]):
            with pytest.raises(ValueError, match="damaged"):
                parse_manifest(damaged)


@pytest.mark.parametrize(
    "change", [{"start": 4}, {"end": 17}, {"row": -1}, {"unit": "layers.2.q"}, {"start": 12}, {"col": 1}]
)
def test_a_piece_that_cannot_be_one_is_refused(change: dict[str, object]) -> None:
    value = plain(MANIFEST)
    tensors = value["tensors"]
    assert isinstance(tensors, dict)
    tensors[PIECE.name("master")]["piece"] |= change
    with pytest.raises(ValueError, match=r"its name, shape and piece do not match|piece.row: input should be greater"):
        parse_manifest(signed(value))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "manifest.json", "a\n", "-rf", "x" * 101, "a\\b"]
)
def test_a_file_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid file name in a checkpoint"):
        parse_manifest(manifest_text(replace(MANIFEST, files={name: StoredFile(bytes=1, blake3=HASH)})).encode())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "not the manifest of a checkpoint"),
        ({"version": 1}, "made by another version of canzona: it has format 1, this version reads format 2"),
        ({"world_size": 0}, "world_size: input should be greater than or equal to 1"),
        ({"created": math.nan}, "created: input should be"),
        ({"progress": {"step": -1, "samples": 0, "tokens": 0}}, "progress.step: input should be greater"),
        ({"progress": {"step": 1, "samples": 0, "tokens": 0, "losses": {"excess": math.nan}}}, "losses.excess"),
        ({"files": {"a": {"bytes": 1, "blake3": "0F" * 32}}}, "files.a"),
        ({"files": {}}, "not listed under files"),
        ({"tensors": {"t": {"file": "rank-00000.safetensors", "dtype": "F32", "shape": [101]}}}, "smaller than"),
        (
            {"tensors": {"t": {"file": "rank-00000.safetensors", "dtype": "object", "shape": [1]}}},
            "not a tensor's type and shape",
        ),
        ({"scalars": {"s": {"__reduce__": 1}}}, "scalars.s"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_whatever_its_hash(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_manifest(signed(plain(MANIFEST) | change))
