"""Reads a Hugging Face folder: its settings, its table of tensors, and its other files.

Only the headers of safetensors files are read. No code in the folder is executed, and the folder's index may
name only files in the folder itself; these may be links, as in Hugging Face's cache. This module also
collects the files that an export writes in addition to the weights: tokenizer and generation settings.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from canzona_cli.checkpoint.huggingface.foreign import (
    FILE,
    VOCABULARY_MULTIPLE,
    StackSlice,
    ignored_keys,
    padded_vocabulary,
    positions_of,
    read_model,
    split_stack,
    tensor_names,
)
from canzona_cli.checkpoint.shard_file import read_table
from canzona_cli.checkpoint.verify import limit_problems
from canzona_cli.config.compose import Composed, compose_run
from canzona_cli.config.overrides import key_of, parse_overrides, text_value
from canzona_cli.config.tree import list_recipes
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.model.families import EMBEDDING, OUTPUT, family_of, family_problems, parameter_count
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.core.reading import Absent, Unreadable, expanded, parse_json, read_plain
from canzona_cli.core.setup import ModelConfig
from canzona_cli.records.corpus import read_corpus
from canzona_cli.records.files import RunFiles
from canzona_cli.records.words import json_text

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
EXTRA_FILES: Final = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", GENERATION),
)
"""The names of files that an import copies into the run in addition to `config.json`."""
Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: Final[Mapping[Dtype, tuple[str, str]]] = {
    "bf16": ("BF16", "bfloat16"),
    "fp16": ("F16", "float16"),
    "fp32": ("F32", "float32"),
}
"""The data types that weights may have in a folder, with their names in safetensors and in torch."""
_MOST_PROBLEMS: Final = 20
"""The maximum number of problems that are listed; in a folder of another model every tensor would be a
problem."""
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.tiktoken")
_MOST_TP: Final = 128
"""The largest tensor-parallel size for which a vocabulary may be padded."""
_IMPORTED_KEYS: Final = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of an imported `config.json` that a recipe has no settings for. An export writes them again."""


@dataclass(frozen=True, kw_only=True)
class FolderTensor:
    """The file, type and shape of a tensor in a folder."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    stacked: StackSlice | None = None
    """The tensor's place in a stack of all experts' tensors; None if the tensor is stored separately."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """The settings and the table of tensors of a Hugging Face folder (`open_folder`)."""

    path: Path
    model: Mapping[str, object]
    """The settings of a recipe's model section, except its name."""
    tensors: Mapping[str, FolderTensor]
    """The tensors by their Hugging Face names."""
    positions: int
    """The length of the longest sequence that the model was made for, in tokens."""
    ignored: tuple[str, ...]
    """The keys of `config.json` that neither canzona nor transformers knows."""
    lack: Problem | None = None
    """The reason why the folder has no weights; None if it has."""

    @property
    def tokenizer(self) -> Path | None:
        """The path of the folder's tokenizer.json; None if the folder has none."""
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    @property
    def other_tokenizer(self) -> str | None:
        """The name of a tokenizer's file that canzona cannot read; None if the folder has a tokenizer.json, or
        no tokenizer."""
        if self.tokenizer is not None:
            return None
        return next((name for name in _OTHER_TOKENIZERS if (self.path / name).is_file()), None)

    def knows_ids_of(self, tokenizer: str) -> bool:
        """Returns False if the folder has another tokenizer.json than `tokenizer`, a setting of built-in text."""
        if self.tokenizer is None:
            return True
        file = expanded(tokenizer)
        file = file / TOKENIZER if file.is_dir() else file
        with suppress(Unreadable):
            return file.resolve() == self.tokenizer.resolve() or read_plain(file) == read_plain(self.tokenizer)
        return False

    def length_warning(self, seq_length: int) -> str | None:
        """Returns a warning if sequences are longer than those that the model was made for."""
        if seq_length <= self.positions:
            return None
        return (
            f"train.seq_length={seq_length:,} is above max_position_embeddings {self.positions:,} of "
            f"{self.path / FILE}: positions beyond that are new to the model"
        )

    def check(self, model: ModelConfig) -> None:
        """Checks that the folder contains this model.

        Raises:
            ConfigError: the folder has no weights, or settings or tensors differ. The error lists every setting
                that differs, other than `init_std`, and the first 20 tensors that are missing, unexpected, or of
                another shape or type.
        """
        refuse([self.lack] if self.lack else [])
        other_family = family_problems(self.as_config(), model, str(self.path))
        wrong_tensors = limit_problems([*self._wrong_tensors(model)], _MOST_PROBLEMS, key="tensors")
        refuse([*other_family, *self._other_settings(model), *wrong_tensors])

    def as_config(self) -> ModelConfig:
        """Returns the folder's model as a configuration without a name."""
        return ModelConfig(name="", **self.model)  # type: ignore[arg-type]

    def rows(self, model: ModelConfig) -> int | None:
        """Returns the number of rows that the folder's embedding and output layer have, if the model has the same
        vocabulary, or pads it as Megatron does for some tensor-parallel size; None otherwise."""
        rows = self.model["vocab_size"]
        assert isinstance(rows, int)
        is_padded = model.vocab_size % VOCABULARY_MULTIPLE == 0
        is_padded &= rows < model.vocab_size < rows + _MOST_TP * VOCABULARY_MULTIPLE
        return rows if is_padded or model.vocab_size == rows else None

    def _other_settings(self, model: ModelConfig) -> Iterator[Problem]:
        """Yields a problem for each setting, other than `init_std`, that differs from the model's."""
        settings = asdict(model)
        for name, value in self.model.items():
            if name == "vocab_size" and self.rows(model) is not None:
                continue
            if settings[name] != value and name != "init_std":
                shown = json.dumps(value)
                reason, fix = f"is {shown} in {self.path / FILE}", f"model.{name}={shown}"
                yield Problem(key=f"model.{name}", value=settings[name], reason=reason, fix=fix)

    def _wrong_tensors(self, model: ModelConfig) -> Iterator[Problem]:
        """Yields a problem for each tensor that the model lacks or has in another form, and for each missing
        tensor."""
        units = {name: unit for unit, name in tensor_names(model).items()}
        fix = "the folder's config.json belongs to another model, or the download is not complete"
        for name, unit in units.items():
            shape, stored = unit_shape(unit, model), self.tensors.get(name)
            if unit in (EMBEDDING, OUTPUT) and (rows := self.rows(model)) is not None:
                shape = (rows, *shape[1:])
            if stored is None:
                yield Problem(key=name, reason="the folder has no such tensor", fix=fix)
            elif stored.shape != shape:
                reason = f"the model's tensor has shape {list(shape)}"
                yield Problem(key=name, value=list(stored.shape), reason=reason, fix=fix)
        for name, stored in self.tensors.items():
            if name not in units and not (name == family_of(model).foreign.output and model.tied_embeddings):
                title = family_of(model).title
                yield Problem(key=name, reason=f"canzona's {title} has no such tensor", fix=fix)
            elif stored.dtype not in {code for code, _ in DTYPES.values()}:
                reason = f"is not one of {', '.join(DTYPES)}"
                yield Problem(key=name, value=stored.dtype, reason=reason, fix="give weights that are not quantised")


def is_hugging_face(path: Path) -> bool:
    """Returns True if the folder has a `config.json`, which run directories and checkpoints never have."""
    return (path / FILE).is_file()


def open_folder(path: Path, *, key: str) -> HuggingFaceFolder:
    """Reads the settings and the table of tensors of a Hugging Face folder.

    Args:
        key: the option or setting that named the folder, for messages.

    Raises:
        ConfigError: the path is not a Hugging Face folder, or its model is not supported. The error lists the
            first 20 reasons.
    """
    problems: list[Problem] = []
    tree: Mapping[str, object] = {}
    model: dict[str, object] = {}
    tensors: dict[str, FolderTensor] = {}
    if not path.is_dir():
        raise ConfigError(Problem(key=key, value=path, reason="there is no such folder", fix=f"{key} takes a folder"))
    try:
        tree = read_object(path / FILE)
        model = read_model(tree)
    except ConfigError as error:
        problems += error.problems
    except Unreadable as error:
        problems.append(Problem(key=key, value=path, reason=f"its {FILE} {error}", fix="name a Hugging Face folder"))
    lacking: list[Problem] = []
    for file in _files(path, key, problems, lacking):
        try:
            # realpath does not raise for a link to itself, unlike Path.resolve; then read_table fails.
            table, size = read_table(Path(os.path.realpath(file)))
            if size != file.stat().st_size:
                raise ValueError("its size does not match its header: the download is not complete")
        except (OSError, ValueError) as error:
            problems.append(Problem(key=key, value=file, reason=str(error), fix="download it again"))
            continue
        for name in table.keys() & tensors.keys():
            reason = f"is also in {tensors[name].file.name}"
            problems.append(Problem(key=name, value=file.name, reason=reason, fix="download the folder again"))
        for name, (dtype, shape) in table.items():
            experts = {
                expert: FolderTensor(file=file, dtype=dtype, shape=(stack_slice.rows, shape[-1]), stacked=stack_slice)
                for expert, stack_slice in split_stack(name, shape)
            }
            tensors |= experts or {name: FolderTensor(file=file, dtype=dtype, shape=shape)}
    refuse(limit_problems([*problems, *lacking] if problems else [], _MOST_PROBLEMS, key="tensors"))
    return HuggingFaceFolder(
        path=path,
        model=model,
        tensors=tensors,
        positions=positions_of(tree),
        ignored=ignored_keys(tree),
        lack=next(iter(lacking), None),
    )


def read_object(path: Path) -> Mapping[str, object]:
    """Reads a JSON object.

    Raises:
        Unreadable: the file does not contain a JSON object, or cannot be read.
    """
    content = parse_json(read_plain(path))
    if not isinstance(content, dict):
        raise Unreadable("is not a JSON object")
    return content


def _files(path: Path, key: str, problems: list[Problem], lacking: list[Problem]) -> list[Path]:
    """Returns a folder's files of weights, sorted by name. If there are none, appends the reason to `lacking`, if
    they cannot be determined, to `problems`; then returns an empty list."""
    try:
        weight_map = read_object(path / INDEX).get("weight_map")
    except Absent:
        if os.path.lexists(path / WEIGHTS):
            if (path / WEIGHTS).is_file():
                return [path / WEIGHTS]
            problems.append(Problem(key=key, value=path / WEIGHTS, reason="is not a file", fix="download it again"))
            return []
        reason, fix = "has no safetensors weights", f"{WEIGHTS}, or {INDEX} and its files; pickles are never read"
        lacking.append(Problem(key=key, value=path, reason=reason, fix=fix))
        return []
    except Unreadable as error:
        problems.append(Problem(key=key, value=path / INDEX, reason=str(error), fix="download it again"))
        return []
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        reason = "its weight_map does not name files of this folder"
        problems.append(Problem(key=key, value=path / INDEX, reason=reason, fix="download it again"))
        return []
    return [path / name for name in sorted({*names})]


def compose_with_weights(overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> Composed:
    """Composes the configuration of a run. If its weights come from a Hugging Face folder, built-in text gets the
    folder's tokenizer unless `overrides` choose data, and without a recipe the recipe is derived from the folder.

    Raises:
        ConfigError: see `compose_run` and `open_folder`.
    """
    key = "checkpoint.weights_from"
    parsed = parse_overrides(overrides)
    path = expanded(str(parsed.values.get(key) or ""))
    if not is_hugging_face(path):
        return compose_run(overrides, recipes_dirs=recipes_dirs)
    if "recipe" not in parsed.groups:
        return compose_from_folder(open_folder(path, key=key), overrides, recipes_dirs)
    composed = compose_run(overrides, recipes_dirs=recipes_dirs)
    if composed.config.data.source != "stdlib" or _chooses_data(overrides):
        return composed
    folder = open_folder(path, key=key)
    if folder.tokenizer is None:
        return replace(composed, warnings=(*composed.warnings, *_unknown_tokenizer(folder)))
    if folder.knows_ids_of(before := composed.config.data.tokenizer):
        return composed
    tokenizer = f"data.tokenizer={text_value(str(path.resolve()))}"
    composed = compose_run([*overrides, tokenizer], recipes_dirs=recipes_dirs)
    warning = f"{tokenizer}, whose ids the weights know, replaces the recipe's {before}"
    return replace(composed, warnings=(*composed.warnings, warning))


def _chooses_data(overrides: Sequence[str]) -> bool:
    chosen = {"data", "data.source", "data.tokenizer", "data.path", "data.blend"}
    return not chosen.isdisjoint(map(key_of, overrides))


def _unknown_tokenizer(folder: HuggingFaceFolder) -> Iterator[str]:
    """Yields a warning if the folder has a tokenizer that canzona cannot read."""
    if (other := folder.other_tokenizer) is not None:
        from canzona_cli.data.tokenizers import tokenizer_line

        text = (
            "text is encoded by the recipe's tokenizer, which the weights do not know, unless a data setting names one"
        )
        yield f"{folder.path} has {other}, but no {TOKENIZER}: {text}; {tokenizer_line(folder.path)}"


def compose_from_folder(
    folder: HuggingFaceFolder, overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()
) -> Composed:
    """Composes the configuration of a run with the folder's model and tokenizer. `overrides` take precedence.

    If `overrides` do not name a recipe, the built-in recipe with the closest number of parameters is used. Its
    sequences are made shorter if the model was not made for their length.

    Raises:
        ConfigError: see `compose_run`.
    """
    overridden = {key_of(override) for override in overrides}
    settings = {f"model.{name}": json.dumps(value) for name, value in folder.model.items()}
    vocabulary = folder.model["vocab_size"]
    assert isinstance(vocabulary, int)
    tp = {key_of(override): override.partition("=")[2] for override in overrides}.get("parallel.tp", "1")
    padded = padded_vocabulary(vocabulary, int(tp) if tp.isdecimal() and 0 < int(tp) <= _MOST_TP else 1)
    settings["model.vocab_size"] = str(padded)
    settings["model.name"] = text_value(folder.path.resolve().name)
    if folder.tokenizer is not None and not _chooses_data(overrides):
        settings |= {"data.source": "stdlib", "data.tokenizer": text_value(str(folder.path.resolve()))}
    from_folder = [
        f"{key}={value}" for key, value in settings.items() if key not in overridden and "model" not in overridden
    ]
    recipe = [] if "recipe" in overridden else [f"recipe={_nearest_recipe(folder)}"]
    composed = compose_run([*recipe, *from_folder, *overrides], recipes_dirs=recipes_dirs)
    warnings: list[str] = []
    if "train.seq_length" in overridden:
        warnings += filter(None, [folder.length_warning(composed.config.train.seq_length)])
    elif composed.config.train.seq_length > folder.positions:
        shorter = [f"train.seq_length={folder.positions}"]
        composed = compose_run([*recipe, *from_folder, *shorter, *overrides], recipes_dirs=recipes_dirs)
    if not _chooses_data(overrides):
        warnings += _unknown_tokenizer(folder)
    if padded != vocabulary and composed.config.model.vocab_size == padded:
        warnings.append(f"the vocabulary of {vocabulary:,} is padded to {padded:,}, as Megatron pads it")
    if folder.ignored:
        warnings.append(f"{FILE} has keys that transformers ignores for this model, too: {', '.join(folder.ignored)}")
    return replace(composed, warnings=(*composed.warnings, *warnings))


def _nearest_recipe(folder: HuggingFaceFolder) -> str:
    """Returns the name of the built-in recipe, of the same family as the folder's model, whose number of
    parameters is closest by ratio."""
    model = folder.as_config()
    sizes = {
        recipe.name: parameter_count(recipe.model).total
        for recipe in list_recipes()
        if recipe.builtin and recipe.model is not None and family_of(recipe.model) is family_of(model)
    }
    parameters = parameter_count(model).total
    return min(sizes, key=lambda name: abs(math.log(sizes[name]) - math.log(parameters)))


@dataclass(frozen=True, kw_only=True)
class ExtraFiles:
    """The files that an export writes in addition to weights and `config.json`, and keys to add to
    `config.json`."""

    copies: tuple[Path, ...] = ()
    """The files to copy."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The texts of other files, by name."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The keys to add to `config.json`."""
    tokenizer: str = ""
    """The origin of the tokenizer, for messages; empty if there is no tokenizer."""


def collect_extra_files(run: RunFiles, tokenizer: Path | None) -> ExtraFiles:
    """Collects the files that an export of a run writes in addition to the weights.

    If the run's first weights were imported from a folder with a tokenizer, that folder's files are copied.
    Otherwise files are written for the tokenizer of the text that the run was trained on.

    Args:
        tokenizer: A folder with another tokenizer to use; None for the run's tokenizer.

    Raises:
        ConfigError: the folder `tokenizer` has no tokenizer.json, or the run's corpus.json is damaged.
    """
    if tokenizer is not None and not (tokenizer / TOKENIZER).is_file():
        fix = f"name a folder with a {TOKENIZER}"
        raise ConfigError(Problem(key="--tokenizer", value=tokenizer, reason=f"has no {TOKENIZER}", fix=fix))
    copies: dict[str, Path] = {}
    settings: dict[str, object] = {}
    if run.huggingface.is_dir():
        copies = _existing_extra_files(run.huggingface)
        with suppress(Unreadable):
            imported = read_object(run.huggingface / FILE)
            settings = {key: imported[key] for key in _IMPORTED_KEYS if imported.get(key) is not None}
    if tokenizer is not None:
        copies = {name: path for name, path in copies.items() if name == GENERATION} | _existing_extra_files(tokenizer)
    if TOKENIZER in copies:
        generation = {GENERATION: _generation(settings.get("eos_token_id"))}
        files = ExtraFiles(texts=generation, tokenizer=str(copies[TOKENIZER].parent))
    else:  # without tokenizer.json, the folder's other files would not match the text's tokenizer
        files, copies = _corpus_tokenizer_files(run), {}
    return replace(
        files,
        copies=tuple(copies.values()),
        texts={name: text for name, text in files.texts.items() if name not in copies},
        settings={**settings, **files.settings},
    )


def _existing_extra_files(folder: Path) -> dict[str, Path]:
    """Returns the paths of the files named in `EXTRA_FILES` that a folder has, by name."""
    return {path.name: path for path in (folder / name for name in EXTRA_FILES) if path.is_file()}


def _corpus_tokenizer_files(run: RunFiles) -> ExtraFiles:
    """Returns the files for the tokenizer of the text that the run was trained on; without a tokenizer if
    that tokenizer is not known."""
    try:
        corpus = read_corpus(run)
    except FileNotFoundError:
        return ExtraFiles(texts={GENERATION: _generation(None)})
    # Loads numpy, which reading a folder does not need.
    from canzona_cli.data.corpus import saved_tokenizer
    from canzona_cli.data.indexed import saved_tokenizer_path

    path, eod = saved_tokenizer_path(corpus.prefix), corpus.eod
    if corpus.tokenizer == "byte":
        text = byte_tokenizer()
    elif path.is_file():
        saved_tokenizer(corpus.prefix, corpus.tokenizer, eod)  # refuses a damaged file
        text = path.read_text(encoding="utf-8")
    else:
        return ExtraFiles(texts={GENERATION: _generation(eod)})
    return ExtraFiles(
        texts={TOKENIZER: text, "tokenizer_config.json": _tokenizer_settings(text, eod), GENERATION: _generation(eod)},
        settings={} if eod is None else {"eos_token_id": eod},
        tokenizer=corpus.tokenizer,
    )


def _tokenizer_settings(text: str, eod: int | None) -> str:
    """Returns the text of `tokenizer_config.json`, which names the end-of-document token and a class that
    reads any tokenizer.json.

    Args:
        text: the text of tokenizer.json.
        eod: the id of the end-of-document token; None if the tokenizer has none.
    """
    from tokenizers import Tokenizer

    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if eod is not None:
        settings["eos_token"] = Tokenizer.from_str(text).id_to_token(eod)
    return json_text(settings) + "\n"


def _generation(eod: object) -> str:
    """Returns the text of `generation_config.json`, which names the token that ends a document."""
    return json_text({} if eod is None else {"eos_token_id": eod}) + "\n"


def byte_tokenizer() -> str:
    """Returns the text of tokenizer.json for the byte tokenizer, whose ids are the bytes of UTF-8, and 256
    for the end of a document.

    A tokenizer.json represents each byte by a printable character: the character with the byte's code or, if
    that is not printable, a character with a code point from 256 on (GPT-2's `bytes_to_unicode`).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from canzona_cli.data.tokenizers import BYTE_VALUES, END_OF_TEXT

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(BYTE_VALUES, 2 * BYTE_VALUES))
    vocabulary = {chr(byte if byte in printable else next(substitutes)): byte for byte in range(BYTE_VALUES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    text: str = tokenizer.to_str()
    return text
