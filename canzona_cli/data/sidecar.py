"""`<prefix>.json`: the inputs and settings a pair was made from,
checked before a run and readable by people."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from canzona_cli.data.indexed import PairInfo
from canzona_cli.data.tokenizers import TokenizerKind
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.run.codec import load

FORMAT: Literal[1] = 1
_MOST_BAD_LINES: Final = 100


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """One input of a corpus."""

    path: str
    bytes: int | None
    """None for a pipe."""


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line of JSONL, or row of Parquet, without the text that it should have."""

    path: str
    line: int
    """Counted from 1."""
    kind: str
    """The reason as it is counted: `not JSON`."""
    detail: str
    """The rest of the message: `: Expecting value at column 5`."""


@dataclass(kw_only=True)
class Tally:
    """Counts of what was read and left out, of one batch or of all up to now."""

    text_bytes: int = 0
    """Bytes of the documents, decompressed."""
    empty: int = 0
    """Documents without text, left out."""
    replaced: int = 0
    """Invalid characters replaced by U+FFFD or `?`."""
    bad_kinds: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason."""
    bad_lines: list[BadLine] = field(default_factory=list)
    """The first hundred."""
    skipped: list[str] = field(default_factory=list)
    """Binary files met in folders, left out."""

    @property
    def bad(self) -> int:
        """Lines left out."""
        return sum(self.bad_kinds.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Documents, lines and files left out, by reason."""
        reasons = {"empty": self.empty, **self.bad_kinds, "binary file": len(self.skipped)}
        return {reason: number for reason, number in reasons.items() if number}

    def add_bad(self, line: BadLine) -> None:
        self.bad_kinds[line.kind] = self.bad_kinds.get(line.kind, 0) + 1
        if len(self.bad_lines) < _MOST_BAD_LINES:
            self.bad_lines.append(line)

    def add(self, later: "Tally") -> None:
        """Add the counts of what was read next."""
        self.text_bytes += later.text_bytes
        self.empty += later.empty
        self.replaced += later.replaced
        for kind, number in later.bad_kinds.items():
            self.bad_kinds[kind] = self.bad_kinds.get(kind, 0) + number
        self.bad_lines = [*self.bad_lines, *later.bad_lines][:_MOST_BAD_LINES]
        self.skipped += later.skipped


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Facts of one prepared pair."""

    format: Literal[1] = FORMAT
    tokenizer_kind: TokenizerKind
    tokenizer: str
    tokenizer_sha256: str | None
    """The hash of `<prefix>.tokenizer.json`; None for byte."""
    vocab_size: int
    """One more than the largest id the tokenizer can produce."""
    eod: int
    """Id that ends every document."""
    tokens: int
    documents: int
    sequences: int
    max_token_id: int
    """Largest id that occurs."""
    dtype: str
    text_bytes: int
    """Bytes of the documents that the tokens were made from, decompressed."""
    replaced: int
    """Invalid characters that were replaced."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Documents without text, bad lines and binary files in folders, by reason. Nothing else is left out:
    equal documents all stay."""
    bad_lines: tuple[BadLine, ...] = ()
    """The first hundred of them."""
    inputs: tuple[InputRecord, ...]
    """The first thousand."""
    input_count: int
    document: str
    text_key: str
    python: str
    canzona: str


def sidecar_path(prefix: Path) -> Path:
    """`<prefix>.json`."""
    return prefix.with_name(prefix.name + ".json")


def saved_tokenizer_path(prefix: Path) -> Path:
    """`<prefix>.tokenizer.json`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def dump_sidecar(sidecar: Sidecar) -> str:
    """The JSON text of `PREFIX.json`, which `load_sidecar` reads back."""
    text = json.dumps(asdict(sidecar), indent=1, ensure_ascii=False)
    # Names of files may be no UTF-8: what stands for their bytes is escaped as JSON does it.
    return text.encode(errors="backslashreplace").decode() + "\n"


def load_sidecar(pair: PairInfo) -> Sidecar | None:
    """The sidecar of an intact pair; None when another tool made the pair.

    Raises:
        ConfigError: key `data.path`; it is damaged, or describes another pair.
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
        raise ConfigError(Problem(key="data.path", value=str(path), reason=reason, fix=fix))
    return sidecar
