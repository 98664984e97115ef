"""One file for a browser: no network, no other file, light or dark as its reader's system is,
from 400 pixels on.

Markup escapes whatever is put into it unless it is markup already; the page around it is `page.html`, a
template.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Literal

from canzona_cli.errors import unwritable
from canzona_cli.report.charts import MEMORY
from canzona_cli.run.files import write_text_atomic
from canzona_cli.run.phases import PHASES
from canzona_cli.run.words import clean


class Html(str):
    """Markup. Only this module makes it of text, so that a run's name cannot become part of a page's code."""

    __slots__ = ()

    def __html__(self) -> str:
        """Tells the page's template not to escape it again."""
        return self


NOTHING = Html()


def tag(name: str, *content: str, **attributes: object) -> Html:
    """An element. Text in it is escaped; an attribute that is None is left out.

    Args:
        attributes: by their names, `_` for `-`; a trailing one keeps a name from being Python's (`class_`).
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts one after another, those that are text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(clean(part, newlines=True)) for part in parts))


def facts(rows: Iterable[tuple[str, str]]) -> Html:
    """Labels and what they say."""
    pairs = [tag("div", tag("dt", label), tag("dd", value)) for label, value in rows]
    return tag("dl", *pairs) if pairs else Html()


def folded(summary: str, *content: str) -> Html:
    """Wraps content that is shown on request."""
    return tag("details", tag("summary", summary), *content)


def scrolling(table: Html) -> Html:
    """Wider than the screen, it moves by itself, with the keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="table")


def percent(share: float) -> str:
    """A length of SVG: `12.5%`."""
    return f"{100 * share:.4g}%"


Mood = Literal["good", "bad", "odd"]
"""The mood of a status: done; failed; anything else."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of a page."""

    title: str
    lead: str = ""
    """The line under the title: units, what is compared with what."""
    body: Html


@dataclass(frozen=True, kw_only=True)
class Document:
    """A page."""

    kind: str
    """The command: `canzona report`."""
    title: str
    status: str = ""
    mood: Mood = "odd"
    top: Html = NOTHING
    """The content before all sections."""
    sections: Sequence[Section]

    def text(self) -> str:
        """The whole file. Its own style and script are all that a browser is allowed to use."""
        from jinja2 import Environment

        template, css, script = (
            files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
        )
        inks = {f"p-{name}": ink.colour for name, ink in PHASES.items()}
        inks |= {f"m-{name}": ink.colour for name, ink in MEMORY.items()}
        style = "".join(f".{name} {{ color: {colour}; }}\n" for name, colour in inks.items()) + css
        environment = Environment(autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(
            page=self, style=Html(style), style_hash=_hash(style), script=Html(script), script_hash=_hash(script)
        )

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            EnvironmentProblem: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(path, self.text())
        except OSError as error:
            raise unwritable("--html", path, error, fix="name another place with --html FILE.html") from None


def _shown(value: object) -> object:
    """A value as the template writes it: markup as it is, anything else without control characters."""
    return value if isinstance(value, Html) else clean(value)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
