"""Megatron-core reads what the writer writes, and damage to either file is found before a run."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.schema import DataConfig
from canzona_cli.core.errors import ConfigError
from canzona_cli.data.indexed import PairWriter, bin_path, idx_path, inspect_pair
from canzona_cli.data.order import split_tokens
from canzona_cli.data.tokenizers import TokenArray
from tests.refusals import refused

Document = Sequence[Sequence[int]]  # sequences of ids
EOD = 256


def ids(values: Sequence[int], dtype: Literal["uint16", "int32"] = "uint16") -> TokenArray:
    return np.asarray(values, dtype=np.uint16) if dtype == "uint16" else np.asarray(values, dtype=np.int32)


def add(writer: PairWriter, document: Sequence[TokenArray]) -> None:
    lengths = np.asarray([sequence.size for sequence in document], dtype=np.int32)
    writer.add(cast(TokenArray, np.concatenate(document)), lengths, np.arange(len(document)) == len(document) - 1)


def write(prefix: Path, documents: Sequence[Document], *, vocab_size: int = 257) -> Path:
    dtype: Literal["uint16", "int32"] = "uint16" if vocab_size < 65_500 else "int32"
    with PairWriter(prefix, vocab_size=vocab_size, eod=EOD) as writer:
        for document in documents:
            add(writer, [ids(sequence, dtype) for sequence in document])
        writer.finish()
        writer.publish()
    return prefix


def problem(prefix: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        inspect_pair(prefix)
    assert {p.key for p in caught.value.problems} == {"data.path"}
    assert all(p.fix or "read" in p.reason for p in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize("vocab_size", [257, 151_936])
def test_megatron_reads_back_ids_sequences_and_document_boundaries(tmp_path: Path, vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(0, vocab_size, size=n).tolist() for n in rng.integers(1, 50, size=rng.integers(1, 4))]
        for _ in range(100)
    ]
    prefix = write(tmp_path / "v1.2", documents, vocab_size=vocab_size)
    dataset = IndexedDataset(str(prefix))

    expected = [s + ([EOD] if s is document[-1] else []) for document in documents for s in document]
    assert dataset.index.dtype is DType.optimal_dtype(vocab_size)
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    assert dataset.document_indices.tolist() == np.cumsum([0] + [len(d) for d in documents]).tolist()
    assert dataset.get(0, offset=1, length=1).tolist() == expected[0][1:2]

    pair = inspect_pair(prefix)
    assert pair.documents == 100
    assert pair.sequences == len(expected)
    assert pair.tokens == sum(map(len, expected))
    assert pair.scan_max_token_id() == max(max(s) for s in expected)


def test_a_pair_megatron_wrote_is_understood(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_item(torch.tensor([1, 2, 70_000]))
    builder.end_document()
    builder.add_item(torch.tensor([4]))
    builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    pair = inspect_pair(tmp_path / "theirs")
    assert (pair.tokens, pair.documents, pair.dtype, pair.scan_max_token_id()) == (4, 2, "int32", 70_000)


def test_the_split_of_the_last_documents_is_the_one_megatron_makes(tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    pair = inspect_pair(write(tmp_path / "p", [[[1] * n] for n in range(1, 138)]))
    for share in (0.0, 0.001, 0.01, 0.02, 0.1, 0.5):
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(f"{1 - share:.6f},{share:.6f},0"))
        begin, end = (matrix[1][0], matrix[1][1]) if matrix[1] else (1.0, 1.0)
        held_out = int(pair.lengths[round(begin * 137) : round(end * 137)].sum())
        settings = DataConfig(source="prepared", validation_fraction=share)
        assert split_tokens(pair, "tail", settings) == (pair.tokens - held_out, held_out), share


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 255), max_size=5), min_size=1, max_size=3), min_size=1, max_size=8))
def test_documents_without_tokens_leave_nothing(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    kept = [d for d in documents if any(d)]
    if not kept:
        return
    prefix = write(tmp_path_factory.mktemp("empty") / "p", documents)
    pair = inspect_pair(prefix)
    stored = np.fromfile(bin_path(prefix), dtype=np.uint16).tolist()
    assert stored == [i for d in kept for i in [*(i for s in d for i in s), EOD]]
    assert pair.documents == len(kept)


def test_an_aborted_writer_leaves_nothing_and_keeps_the_older_pair(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", [[[1, 2, 3]]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted() -> None:
        with PairWriter(prefix, vocab_size=257, eod=EOD) as writer:
            add(writer, [ids([9] * 100_000)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failed_publication_leaves_no_half_pair(tmp_path: Path) -> None:
    (tmp_path / "p.json").mkdir()  # the rename onto it fails after .bin is in place

    def publish() -> None:
        with PairWriter(tmp_path / "p", vocab_size=257, eod=EOD) as writer:
            add(writer, [ids([1])])
            writer.finish()
            writer.publish((tmp_path / "p.json", "{}"))

    with pytest.raises(OSError):
        publish()
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_missing_files_are_each_named(tmp_path: Path) -> None:
    text = problem(tmp_path / "p")
    assert "no such file" in text
    prefix = write(tmp_path / "p", [[[1]]])
    idx_path(prefix).unlink()
    assert "incomplete" in problem(prefix)


def test_a_file_of_text_is_answered_with_the_command_that_prepares_it(tmp_path: Path) -> None:
    (tmp_path / "my texts.jsonl").write_text("{}")
    assert f"canzona data prepare '{tmp_path}/my texts.jsonl' --output" in problem(tmp_path / "my texts.jsonl")


def test_a_path_with_extension_or_without_megatrons_ending_is_answered_with_the_right_one(tmp_path: Path) -> None:
    write(tmp_path / "wiki_text_document", [[[1]]])
    for typed in ("wiki_text_document.bin", "wiki_text_document.idx", "wiki"):
        problems = refused(inspect_pair, tmp_path / typed)
        assert f"data.path={tmp_path / 'wiki_text_document'}" in problems[0].fix


@pytest.mark.parametrize("keep", [0, 5, 9, 20, 33, 34, 40, -1])
def test_an_index_cut_anywhere_is_found(tmp_path: Path, keep: int) -> None:
    prefix = write(tmp_path / "p", [[[1, 2]], [[3]]])
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:keep])
    assert problem(prefix)


@pytest.mark.parametrize(("change", "word"), [(-2, "truncated"), (2, "longer"), (-(10**9), "truncated")])
def test_a_bin_of_another_size_is_found(tmp_path: Path, change: int, word: str) -> None:
    prefix = write(tmp_path / "p", [[[1, 2]], [[3]]])
    data = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    assert word in problem(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [
        (0, b"PAR1", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "does not contain integers"),
        (17, b"\x63", "does not contain integers"),
        (18, struct.pack("<Q", 2**60), "truncated"),
        (34, struct.pack("<i", -7), "points outside"),
        (42, struct.pack("<q", 2**40), "points outside"),
        (58, struct.pack("<q", 1), "out of order"),
        (74, struct.pack("<q", 9), "out of order"),
    ],
)
def test_a_damaged_index_is_found_and_described(tmp_path: Path, offset: int, value: bytes, word: str) -> None:
    prefix = write(tmp_path / "p", [[[1, 2]], [[3]]])
    raw = bytearray(idx_path(prefix).read_bytes())
    raw[offset : offset + len(value)] = value
    idx_path(prefix).write_bytes(raw)
    assert word in problem(prefix)


def test_a_negative_id_is_found_by_the_scan(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", [[[5, -3]]], vocab_size=70_000)
    with pytest.raises(ConfigError, match="negative token id -3"):
        inspect_pair(prefix).scan_max_token_id()


@pytest.mark.parametrize("extension", ["bin", "idx"])
def test_one_file_of_the_pair_is_answered_with_the_prefix(tmp_path: Path, extension: str) -> None:
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).touch()
    (problem,) = refused(inspect_pair, tmp_path / f"corpus.{extension}")
    assert problem.fix == f"data.path={tmp_path / 'corpus'}"
