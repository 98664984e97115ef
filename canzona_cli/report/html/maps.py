"""The load of every rank of a grid DP x TP: its colour is the load over the mean."""

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_cli.report.charts import HEAT_LIMITS, heat_level
from canzona_cli.report.html.elements import Html, folded, joined, percent, plain_table, tag
from canzona_cli.run.words import milliseconds, step_time

_MOST_WRITTEN = 16
"""Owners up to which each cell has its number."""


@dataclass(frozen=True, kw_only=True)
class LoadMap:
    """One map."""

    title: str
    loads: Sequence[float]
    """Seconds by cell, `owner * hosts + host`."""


def load_maps(maps: Sequence[LoadMap], *, hosts: int) -> Html:
    """Maps beside each other: columns are owners (DP), rows hosts (TP).

    Args:
        hosts: TP ranks.
    """
    numbers = folded("the numbers", *(_numbers(one, hosts) for one in maps))
    return joined([tag("div", *(_map(one, hosts) for one in maps), *_legend(), class_="grid-of-charts"), numbers])


def _numbers(one: LoadMap, hosts: int) -> Html:
    """A row for each owner."""
    rows = (
        (f"DP {owner}", *map(milliseconds, one.loads[owner * hosts : (owner + 1) * hosts]))
        for owner in range(len(one.loads) // hosts)
    )
    heads = (f"{one.title}, ms", *(f"TP {host}" for host in range(hosts)))
    return plain_table(heads, rows, class_="numbers")


def _map(one: LoadMap, hosts: int) -> Html:
    loads, owners = one.loads, len(one.loads) // hosts
    mean, top = sum(loads) / len(loads), max(loads)
    cells: list[Html] = []
    for cell, load in enumerate(loads):
        owner, host = divmod(cell, hosts)
        said = f"DP {owner}, TP {host}: {step_time(load)}" + (f", {load / mean:.2f} of the mean" if mean > 0 else "")
        x, width = owner / owners, 1 / owners
        y, height = host * 26, 24
        cells.append(
            tag("rect", tag("title", said), x=percent(x), y=y, width=percent(width), height=height,
                class_=f"cell h{heat_level(load, mean)}")
        )  # fmt: skip
        if owners <= _MOST_WRITTEN:
            cells.append(tag("text", milliseconds(load), x=percent(x + width / 2), y=y + 16, class_="cell-text"))
    balance = f"max / mean {top / mean:.3f}, slowest {step_time(top)}" if mean > 0 else "no updates"
    said = f"{one.title}: {owners} owners x {hosts} hosts, {balance}"
    picture = tag("svg", *cells, class_="map", height=26 * hosts, role="img", aria_label=said)
    caption = tag("figcaption", tag("b", one.title), tag("span", balance))
    axis = tag("p", f"columns DP 0 to {owners - 1}, rows TP 0 to {hosts - 1}, ms", class_="note")
    return tag("figure", caption, picture, axis)


def _legend() -> list[Html]:
    words = (*(f"up to {limit:g}" for limit in HEAT_LIMITS), "above that, of the mean")
    keys = (tag("span", tag("span", class_=f"key h{level}"), text) for level, text in enumerate(words))
    return [tag("p", *keys, class_="keys wide")]
