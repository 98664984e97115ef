"""The files beside exported weights: the tokenizer that the run's text was made with, and how to generate."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from canzona_cli.config.reading import Unreadable
from canzona_cli.data.sidecar import saved_tokenizer_path
from canzona_cli.data.tokenizers import BYTE_VALUES, END_OF_TEXT
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.huggingface.folder import BESIDE, GENERATION, TOKENIZER, read_object
from canzona_cli.huggingface.foreign import FILE
from canzona_cli.run.corpus import read_corpus
from canzona_cli.run.files import RunFiles
from canzona_cli.run.words import json_text

_KEPT: Final = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of an imported `config.json` that a recipe does not have."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Files to write beside the weights, and what they add to `config.json`."""

    copies: tuple[Path, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    tokenizer: str = ""
    """The origin of the tokenizer, for people; empty where there is none."""


def beside(run: RunFiles, tokenizer: Path | None) -> Beside:
    """Collects a run's files: from the folder of its first weights, else from the text it was trained on.

    Args:
        tokenizer: a folder whose tokenizer to take instead.

    Raises:
        ConfigError: that folder has none; the run's corpus.json is damaged.
    """
    if tokenizer is not None and not (tokenizer / TOKENIZER).is_file():
        fix = f"name a folder with a {TOKENIZER}"
        raise ConfigError(Problem(key="--tokenizer", value=tokenizer, reason=f"has no {TOKENIZER}", fix=fix))
    copies: dict[str, Path] = {}
    settings: dict[str, object] = {}
    if run.huggingface.is_dir():
        copies = _files(run.huggingface)
        with suppress(Unreadable):
            there = read_object(run.huggingface / FILE)
            settings = {key: there[key] for key in _KEPT if there.get(key) is not None}
    if tokenizer is not None:
        copies = {name: path for name, path in copies.items() if name == GENERATION} | _files(tokenizer)
    if TOKENIZER in copies:
        generation = {GENERATION: _generation(settings.get("eos_token_id"))}
        files = Beside(texts=generation, tokenizer=str(copies[TOKENIZER].parent))
    else:  # the folder's other files are of another tokenizer than the text's
        files, copies = _of_the_text(run), {}
    return replace(
        files,
        copies=tuple(copies.values()),
        texts={name: text for name, text in files.texts.items() if name not in copies},
        settings={**settings, **files.settings},
    )


def _files(folder: Path) -> dict[str, Path]:
    """Lists the files beside a folder's weights, by name."""
    return {path.name: path for path in (folder / name for name in BESIDE) if path.is_file()}


def _of_the_text(run: RunFiles) -> Beside:
    try:
        corpus = read_corpus(run)
    except FileNotFoundError:
        return Beside(texts={GENERATION: _generation(None)})
    path, eod = saved_tokenizer_path(corpus.prefix), corpus.eod
    if corpus.tokenizer == "byte":
        text = byte_tokenizer()
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        return Beside(texts={GENERATION: _generation(eod)})
    return Beside(
        texts={TOKENIZER: text, "tokenizer_config.json": _settings_of(text, eod), GENERATION: _generation(eod)},
        settings={} if eod is None else {"eos_token_id": eod},
        tokenizer=corpus.tokenizer,
    )


def _settings_of(text: str, eod: int | None) -> str:
    """`tokenizer_config.json`: the class that reads any tokenizer.json,
    and the token that ends a document."""
    from tokenizers import Tokenizer

    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if eod is not None:
        settings["eos_token"] = Tokenizer.from_str(text).id_to_token(eod)
    return json_text(settings) + "\n"


def _generation(eod: object) -> str:
    return json_text({} if eod is None else {"eos_token_id": eod}) + "\n"


def byte_tokenizer() -> str:
    """tokenizer.json of the byte tokenizer: ids are the bytes of UTF-8, and 256 ends a document.

    In such files a byte is a printable character: itself, or one from 256 on (GPT-2's `bytes_to_unicode`).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTE_VALUES, 2 * BYTE_VALUES))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(BYTE_VALUES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    text: str = tokenizer.to_str()
    return text
