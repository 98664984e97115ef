"""Divides the documents of a set into those to train on and those that are held out for validation, without importing
torch.

This is computed from the tokens wherever it is needed. The hashes of all documents are read from the cache, because
finding them takes a second for each GB of tokens, and a second for each million documents.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from canzona_cli.config.schema import DataConfig
from canzona_cli.core.writing import write_atomic
from canzona_cli.data.indexed import PairInfo, bin_path
from canzona_cli.records.corpus import Division
from canzona_cli.records.files import cache_root

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
