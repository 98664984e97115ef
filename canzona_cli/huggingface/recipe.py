"""A recipe for the model in a Hugging Face folder."""

import math
from collections.abc import Sequence
from pathlib import Path

from canzona_cli.config.compose import Composed, compose_run
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.schema import ModelConfig
from canzona_cli.config.tree import list_recipes
from canzona_cli.huggingface.folder import HuggingFaceFolder
from canzona_cli.model.families import parameter_count


def recipe_of(found: HuggingFaceFolder, overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> Composed:
    """The run that `overrides` ask for, with the folder's model and tokenizer where they do not say otherwise.

    Without a recipe among them it is the built-in one whose model has most nearly as many parameters.

    Raises:
        ConfigError: as `compose_run`.
    """
    asked = {key_of(override) for override in overrides}
    settings = {f"model.{name}": _typed(value) for name, value in found.model.items()}
    settings["model.name"] = text_value(found.path.resolve().name)
    if found.tokenizer is not None and not any(key.partition(".")[0] == "data" for key in asked):
        settings |= {"data.source": "stdlib", "data.tokenizer": text_value(str(found.path.absolute()))}
    own = [f"{key}={value}" for key, value in settings.items() if key not in asked and "model" not in asked]
    recipe = [] if "recipe" in asked else [f"recipe={_nearest(found)}"]
    return compose_run([*recipe, *own, *overrides], recipes_dirs=recipes_dirs)


def _nearest(found: HuggingFaceFolder) -> str:
    """The built-in recipe whose model is most nearly as large."""
    sizes = {
        recipe.name: parameter_count(recipe.model).total
        for recipe in list_recipes()
        if recipe.builtin and recipe.model is not None
    }
    wanted = parameter_count(ModelConfig(name="", **found.model)).total  # type: ignore[arg-type]
    return min(sizes, key=lambda name: abs(math.log(sizes[name]) - math.log(wanted)))


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
