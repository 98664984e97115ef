"""What an evaluation found: the loss of a checkpoint on held-out or other text."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from canzona_cli.config.schema import Layout
from canzona_cli.run.codec import load
from canzona_cli.run.files import RunFiles

Documents = Literal["held-out", "all"]
"""Which of a corpus are read: those that a run of these settings does not train on, or all."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """evaluation.json, written by rank 0."""

    VERSION: ClassVar = 1

    checkpoint: Path
    step: int
    data: Path
    """Prefix of the pair, or of a blend's first."""
    tokenizer: str
    documents: Documents
    layout: Layout
    batches: int
    """Global ones."""
    tokens: int
    """That were predicted; some of them several times where `epochs` is above 1."""
    epochs: float
    """How often the documents were read."""
    text_bytes: float | None
    """Of text that the tokens stand for; None where their tokenizer is not known."""
    bytes_counted: bool
    """Token by token; else from the mean of the whole corpus, for its tokenizer does not tell."""
    loss: float | None
    """Mean, nats per token; None where it is not finite. Of a blend, as the bytes, by the shares of its sets."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """Of a blend, the loss of each set by its name."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where no number holds it."""
        return None if self.loss is None or self.loss > math.log(1e308) else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """What all tokens took over the bytes of their text: the one number to compare tokenizers by."""
        if self.loss is None or not self.text_bytes:
            return None
        return self.loss * self.tokens / self.text_bytes / math.log(2)

    def as_json(self) -> dict[str, object]:
        """The stable form of `canzona eval --json`."""
        places = {"checkpoint": str(self.checkpoint), "data": str(self.data)}
        found = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"version": self.VERSION, **asdict(self), **places, **found}


def evaluation_file(files: RunFiles) -> Path:
    return files.root / "evaluation.json"


def read_evaluation(files: RunFiles) -> Evaluation:
    """What the ranks have found.

    Raises:
        ConfigError: it is damaged.
        FileNotFoundError: they have not.
    """
    return load(evaluation_file(files), Evaluation, key="evaluation.json", fix="evaluate again")
