"""Converts batches of text to tokens, in this process or in a pool of processes. The order of the batches is
kept."""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from canzona_cli.core.errors import CanzonaError, EnvironmentProblem, Problem
from canzona_cli.data.indexed import Lengths
from canzona_cli.data.reading import (
    Batch,
    ReadSettings,
    pieces,
)
from canzona_cli.data.sidecar import Tally
from canzona_cli.data.tokenizers import (
    TokenArray,
    Tokenizer,
    begin_child,
    token_dtype,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The tokenizer and the settings on which tokens depend, in addition to the inputs."""

    tokenizer: Tokenizer
    read: ReadSettings


def encode_in_order(
    items: Iterable[Batch | Tally | CanzonaError], recipe: Recipe, workers: int
) -> Iterator["Encoded | Tally"]:
    """Encodes the batches among `items`, passes the tallies through, and yields both in the order of the
    items.

    Args:
        items: batches, tallies and errors. An error is raised once the results before it have been yielded.
        recipe: the tokenizer and the settings.
        workers: the number of processes. With 1, this process encodes.

    Raises:
        CanzonaError: an error among the items, or a batch that cannot be tokenised.
        EnvironmentProblem: a process of the pool died.
    """
    if workers == 1:
        for item in items:
            if isinstance(item, CanzonaError):
                raise item
            yield encode(item, recipe) if isinstance(item, Batch) else item
        return
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[Encoded] | Tally | CanzonaError] = deque()

    def next_result() -> Encoded | Tally:
        item = pending.popleft()
        if isinstance(item, CanzonaError):
            raise item
        return item.result() if isinstance(item, Future) else item

    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(recipe,))
    try:
        for item in items:
            pending.append(pool.submit(_encode_in_worker, item) if isinstance(item, Batch) else item)
            if len(pending) > 2 * workers:
                yield next_result()
        while pending:
            yield next_result()
    except BrokenProcessPool:
        reason, fix = "a tokenising process died", "usually because memory ran out: use fewer --workers"
        raise EnvironmentProblem(Problem("INPUT", reason, fix)) from None
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of a batch."""

    tokens: TokenArray
    """The ids of all sequences, concatenated; eod is not included."""
    lengths: Lengths
    """The number of tokens of each sequence, shape [sequences]."""
    last: npt.NDArray[np.bool_]
    """True for each sequence that is the last of its document, shape [sequences]."""
    tally: Tally


def encode(batch: Batch, recipe: Recipe) -> Encoded:
    """Reads and tokenises the texts of a batch.

    Raises:
        ConfigError: the tokenizer fails.
    """
    tokenizer = recipe.tokenizer
    tally = Tally()
    texts = list(pieces(batch, recipe.read, tally))
    tally.text_bytes = sum(len(piece.data) for piece in texts)
    replaced_before = tokenizer.replaced
    sequences = tokenizer.encode_batch([piece.data for piece in texts])
    tally.replaced += tokenizer.replaced - replaced_before
    return Encoded(
        tokens=np.concatenate([np.empty(0, token_dtype(tokenizer.vocab_size)), *sequences]),
        lengths=np.asarray([sequence.size for sequence in sequences], dtype=np.int32),
        last=np.asarray([piece.last for piece in texts], dtype=np.bool_),
        tally=tally,
    )


_worker_recipe: Recipe
"""The recipe in a process of the pool."""


def _begin_worker(recipe: Recipe) -> None:
    global _worker_recipe
    begin_child(threads=1)
    _worker_recipe = recipe


def _encode_in_worker(batch: Batch) -> Encoded:
    return encode(batch, _worker_recipe)
