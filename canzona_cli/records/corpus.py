"""The corpus of a run, and the number of times that the run reads it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from canzona_cli.config.checks import BYTE_TOKENIZER_IDS
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import Layout, TrainConfig
from canzona_cli.records.codec import load
from canzona_cli.records.files import RunFiles
from canzona_cli.records.words import clean, count

DATA_FILE: Final = "data.json"
"""The file of a checkpoint with the run's `DataPlan`."""
MOST_EPOCHS: Final = 4
"""The number of epochs up to which repeated tokens are worth nearly as much as new ones (Muennighoff et al.
2023, arXiv 2305.16264, sec. 6). Each epoch beyond it teaches less than the one before, and the training loss
becomes a poor estimate of the loss on other text."""
_STDLIB_TOKENS: Final = {"byte": 11_300_000}
"""The number of training tokens in the sources of Python's standard library (11.5 MB in 3.12), by tokenizer."""
_STDLIB_OTHER_TOKENS: Final = 2_900_000
"""The number of training tokens in the same sources with any other tokenizer, at about four bytes per token."""

Division = Literal["drawn", "tail"]
"""How the documents of a set are divided. drawn: a document is held out by a hash of its tokens, so equal documents
are on the same side, and a document stays on its side when others are added. tail: the last documents are held out,
as in the built-in corpus, whose documents are in the order of a hash, and in runs that began before documents were
drawn."""


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """A data set (a pair of .bin and .idx files) that is ready to train on."""

    name: str
    """The set's name in a blend: the last part of its path if that is unique in the blend."""
    prefix: Path
    share: float = 1.0
    """The share of the samples; the shares of all sets add up to 1."""
    tokens: int
    documents: int
    train_tokens: int
    validation_tokens: int
    division: Division = "tail"
    fingerprint: str = ""
    """The hash of the index and of the token ids (`PairInfo.fingerprint`); empty if it is not known."""


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """The contents of corpus.json: the data set of a run, or the sets of its blend, which share a
    tokenizer."""

    sets: tuple[PreparedSet, ...]
    tokenizer: str
    """The name of the tokenizer; `unknown` for data that another tool prepared."""
    vocab_size: int
    """The largest id that the tokenizer can produce plus one; if the tokenizer is unknown, the largest id in
    the data plus one."""
    max_token_id: int
    eod: int | None
    """The end-of-document token; None for data from other tools, whose files do not record it."""
    tokenizer_sha256: str = ""
    """The hash of the tokenizer's file, or `byte`; empty if the tokenizer is unknown."""
    validation: PreparedSet | None = None
    """The set of `data.validation`, with only validation tokens; None if the run validates on held-out documents."""

    @property
    def prefix(self) -> Path:
        """The prefix of the first set; the tokenizer of all sets lies next to it."""
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
        return sum(part.validation_tokens for part in self.validation_sets)

    @property
    def validation_sets(self) -> tuple[PreparedSet, ...]:
        """The sets with the validation tokens."""
        return self.sets if self.validation is None else (self.validation,)


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The contents of a checkpoint's data.json: the data of a run, and the order in which the run reads
    it."""

    corpus: PreparedCorpus
    samples: int
    """The number of samples that the run reads in all its steps, for which Megatron chooses the order."""
    blend_start: int = 0
    """The number of samples that the run had read when it began to mix its sets in their present shares."""
    set_starts: tuple[int, ...] = ()
    """The number of samples that it had read of each set by then; empty if it had read none."""

    def start_of(self, index: int) -> int:
        """Returns the number of samples of a set that were read before `blend_start`."""
        return self.set_starts[index] if self.set_starts else 0

    def place_of(self, part: PreparedSet) -> int | None:
        """Returns the number of the set with the same path or, if there is none, the same contents; None if
        the plan does not have this set."""
        by_path = {known.prefix: number for number, known in enumerate(self.corpus.sets)}
        by_contents = {known.fingerprint: number for number, known in enumerate(self.corpus.sets) if known.fingerprint}
        return by_path.get(part.prefix, by_contents.get(part.fingerprint))


def samples_needed(train: TrainConfig, batch: int, *, step: int = 0, samples: int = 0) -> int:
    """Returns the number of samples that a run reads in all its steps.

    Args:
        batch: the number of samples in a step after the ramp-up.
        step, samples: the number of steps and samples that are already done, with any batch.
    """
    return samples + train.sequences(batch, step + 1, train.steps)


def read_corpus(files: RunFiles) -> PreparedCorpus:
    """Reads corpus.json, the corpus that the launcher chose for a run.

    Raises:
        ConfigError: the file is damaged.
        FileNotFoundError: there is no such file.
    """
    return load(files.corpus, PreparedCorpus, key="corpus.json", fix="start the run again")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The number of tokens that a run needs, and the number that is available."""

    needed: int
    """The number of tokens that the run reads in all its steps."""
    available: int
    """The number of tokens to train on, excluding held-out tokens."""
    is_estimate: bool = False
    """True if `available` is an estimate, because the built-in corpus has not been prepared yet."""
    sets: Mapping[str, "Supply"] = field(default_factory=dict)
    """The supply of each set of a blend, by name; empty for a single set."""

    @property
    def epochs(self) -> float:
        """The number of times that the run reads its data; for a blend, the largest number of any set."""
        return max((part.epochs for part in self.sets.values()), default=self.needed / max(1, self.available))

    @property
    def too_often(self) -> bool:
        """True if the run reads its data more than `MOST_EPOCHS` times."""
        return self.epochs > MOST_EPOCHS

    @property
    def epochs_text(self) -> str:
        """The epochs as text: `0.043`, `3,616`, `about 12`; for a blend, `code 1.2, web 0.3`."""
        if self.sets:
            return ", ".join(f"{clean(name)} {part.epochs_text}" for name, part in self.sets.items())
        about = "about " if self.is_estimate else ""
        return about + (f"{self.epochs:,.0f}" if self.epochs >= 10 else f"{self.epochs:.2g}")

    @property
    def words(self) -> str:
        """The epochs and tokens as text: `0.043 (492 k tokens needed, 11.3 M available)`."""
        about = "about " if self.is_estimate else ""
        return f"{self.epochs_text} ({count(self.needed)} tokens needed, {about}{count(self.available)} available)"


def tokens_needed(config: RunConfig, layout: Layout, *, samples: int | None = None) -> int:
    """Returns the number of tokens that a run reads in all its steps.

    Args:
        samples: the number of samples of a resumed run, whose earlier steps may have had another batch; None
            for a run that starts at its first step.
    """
    if samples is None:
        samples = samples_needed(config.train, layout.global_batch_size)
    return samples * config.train.seq_length


def supply(
    config: RunConfig, layout: Layout, corpus: PreparedCorpus | None = None, *, samples: int | None = None
) -> Supply | None:
    """Compares the number of tokens that a run reads with the number that is available.

    Args:
        corpus: the corpus of the run. With None, the built-in corpus is estimated without reading any data.
        samples: see `tokens_needed`.

    Returns:
        The comparison; None if the run reads a user's corpus and `corpus` is None.
    """
    needed = tokens_needed(config, layout, samples=samples)
    if corpus is not None:
        sets = {}
        for part in corpus.sets:
            sets[part.name] = Supply(needed=round(needed * part.share), available=part.train_tokens)
        return Supply(needed=needed, available=corpus.train_tokens, sets=sets if len(sets) > 1 else {})
    if config.data.source == "stdlib":
        available = _STDLIB_TOKENS.get(config.data.tokenizer, _STDLIB_OTHER_TOKENS)
        return Supply(needed=needed, available=available, is_estimate=True)
    return None


def data_warnings(
    config: RunConfig, layout: Layout, corpus: PreparedCorpus | None, *, samples: int | None = None
) -> Iterator[str]:
    """Yields warnings about data that is read too often, and about an embedding with mostly unused rows.

    Args:
        samples: see `tokens_needed`.
    """
    tokens = supply(config, layout, corpus, samples=samples)
    if tokens is not None and tokens.too_often:
        yield _too_often_warning(config, tokens)
    ids = _token_ids(config, corpus)
    rows = config.model.vocab_size
    if ids is not None and rows > 2 * ids:
        yield (
            f"model.vocab_size={rows}, but the data's tokenizer has only {ids:,} ids: {1 - ids / rows:.0%} of the "
            "embedding's rows are never used; use data tokenised with the model's tokenizer, or a smaller "
            "model.vocab_size"
        )


def _too_often_warning(config: RunConfig, tokens: Supply) -> str:
    needed, available, epochs = count(tokens.needed), count(tokens.available), tokens.epochs_text
    if config.data.source == "stdlib":
        return (
            f"THIS IS A TRIAL RUN. {clean(config.name)} needs {needed} tokens, but the demonstration corpus (Python's "
            f"own sources) has about {available}: {epochs} epochs, so the model will memorise it. For a real run: "
            "canzona data prepare FILES --output data/corpus --tokenizer tokenizer.json, then data=prepared "
            "data.path=data/corpus"
        )
    steps = max(1, int(config.train.steps * MOST_EPOCHS / tokens.epochs))
    return (
        f"the data is read {epochs} times: {needed} tokens needed, {available} available. Beyond {MOST_EPOCHS} epochs "
        f"repeated text teaches less and less: prepare more data, or train.steps={steps}"
    )


def _token_ids(config: RunConfig, corpus: PreparedCorpus | None) -> int | None:
    """Returns the number of ids of the tokenizer; None if finding out requires reading the data or a
    tokenizer file."""
    if corpus is not None:
        return corpus.vocab_size
    if config.data.source == "stdlib":
        return {"byte": BYTE_TOKENIZER_IDS, "bpe": config.bpe_ids}.get(config.data.tokenizer)
    return None
