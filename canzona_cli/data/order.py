"""Divides the documents of a set into those to train on and those that are held out for validation, and computes the
order in which a run reads its samples, as Megatron chooses it; without importing torch.

The division is computed from the tokens wherever it is needed. The hashes of all documents are read from the cache,
because finding them takes a second for each GB of tokens, and a second for each million documents.

Megatron reads a set in epochs. It shuffles the documents of all epochs together, cuts them into samples, and
shuffles the samples (`GPTDataset._build_document_sample_shuffle_indices`). If a run reads less than four
fifths of its last epoch, the documents and samples of that epoch are shuffled separately and come last. So
the order depends on the number of samples that the whole run reads, and may change if a run is resumed with
other settings. `Order` has everything on which it depends.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from canzona_cli.config.schema import DataConfig
from canzona_cli.core.writing import write_atomic
from canzona_cli.data.indexed import PairInfo, bin_path
from canzona_cli.records.corpus import DataPlan, Division, PreparedCorpus
from canzona_cli.records.files import cache_root

_LAST_EPOCH_SHARE: Final = 0.8


@dataclass(frozen=True, kw_only=True)
class Order:
    """The numbers on which the order of the samples of a set depends. Equal orders of the same data are the
    same sequence of samples."""

    seed: int
    seq_length: int
    tokens: int
    """The number of tokens to train on."""
    epochs: int
    """The number of times that the data is read, rounded up."""
    separate_last: bool
    """True if the last epoch is shuffled by itself and comes last."""

    @property
    def samples(self) -> int:
        """The number of samples in all epochs."""
        return (self.epochs * self.tokens - 1) // self.seq_length

    @property
    def samples_before_last(self) -> int:
        """The number of samples that end before the last epoch."""
        return ((self.epochs - 1) * self.tokens - 1) // self.seq_length


def order_of(*, tokens: int, samples: int, seq_length: int, seed: int) -> Order:
    """Returns the order in which Megatron reads a set.

    Args:
        tokens: the number of tokens to train on.
        samples: the number of samples of the set for which Megatron builds its index.
    """
    epochs = max(1, math.ceil((samples * seq_length + 1) / tokens))
    order = Order(seed=seed, seq_length=seq_length, tokens=tokens, epochs=epochs, separate_last=False)
    if epochs == 1:
        return order
    per_epoch = (tokens - 1) // seq_length
    of_last_epoch = samples - order.samples_before_last
    separate = of_last_epoch < int(_LAST_EPOCH_SHARE * per_epoch)
    return Order(seed=seed, seq_length=seq_length, tokens=tokens, epochs=epochs, separate_last=separate)


def set_sizes(plan: DataPlan) -> tuple[int, ...]:
    """Returns the number of samples of each set for which Megatron builds an index.

    Each set of a blend gets a surplus: at least Megatron's 0.5%, and enough for one sample more than its
    share, because a blend may take that many.
    """
    left, shares = plan.samples - plan.blend_start, [part.share for part in plan.corpus.sets]
    sizes = [left]
    if len(shares) > 1:
        surplus = max(0.005, (len(shares) + 1 / min(shares)) / max(1, left))
        normalized = (np.array(shares) / np.sum(shares)).tolist()  # as in `megatron.core.datasets.utils.normalize`
        sizes = [math.ceil(math.ceil(left * share) * (1 + surplus)) for share in normalized]
    return tuple(plan.start_of(number) + size for number, size in enumerate(sizes))


def continue_plan(
    saved: DataPlan,
    corpus: PreparedCorpus,
    *,
    samples: int,
    done: int,
    count: Callable[[Sequence[float], int], Sequence[int]],
) -> DataPlan:
    """Returns the data plan of a run that continues from a checkpoint. With the sets and shares of the
    checkpoint, the run continues the same mixture. Otherwise a new mixture begins, in which every set
    continues with its own next sample; a set that the checkpoint does not know begins with its first one.

    Args:
        samples: the number of samples that the run reads in all its steps.
        done: the number of samples that are done.
        count: a function that returns how many of the first samples of a blend, by its shares and their
            number, are of each set.
    """
    places = [saved.place_of(part) for part in corpus.sets]
    shares, saved_shares = ([part.share for part in sets] for sets in (corpus.sets, saved.corpus.sets))
    if places == [*range(len(saved_shares))] and shares == saved_shares:
        return replace(saved, corpus=corpus, samples=samples)
    positions = set_positions(saved, done, count)
    starts = tuple(0 if place is None else positions[place] for place in places)
    return DataPlan(corpus=corpus, samples=samples, blend_start=done, set_starts=starts)


def set_positions(plan: DataPlan, done: int, count: Callable[[Sequence[float], int], Sequence[int]]) -> list[int]:
    """Returns the number of samples of each set that a run has read when it has read `done` samples."""
    shares, read = [part.share for part in plan.corpus.sets], done - plan.blend_start
    by_set = [read] if len(shares) == 1 else count(shares, read)
    return [plan.start_of(number) + of_set for number, of_set in enumerate(by_set)]


def about_by_share(shares: Sequence[float], samples: int) -> list[int]:
    """Returns how many of the first `samples` samples of a blend are of each set, to within one sample."""
    return [round(share * samples) for share in shares]


ReportProgress = Callable[[str, float], None]
Mask = npt.NDArray[np.bool_]
_BYTES: Final = 4
"""The bytes of a document's hash: the share of documents that are held out is exact to one in four billion."""
_DOCUMENTS_AT_ONCE: Final = 1 << 16


def held_out(pair: PairInfo, division: Division, data: DataConfig, report: ReportProgress | None = None) -> Mask:
    """Returns True for each sequence that is held out for validation, shape [sequences].

    Drawn documents are those whose hash is below a limit, so the documents of a smaller share are a part of those of
    a larger one. At least one document is on either side, unless all are equal.

    Args:
        data: the settings with the share to hold out and the folder of the cache.
        report: called with a description of the current work and the finished share, 0 to 1.
    """
    share = data.held_out_share
    if share == 0 or pair.tokens == 0:
        return np.zeros(pair.sequences, dtype=np.bool_)
    if division == "tail":
        return np.arange(pair.sequences) >= pair.split_at(share)
    hashes = _document_hashes(pair, report or (lambda what, share: None))
    limit = min(max(share * 256.0**_BYTES, int(hashes.min()) + 1), int(hashes.max()))
    return np.repeat(hashes < limit, np.diff(pair.document_ends, prepend=0))


def split_tokens(
    pair: PairInfo, division: Division, data: DataConfig, report: ReportProgress | None = None
) -> tuple[int, int]:
    """Returns the number of tokens for training and the number for validation; for arguments see `held_out`."""
    for_validation = int(pair.lengths[held_out(pair, division, data, report)].sum(dtype=np.int64))
    return pair.tokens - for_validation, for_validation


def _document_hashes(pair: PairInfo, report: ReportProgress) -> npt.NDArray[np.uint32]:
    """Returns a hash of the tokens of each document, shape [documents]."""
    memo = pair.scan_path(cache_root(), "documents")
    with suppress(OSError):
        content = memo.read_bytes()
        hashes, digest = content[: pair.documents * _BYTES], content[pair.documents * _BYTES :]
        if hashlib.sha256(hashes).digest() == digest:
            return np.frombuffer(hashes, dtype="<u4")
    tokens = memoryview(np.memmap(bin_path(pair.prefix), dtype=np.uint8, mode="r"))
    token_ends = np.concatenate([[0], np.cumsum(pair.lengths, dtype=np.int64)]) * np.dtype(pair.dtype).itemsize
    found, start = bytearray(), 0
    for first in range(0, pair.documents, _DOCUMENTS_AT_ONCE):
        report("drawing documents for validation", first / pair.documents)
        for end in token_ends[pair.document_ends[first : first + _DOCUMENTS_AT_ONCE]].tolist():
            found += hashlib.sha256(tokens[start:end]).digest()[:_BYTES]
            start = end
    with suppress(OSError):  # without the cache, the next run reads the tokens again
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(memo, bytes(found) + hashlib.sha256(found).digest())
    return np.frombuffer(found, dtype="<u4")
