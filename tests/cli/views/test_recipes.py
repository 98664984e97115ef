"""The table of layouts: complete, readable, honest about what does not fit."""

import functools

import pytest

from canzona_cli.cli.views.layouts import GPU_COUNTS, layouts_by_gpus
from canzona_cli.core.simulate import fit
from canzona_cli.records.words import layout_code
from tests.cli.views import terminal
from tests.sizes import Size, run

table = functools.cache(lambda size, gpu_counts, **set_: layouts_by_gpus(run(size, 1, **set_), gpu_counts))
"""A layout table by size; it adapts to the width of the console that prints it."""


def printed(size: Size, width: int, gpu_counts: tuple[int, ...], **set_: object) -> str:
    return terminal.printed(table(size, gpu_counts, **set_), width)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "size", ["8b", *(pytest.param(size, marks=pytest.mark.sweep) for size in ("0.6b", "1.7b", "4b", "14b", "32b"))]
)
def test_every_gpu_count_has_its_line_inside_the_width(size: Size, width: int) -> None:
    # All counts, each a search, for the size that does not fit everywhere and has the longest lines. How much is
    # recomputed is set: less to search.
    counts = GPU_COUNTS if size == "32b" else GPU_COUNTS[:3]
    lines = printed(size, width, counts, micro_batch_size=1, recompute="full").splitlines()
    assert max(len(line) for line in lines) <= width
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert [first for first in firsts if first.isdigit()] == [str(gpus) for gpus in counts]


def test_a_row_shows_the_layout() -> None:
    layout = fit.resolve(run("32b", 256).setup)[1]
    line = next(line for line in printed("32b", 120, (256,)).splitlines() if line.split()[:1] == ["256"])
    assert f" {layout_code(layout)} " in line
    assert " 256 " in line


def test_what_does_not_fit_says_so_with_the_way_out() -> None:
    lines = printed("8b", 80, (1,)).splitlines()
    assert "does not fit" in next(line for line in lines if line.split()[:1] == ["1"])
    assert next(line for line in lines if line.split()[:1] == ["1:"]).split(maxsplit=1)[1] == (
        "would fit with gpus=2 or cluster=h200"
    )


def test_what_is_not_possible_says_why() -> None:
    assert "not a whole number of machines" in " ".join(printed("8b", 120, (12,)).split())


def test_parameters_stand_beside_the_published_ones() -> None:
    assert "8.191 B parameters (published 8.2 B), 6.946 B without embeddings (6.95 B)" in printed("8b", 120, (1,))
