"""HTML pages: the text of the terminal views, with SVG charts instead of character charts.

A page is a single file that loads nothing else. It follows the system's light or dark theme, and is readable
on screens at least 400 pixels wide. `page.html` is the template.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import rich.table
from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import MEMORY
from canzona_cli.cli.views.page import (
    NOTHING,
    GroupedTable,
    Html,
    Page,
    Paragraph,
    Picture,
    Screen,
    fact_list,
    join_markup,
    styled_markup,
    table_html,
    tag,
)
from canzona_cli.core.phases import PHASES
from canzona_cli.records.words import clean

SCREEN = Screen(width=120, colour=True, page=True)
Mood = Literal["good", "bad", "odd"]
"""The colour class of a status: good for done, bad for failed, odd for anything else."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a page, with a title."""

    title: str
    lead: str = ""
    """The line below the title, such as units or an explanation; empty for none."""
    body: Html


@dataclass(frozen=True, kw_only=True)
class Document:
    """An HTML page."""

    kind: str
    """The command that made the page, such as `canzona report`."""
    title: str
    status: str = ""
    mood: Mood = "odd"
    lead: str = ""
    """The sentence below the title, such as a verdict; empty for none."""
    top: Html = NOTHING
    """The content before the first section."""
    sections: Sequence[Section]

    def text(self) -> str:
        """Returns the text of the HTML file, whose security policy allows only its own style and script."""
        from jinja2 import Environment

        template, css, script = (
            files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
        )
        inks = (*PHASES.values(), *MEMORY.values())
        style = "".join(f".{ink.css} {{ color: {ink.colour}; }}\n" for ink in inks) + css
        environment = Environment(autoescape=True, finalize=_printable, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(
            page=self, style=Html(style), style_hash=_hash(style), script=Html(script), script_hash=_hash(script)
        )


def _printable(value: object) -> object:
    """Returns markup unchanged, and any other value as text without control characters."""
    return value if isinstance(value, Html) else clean(value)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def document(kind: str, view: Page) -> Document:
    """Converts a terminal view to an HTML page. The first line of the view becomes the title.

    Args:
        kind: the command, such as `canzona plan`.
    """
    heading, *parts = _flatten(view.parts(SCREEN))
    title = " ".join(str(_text(heading)).split())
    top, *rest = sections(parts)
    if top.title:
        return Document(kind=kind, title=title, sections=[top, *rest])
    return Document(kind=kind, title=title, top=top.body, sections=rest)


def sections(parts: Iterable[RenderableType]) -> list[Section]:
    """Divides a view into sections. A paragraph that starts with bold text starts a new section."""
    closed: list[Section] = []
    title, lead = "", ""
    body: list[RenderableType] = []

    def close() -> None:
        if inner := elements(body):
            closed.append(Section(title=title, lead=lead, body=inner))

    for part in _flatten(parts):
        text = _text(part)
        if text is not None and (head := _title(text)):
            close()
            title = head
            lead = text.plain[len(head) :].lstrip(" ,:;").strip()
            body = []
        else:
            body.append(part)
    close()
    return closed


def elements(parts: Iterable[RenderableType]) -> Html:
    """Returns the markup of the parts of a section; consecutive labelled lines become one list."""
    shown: list[Html] = []
    rows: list[tuple[str, str]] = []
    for part in _flatten(parts):
        if isinstance(part, Paragraph) and (label := part.first.plain.strip()) and label not in "-!":
            rows.append((label, styled_markup(part.text)))
        else:
            shown += [fact_list(rows), _element(part)]
            rows = []
    return join_markup([*shown, fact_list(rows)])


def _element(part: RenderableType) -> Html:
    if isinstance(part, Paragraph):
        warning = part.first.plain.strip() == "!"
        dim = "dim" in str(part.text.style)
        return tag("p", styled_markup(part.text), class_="warning" if warning else "note" if dim else None)
    if isinstance(part, Html):
        return part
    if isinstance(part, Picture):
        return part.html()
    if isinstance(part, GroupedTable | rich.table.Table):
        return table_html(part)
    return tag("p", styled_markup(part)) if isinstance(part, Text) and part.plain.strip() else NOTHING


def _flatten(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for part in parts:
        if isinstance(part, Page) and not isinstance(part, Picture):
            yield from _flatten(part.parts(SCREEN))
        else:
            yield part


def _text(part: RenderableType) -> Text | None:
    if isinstance(part, Paragraph):
        return part.text if not part.first.plain.strip() else None
    return part if isinstance(part, Text) else None


def _title(text: Text) -> str:
    """Returns the bold text at the start of a line; empty if the line does not start in bold."""
    if str(text.style) == "bold":
        return text.plain.strip()
    ends = [span.end for span in text.spans if span.start == 0 and str(span.style) == "bold"]
    return text.plain[: ends[0]] if ends else ""
