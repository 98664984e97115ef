"""Every input form gives out exactly the text it holds, and what cannot be read is said with its place."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.errors import ConfigError, EnvironmentProblem
from canzona_cli.data.indexed import Tally
from canzona_cli.data.prepare import PrepareRequest, prepare
from canzona_cli.data.reading import DocumentUnit, Reader, ReadSettings, cut_stream, piece_bytes
from canzona_cli.data.sources import InputFormat, Source, find_sources, stdlib_digest, stdlib_sources


def zstd(data: bytes) -> bytes:
    compressed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return compressed


def read(
    *inputs: Path | str,
    wanted: InputFormat = "auto",
    document: DocumentUnit = "file",
    text_key: str = "text",
    piece: int = 1 << 20,
) -> tuple[list[bytes], Tally, Reader]:
    """The documents of these inputs, put together again from their pieces."""
    sources, problems = find_sources([str(text) for text in inputs], wanted)
    if problems:
        raise ConfigError(*problems)
    reader = Reader(settings=ReadSettings(piece=piece, document=document, text_key=text_key))
    documents, growing = [], b""
    for source in sources:
        for batch in reader.read(source):
            for data, last in batch:
                assert 0 < len(data) <= piece
                growing += data
                if last:
                    documents.append(growing)
                    growing = b""
    assert growing == b""
    return documents, reader.tally, reader


def fails(*inputs: Path | str, wanted: InputFormat = "auto", text_key: str = "text") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(*inputs, wanted=wanted, text_key=text_key)
    return caught.value


@given(data=st.binary(max_size=400), size=st.integers(8, 64))
def test_pieces_put_together_are_the_document(data: bytes, size: int) -> None:
    cut = list(cut_stream(io.BytesIO(data), size))
    assert b"".join(piece.data for piece in cut) == data
    assert [piece.last for piece in cut] == [False] * (len(cut) - 1) + [True] * bool(cut)
    assert all(0 < len(piece.data) <= size for piece in cut)


@given(text=st.text(max_size=300), size=st.integers(8, 64))
def test_no_cut_falls_inside_a_character(text: str, size: int) -> None:
    data = text.encode()
    assert "".join(piece.data.decode() for piece in cut_stream(io.BytesIO(data), size)) == text


def test_cuts_fall_at_line_ends_where_lines_are_shorter_than_half_a_piece() -> None:
    data = b"".join(b"line %d\n" % i for i in range(1000))
    cut = list(cut_stream(io.BytesIO(data), 100))
    assert len(cut) > 10
    assert all(piece.data.endswith(b"\n") for piece in cut)


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: zstd(data[:500]) + zstd(data[500:])),  # as tools for many cores write it
    ],
)
def test_compressed_files_read_like_plain_ones(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    text = b"first line\nsecond \xff line\n" * 50_000
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(text))
    documents, tally, reader = read(path)
    assert documents == [text]
    assert reader.bytes_read == path.stat().st_size
    assert tally.records[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_members_of_a_concatenated_gzip_are_all_read(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert read(tmp_path / "a.gz")[0] == [b"one two"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_a_cut_compressed_file_is_named(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    whole = compress(bytes(range(1, 256)) * 5000)
    (tmp_path / "a.txt").write_bytes(whole[: len(whole) * 2 // 3])
    assert "a.txt" in str(fails(tmp_path / "a.txt").problems[0].value)


def test_lines_are_documents_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\nthree")
    documents, tally, _ = read(tmp_path / "a.txt", document="line")
    assert documents == [b"one", b"two", b"three"]
    assert tally.empty == 1


def test_each_jsonl_line_is_a_document_also_compressed(tmp_path: Path) -> None:
    texts = ["eins\nzwei", "日本", "", "x" * 100]
    lines = "\n".join(json.dumps({"id": 1, "body": text}) for text in texts) + "\n\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    documents, tally, _ = read(tmp_path / "a.jsonl.gz", text_key="body", piece=16)
    assert documents == [text.encode() for text in texts if text]
    assert tally.empty == 1


def test_bad_jsonl_lines_are_told_with_file_and_line_several_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": \n\n{"tekst": "x"}\n[1]\n{"text": 3}\n{"text": "ok"}\n\xff\n')
    documents, tally, _ = read(path)
    assert [line.line for line in tally.bad_lines] == [2, 4, 5, 6, 8]
    words = ["not JSON", "'tekst'", "list", "int", "UTF-8"]
    assert all(word in line.kind + line.detail for line, word in zip(tally.bad_lines, words, strict=True))
    assert documents == [b"ok", b"ok"]
    assert tally.bad_kinds == {
        "not JSON": 1,
        "no field 'text'": 1,
        "not an object": 1,
        "no text": 1,
        "not UTF-8": 1,
    }


def test_a_column_of_parquet_is_read_row_by_row_and_rows_without_text_are_counted(tmp_path: Path) -> None:
    texts = ["eins\nzwei", None, "日本", "", "x" * 100]
    pq.write_table(pa.table({"n": [*range(5)], "body": texts}), tmp_path / "a.parquet", row_group_size=2)
    documents, tally, _ = read(tmp_path, text_key="body", piece=16)
    assert documents == [text.encode() for text in texts if text]
    assert tally.dropped == {"empty": 1, "no text": 1}
    assert (tally.bad_lines[0].path, tally.bad_lines[0].line) == (str(tmp_path / "a.parquet"), 2)
    whole = (tmp_path / "a.parquet").read_bytes()
    assert tally.records[0].sha256 == hashlib.sha256(whole).hexdigest()
    assert "n, body" in fails(tmp_path).problems[0].fix
    assert "int64" in fails(tmp_path, text_key="n").problems[0].reason
    for damaged in (whole[:-9], whole[:4] + whole[200:]):
        (tmp_path / "a.parquet").write_bytes(damaged)
        assert fails(tmp_path, text_key="body").problems[0].value == str(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_a_missing_package_is_named_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(zstd(b"text"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem) as caught:
        prepare(PrepareRequest(inputs=(str(tmp_path),), output=str(tmp_path / "p")), lambda _: None)
    assert "canzona[data]" in caught.value.problems[0].fix
    (tmp_path / name).rename(tmp_path / "unnamed")  # seen when it is opened
    with pytest.raises(EnvironmentProblem, match="not installed"):
        read(tmp_path / "unnamed")


def test_lone_surrogates_are_counted_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    documents, tally, _ = read(tmp_path / "a.jsonl")
    assert documents == [b"a?b"]
    assert tally.replaced == 1


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "a.txt")[0] == [b"hello"]
    (tmp_path / "b").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    piped = Source(label="standard input", path=tmp_path / "b", format="auto", size=23)
    assert next(Reader(settings=ReadSettings(piece=100)).read(piped)) == [(b"hello", True)]


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"\x7fELF\0\0", "binary"), ("text".encode("utf-16"), "binary"), (b"PAR1xx", "Parquet"), (b"PK\x03\x04x", "zip")],
)
def test_a_binary_file_is_refused_by_name_and_ignored_in_a_folder(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "b.txt").write_bytes(content)
    (tmp_path / "a.txt").write_bytes(b"text")
    assert word in str(fails(tmp_path / "b.txt"))
    documents, tally, _ = read(tmp_path)
    assert documents == [b"text"]
    assert tally.skipped == [str(tmp_path / "b.txt")]


def test_folders_and_globs_are_sorted_hidden_files_left_out_and_nothing_read_twice(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", "c.txt", ".git/x", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [b"a/1.txt", b"b/2.txt", b"c.txt"]
    assert read(tmp_path)[0] == names
    assert read(tmp_path / "**/*.txt", tmp_path, tmp_path / "a/../c.txt")[0] == names
    assert read(tmp_path / "c.txt", tmp_path)[0] == [b"c.txt", b"a/1.txt", b"b/2.txt"]


def test_every_wrong_input_is_told_at_once_with_near_names(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text("x")
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    error = fails(tmp_path / "wikki.txt", tmp_path / "*.zz", tmp_path / "a.json", tmp_path / "empty")
    reasons = [p.reason for p in error.problems]
    assert len(reasons) == 4
    assert "wiki.txt" in error.problems[0].fix
    assert "--format" in error.problems[2].fix


@pytest.mark.parametrize(("size", "expected"), [(100, 4 << 10), (64 << 20, 256 << 10), (10 << 30, 1 << 20)])
def test_pieces_are_small_enough_to_hold_out_a_hundredth(tmp_path: Path, size: int, expected: int) -> None:
    with open(tmp_path / "a.txt", "wb") as stream:
        stream.truncate(size)  # sparse
    sources, _ = find_sources([str(tmp_path / "a.txt")], "auto")
    assert piece_bytes(sources) == expected


def test_the_standard_library_is_large_the_same_every_time_and_mixed() -> None:
    first, second = stdlib_sources(), stdlib_sources()
    assert first == second
    assert stdlib_digest(first) == stdlib_digest(second) != stdlib_digest(first[::-1])
    assert sum(source.size or 0 for source in first) > 5_000_000
    labels = [source.label for source in first]
    assert "stdlib:json/decoder.py" in labels
    assert not any("/test/" in label or "site-packages" in label or "_sysconfigdata" in label for label in labels)
    held_out = {label.removeprefix("stdlib:")[0] for label in labels[-len(labels) // 20 :]}
    assert len(held_out) > 6, "the end of the corpus is a mix of modules"
