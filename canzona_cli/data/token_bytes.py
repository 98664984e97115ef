"""The number of bytes of text that each token stands for."""

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from canzona_cli.data.corpus import tokenizer_of
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.data.sidecar import load_sidecar
from canzona_cli.data.tokenizers import BYTE_VALUES, ByteTokenizer, Tokenizer
from canzona_cli.errors import ConfigError
from canzona_cli.run.corpus import PreparedCorpus


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """The bytes by token id, of one tokenizer."""

    values: npt.NDArray[np.float64]
    """`[vocab_size]`; what ends a document stands for none."""
    counted: bool
    """False: each is the corpus' mean, as the tokenizer does not tell."""


def token_bytes(corpus: PreparedCorpus) -> TokenBytes | None:
    """Returns the bytes of a corpus's tokenizer; None if it is not known.

    Raises:
        ConfigError: the corpus is damaged.
    """
    try:
        tokenizer = tokenizer_of(corpus)
    except ConfigError:
        return None
    if (values := bytes_by_id(tokenizer)) is not None:
        return TokenBytes(values=values, counted=True)
    sidecars = [sidecar for one in corpus.sets if (sidecar := load_sidecar(inspect_pair(one.prefix))) is not None]
    if len(sidecars) < len(corpus.sets):
        return None
    mean = sum(one.text_bytes for one in sidecars) / sum(one.tokens for one in sidecars)
    return TokenBytes(values=np.full(corpus.vocab_size, mean), counted=False)


def bytes_by_id(tokenizer: Tokenizer) -> npt.NDArray[np.float64] | None:
    """Returns the bytes of a byte tokenizer, or of one whose vocabulary has a letter for each byte (GPT-2's, and most
    since then); None for others."""
    if isinstance(tokenizer, ByteTokenizer):
        values = np.ones(tokenizer.vocab_size)
        values[BYTE_VALUES:] = 0
        return values
    tree = json.loads(tokenizer.to_json())
    decoder = tree.get("decoder") or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    if kinds != {"ByteLevel"}:
        return None
    values = np.zeros(tokenizer.vocab_size)
    for token, number in tokenizer.backend.get_vocab(with_added_tokens=False).items():
        values[number] = len(token)
    for added in tree["added_tokens"]:
        values[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return values
