"""Reads a page by Python's own parser: its elements in their order, and what they would ask the network for."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta"}
_ADDRESSES = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction", "xlink:href", "ping"}


@dataclass
class Element:
    """One element, and all text in it."""

    name: str
    attributes: Mapping[str, str]
    text: str = ""
    inside: tuple[str, ...] = ()
    """Names of the elements that it is in."""


@dataclass
class Page(HTMLParser):
    """A page that is well-formed, or an AssertionError."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []
        self._said: list[str] = []
        assert self.source.startswith("<!DOCTYPE html>\n")
        self.feed(self.source)
        self.close()
        assert not self._open, f"not closed: {[element.name for element in self._open]}"

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        inside = tuple(element.name for element in self._open)
        element = Element(name=tag, attributes={key: value or "" for key, value in attrs}, inside=inside)
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"{tag} was not open"
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data
        if self._open and self._open[-1].name not in ("script", "style", "title"):
            self._said.append(data)

    def all(self, name: str, **attributes: str) -> list[Element]:
        """Elements of a name, with attributes that have these words."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element.name == name
            and all(value in element.attributes.get(key, "").split() for key, value in wanted.items())
        ]

    def one(self, name: str, **attributes: str) -> Element:
        (element,) = self.all(name, **attributes)
        return element

    @property
    def words(self) -> str:
        """The text that a person reads, with runs of spaces collapsed."""
        return " ".join(" ".join(self._said).split())

    def rows(self) -> list[list[str]]:
        """Every row of every table."""
        found: list[list[str]] = []
        for element in self.elements:
            if element.name == "tr":
                found.append([])
            elif element.name in ("td", "th"):
                found[-1].append(" ".join(element.text.split()))
        return found

    def curves(self, title: str) -> dict[str, list[tuple[float, str]]]:
        """(step, value as it is written) of each curve of a picture."""
        for figure in self.all("figure", class_="chart"):
            if figure.text.startswith(title):
                drawn = json.loads(figure.attributes["data-curves"])
                return {curve["name"]: [(step, value) for _, step, value in curve["points"]] for curve in drawn}
        raise AssertionError(f"there is no picture of {title}")

    def check_alone(self) -> None:
        """It needs no network, and nothing in it but its own script runs: not even markup that came with a name."""
        for element in self.elements:
            for key, value in element.attributes.items():
                assert not key.startswith("on"), f"{element.name} has {key}"
                assert key != "style", "the policy allows none"
                if key in _ADDRESSES:
                    assert re.fullmatch(r"#s\d+", value), f"{element.name} leads to {value}"
            assert element.name not in ("iframe", "object", "embed", "link", "base", "img", "form", "foreignobject")
        style, script = self.one("style").text, self.one("script").text
        assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttpRequest|innerHTML|eval\(", style + script)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
        (policy,) = (meta.attributes["content"] for meta in self.all("meta") if "http-equiv" in meta.attributes)
        wanted = ["default-src 'none'", f"style-src 'sha256-{hashes[0]}'", f"script-src 'sha256-{hashes[1]}'"]
        assert policy.split("; ")[:3] == wanted

    def check_accessible(self) -> None:
        """Every picture says what it shows, every table has heads, places are unique and lead somewhere."""
        for svg in self.all("svg"):
            if "svg" not in svg.inside:
                assert svg.attributes["role"] == "img"
                assert svg.attributes["aria-label"]
        for head in self.all("th"):
            assert head.attributes["scope"] in ("row", "col", "colgroup")
        places = [element.attributes["id"] for element in self.elements if "id" in element.attributes]
        assert len(places) == len(set(places))
        assert {link.attributes["href"][1:] for link in self.all("a")} <= set(places)
        assert self.one("html").attributes["lang"] == "en"
        assert self.one("h1").text
        assert "width=device-width" in "".join(meta.attributes.get("content", "") for meta in self.all("meta"))


def read_page(text: str) -> Page:
    """A page, with what holds of all of them checked."""
    page = Page(text)
    page.check_alone()
    page.check_accessible()
    return page
