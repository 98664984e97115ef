"""Text to token ids: raw bytes, a byte-pair encoding trained on the spot,
or any local Hugging Face tokenizer.json.

Every kind takes UTF-8 bytes, because that is what files hold: the byte tokenizer then needs no decoding at
all, and the others count what they had to replace. Text never produces a special token: `<|endoftext|>`
inside a document is ordinary text, only the writer ends documents.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from canzona_cli.config.reading import Unreadable, read_plain
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem, closest
from canzona_cli.run.codec import Damaged, parse

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
TokenizerKind = Literal["byte", "bpe", "huggingface"]

END_OF_TEXT = "<|endoftext|>"
EOD_CANDIDATES = (
    *(END_OF_TEXT, "</s>", "<|im_end|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
    *("<eos>", "<|eos|>", "[EOS]", "<|eot_id|>", "[SEP]"),
)
"""The names that published tokenizers give the end of a document, the usual names of base models first."""

BYTE_VALUES = 256
REPLACEMENT = "\ufffd"
_FORM = "give the tokenizer.json of a fast tokenizer (not tokenizer.model or tokenizer_config.json)"


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The narrowest type Megatron stores ids below `vocab_size` in (its `DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is a token, 256 ends a document. Lossless for any input, so nothing is ever replaced."""

    kind: Literal["byte"] = "byte"
    name: str = "byte"
    vocab_size: int = BYTE_VALUES + 1
    """One more than the largest id it can give."""
    eod: int = BYTE_VALUES
    """Id that ends a document; encoding text never gives it."""
    replaced: int = 0
    """Invalid UTF-8 sequences replaced by U+FFFD so far."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Token ids of each text, a 1-D array per text, in order, without eod."""
        # Converted in one go and handed out as views: with a line a document there are many small texts.
        ids = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.uint16)
        ends = list(accumulate(map(len, texts), initial=0))
        return [ids[start:end] for start, end in pairwise(ends)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; U+FFFD for what is none."""
        whole = (bytes([token]) if token < BYTE_VALUES else REPLACEMENT.encode() for token in ids)
        return b"".join(whole).decode(errors="replace")

    def to_json(self) -> None:
        """Its tokenizer.json; there is nothing to keep."""


@dataclass
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, set up for pre-training data."""

    kind: TokenizerKind
    name: str
    eod: int
    backend: "RustTokenizer"
    vocab_size: int = field(init=False)
    replaced: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Files from the Hub often truncate to the model's context, pad batches, and read special tokens
        # inside text: each would silently damage a corpus.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        # Ids may have holes, so the number of entries does not bound them.
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def __reduce__(self) -> tuple[type["JsonTokenizer"], tuple[TokenizerKind, str, int, "RustTokenizer"]]:
        return JsonTokenizer, (self.kind, self.name, self.eod, self.backend)  # set up again in the other process

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        decoded = [self._text(text) for text in texts]
        try:
            encodings = self.backend.encode_batch_fast(decoded, add_special_tokens=False)
        except Exception as error:  # the library's own are bare; a vocabulary may lack a token for the unknown
            raise _refused(self.name, f"cannot tokenise this text: {error}") from error
        if token_dtype(self.vocab_size) is np.uint16:
            return [np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings]
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens and ids that it has not."""
        text: str = self.backend.decode(list(ids))
        return text

    def to_json(self) -> str:
        text: str = self.backend.to_str()
        return text

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            text = raw.decode("utf-8", errors="replace")
            self.replaced += text.count(REPLACEMENT) - raw.count(REPLACEMENT.encode())
            return text


@dataclass(frozen=True, kw_only=True)
class TokenContent:
    """A token as tokenizer_config.json may write it."""

    content: str


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The part of a Hugging Face tokenizer_config.json that counts here."""

    eos_token: str | TokenContent | None = None


Tokenizer = ByteTokenizer | JsonTokenizer

SAMPLE_BYTES = 64 << 20
"""Text a vocabulary is learnt from. More hardly changes the merges, and time and memory grow with it."""
MIN_VOCAB_SIZE = BYTE_VALUES + 1
"""Every byte and the end of a document."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression by which text is cut into words before merging, from the tokenizer.json of Qwen3."""


def train_bpe(sample: Iterable[bytes], vocab_size: int, *, workers: int | None = None) -> JsonTokenizer:
    """Train a byte-level byte-pair encoding on `sample`; the same texts give the same tokenizer.

    Training is one long call into Rust during which Python cannot act on a signal, so it runs in a process of
    its own, which can be killed at once.

    Args:
        sample: UTF-8 texts, best no more than `SAMPLE_BYTES` in all.
        vocab_size: entries to reach, at least `MIN_VOCAB_SIZE`; a small sample may give fewer.
        workers: threads; None: one per core.

    Raises:
        EnvironmentProblem: the training process died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_train, args=(theirs, vocab_size, workers), daemon=True)
    child.start()
    theirs.close()
    try:
        for text in sample:
            ours.send_bytes(text)
        ours.send_bytes(b"")
        while not ours.poll(0.2):  # a signal that arrives just before a read that waits would not end it
            pass
        trained = ours.recv_bytes().decode()
    except (BrokenPipeError, ConnectionResetError, EOFError):
        child.join()
        reason = f"the process that trains it died (exit code {child.exitcode})"
        fix = "-9 means the machine ran out of memory: try a smaller --vocab-size, or a ready tokenizer.json"
        raise EnvironmentProblem(Problem(key="--tokenizer", value="bpe", reason=reason, fix=fix)) from None
    finally:
        child.kill()
        child.join()
    from tokenizers import Tokenizer as RustTokenizer

    backend = RustTokenizer.from_str(trained)
    name = f"bpe-{backend.get_vocab_size()}-{hashlib.sha256(trained.encode()).hexdigest()[:8]}"
    return JsonTokenizer(kind="bpe", name=name, eod=_find_eod(backend, END_OF_TEXT, Path("bpe")), backend=backend)


def _train(connection: Connection, vocab_size: int, workers: int | None) -> None:
    """Run in the child process: texts in up to an empty one, a tokenizer.json out."""
    begin_child(workers)
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, so that any text can be encoded; sorted, so that ids do not depend on a hash order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text.decode("utf-8", errors="replace") for text in iter(connection.recv_bytes, b""))
    tokenizer.train_from_iterator(texts, trainer)
    connection.send_bytes(tokenizer.to_str().encode())


def begin_child(threads: int | None) -> None:
    """Prepare a child process: it ends with its parent, which alone answers Ctrl-C.

    Args:
        threads: the threads of its tokenizer; None: one per core.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read when the tokenizer's thread pool starts
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def tokenizer_file(spec: str) -> Path:
    """The tokenizer.json a path means; a folder means the one in it.

    Raises:
        ConfigError: no such file.
    """
    path = Path(spec).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        reason = "this folder has no tokenizer.json, the form that fast tokenizers have"
        fix = f"AutoTokenizer.from_pretrained({spec!r}).save_pretrained(FOLDER), of transformers, writes one"
    else:
        reason = "there is no such file; a tokenizer is byte, bpe, or a local tokenizer.json (nothing is downloaded)"
        fix = "give byte, bpe, or a path; from the Hub: hf download MODEL tokenizer.json --local-dir ."
    raise _refused(spec, reason, fix)


def load_json_tokenizer(spec: str, eod: str | None = None) -> JsonTokenizer:
    """Load a local tokenizer.json, or the folder holding one.

    Args:
        spec: its path.
        eod: the token that ends a document; None: the eos_token of the tokenizer_config.json beside it, else the
            first of `EOD_CANDIDATES` it knows.

    Raises:
        ConfigError: no such file, not a tokenizer, or no end-of-document token.
    """
    path = tokenizer_file(spec)
    backend = read_backend(path)
    config = path.with_name("tokenizer_config.json")
    if eod is None and path.name == "tokenizer.json" and config.is_file():
        eod = _configured_eos(config)
    return JsonTokenizer(
        kind="huggingface", name=_display_name(path), eod=_find_eod(backend, eod, path), backend=backend
    )


def read_backend(path: Path) -> "RustTokenizer":
    """Reads a tokenizer.json.

    Raises:
        ConfigError: it is not a tokenizer file.
    """
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_buffer(read_plain(path))
    except Unreadable as error:
        raise _refused(str(path), str(error)) from None
    except Exception as error:  # the library's own are bare
        raise _refused(str(path), f"is not a tokenizer file: {error}") from error


def _refused(value: str, reason: str, fix: str = _FORM) -> ConfigError:
    return ConfigError(Problem(key="--tokenizer", value=value, reason=reason, fix=fix))


def _configured_eos(path: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, if it has one."""
    try:
        # Not by our own reader of JSON: what says "no limit" there is an integer of 31 digits.
        eos = parse(TokenizerSettings, read_plain(path)).eos_token
    except (Unreadable, Damaged) as error:
        raise _refused(
            str(path), str(error), "repair or remove it, or name the end-of-document token by --eod"
        ) from None
    return eos.content if isinstance(eos, TokenContent) else eos


def _display_name(path: Path) -> str:
    """`Qwen3-0.6B` for `.../Qwen3-0.6B/tokenizer.json`, since every such file has the same name."""
    return path.resolve().parent.name if path.stem == "tokenizer" else path.stem


def _find_eod(backend: "RustTokenizer", named: str | None, path: Path) -> int:
    for token in (named,) if named is not None else EOD_CANDIDATES:
        number: int | None = backend.token_to_id(token)
        if number is not None:
            return number
    special = [added.content for added in backend.get_added_tokens_decoder().values()]
    fix = "name the token that ends a document with --eod TOKEN"
    fix += f"; its special tokens are {', '.join(special[:10])}" if special else ""
    if named is None:
        raise _refused(str(path), "it has none of the usual end-of-document tokens", fix)
    if near := closest(named, [*special, *EOD_CANDIDATES]):
        fix = f"did you mean {near}?"
    raise ConfigError(Problem(key="--eod", value=named, reason=f"{path} has no such token", fix=fix))


def bytes_by_id(tokenizer: Tokenizer) -> npt.NDArray[np.float64] | None:
    """Count the bytes of text that each token stands for, by token id.

    None unless the vocabulary has a letter for each byte, as GPT-2's has and most since then.
    """
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
