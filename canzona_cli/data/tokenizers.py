"""Converts text to token ids: raw bytes, a byte-pair encoding trained on the text, or a local tokenizer.json.

All tokenizers take undecoded bytes: the byte tokenizer needs no decoding, and the other tokenizers count the
invalid characters that they replace. Text never produces a special token. `<|endoftext|>` in a document is
ordinary text; only the writer of a pair adds the end-of-document token.
"""

import hashlib
import json
import re
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.reading import Damaged, Unreadable, expanded, parse, read_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
TokenizerKind = Literal["byte", "bpe", "huggingface"]

END_OF_TEXT = "<|endoftext|>"
EOD_CANDIDATES = (
    END_OF_TEXT,
    "</s>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|eot_id|>",
    "[SEP]",
)
"""The names of end-of-document tokens in published tokenizers, in the order in which they are tried."""

BYTE_VALUES = 256
REPLACEMENT = "\ufffd"
_MOST_IDS = 1 << 24
"""The limit on ids in a tokenizer.json. A file may give a token any 32-bit id, and canzona's tables have an
entry for each id up to the largest."""
_EXPECTED_FILE = "give the tokenizer.json of a fast tokenizer (not tokenizer.model or tokenizer_config.json)"


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Returns the type in which Megatron stores ids below `vocab_size` (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def narrow(ids: Sequence[int], vocab_size: int) -> TokenArray:
    """Converts ids to an array of `token_dtype(vocab_size)`."""
    if token_dtype(vocab_size) is np.uint16:
        return np.asarray(ids, dtype=np.uint16)
    return np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class ByteTokenizer:
    """The tokenizer in which every byte is a token and id 256 ends a document. It is lossless for any
    input."""

    kind: Literal["byte"] = "byte"
    name: str = "byte"
    vocab_size: int = BYTE_VALUES + 1
    """One more than the largest id."""
    eod: int = BYTE_VALUES
    """The id that ends a document; encoded text never contains it."""
    replaced: int = 0
    """The number of invalid UTF-8 sequences that were replaced; always 0."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Returns the token ids of each text as one 1-D array per text; eod is not added."""
        # All texts are converted in one call and returned as views, because there may be many small texts.
        ids = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.uint16)
        ends = list(accumulate(map(len, texts), initial=0))
        return [ids[start:end] for start, end in pairwise(ends)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, with U+FFFD for ids other than bytes and for invalid UTF-8."""
        parts = (bytes([token]) if token < BYTE_VALUES else REPLACEMENT.encode() for token in ids)
        return b"".join(parts).decode(errors="replace")

    unknown: None = None
    """The id of text that the vocabulary does not have; always None."""

    def to_json(self) -> None:
        """Returns None, because this tokenizer needs no tokenizer.json."""


@dataclass
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, configured for pre-training data."""

    kind: TokenizerKind
    name: str
    eod: int
    backend: "RustTokenizer"
    vocab_size: int = field(init=False)
    replaced: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Published files often truncate to the model's context, pad batches, and parse special tokens in
        # text. Each of these would silently damage a corpus.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        # Ids may have gaps, so the largest id may exceed the number of entries.
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Returns the token ids of each text as one 1-D array per text; eod is not added.

        Raises:
            ConfigError: the tokenizer cannot encode a text.
        """
        decoded = [self._text(text) for text in texts]
        try:
            encodings = self.backend.encode_batch_fast(decoded, add_special_tokens=False)
        except BaseException as error:  # for example, a vocabulary without a token for unknown text
            raise _tokenizer_error(error, self.name, "cannot tokenise this text") from error
        return [narrow(encoding.ids, self.vocab_size) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens as they are written; unknown ids are skipped."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def unknown(self) -> int | None:
        """The id of all text that the vocabulary does not have; None if every text can be encoded."""
        model = json.loads(self.backend.to_str())["model"]
        token = model.get("unk_token")
        number = model.get("unk_id") if token is None else self.backend.token_to_id(token)
        return number if isinstance(number, int) else None

    def to_json(self) -> str:
        """Returns the contents of its tokenizer.json."""
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
class TokenSettings:
    """The settings of one token in a tokenizer_config.json."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The part of a Hugging Face tokenizer_config.json that canzona reads."""

    eos_token: str | TokenSettings | None = None
    added_tokens_decoder: Mapping[int, TokenSettings] = field(default_factory=dict)


Tokenizer = ByteTokenizer | JsonTokenizer

SAMPLE_BYTES = 64 << 20
"""The maximum number of bytes of text on which a vocabulary is trained. More text hardly changes the merges,
but costs time and memory."""
MIN_VOCAB_SIZE = BYTE_VALUES + 1
"""The smallest vocabulary: all bytes and the end of a document."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The regular expression that splits text into words before merging, from the tokenizer.json of Qwen3."""


def train_bpe(sample: Iterable[bytes], vocab_size: int) -> JsonTokenizer:
    """Trains a byte-level byte-pair encoding on `sample`. The same texts always give the same tokenizer.

    Training is one long call into Rust, during which Python cannot handle Ctrl-C; the signal then ends the process.

    Args:
        sample: UTF-8 texts, preferably at most `SAMPLE_BYTES` in total.
        vocab_size: the number of entries, at least `MIN_VOCAB_SIZE`. A small sample may give fewer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # The alphabet has all 256 bytes, so that any text can be encoded, in a fixed order, so that ids are
        # reproducible.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text.decode("utf-8", errors="replace") for text in sample]
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tokenizer.train_from_iterator(texts, trainer)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return bpe_from_json(tokenizer.to_str())


def bpe_from_json(text: str) -> JsonTokenizer:
    """Loads a tokenizer from the JSON that `train_bpe` made."""
    from tokenizers import Tokenizer as RustTokenizer

    backend = RustTokenizer.from_str(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    vocab_size = backend.get_vocab_size(with_added_tokens=True)
    eod = _find_eod(backend, END_OF_TEXT, Path("bpe"))
    return JsonTokenizer(kind="bpe", name=f"bpe-{vocab_size}-{digest}", eod=eod, backend=backend)


def tokenizer_line(folder: Path) -> str:
    """Returns the advice to write a folder's tokenizer.json from the files of another kind of tokenizer."""
    path = str(folder)
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained({path!r}).save_pretrained({path!r})"
    packages = "transformers sentencepiece" if (folder / "tokenizer.model").is_file() else "transformers"
    return f"write it with (pip install {packages}): python -c {shlex.quote(code)}"


def tokenizer_file(spec: str) -> Path:
    """Returns the path of the tokenizer.json that `spec` names: a file, or a folder that contains the file.

    Raises:
        ConfigError: there is no such file.
    """
    path = expanded(spec)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    reason = "there is no such file; a tokenizer is byte, bpe, or a local tokenizer.json (nothing is downloaded)"
    fix = "give byte, bpe, or the path of a tokenizer.json"
    if path.is_dir():
        reason = "this folder has no tokenizer.json, which is the file of a fast tokenizer"
        fix = tokenizer_line(path)
    elif re.fullmatch(r"[^./~][^/]*/[^/]+", spec) and not spec.endswith(".json"):  # OWNER/MODEL on the hub
        fix = f"hf download {spec} tokenizer.json --local-dir ., then --tokenizer tokenizer.json"
    raise ConfigError(Problem("--tokenizer", reason, fix, value=spec))


def load_json_tokenizer(spec: str, eod: str | None = None) -> JsonTokenizer:
    """Loads a local tokenizer.json, with the additional tokens of the tokenizer_config.json in the same
    folder. For a file with another name, tokenizer_config.json is ignored.

    Args:
        spec: the path of the file, or of its folder.
        eod: the token that ends a document; None for the eos_token of tokenizer_config.json, or else for the
            first of `EOD_CANDIDATES` that the tokenizer has.

    Raises:
        ConfigError: there is no such file, it is not a tokenizer, its tokenizer_config.json cannot be used, or
            it has no end-of-document token.
    """
    path = tokenizer_file(spec)
    backend = read_backend(path)
    eos = _apply_config(backend, path.with_name("tokenizer_config.json")) if path.name == "tokenizer.json" else None
    eod_id = _find_eod(backend, eod or eos, path)
    return JsonTokenizer(kind="huggingface", name=_display_name(path), eod=eod_id, backend=backend)


def read_backend(path: Path) -> "RustTokenizer":
    """Reads a tokenizer.json.

    Raises:
        ConfigError: the file is not a tokenizer, cannot be read, or has an id of `_MOST_IDS` or more.
    """
    from tokenizers import Tokenizer as RustTokenizer

    try:
        backend = RustTokenizer.from_buffer(read_plain(path))
    except Unreadable as error:
        raise ConfigError(Problem("--tokenizer", str(error), _EXPECTED_FILE, value=str(path))) from None
    except BaseException as error:
        raise _tokenizer_error(error, str(path), "is not a tokenizer file") from error
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= _MOST_IDS:
        reason = f"has a token with the id {largest:,}, which is too large for an embedding"
        raise ConfigError(Problem("--tokenizer", reason, _EXPECTED_FILE, value=str(path)))
    return backend


def _tokenizer_error(error: BaseException, value: str, what: str) -> ConfigError:
    """Returns a ConfigError for an error of the tokenizers library; re-raises other errors, such as
    Ctrl-C."""
    # The library raises plain Exception or, after a panic in Rust, a PanicException, which is a
    # BaseException.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    message = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(Problem("--tokenizer", f"{what}: {message}", _EXPECTED_FILE, value=value))


def _apply_config(backend: "RustTokenizer", path: Path) -> str | None:
    """Adds the tokens that only tokenizer_config.json has to the tokenizer, as transformers does.

    Returns:
        The eos_token of the tokenizer_config.json; None if there is none.

    Raises:
        ConfigError: the file cannot be read, or it gives a token another id than the tokenizer.
    """
    from tokenizers import AddedToken

    if not path.is_file():
        return None
    fix = "repair or remove it; without it, canzona looks for the usual end-of-document tokens, or uses --eod TOKEN"
    try:
        # Not `parse_json`, because model_max_length may be an integer of 31 digits ("no limit").
        config = parse(TokenizerSettings, read_plain(path))
    except (Unreadable, Damaged) as error:
        raise ConfigError(Problem("--tokenizer", str(error), fix, value=str(path))) from None
    for token_id, token in sorted(config.added_tokens_decoder.items()):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([AddedToken(**asdict(token))])
        if (own_id := backend.token_to_id(token.content)) != token_id:
            reason = f"it gives {token.content!r} the id {token_id}, but tokenizer.json gives it {own_id}"
            raise ConfigError(Problem("--tokenizer", reason, fix, value=str(path)))
    return config.eos_token.content if isinstance(config.eos_token, TokenSettings) else config.eos_token


def _display_name(path: Path) -> str:
    """Returns the name to show for a tokenizer file: `Qwen3-0.6B` for the tokenizer.json in a Hugging Face
    folder of this name, `new/tokenizer.json` in a folder `new` without other files of a model; otherwise the
    file's name without its extension."""
    if path.name != "tokenizer.json":
        return path.stem
    folder = path.resolve().parent
    published = any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    return folder.name if published else f"{folder.name}/{path.name}"


def _find_eod(backend: "RustTokenizer", name: str | None, path: Path) -> int:
    """Returns the id of the token `name` or, if that is None, of the first of `EOD_CANDIDATES` that the
    tokenizer has.

    Raises:
        ConfigError: there is no such token.
    """
    candidates = EOD_CANDIDATES if name is None else (name,)
    for token in candidates:
        token_id: int | None = backend.token_to_id(token)
        if token_id is not None:
            return token_id
    special = [added.content for added in backend.get_added_tokens_decoder().values()]
    if name is not None:
        near = get_close_matches(name, [*special, *EOD_CANDIDATES, *backend.get_vocab()], n=3)
        fix = f"did you mean {' or '.join(near)}?" if near else _eod_fix(special)
        raise ConfigError(Problem("--eod", f"{path} has no such token", fix, value=name))
    reason = "it has none of the usual end-of-document tokens"
    raise ConfigError(Problem("--tokenizer", reason, _eod_fix(special), value=str(path)))


def _eod_fix(special: Sequence[str]) -> str:
    if not special:
        return "name the token that ends a document with --eod TOKEN"
    shown = ", ".join(special[:10]) + (f" and {len(special) - 10} more" if len(special) > 10 else "")
    return f"name the token that ends a document with --eod TOKEN; its special tokens are {shown}"


def bytes_by_id(tokenizer: Tokenizer) -> npt.NDArray[np.float64] | None:
    """Returns the number of bytes of text for each token id, shape [vocab_size]; special tokens have 0.

    Returns None unless the tokenizer is byte-level, as GPT-2's and most later tokenizers are: their
    vocabularies write each byte as one character.
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
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=False).items():
        values[token_id] = len(token)
    for added in tree["added_tokens"]:
        values[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return values
