"""Small prepared data sets of documents with different lengths."""

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.prepare import PrepareRequest, prepare

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "one", "two", "three", "four")


def drawn(prefix: Path, share: float) -> npt.NDArray[np.bool_]:
    """Returns True for each document of 16-bit tokens, all of one sequence, that the rule holds out: the first 32 bits
    of the SHA-256 of its tokens, as a little-endian number, are below this share of 2**32."""
    tokens = prefix.with_suffix(".bin").read_bytes()
    ends = [0, *(2 * int(end) for end in np.cumsum(inspect_pair(prefix).lengths))]
    hashes = [hashlib.sha256(tokens[begin:end]).digest() for begin, end in pairwise(ends)]
    return np.array([int.from_bytes(digest[:4], "little") < share * 2**32 for digest in hashes])


def prepare_documents(
    folder: Path, name: str, *, documents: int, seed: int, tokenizer: str = "byte", reverse: bool = False
) -> Path:
    """Prepares documents of 10 to 200 bytes; returns the prefix. Other data of this name is replaced.

    Args:
        reverse: True for the same documents in the opposite order, so that all totals stay the same.
    """
    draw = random.Random(seed)
    texts = []
    for number in range(documents):
        text, length = f"{number} ", draw.randint(10, 200)
        while len(text) < length:
            text += draw.choice(WORDS) + " "
        texts.append(text[:length])
    source, prefix = folder / f"{name}.jsonl", folder / name
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in (texts[::-1] if reverse else texts)))
    size = 280 if tokenizer == "bpe" else None
    prepare(
        PrepareRequest(inputs=(str(source),), output=str(prefix), tokenizer=tokenizer, vocab_size=size, overwrite=True),
        lambda _: None,
    )
    return prefix
