"""One file for a browser: no network, no other file, light or dark as its reader's system is, from 400 pixels on."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from canzona_cli.errors import unwritable
from canzona_cli.report.html.bars import COLOURS
from canzona_cli.report.html.elements import NOTHING, Html, tag
from canzona_cli.run.files import write_text_atomic

Mood = Literal["good", "bad", "odd"]
"""Of a status: done; failed; anything else."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of a page."""

    title: str
    lead: str = ""
    """What the title leaves open: units, what is compared with what."""
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
    """In front of all sections."""
    sections: Sequence[Section]

    def text(self) -> str:
        """The whole file. Its own style and script are all that a browser is allowed to use."""
        own, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
        style = "".join(f".{name} {{ color: {colour}; }}\n" for name, colour in COLOURS.items()) + own
        policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
        head = tag(
            "head",
            Html('<meta charset="utf-8"/>'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1"/>'),
            Html('<meta name="color-scheme" content="light dark"/>'),
            tag("title", f"{self.title} - {self.kind}"),
            Html(f"<style>{style}</style>"),
        )
        places = {f"s{number}": section for number, section in enumerate(self.sections, 1)}
        links = [tag("a", section.title, href=f"#{place}") for place, section in places.items()]
        badge = tag("span", self.status, class_=f"badge {self.mood}") if self.status else Html()
        header = tag("header", tag("p", self.kind, class_="kind"), tag("h1", self.title, " ", badge))
        shown = [
            tag(
                "section",
                tag("h2", section.title, id=f"{place}-title"),
                tag("p", section.lead, class_="lead") if section.lead else Html(),
                section.body,
                id=place,
                aria_labelledby=f"{place}-title",
            )
            for place, section in places.items()
        ]
        main = tag("main", self.top, *shown)
        body = tag("body", header, tag("nav", *links, aria_label="sections"), main, Html(f"<script>{script}</script>"))
        return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'

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


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
