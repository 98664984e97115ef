"""`canzona recipes`: lists, shows and copies recipes, and derives them from Hugging Face models."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from canzona_cli.cli.commands.output import (
    AsJson,
    Destination,
    Force,
    RecipesDirs,
    key_values,
    option_argument,
    warn_about,
)
from canzona_cli.cli.commands.output import show as show_page
from canzona_cli.config.overrides import parse_overrides
from canzona_cli.config.recipes import check_destination, is_file_name, recipe_text, short_recipe_text, write_recipe
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.model.families import parameter_count
from canzona_cli.core.reading import display_path, expanded, read_yaml
from canzona_cli.records.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from canzona_cli.config.compose import Composed
    from canzona_cli.config.schema import RunConfig
    from canzona_cli.config.tree import RecipeInfo

JSON_VERSION = 1
"""The version of the JSON of these commands. New fields do not change it."""
app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, option_argument("recipe", "The name or the file of a recipe.")]
OverrideList = Annotated[list[str] | None, key_values("Settings to change.")]


@app.command("list")
def list_(as_json: AsJson = False, recipes_dir: RecipesDirs = None) -> None:
    """List your recipes and the built-in ones."""
    from canzona_cli.cli.views.page import Table
    from canzona_cli.config.tree import list_recipes

    recipes = list_recipes(recipes_dir or ())
    models = {recipe.name: recipe.model for recipe in recipes}
    sizes = {name: 0 if model is None else parameter_count(model).total for name, model in models.items()}
    recipes.sort(key=lambda recipe: (recipe.builtin, sizes[recipe.name]))
    if as_json:
        listed = [{**_content(recipe), "parameters": sizes[recipe.name] or None} for recipe in recipes]
        show_page({"version": JSON_VERSION, "recipes": listed})
        return
    has_own = any(not recipe.builtin for recipe in recipes)
    table = Table()
    table.add_column("recipe", no_wrap=True)
    table.add_numbers("params", "ranks")
    for title in ("cluster", "optimizer"):
        table.add_column(title, no_wrap=True)
    table.add_words("description", *(["from"] if has_own else []))
    for recipe in recipes:
        origin = "built-in" if recipe.builtin else display_path(recipe.path)
        cells = [
            recipe.name,
            "?" if recipe.model is None else count(sizes[recipe.name]),
            "?" if recipe.gpus is None else str(recipe.gpus),
            recipe.cluster,
            recipe.optimizer,
            f"cannot be read: {recipe.error}" if recipe.error else recipe.description,
            origin + (", shadows the built-in" if recipe.shadows else ""),
        ]
        table.add_row(*cells[: len(table.columns)], style="yellow" if recipe.error or recipe.shadows else "")
    show_page(table)


@app.command()
def show(name: Name, overrides: OverrideList = None, as_json: AsJson = False, recipes_dir: RecipesDirs = None) -> None:
    """Print a composed recipe and the files it comes from.

    Settings that are null are chosen when a run starts.
    """
    from canzona_cli.config.compose import compose_run, dump_resolved

    composed = compose_run([f"recipe={name}", *(overrides or ())], recipes_dirs=recipes_dir or ())
    warn_about(composed)
    if as_json:
        files = [str(file) for file in composed.files]
        show_page({"version": JSON_VERSION, "files": files, "settings": asdict(composed.config)})
        return
    typer.echo("# Composed from these files; later ones override earlier ones:")
    for file in composed.files:
        typer.echo(f"#   {display_path(file)}")
    if composed.explicit - {"recipe"}:
        typer.echo(f"# and {' '.join(overrides or ())}")
    typer.echo(dump_resolved(composed.config), nl=False)


@app.command()
def copy(
    name: Name,
    destination: Destination,
    overrides: OverrideList = None,
    recipes_dir: RecipesDirs = None,
    force: Force = False,
    short: Annotated[
        bool, Option("--short", help="Write only the changes, on top of the recipe: about ten lines.")
    ] = False,
) -> None:
    """Copy a recipe to a file of your own, to edit.

    The file is complete: it has every setting with its value and meaning. With --short it builds on the
    recipe (`defaults: [NAME]`) and has only the differences.
    """
    from canzona_cli.config.compose import compose_run

    composed = compose_run([f"recipe={name}", *(overrides or ())], recipes_dirs=recipes_dir or ())
    config = _named_after(destination, composed)
    text = recipe_text(config, origin=composed.config.name)
    if short:
        text = _short_text(composed.recipe_file, overrides or (), config.name)
    write_recipe(destination, text, force=force)
    written = display_path(destination)
    where = "".join(f" --recipes-dir {shlex.quote(str(folder))}" for folder in recipes_dir or ()) if short else ""
    typer.echo(f"Wrote {written}. Train it with: canzona train recipe={written}{where}")


def _short_text(recipe: Path, overrides: "Sequence[str]", name: str) -> str:
    """Returns the text of a recipe that builds on another recipe and has only the changes.

    Args:
        recipe: the file of the other recipe.
        overrides: the changes, which have already been checked.
        name: the name of the new recipe.

    Raises:
        ConfigError: the other recipe is not in a group folder, so recipes cannot build on it.
    """
    if recipe.parent.name != "recipe":
        reason = "is not in a recipe folder, and a recipe can build only on another recipe's name"
        fix = "leave out --short, or move the file to DIR/recipe/ and use --recipes-dir DIR"
        raise ConfigError(Problem(key="NAME", value=str(recipe), reason=reason, fix=fix))
    changes = parse_overrides(overrides)
    values = {key: value for key, value in changes.values.items() if key != "name"}
    groups = dict(changes.groups)
    for group in [group for group, choice in groups.items() if group != "recipe" and is_file_name(choice)]:
        # `defaults:` can only name options, so the profile's values are written instead.
        values = {
            **{f"{group}.{key}": value for key, value in read_yaml(expanded(groups.pop(group))).items()},
            **values,
        }
    return short_recipe_text(name, recipe.stem, groups, values)


@app.command("from-hf")
def from_hf(
    folder: Annotated[Path, Argument(metavar="DIR", help="A Hugging Face folder of a Qwen3 or Llama model.")],
    destination: Destination,
    overrides: OverrideList = None,
    recipes_dir: RecipesDirs = None,
    force: Force = False,
) -> None:
    """Write a recipe for a Hugging Face model.

    Shape and tokenizer come from the folder; all other settings come from recipe=NAME, or from the built-in
    recipe that is closest in size.
    """
    from canzona_cli.checkpoint.huggingface.folder import compose_from_folder, open_folder

    check_destination(destination, force=force)
    source = open_folder(folder, key="DIR")
    composed = compose_from_folder(source, overrides or (), recipes_dir or ())
    warn_about(composed)
    config = _named_after(destination, composed)
    if "description" not in composed.explicit:
        config = replace(config, description=f"The model in {folder.resolve().name}")
    write_recipe(destination, recipe_text(config, origin=composed.config.name), force=force)
    recipe = f"recipe={display_path(destination)}"
    ways = f"Train from the folder's weights with: canzona train {recipe} init={display_path(folder)}"
    if source.lack is not None:
        ways = f"The folder has no weights. Plan it with: canzona plan {recipe}, or train from random weights."
    typer.echo(f"Wrote {display_path(destination)}. {ways}")


def _named_after(file: Path, composed: "Composed") -> "RunConfig":
    """Returns a composed run with the name of a file, unless an override sets the name."""
    return composed.config if "name" in composed.explicit else replace(composed.config, name=file.stem)


def _content(recipe: "RecipeInfo") -> dict[str, object]:
    """Returns a recipe's entry in `canzona recipes list --json`."""
    names = ("name", "builtin", "shadows", "gpus", "cluster", "optimizer", "description", "error")
    return {"path": str(recipe.path), **{name: getattr(recipe, name) for name in names}}
