"""Tables keep their widths, leave no spaces at the ends of lines, and show text as it is."""

import pytest
from rich.text import Text

from canzona_cli.cli.views.page import Columns, GroupedTable, Table, column, labelled_rows
from tests.cli.views.test_bench import shown


def small() -> Table:
    table = Table("name")
    table.add_numbers("first", "second")
    table.add_row("a", "1", "")
    table.add_section()
    table.add_row("[red]b[/red]", "1,000", "2")
    return table


def test_lines_end_where_their_text_does() -> None:
    assert shown(small(), 40).splitlines() == [
        "name          first  second",
        "───────────────────────────",
        "a                 1",
        "───────────────────────────",
        "[red]b[/red]  1,000       2",
    ]


def test_groups_that_do_not_fit_go_below_with_the_same_labels() -> None:
    def group(title: str) -> Columns:
        return Columns(title=title, heads=("one", "two"), rows=(("1", "22"), (), ("a long cell",)))

    table = GroupedTable(head="name", labels=["x", "y", "z"], groups=[group("A"), group("B"), group("C")])
    lines = shown(table, 30).splitlines()
    assert lines[:6] == [
        "           A            B",
        "name      one two      one two",
        "───── ──────────── ───────────",
        "x           1  22        1  22",
        "y",
        "z     a long cell  a long cell",
    ]
    assert lines[6] == ""
    assert [line.strip() for line in lines if line.strip().startswith("C")] == ["C"]


def test_groups_that_are_not_needed_are_left_out_where_they_do_not_fit() -> None:
    groups = [column(f"head {number}", ["1", "22"]) for number in range(4)]
    for width, heads in ((80, 4), (20, 2), (10, 2)):
        lines = shown(GroupedTable(labels=["x", "y"], groups=groups, needed=2), width).splitlines()
        assert sum(line.count("head") for line in lines) == heads
        assert sum(line.startswith("x") for line in lines) == (2 if width == 10 else 1), "those needed go below"


def test_a_row_without_its_last_cell_keeps_its_columns() -> None:
    groups = [Columns(title="T", heads=("one", "two"), rows=(("1", ""), ("2", "3")))]
    lines = shown(GroupedTable(labels=["x", "y"], groups=groups), 40).splitlines()
    assert lines[-2:] == ["x    1", "y    2   3"]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_columns_without_titles_have_one_line_of_heads(width: int) -> None:
    groups = [column(f"head {number}", ["1", Text("22")]) for number in range(6)]
    lines = shown(GroupedTable(head="name", labels=["x", "y"], groups=groups), width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("name") for line in lines) == sum(line.startswith("x") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_values_are_wrapped_beside_their_label() -> None:
    (row,) = labelled_rows([("label", "one two three four")], 7)
    assert shown(row, 20).splitlines() == ["  label  one two", "         three four"]
