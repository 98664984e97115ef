"""`canzona clusters`: lists, shows and copies hardware profiles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from canzona_cli.cli.commands.output import Destination, Force, RecipesDirs, option_argument
from canzona_cli.cli.commands.output import show as show_page
from canzona_cli.config.recipes import write_recipe
from canzona_cli.core.errors import refuse
from canzona_cli.core.reading import display_path

if TYPE_CHECKING:
    from canzona_cli.config.profiles import Profile

app = typer.Typer(no_args_is_help=True, add_completion=False)


Name = Annotated[str, option_argument("cluster", "The name or the file of a profile.")]


@app.command("list")
def list_(recipes_dir: RecipesDirs = None) -> None:
    """List the profiles.

    Shows the memory and rates of a GPU or CPU rank, its links, and which profiles were measured.
    """
    from canzona_cli.cli.views.machines import ProfileList
    from canzona_cli.config.profiles import list_profiles

    show_page(ProfileList(profiles=list_profiles(recipes_dir or ())))


@app.command()
def show(name: Name, recipes_dir: RecipesDirs = None) -> None:
    """Print the file of a profile, with the source of each number."""
    profile = _valid_profile(name, recipes_dir)
    typer.echo(f"# {display_path(profile.path)}")
    typer.echo(profile.text, nl=False)


@app.command()
def copy(name: Name, destination: Destination, recipes_dir: RecipesDirs = None, force: Force = False) -> None:
    """Copy a profile to a file of your own, to edit.

    The copy is named after its file.
    """
    text = _valid_profile(name, recipes_dir).text_with_name(destination.stem)
    write_recipe(destination, text, force=force, what="a profile")
    typer.echo(f"Wrote {display_path(destination)}. Use it with: cluster={display_path(destination)}")


def _valid_profile(name: str, recipes_dirs: list[Path] | None) -> "Profile":
    """Returns the profile with this name or file.

    Raises:
        ConfigError: there is no such profile, or it has problems; all of them are reported.
    """
    from canzona_cli.config.profiles import find_profile

    profile = find_profile(name, recipes_dirs or ())
    refuse(profile.problems)
    return profile
