"""The surface is frozen: `surface.txt` has every command and option, `recipes/SETTINGS.md` every setting.

Adding or removing one changes these files, so that it is seen in review. An option exists only where a plan can choose
it or a user needs it. Write both files anew: `python -m tests.test_surface`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Final, get_type_hints

import pytest
import typer

from canzona_cli.cli.app import COMMANDS, _load
from canzona_cli.config.recipes import group_options
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import Setting, override_text, sections, settings
from canzona_cli.core.fields import CURVE, LAYOUT, MODEL, OPTIMIZER, PLAN, SPREAD, Affects
from canzona_cli.core.optimizers.facts import OptimizerBase
from canzona_cli.core.setup import OPTIMIZERS

SURFACE = Path(__file__).with_name("surface.txt")
PAGE = Path(__file__).parents[1] / "recipes" / "SETTINGS.md"
_KINDS: Final[Mapping[str, str]] = {"integer": "a whole number", "number": "a number", "text": "text"}
_ON_RESUME: Final[Mapping[Affects, str]] = {MODEL | OPTIMIZER: "refused", CURVE: "warning", SPREAD | LAYOUT: "note"}
_SANITY_LIMIT: Final = 10**9
_INTRODUCTION = """\
# All settings

{count} settings, written from the program by `python -m tests.test_surface`; the [main ones](README.md#settings), and
how recipes and the command line set them, are in the manual of recipes.

- **Default**: the value if neither the recipe nor a file of its groups sets one (`canzona recipes show NAME` prints
  them all); a dash if one of them has to. The meaning says what `null` stands for.
- **Values**: the allowed ones. Upper limits of a billion and more, which only catch mistakes, are left out.
- **Resumed**: what `canzona resume` says of a change: a warning that the loss curve differs, a note, or that it is
  refused, because the checkpoint does not fit. A star (*) marks the settings that plans depend on.
"""


def options(command: Any, name: str) -> Iterator[str]:
    yield name
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield f"{name} {'/'.join(sorted(parameter.opts))}"
    for below, inner in sorted(getattr(command, "commands", {}).items()):
        yield from options(inner, f"{name} {below}")


def surface() -> str:
    commands = [line for name in COMMANDS for line in options(_load(name), name)]
    return "\n".join([f"{len(commands)} commands and options", *commands, ""])


def page() -> str:
    """Returns the page of all settings."""
    lines = [_INTRODUCTION.format(count=len(settings()))]
    top_level = [setting for setting in settings().values() if "." not in setting.key]
    lines += ["## The run", "", *_table(top_level), ""]
    for name, hint in get_type_hints(RunConfig).items():
        if name in sections():
            owner = OptimizerBase if name == "optimizer" else hint
            lines += [f"## `{name}`", "", _paragraph(owner.__doc__ or "") + _group(name), ""]
            lines += [*_table([each for each in settings().values() if each.key.startswith(f"{name}.")]), ""]
    return "\n".join(lines)


def _paragraph(docstring: str) -> str:
    return " ".join(docstring.partition("\n\n")[0].split())


def _group(name: str) -> str:
    """Returns a sentence on the files that set a whole section; empty if there are none."""
    files = ", ".join(f"`{file}`" for file in group_options(name, [PAGE.parent]))
    return f" `{name}=NAME` chooses a file with values for them: {files}." if files else ""


def _table(rows: list[Setting]) -> Iterator[str]:
    yield "| setting | default | values | meaning | resumed |"
    yield "|---|---|---|---|---|"
    for setting in rows:
        default = "–" if setting.required else f"`{_written(setting.default)}`"
        cells = (f"`{setting.key}`", default, _values(setting), _meaning(setting), _on_resume(setting))
        yield f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |"


def _written(default: object) -> str:
    if isinstance(default, tuple):
        return f"[{','.join(map(_written, default))}]"
    return override_text(default) or "''"


def _values(setting: Setting) -> str:
    if setting.choices or setting.kind == "boolean":
        words = ", ".join(f"`{choice}`" for choice in setting.choices or ("true", "false"))
    elif setting.kind in ("list", "mapping"):
        words = f"a {setting.kind}" + (f": `{setting.example}`" if setting.example else "")
    else:
        limits = setting.range if setting.range.at_most < _SANITY_LIMIT else replace(setting.range, at_most=inf)
        words = " ".join(filter(None, (_KINDS[setting.kind], limits.words(0))))
    return words + (", `null`" if setting.optional else "")


def _meaning(setting: Setting) -> str:
    some = setting.optimizers and setting.optimizers != OPTIMIZERS.keys()
    return (f"For {', '.join(sorted(setting.optimizers))}. " if some else "") + setting.meaning


def _on_resume(setting: Setting) -> str:
    assert setting.affects is not None
    words = next((word for effects, word in _ON_RESUME.items() if setting.affects & effects), "")
    return f"{words} *".strip() if PLAN in setting.affects else words


@pytest.mark.parametrize(("file", "written"), [(SURFACE, surface), (PAGE, page)], ids=["commands", "settings"])
def test_the_surface_is_that_of_the_files(file: Path, written: Any) -> None:
    assert written() == file.read_text(encoding="utf-8"), f"write it anew: python -m {__name__}"


def test_the_page_has_every_setting_once_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| (.+) \| [^|]*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [key for key, _ in rows] == sorted([*settings()], key=lambda key: "." in key)
    assert all(settings()[key].meaning.replace("|", "\\|") in meaning for key, meaning in rows)


if __name__ == "__main__":
    for file, written in ((SURFACE, surface), (PAGE, page)):
        file.write_text(written(), encoding="utf-8")
        typer.echo(f"wrote {file}")
