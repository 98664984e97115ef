"""Docstrings begin with a verb, or with a noun and its article: never with a question or a genitive."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTIONS = {"how", "what", "when", "where", "whether", "which", "who", "whose", "why"}
PREPOSITIONS = {
    *("above", "after", "against", "as", "at", "before", "behind", "below", "beside", "between", "by", "during", "for"),
    *("from", "in", "inside", "into", "of", "on", "over", "per", "since", "through", "to", "under", "until", "up"),
    *("with", "within", "without"),
}


def _in_tree(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the docstrings of a module, of its classes and functions, and those under assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
                if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.value


@cache
def docstrings() -> list[tuple[str, str]]:
    """Returns every docstring of the product, the tests and the scripts with its place, `file:line`."""
    return [
        (f"{path.relative_to(ROOT)}:{text.lineno}", str(text.value))
        for folder in ("canzona_cli", "tests", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in _in_tree(ast.parse(path.read_bytes()))
    ]


def lines_with(pattern: str) -> list[str]:
    """Returns the lines of docstrings in which the pattern is found, each with the docstring's place."""
    return [
        f"{place}: {line.strip()}"
        for place, text in docstrings()
        for line in text.splitlines()
        if re.search(pattern, line)
    ]


def test_docstrings_begin_with_a_verb_or_an_article() -> None:
    assert len(docstrings()) > 3000
    wrong = [
        f"{place}: {text.strip().splitlines()[0]}"
        for place, text in docstrings()
        if re.split(r"\W", text.strip(), maxsplit=1)[0].lower() in QUESTIONS | PREPOSITIONS
    ]
    assert wrong == []


def test_arguments_are_described_by_a_noun_or_a_condition() -> None:
    """`matrices: the matrices of the stage`, not `matrices: of the stage`; `True if`, not `whether`."""
    assert lines_with(r"^\s+\w+(, \w+)*: ([Oo]f|[Ww]hat|[Ww]hether) ") == []


def test_lists_and_tables_have_a_line_for_each_entry() -> None:
    """A wrapped list loses its form: "; - second entry", or "| cell | | cell |"."""
    assert [line for line in lines_with(r"[.;:] - [a-z`]|\| \| ") if "test_docstrings.py" not in line] == []
