"""A Hugging Face folder as it lies on the disk: its settings, and which tensor is in which file.
Opens headers only.

Nothing in it is executed, and no file outside of it is named by its index; files may be links, as in Hugging
Face's own cache.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from canzona_cli.checkpoint.shard_file import read_table
from canzona_cli.config.compose import Composed, compose_run
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.reading import Absent, Unreadable, parse_json, read_plain
from canzona_cli.config.schema import ModelConfig
from canzona_cli.config.tree import list_recipes
from canzona_cli.errors import ConfigError, Problem, refuse
from canzona_cli.huggingface.foreign import FILE, read_model, tensor_names
from canzona_cli.model.families import family_of, parameter_count
from canzona_cli.model.geometry import unit_shape

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
BESIDE: Final = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", GENERATION),
)
"""Files beside the weights that are copied into a run."""
Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: Final[Mapping[Dtype, tuple[str, str]]] = {
    "bf16": ("BF16", "bfloat16"),
    "fp16": ("F16", "float16"),
    "fp32": ("F32", "float32"),
}
"""Types of weights that are read and written: safetensors' names, and torch's."""
_MOST: Final = 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the folder."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """The settings and tensors of a folder, as `open_folder` read them."""

    path: Path
    model: Mapping[str, object]
    """Settings of a recipe's model section, but for its name."""
    tensors: Mapping[str, Stored]
    """The tensors by Hugging Face's name."""

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json; None where it has none."""
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    def check(self, model: ModelConfig) -> None:
        """Refuses a folder of another model.

        Raises:
            ConfigError: every setting that differs, and every tensor that is missing, is one too many, or has
            another
                shape or type.
        """
        refuse([*self._other_settings(model), *_first(self._wrong_tensors(model))])

    def _other_settings(self, model: ModelConfig) -> Iterator[Problem]:
        settings = asdict(model)
        for name, value in self.model.items():
            if settings[name] != value and name != "init_std":
                shown = str(value).lower() if isinstance(value, bool) else f"{value}"
                reason, fix = f"is {shown} in {self.path / FILE}", f"model.{name}={shown}"
                yield Problem(key=f"model.{name}", value=settings[name], reason=reason, fix=fix)

    def _wrong_tensors(self, model: ModelConfig) -> Iterator[Problem]:
        units = {name: unit for unit, name in tensor_names(model).items()}
        fix = "the folder's config.json is of another model, or its download is not complete"
        for name, unit in units.items():
            shape, stored = unit_shape(unit, model), self.tensors.get(name)
            if stored is None:
                yield Problem(key=name, reason="the folder has no such tensor", fix=fix)
            elif stored.shape != shape:
                yield Problem(key=name, value=list(stored.shape), reason=f"the model has {list(shape)} there", fix=fix)
        for name, stored in self.tensors.items():
            if name not in units and not (name == family_of(model).foreign.output and model.tied_embeddings):
                yield Problem(key=name, reason="canzona's Qwen3 has no such tensor", fix=fix)
            elif stored.dtype not in {code for code, _ in DTYPES.values()}:
                reason = f"is not one of {', '.join(DTYPES)}"
                yield Problem(key=name, value=stored.dtype, reason=reason, fix="give weights that are not quantised")


def is_hugging_face(path: Path) -> bool:
    """Tells a Hugging Face folder by its `config.json`, which nothing of a canzona run has."""
    return (path / FILE).is_file()


def open_folder(path: Path, *, key: str) -> HuggingFaceFolder:
    """Its settings and its table of tensors.

    Args:
        key: the option or setting that named it.

    Raises:
        ConfigError: it is none, or of a model that canzona has not; every reason at once.
    """
    problems: list[Problem] = []
    model: dict[str, object] = {}
    tensors: dict[str, Stored] = {}
    if not path.is_dir():
        raise ConfigError(Problem(key=key, value=path, reason="there is no such folder", fix=f"{key} takes a folder"))
    try:
        model = read_model(read_object(path / FILE))
    except ConfigError as error:
        problems += error.problems
    except Unreadable as error:
        problems.append(Problem(key=key, value=path, reason=f"its {FILE} {error}", fix="name a Hugging Face folder"))
    for file in _files(path, key, problems):
        try:
            table, size = read_table(Path(os.path.realpath(file)))  # which a link to itself does not end
            if size != file.stat().st_size:
                raise ValueError("it is not as long as its header says: its download is not complete")
        except (OSError, ValueError) as error:
            problems.append(Problem(key=key, value=file, reason=str(error), fix="download it again"))
            continue
        for name in table.keys() & tensors.keys():
            reason = f"is in {tensors[name].file.name} too, and it is unclear which one is meant"
            problems.append(Problem(key=name, value=file.name, reason=reason, fix="download the folder again"))
        tensors |= {name: Stored(file=file, dtype=dtype, shape=shape) for name, (dtype, shape) in table.items()}
    refuse(_first(iter(problems)))
    return HuggingFaceFolder(path=path, model=model, tensors=tensors)


def read_object(path: Path) -> Mapping[str, object]:
    """A JSON object.

    Raises:
        Unreadable: it is none, or cannot be read.
    """
    content = parse_json(read_plain(path))
    if not isinstance(content, dict):
        raise Unreadable("is no JSON object")
    return content


def _files(path: Path, key: str, problems: list[Problem]) -> list[Path]:
    """Its files of weights, each once, in order."""
    try:
        files = read_object(path / INDEX).get("weight_map")
    except Absent:
        if (path / WEIGHTS).is_file():
            return [path / WEIGHTS]
        reason, fix = "has no safetensors weights", f"{WEIGHTS}, or {INDEX} and its files; pickles are never read"
        problems.append(Problem(key=key, value=path, reason=reason, fix=fix))
        return []
    except Unreadable as error:
        problems.append(Problem(key=key, value=path / INDEX, reason=str(error), fix="download it again"))
        return []
    names = list(files.values()) if isinstance(files, dict) else []
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        reason = "its weight_map does not name files of this folder"
        problems.append(Problem(key=key, value=path / INDEX, reason=reason, fix="download it again"))
        return []
    return [path / name for name in sorted({*names})]


def _first(problems: Iterator[Problem]) -> list[Problem]:
    """The first few, and how many more there are: of another model all tensors are wrong."""
    listed = list(problems)
    more = [Problem(key="tensors", reason=f"and {len(listed) - _MOST} more")] if len(listed) > _MOST else []
    return listed[:_MOST] + more


def recipe_of(folder: HuggingFaceFolder, overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> Composed:
    """The run that `overrides` ask for, with the folder's model and tokenizer where they do not say otherwise.

    Without a recipe among them it is the built-in one whose model has most nearly as many parameters.

    Raises:
        ConfigError: as `compose_run`.
    """
    asked = {key_of(override) for override in overrides}
    settings = {f"model.{name}": _typed(value) for name, value in folder.model.items()}
    settings["model.name"] = text_value(folder.path.resolve().name)
    if folder.tokenizer is not None and not any(key.partition(".")[0] == "data" for key in asked):
        settings |= {"data.source": "stdlib", "data.tokenizer": text_value(str(folder.path.absolute()))}
    from_folder = [f"{key}={value}" for key, value in settings.items() if key not in asked and "model" not in asked]
    recipe = [] if "recipe" in asked else [f"recipe={_nearest(folder)}"]
    return compose_run([*recipe, *from_folder, *overrides], recipes_dirs=recipes_dirs)


def _nearest(folder: HuggingFaceFolder) -> str:
    """The built-in recipe whose model is most nearly as large."""
    sizes = {
        recipe.name: parameter_count(recipe.model).total
        for recipe in list_recipes()
        if recipe.builtin and recipe.model is not None
    }
    elements = parameter_count(ModelConfig(name="", **folder.model)).total  # type: ignore[arg-type]
    return min(sizes, key=lambda name: abs(math.log(sizes[name]) - math.log(elements)))


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
