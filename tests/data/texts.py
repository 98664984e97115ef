"""Small prepared data sets of documents with different lengths."""

import json
import random
from pathlib import Path

from canzona_cli.data.prepare import PrepareRequest, prepare

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "one", "two", "three", "four")


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
