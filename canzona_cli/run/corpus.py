"""The corpus of a run, and how often the run reads it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from canzona_cli.config.checks import BYTE_TOKENIZER_IDS
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.run.codec import load
from canzona_cli.run.files import RunFiles
from canzona_cli.run.words import clean, count

MOST_EPOCHS: Final = 4
"""Epochs up to which repeated tokens are worth nearly as much as new ones (Muennighoff et al. 2023, arXiv
2305.16264, sec. 6); beyond them ever less, and the loss on them says ever less about other text."""
_STDLIB_TOKENS: Final = {"byte": 11_300_000}
"""Tokens of the Python standard library's sources to train on (11.5 MB in 3.12) ..."""
_STDLIB_WORDS: Final = 2_900_000
"""... and with a vocabulary of words, at some four bytes a token."""


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """A pair that is ready to train on."""

    name: str
    """The set's name in a blend: the last part of its path where that tells it from the others."""
    prefix: Path
    share: float = 1.0
    """The share of the samples; 1 for all sets together."""
    tokens: int
    documents: int
    train_tokens: int
    validation_tokens: int


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """corpus.json: the sets of a run, one or a blend, of one tokenizer."""

    sets: tuple[PreparedSet, ...]
    tokenizer: str
    """Its name; `unknown` for a pair that another tool made."""
    vocab_size: int
    """One more than the largest id the tokenizer can produce or, if it is unknown, the largest id found."""
    max_token_id: int
    eod: int | None
    """The end-of-document token; None for a pair that another tool made, whose files do not name one."""

    @property
    def prefix(self) -> Path:
        """The prefix of the first set; the tokenizer beside it is that of all."""
        return self.sets[0].prefix

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.sets)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.sets)

    @property
    def train_tokens(self) -> int:
        return sum(part.train_tokens for part in self.sets)

    @property
    def validation_tokens(self) -> int:
        return sum(part.validation_tokens for part in self.sets)


def read_corpus(files: RunFiles) -> PreparedCorpus:
    """corpus.json: the corpus that the launcher chose for a run.

    Raises:
        ConfigError: it is damaged.
        FileNotFoundError: there is none.
    """
    return load(files.corpus, PreparedCorpus, key="corpus.json", fix="start the run again")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The tokens that a run wants against those that there are."""

    needed: int
    """Tokens that the run reads in all its steps."""
    there: int
    """Tokens to train on, without the held-out ones."""
    about: bool = False
    """True where `there` is an estimate: the built-in corpus has not been prepared yet."""
    sets: Mapping[str, "Supply"] = field(default_factory=dict)
    """The supply of each set of a blend, by name."""

    @property
    def epochs(self) -> float:
        """The number of times the run reads its data, or the set of a blend that it reads most often."""
        return max((each.epochs for each in self.sets.values()), default=self.needed / max(1, self.there))

    @property
    def too_often(self) -> bool:
        """True where a person should know before the run starts."""
        return self.epochs > MOST_EPOCHS

    @property
    def times(self) -> str:
        """The epochs as a person reads them: `0.043`, `3,616`; of a blend `code 1.2, web 0.3`."""
        if self.sets:
            return ", ".join(f"{clean(name)} {each.times}" for name, each in self.sets.items())
        about = "about " if self.about else ""
        return about + (f"{self.epochs:,.0f}" if self.epochs >= 10 else f"{self.epochs:.2g}")

    @property
    def words(self) -> str:
        """`0.043 (492 k tokens wanted, 11.3 M to train on)`."""
        about = "about " if self.about else ""
        return f"{self.times} ({count(self.needed)} tokens wanted, {about}{count(self.there)} to train on)"


def tokens_wanted(config: RunConfig, layout: Layout, *, steps: int | None = None) -> int:
    """Tokens that a run reads in all its steps, or in `steps`."""
    return (config.train.steps if steps is None else steps) * layout.global_batch_size * config.train.seq_length


def supply(config: RunConfig, layout: Layout, corpus: PreparedCorpus | None = None) -> Supply | None:
    """Compares the data that a run reads with the data there is.

    Args:
        corpus: the corpus of the run. Without it the built-in corpus is estimated, so that nothing needs to
            be read.

    Returns:
        None for a corpus of somebody's own that is not given.
    """
    needed = tokens_wanted(config, layout)
    if corpus is not None:
        sets = {one.name: Supply(needed=round(needed * one.share), there=one.train_tokens) for one in corpus.sets}
        return Supply(needed=needed, there=corpus.train_tokens, sets=sets if len(sets) > 1 else {})
    if config.data.source == "stdlib":
        there = _STDLIB_TOKENS.get(config.data.tokenizer, _STDLIB_WORDS)
        return Supply(needed=needed, there=there, about=True)
    return None


def data_warnings(config: RunConfig, layout: Layout, corpus: PreparedCorpus | None = None) -> Iterator[str]:
    """Lists what will run but is hardly intended: a corpus read too often,
    an embedding that nothing trains."""
    read, demonstration = supply(config, layout, corpus), config.data.source == "stdlib"
    if read is not None and read.too_often and demonstration:
        yield (
            f"THIS IS A TRIAL. {clean(config.name)} wants {count(read.needed)} tokens, and the demonstration corpus "
            f"(Python's own sources) has about {count(read.there)}: it is read {read.times} times and learnt by heart. "
            "For a run that counts: canzona data prepare FILES --output data/corpus --tokenizer tokenizer.json, then "
            "data=prepared data.path=data/corpus"
        )
    elif read is not None and read.too_often:
        fewer = int(config.train.steps * MOST_EPOCHS / read.epochs)
        yield (
            f"the data is read {read.times} times: {count(read.needed)} tokens wanted, {count(read.there)} to train "
            f"on. Beyond {MOST_EPOCHS} epochs repeated text teaches ever less: prepare more of it, or "
            f"train.steps={max(1, fewer)}"
        )
    ids, rows = _token_ids(config, corpus), config.model.vocab_size
    if ids is not None and rows > 2 * ids:
        yield (
            f"model.vocab_size={rows}, and the data's tokenizer has {ids:,} ids: {1 - ids / rows:.0%} of the "
            "embedding's rows never occur; use data of the model's own tokenizer, or a smaller model.vocab_size"
        )


def _token_ids(config: RunConfig, corpus: PreparedCorpus | None) -> int | None:
    """The number of ids the tokenizer has; None for a file that is not open."""
    if corpus is not None:
        return corpus.vocab_size
    if config.data.source == "stdlib":
        return {"byte": BYTE_TOKENIZER_IDS, "bpe": config.data.tokenizer_vocab_size}.get(config.data.tokenizer)
    return None
