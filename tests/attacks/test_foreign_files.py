"""Models, tokenizers and texts of strangers: what is wrong with them is said; nothing outside of them is read, nothing
fills the memory, and no library's own failure is ours."""

import gzip
import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError, safe_open

from canzona_cli.checkpoint.huggingface.folder import compose_from_folder, open_folder
from canzona_cli.checkpoint.huggingface.foreign import config_json, tensor_names
from canzona_cli.checkpoint.huggingface.weights import copy_file
from canzona_cli.checkpoint.manifest import tensor_bytes
from canzona_cli.core.errors import CanzonaError, ConfigError
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.core.setup import ModelConfig
from canzona_cli.data import reading
from canzona_cli.data.indexed import Tally
from canzona_cli.data.reading import Reader, ReadSettings
from canzona_cli.data.sources import find_sources
from canzona_cli.data.tokenizers import load_json_tokenizer
from tests.cli.commands.support import canzona
from tests.refusals import refused
from tests.sizes import model

Header = dict[str, object]
ENTRY: Header = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def shard(path: Path, header: Header | str | bytes, data: int = 8) -> None:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def model_file(
    path: Path, shape: ModelConfig, *, more: Mapping[str, tuple[str, tuple[int, ...]]] | None = None, note: str = ""
) -> None:
    """Zeros, without torch, whose threads no process forked from this one would have."""
    tensors = {name: ("F32", unit_shape(unit, shape)) for unit, name in tensor_names(shape).items()}
    header: Header = {}
    end = 0
    for name, (dtype, sides) in (tensors | dict(more or {})).items():
        start, end = end, end + tensor_bytes(dtype, sides)
        header[name] = {"dtype": dtype, "shape": sides, "data_offsets": [start, end], "note": note}
    shard(path, header, end)


def settings(folder: Path, **changed: object) -> None:
    folder.mkdir(exist_ok=True)
    known = config_json(model("tiny"), dtype="float32", max_positions=64)
    (folder / "config.json").write_text(json.dumps(known | changed))


def refusal_of(folder: Path) -> str:
    with pytest.raises(ConfigError) as found:
        open_folder(folder, key="DIR")
    return str(found.value)


HEADERS: dict[str, tuple[Header | str | bytes, int]] = {
    "a length that is text": ({"a": {**ENTRY, "data_offsets": [0, "8"]}}, 8),
    "sides below 0": ({"a": {**ENTRY, "shape": [-1, -2]}}, 8),
    "a type of its own": ({"a": {**ENTRY, "dtype": "F128"}}, 8),
    "a thousand levels": ("[" * 100_000, 8),
    "an end before the file's": ({"a": ENTRY}, 16),
    "an end after the file's": ({"a": ENTRY}, 4),
    "two tensors in one place": ({"a": ENTRY, "b": ENTRY}, 8),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_is_none_is_said(kind: str, tmp_path: Path) -> None:
    """And the library, which reads the tensors, refuses it too."""
    settings(tmp_path)
    header, data = HEADERS[kind]
    shard(tmp_path / "model.safetensors", header, data)
    said = refusal_of(tmp_path)
    assert "not a safetensors file" in said or "does not match its header" in said
    with pytest.raises((SafetensorError, OSError)), safe_open(tmp_path / "model.safetensors", framework="np"):
        pass


def test_a_header_that_only_we_can_read_ends_an_import_in_words(tmp_path: Path) -> None:
    settings(tmp_path / "in")
    model_file(tmp_path / "in" / "model.safetensors", model("tiny"), note="\ud800")
    with pytest.raises(SafetensorError), safe_open(tmp_path / "in" / "model.safetensors", framework="np"):
        pass
    done = canzona("checkpoint", "import", tmp_path / "in", "--out", tmp_path / "run", code=2)
    assert "safetensors cannot read it" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "a\0b", "x" * 300, 7], ids=ascii)
def test_an_index_names_files_of_its_folder_alone(name: object, tmp_path: Path) -> None:
    shard(tmp_path / "outside.safetensors", {"a": ENTRY})
    settings(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    said = refusal_of(tmp_path / "in")
    assert "DIR" in said or "weight_map" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "a.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_nobody_waits_for_it(name: str, tmp_path: Path) -> None:
    if name != "config.json":
        settings(tmp_path)
    if name == "a.safetensors":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    os.mkfifo(tmp_path / name)
    refusal_of(tmp_path)


def test_a_tensor_that_two_files_have_is_nobodys(tmp_path: Path) -> None:
    settings(tmp_path)
    for number in range(2):
        shard(tmp_path / f"{number}.safetensors", {"a": ENTRY})
    index = {"weight_map": {"a": "0.safetensors", "b": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is also in 0.safetensors" in refusal_of(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 10**15},
        {"rope_theta": 1e300},
        {"hidden_size": "64"},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
        {"num_experts": 8},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e9}},
        {"layer_types": ["sliding_attention"]},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_settings_that_no_known_model_has_are_refused(changed: dict[str, object], tmp_path: Path) -> None:
    """The refusal comes before anything of that size is allocated."""
    settings(tmp_path, **changed)
    shard(tmp_path / "model.safetensors", {"a": ENTRY})
    with pytest.raises(ConfigError) as found:
        compose_from_folder(open_folder(tmp_path, key="DIR"), [])
    wanted = {"num_hidden_layers": "num_layers", "rope_theta": "rope_base", "rms_norm_eps": "norm_eps"}
    assert any(key in str(found.value) or wanted.get(key, key) in str(found.value) for key in changed)


def test_an_output_layer_of_another_type_is_compared_by_its_numbers(tmp_path: Path) -> None:
    shape = model("tiny")
    settings(tmp_path / "in")
    more = {"lm_head.weight": ("BF16", (shape.vocab_size, shape.hidden_size))}
    model_file(tmp_path / "in" / "model.safetensors", shape, more=more)
    assert canzona("checkpoint", "import", tmp_path / "in", "--out", tmp_path / "run").returncode == 0


def test_what_lies_beside_weights_is_no_larger_than_anything_that_does(tmp_path: Path) -> None:
    """Links are followed, as those of Hugging Face's cache have to be."""
    (tmp_path / "small").write_text("{}")
    (tmp_path / "link").symlink_to("small")
    copy_file(tmp_path / "link", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "{}"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for odd in ("pipe", "huge"):
        with pytest.raises(ConfigError):
            copy_file(tmp_path / odd, tmp_path / f"copy of {odd}")
        assert not (tmp_path / f"copy of {odd}").exists()


TOKENIZER: Header = {
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"},
}
WORDS = {"type": "WordLevel", "unk_token": "?"}
MERGED = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]}
TOKENIZERS: dict[str, Header] = {
    "a merge shorter than its prefix": {"model": {**MERGED, "continuing_subword_prefix": "#" * 12}},
    "a damaged table of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "an id of 32 bits": {"model": {**WORDS, "vocab": {"<|endoftext|>": 4294967295}}},
    "a pattern that is none": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"}},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_fails_is_refused_wherever_it_does(kind: str, tmp_path: Path) -> None:
    """Some of them where Rust gives up, which is no Exception in Python."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER))
    ids = load_json_tokenizer(str(path)).encode_batch([b"a"])
    assert [list(each) for each in ids] == [[0]]
    path.write_text(json.dumps(TOKENIZER | TOKENIZERS[kind]))
    problems = refused(lambda: load_json_tokenizer(str(path)).encode_batch([b"what it does not know"]))
    assert [problem.key for problem in problems] == ["--tokenizer"]


def zstd(data: bytes) -> bytes:
    compressed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return compressed


def read(path: Path) -> tuple[list[bytes], Tally]:
    """All its text, and what was counted."""
    inputs, problems = find_sources([str(path)], "auto")
    assert not problems
    reader, texts = Reader(settings=ReadSettings(piece=1 << 20)), []
    for source in inputs:
        for batch in reader.read(source):
            texts += [piece.data for piece in batch]
    return texts, reader.tally


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reading, "LONGEST_LINE", 4 << 20)
    return 4 << 20


def bomb(packed: Callable[[bytes], bytes], before: bytes = b"", after: bytes = b"") -> bytes:
    """128 MiB of one line."""
    return packed(before) + packed(b" " * (1 << 20)) * 128 + packed(after)


@pytest.mark.parametrize("packed", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_lines_that_fill_the_memory_are_left_out(
    packed: Callable[[bytes], bytes], tmp_path: Path, short_lines: int
) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(bomb(packed, b'{"text": "before"}\n', b'\n{"text": "after"}\n'))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        texts, tally = read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * short_lines
    finally:
        tracemalloc.stop()
    assert texts == [b"before", b"after"]
    assert [(line.line, line.kind) for line in tally.bad_lines] == [(2, "too long")]


def twice() -> pa.Table:
    return pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])


TABLES: dict[str, Callable[[], pa.Table]] = {
    "lists": lambda: pa.table({"text": [["a"], ["b"]]}),
    "numbers": lambda: pa.table({"text": [1, 2]}),
    "two of the name": twice,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_column_that_holds_no_text_is_said(kind: str, tmp_path: Path) -> None:
    pq.write_table(TABLES[kind](), tmp_path / "a.parquet")
    with pytest.raises(ConfigError) as found:
        read(tmp_path / "a.parquet")
    assert "'text'" in str(found.value)


def damaged(whole: bytes) -> Iterator[bytes]:
    """Every byte of the end, which says what is where, is another one; and the file ends anywhere."""
    for place in range(len(whole) - 300, len(whole), 3):
        yield whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]
    for end in range(0, len(whole), len(whole) // 50):
        yield whole[:end]


def test_a_damaged_table_is_read_or_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(200)]}), tmp_path / "a.parquet", row_group_size=50)
    held = 0
    for content in damaged((tmp_path / "a.parquet").read_bytes()):
        (tmp_path / "b.parquet").write_bytes(content)
        try:
            read(tmp_path / "b.parquet")
        except CanzonaError:
            held += 1
    assert held > 50


def test_names_of_files_may_be_any_bytes(tmp_path: Path) -> None:
    """Not UTF-8, and with what a terminal would obey."""
    os.mkdir(tmp_path / "in")
    for name in (b"\xff.txt", b"a\x1b[31m\n.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/" + name)).write_text("text")
    done = canzona("data", "prepare", tmp_path / "in", "--output", tmp_path / "out", code=0)
    assert "\x1b" not in done.stdout + done.stderr
