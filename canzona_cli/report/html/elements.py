"""Markup: whatever is put into an element is escaped unless it is markup already."""

from collections.abc import Iterable
from html import escape

from canzona_cli.run.words import clean


class Html(str):
    """Markup. Only this module makes it of text, so that a run's name cannot become part of a page's code."""

    __slots__ = ()


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
    """What is shown on request."""
    return tag("details", tag("summary", summary), *content)


def plain_table(heads: Iterable[str], rows: Iterable[Iterable[str]], *, class_: str | None = None) -> Html:
    """Text at the left; a row's first cell names it."""
    body = []
    for first, *rest in rows:
        body.append(tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)))
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    return scrolling(tag("table", tag("thead", head), tag("tbody", *body), class_=class_))


def scrolling(table: Html) -> Html:
    """Wider than the screen, it moves by itself, with the keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="table")


def percent(share: float) -> str:
    """A length of SVG: `12.5%`."""
    return f"{100 * share:.4g}%"
