"""Pictures of pages: what is drawn is what was measured, however much there is of it."""

import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations, pairwise
from operator import mul

import pytest

from canzona_cli.cli.views.bench import BenchView
from canzona_cli.cli.views.charts import MEMORY, Bar, Bars, Curve, Curves, Lane, Lanes
from canzona_cli.cli.views.document import Document, Section, document, sections
from canzona_cli.cli.views.page import Html, note, section_head, tag
from canzona_cli.core.phases import PHASES, Ink, Interval
from tests.bench.benches import bench
from tests.cli.views.html_page import Page, read_page


def page(body: Html) -> Page:
    return read_page(Document(kind="test", title="test", sections=[Section(title="test", body=body)]).text())


def test_text_is_escaped_wherever_it_stands() -> None:
    element = tag("p", "<b>", tag("i", "&"), title='"<')
    assert element == '<p title="&quot;&lt;">&lt;b&gt;<i>&amp;</i></p>'
    found: list[tuple[str, str | None]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(attrs)

    Reader().feed(element)
    assert found == [("title", '"<')]


def test_a_long_curve_keeps_its_spikes() -> None:
    """100,000 steps in a few hundred points: the highest, the lowest and both ends are among them."""
    points = [(step, 2.0 + (7.5 if step == 54_321 else -1.5 if step == 77_777 else 0.0)) for step in range(100_000)]
    drawn = page(Curves(title="loss", curves=[Curve(name="loss", points=points)]).html()).curves("loss")["loss"]
    assert len(drawn) <= 602
    assert {(54_321, "9.5"), (77_777, "0.5"), (0, "2"), (99_999, "2")} <= set(drawn)
    assert all(one < other for (one, _), (other, _) in pairwise(drawn))


@pytest.mark.parametrize("text", ["ms", ", ms", "; ms", ": ms"])
def test_the_line_below_a_title_begins_with_a_word(text: str) -> None:
    (part,) = sections([section_head("Times", text), note("1")])
    assert (part.title, part.lead) == ("Times", "ms")


def test_what_the_pointer_shows_is_below_the_drawing_and_names_groups() -> None:
    """Above it, a text that gets longer would move the drawing away from the pointer."""
    curves = [Curve(name=f"run-{seed}", group="muon", points=[(1, 2.0), (2, 1.0)]) for seed in (1, 2)]
    found = page(Curves(title="x", curves=curves).html())
    figure = [element.name for element in found.elements if "figure" in element.inside]
    assert figure.index("output") > figure.index("svg")
    assert [curve["group"] for curve in json.loads(found.one("figure").attributes["data-curves"])] == ["muon", "muon"]


def test_labels_of_a_wide_table_stay_in_view() -> None:
    css = files("canzona_cli.cli.views").joinpath("page.css").read_text("utf-8")
    [rule] = re.findall(r"^tr > :first-child \{(.*)\}$", css, re.M)
    assert {"position: sticky", "left: 0", "background: var(--bg)"} <= {part.strip() for part in rule.split(";")}


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [0.0, 0.0], [-1e-9, 1e-9], [1e12, 2e12], [2.5, 2.5000001]])
def test_every_point_is_inside_its_picture(values: list[float]) -> None:
    found = page(Curves(title="x", curves=[Curve(name="x", points=list(enumerate(values, 1)))], height=100).html())
    path = found.one("path").attributes["d"]
    spots = [tuple(map(float, spot.split(","))) for spot in path.removeprefix("M").split("L")]
    assert len(spots) == len(values)
    assert all(0 <= x <= 1000 and 0 <= y <= 100 for x, y in spots)
    assert len(found.all("text", class_="value")) >= 2


def _lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of an sRGB colour under D65 (IEC 61966-2-1)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))  # over the white point
    relative = (sum(map(mul, row, linear)) for row in to_xyz)
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in relative)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("inks", [PHASES, MEMORY], ids=["phases", "memory"])
def test_colours_of_one_bar_are_told_apart(theme: str, inks: Mapping[str, Ink]) -> None:
    """A difference of 2.3 is just noticed side by side; a legend needs many times that."""
    css = files("canzona_cli.cli.views").joinpath("page.css").read_text("utf-8")
    changed = dict(re.findall(r"\.p-(\w+) \{ color: (#\w+); \}", css)) if theme == "dark" else {}
    shown = {name: changed.get(name, ink.colour) for name, ink in inks.items() if name != "optimizer"}
    for one, other in combinations(shown, 2):
        assert math.dist(_lab(shown[one]), _lab(shown[other])) > 15, (one, other)


def test_bars_share_one_scale() -> None:
    rows = [
        Bar(label="a", parts=[("forward", 1.0), ("backward", 2.0), ("exchange", 0.0)], value="3 s"),
        Bar(label="b", parts=[("forward", 0.5)], value="0.5 s", limit=4.0),
    ]
    found = page(Bars(rows=rows, scale=4.0).html()).all("rect")
    assert [(rect.attributes["x"], rect.attributes["width"]) for rect in found] == [
        ("0%", "25%"), ("25%", "50%"), ("0%", "100%"), ("0%", "12.5%")
    ]  # fmt: skip
    assert found[1].text == "backward: 2.00 s"


def test_lanes_of_thousands_of_moments_stay_small_and_keep_their_ends() -> None:
    names = ("forward", "backward")
    moments = [Interval(name=names[n % 2], start_s=n * 5e-5, end_s=(n + 1) * 5e-5) for n in range(20_000)]
    found = page(Lanes(rows=[Lane(label="rank 0", intervals=moments)], end_s=1.0).html()).all("rect")
    assert len(found) < 3000
    edges = [float(rect.attributes["x"].rstrip("%")) for rect in found]
    assert edges == sorted(edges)
    few = page(Lanes(rows=[Lane(label="rank 0", intervals=moments[:2])], end_s=1e-4).html()).all("rect")
    assert [rect.attributes["width"] for rect in few] == ["50%", "50%"]


def test_a_bench_as_a_page() -> None:
    result = bench()
    found = read_page(document("canzona bench", BenchView(result)).text())
    (update,) = (row for row in found.rows() if row[0] == "matrix update")
    assert update[1] == f"{1e3 * result.strategies['canzona'].measured.means['matrix_update']:.0f}"
    cells = found.all("rect", class_="cell")
    assert len(cells) == 4 * sum(any(one.measured.update_s) for one in result.strategies.values())
