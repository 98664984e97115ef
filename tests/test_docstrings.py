"""Docstrings of the product begin with a verb, or with a noun and its article: never with a question or a genitive."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import canzona_cli

ROOT = Path(canzona_cli.__file__).parent
QUESTIONS = {"how", "what", "when", "where", "whether", "which", "who", "whose", "why"}
PREPOSITIONS = {
    *("above", "after", "against", "as", "at", "before", "behind", "below", "beside", "between", "by", "during", "for"),
    *("from", "in", "inside", "into", "of", "on", "over", "per", "since", "through", "to", "under", "until", "up"),
    *("with", "within", "without"),
}


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the docstrings of a module, of its classes and functions, and those under assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
                if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.value


def lines() -> Iterator[tuple[str, str]]:
    """Yields each line of every docstring with its place, `file:line of the docstring`."""
    for path in sorted(ROOT.rglob("*.py")):
        for text in docstrings(ast.parse(path.read_bytes())):
            for line in str(text.value).splitlines():
                yield f"{path.relative_to(ROOT)}:{text.lineno}", line


def test_docstrings_begin_with_a_verb_or_an_article() -> None:
    every = [(path, text) for path in sorted(ROOT.rglob("*.py")) for text in docstrings(ast.parse(path.read_bytes()))]
    assert len(every) > 1000
    wrong = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {str(text.value).strip().splitlines()[0]}"
        for path, text in every
        if re.split(r"\W", str(text.value).strip(), maxsplit=1)[0].lower() in QUESTIONS | PREPOSITIONS
    ]
    assert wrong == []


def test_arguments_are_described_by_a_noun_or_a_condition() -> None:
    """`matrices: the matrices of the stage`, not `matrices: of the stage`; `True if`, not `whether`."""
    pattern = re.compile(r"\s+\w+(, \w+)*: ([Oo]f|[Ww]hat|[Ww]hether) ")
    assert [f"{place}: {line.strip()}" for place, line in lines() if pattern.match(line)] == []


def test_lists_and_tables_have_a_line_for_each_entry() -> None:
    """A wrapped list loses its form: "; - second entry", or "| cell | | cell |"."""
    pattern = re.compile(r"[.;:] - [a-z`]|\| \| ")
    assert [f"{place}: {line.strip()}" for place, line in lines() if pattern.search(line)] == []
