"""Turns batches of text into tokens, in this process or in a pool of them, in the order of the batches."""

import hashlib
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from canzona_cli.data.indexed import Lengths
from canzona_cli.data.reading import Batch, ReadSettings, pieces
from canzona_cli.data.sidecar import FORMAT, Tally
from canzona_cli.data.sources import Source
from canzona_cli.data.tokenizers import TokenArray, Tokenizer, begin_child, token_dtype
from canzona_cli.errors import EnvironmentProblem, Problem


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything beside the inputs that the tokens depend on."""

    tokenizer: Tokenizer
    read: ReadSettings

    def fingerprint(self, sources: Sequence[Source]) -> str:
        """Hash all that the tokens of these sources depend on."""
        tokenizer = self.tokenizer
        made_by = [FORMAT, tokenizer.kind, tokenizer.eod, tokenizer.to_json(), asdict(self.read)]
        inputs = []
        for source in sources:
            status = None if source.path is None else source.path.stat()
            version = None if status is None else (status.st_size, status.st_mtime_ns, status.st_ino)
            inputs.append((source.label, version, source.format))
        return hashlib.sha256(json.dumps([made_by, inputs]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of a batch."""

    tokens: TokenArray
    """Ids of all sequences one after another, without eod."""
    lengths: Lengths
    """Tokens of each sequence, shape [sequences]."""
    last: npt.NDArray[np.bool_]
    """The document ends with that sequence, shape [sequences]."""
    tally: Tally


def in_order(items: Iterable[Batch | Tally], recipe: Recipe, workers: int) -> Iterator[Encoded | Tally]:
    """Encode all batches in a pool of processes, or in this one; the results in the order of the batches.

    Raises:
        ConfigError: a batch cannot be tokenised.
        EnvironmentProblem: a process of the pool died.
    """
    if workers == 1:
        yield from (encode(item, recipe) if isinstance(item, Batch) else item for item in items)
        return
    pending: deque[Future[Encoded] | Tally] = deque()

    def first() -> Encoded | Tally:
        item = pending.popleft()
        return item.result() if isinstance(item, Future) else item

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(recipe,))
    try:
        for item in items:
            pending.append(pool.submit(_encode_in_worker, item) if isinstance(item, Batch) else item)
            if len(pending) > 2 * workers:
                yield first()
        while pending:
            yield first()
    except BrokenProcessPool:
        fix = "often the machine ran out of memory: use fewer --workers"
        raise EnvironmentProblem(Problem(key="INPUT", reason="a process that tokenised them died", fix=fix)) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode(batch: Batch, recipe: Recipe) -> Encoded:
    """Read and tokenise the texts of a batch.

    Raises:
        ConfigError: the tokenizer cannot.
    """
    tokenizer, tally = recipe.tokenizer, Tally()
    texts = list(pieces(batch, recipe.read, tally))
    tally.text_bytes = sum(len(piece.data) for piece in texts)
    replaced = tokenizer.replaced
    sequences = tokenizer.encode_batch([piece.data for piece in texts])
    tally.replaced += tokenizer.replaced - replaced
    return Encoded(
        tokens=np.concatenate([np.empty(0, token_dtype(tokenizer.vocab_size)), *sequences]),
        lengths=np.asarray([sequence.size for sequence in sequences], dtype=np.int32),
        last=np.asarray([piece.last for piece in texts], dtype=np.bool_),
        tally=tally,
    )


_worker_recipe: Recipe
"""The recipe of this process of the pool."""


def _begin_worker(recipe: Recipe) -> None:
    global _worker_recipe
    begin_child(threads=1)
    _worker_recipe = recipe


def _encode_in_worker(batch: Batch) -> Encoded:
    return encode(batch, _worker_recipe)
