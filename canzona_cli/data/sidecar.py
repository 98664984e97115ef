"""Reads and writes `<prefix>.json`, the record of the inputs and settings of a pair."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.data.indexed import PairInfo
from canzona_cli.data.tokenizers import TokenizerKind
from canzona_cli.records.codec import load

FORMAT: Literal[1] = 1
_MOST_BAD_LINES: Final = 100


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """The path, size and hash of one input of a corpus."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line of JSONL or row of Parquet without usable text."""

    path: str
    line: int
    """The number of the line or row, counted from 1."""
    kind: str
    """The category under which the line is counted: `not JSON`."""
    detail: str
    """The rest of the message: `: Expecting value at column 5`."""


@dataclass(kw_only=True)
class Tally:
    """The counts of text read and skipped, in one batch or in all batches so far."""

    text_bytes: int = 0
    """The bytes of the documents after decompression."""
    empty: int = 0
    """The number of documents without text, which were skipped."""
    replaced: int = 0
    """The number of invalid characters that were replaced by U+FFFD or `?`."""
    bad_kinds: dict[str, int] = field(default_factory=dict)
    """The number of skipped lines for each reason."""
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first hundred lines that were skipped."""
    skipped: list[str] = field(default_factory=list)
    """The binary files in folders, which were skipped."""
    records: list[InputRecord] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """The number of lines that were skipped."""
        return sum(self.bad_kinds.values())

    @property
    def dropped(self) -> dict[str, int]:
        """The number of skipped documents, lines and files for each reason, omitting zeros."""
        reasons = {"empty": self.empty, **self.bad_kinds, "binary file": len(self.skipped)}
        return {reason: count for reason, count in reasons.items() if count}

    def add_bad(self, line: BadLine) -> None:
        """Counts a skipped line, and keeps it if it is one of the first hundred."""
        self.bad_kinds[line.kind] = self.bad_kinds.get(line.kind, 0) + 1
        if len(self.bad_lines) < _MOST_BAD_LINES:
            self.bad_lines.append(line)

    def add(self, later: "Tally") -> None:
        """Adds the counts of a later batch or input."""
        self.text_bytes += later.text_bytes
        self.empty += later.empty
        self.replaced += later.replaced
        for kind, count in later.bad_kinds.items():
            self.bad_kinds[kind] = self.bad_kinds.get(kind, 0) + count
        self.bad_lines = [*self.bad_lines, *later.bad_lines][:_MOST_BAD_LINES]
        self.skipped += later.skipped
        self.records += later.records


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The contents of `<prefix>.json`, which describes one prepared pair."""

    format: Literal[1] = FORMAT
    tokenizer_kind: TokenizerKind
    tokenizer: str
    tokenizer_sha256: str | None
    """The hash of `<prefix>.tokenizer.json`; None for the byte tokenizer, which has no such file."""
    vocab_size: int
    """One more than the largest id that the tokenizer can produce."""
    eod: int
    """The id that ends every document."""
    tokens: int
    documents: int
    sequences: int
    max_token_id: int
    """The largest token id in the pair."""
    dtype: str
    text_bytes: int
    """The bytes of the documents after decompression."""
    replaced: int
    """The number of invalid characters that were replaced."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """The number of skipped empty documents, bad lines and binary files in folders, for each reason. Nothing
    else is skipped, not even duplicate documents."""
    bad_lines: tuple[BadLine, ...] = ()
    """The first hundred bad lines."""
    inputs_sha256: str
    """The hash of the inputs' hashes, in order."""
    inputs: tuple[InputRecord, ...]
    """The first thousand inputs."""
    input_count: int
    """The number of all inputs."""
    document: str
    text_key: str
    template: str = ""
    python: str
    canzona: str


def sidecar_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.json`."""
    return prefix.with_name(prefix.name + ".json")


def saved_tokenizer_path(prefix: Path) -> Path:
    """Returns the path `<prefix>.tokenizer.json`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def dump_sidecar(sidecar: Sidecar) -> str:
    """Returns the JSON text of `<prefix>.json`, which `load_sidecar` reads."""
    text = json.dumps(asdict(sidecar), indent=1, ensure_ascii=False)
    # File names that are not UTF-8 contain surrogates, which are written as JSON escapes.
    return text.encode(errors="backslashreplace").decode() + "\n"


def load_sidecar(pair: PairInfo) -> Sidecar | None:
    """Returns the sidecar of an intact pair; None if there is none, because another tool made the pair.

    Raises:
        ConfigError: the sidecar is damaged or describes another pair. The key of the problem is `data.path`.
    """
    path = sidecar_path(pair.prefix)
    if not path.is_file():
        return None
    fix = f"prepare the data again with --overwrite, or remove {path} if another tool made the pair"
    sidecar = load(path, Sidecar, key="data.path", value=str(path), fix=fix)
    described = (sidecar.tokens, sidecar.documents, sidecar.sequences, sidecar.dtype)
    if described != (pair.tokens, pair.documents, pair.sequences, pair.dtype):
        reason = f"it describes {sidecar.tokens:,} tokens in {sidecar.documents:,} documents, but its pair has "
        reason += f"{pair.tokens:,} in {pair.documents:,}"
        raise ConfigError(Problem("data.path", reason, fix, value=str(path)))
    return sidecar
