"""Reads prepared data back as text: the first documents, and the lengths of all documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canzona_cli.config.schema import DataConfig
from canzona_cli.data.corpus import saved_tokenizer
from canzona_cli.data.indexed import PairInfo, Sidecar, bin_path, inspect_pair, load_sidecar
from canzona_cli.data.order import held_out
from canzona_cli.data.tokenizers import TokenArray, Tokenizer

BINS = 6
"""The maximum number of bars in the histogram of lengths."""
MOST_COUNTED = 1 << 26
"""The maximum number of tokens that are read to describe data: among these, unknown ones are counted in a tenth of a
second."""


@dataclass(frozen=True, kw_only=True)
class ShownDocument:
    """The beginning of a document, as text."""

    number: int
    """The index of the document in the data."""
    tokens: int
    """The number of tokens of the whole document, including the end-of-document token."""
    text: str
    """The text of the document's first tokens."""
    cut: bool
    """True if the document has more tokens than are shown."""


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """The lengths of all documents, in tokens."""

    least: int
    median: int
    mean: float
    p90: int
    most: int
    histogram: tuple[tuple[int, int], ...]
    """The bars as pairs (most tokens, documents). Each bar counts the documents that have at most that many
    tokens and are not in an earlier bar."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The documents that a run holds out for validation by default."""

    share: float
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class UnknownTokens:
    """The tokens that stand for text which the tokenizer's vocabulary does not have."""

    tokens: int
    counted: int
    """The number of tokens, from the start of the data, among which they were counted."""

    @property
    def share(self) -> float:
        return self.tokens / max(1, self.counted)


@dataclass(frozen=True, kw_only=True)
class DataView:
    """One prepared pair in readable form."""

    pair: PairInfo
    sidecar: Sidecar | None
    """The facts that `canzona data prepare` wrote; None for data from other tools."""
    lengths: LengthSummary
    held_out: HeldOut | None
    """The documents held out by default; None for data that would take long to read."""
    documents: tuple[ShownDocument, ...]
    """The first documents, without text if the tokenizer is unknown."""
    unknown: UnknownTokens | None
    """The tokens that stand for unknown text; None if the tokenizer has no such token, or is not known."""


def view(prefix: Path, *, documents: int, tokens: int) -> DataView:
    """Reads the first documents of a prepared pair, and the statistics of all its documents.

    Args:
        documents: the number of documents to show.
        tokens: the maximum number of tokens to show per document.

    Raises:
        ConfigError: the pair is missing, or a file of it is damaged.
    """
    pair = inspect_pair(prefix)
    sidecar = load_sidecar(pair)
    tokenizer = None if sidecar is None else saved_tokenizer(pair.prefix, sidecar.tokenizer, sidecar.eod)
    ids: TokenArray = np.memmap(bin_path(pair.prefix), dtype=pair.dtype, mode="r")
    ends = np.cumsum(pair.lengths, dtype=np.int64)[pair.document_ends - 1]
    return DataView(
        pair=pair,
        sidecar=sidecar,
        lengths=_length_summary(np.diff(ends, prepend=0)),
        unknown=_unknown_tokens(ids, tokenizer),
        held_out=_held_out(pair) if pair.tokens <= MOST_COUNTED else None,
        documents=tuple(_documents(ids, ends[:documents].tolist(), tokens, tokenizer)),
    )


def count_unknown(prefix: Path) -> UnknownTokens | None:
    """Counts the unknown tokens of a prepared pair; returns None if its tokenizer has no such token.

    Raises:
        ConfigError: the pair is missing, or a file of it is damaged.
    """
    pair = inspect_pair(prefix)
    sidecar = load_sidecar(pair)
    tokenizer = None if sidecar is None else saved_tokenizer(pair.prefix, sidecar.tokenizer, sidecar.eod)
    return _unknown_tokens(np.memmap(bin_path(pair.prefix), dtype=pair.dtype, mode="r"), tokenizer)


def _held_out(pair: PairInfo) -> HeldOut:
    default = DataConfig(source="prepared")
    mask = held_out(pair, "drawn", default)
    return HeldOut(
        share=default.validation_fraction,
        documents=int(mask[pair.document_ends - 1].sum()),
        tokens=int(pair.lengths[mask].sum()),
    )


def _unknown_tokens(ids: TokenArray, tokenizer: Tokenizer | None) -> UnknownTokens | None:
    if tokenizer is None or tokenizer.unknown is None:
        return None
    counted = ids[:MOST_COUNTED]
    return UnknownTokens(tokens=int(np.count_nonzero(counted == tokenizer.unknown)), counted=counted.size)


def _documents(ids: TokenArray, ends: list[int], most: int, tokenizer: Tokenizer | None) -> Iterator[ShownDocument]:
    start = 0
    for index, end in enumerate(ends):
        shown = ids[start : min(end, start + most)]
        without_end = shown[:-1] if tokenizer is not None and shown.size and shown[-1] == tokenizer.eod else shown
        text = "" if tokenizer is None else tokenizer.decode(without_end.tolist())
        yield ShownDocument(number=index, tokens=end - start, text=text, cut=end - start > most)
        start = end


def _length_summary(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> LengthSummary:
    """Summarises the documents' lengths. The bars of the histogram end at powers of two."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    first_power = max(int(powers.min()), int(powers.max()) - BINS + 1)
    counts = np.bincount(np.maximum(powers, first_power) - first_power)
    return LengthSummary(
        least=int(lengths.min()),
        median=int(np.median(lengths)),
        mean=float(lengths.mean()),
        p90=int(np.quantile(lengths, 0.9)),
        most=int(lengths.max()),
        histogram=tuple((1 << (first_power + index), int(count)) for index, count in enumerate(counts)),
    )
