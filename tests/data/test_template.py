"""Templates fill documents from fields or messages, and say what they lack."""

from pathlib import Path

import pytest

from canzona_cli.data.reading import Unfilled, fill, template_problem
from tests.cli.commands.support import canzona

CHAT = [{"role": "user", "content": "2 + {2}?"}, {"role": "assistant", "content": "4\n"}]


def test_messages_or_fields_are_filled_and_braces_in_them_are_text() -> None:
    template = r"{role}: {content}\n"
    assert fill(template, {"messages": CHAT}, "messages") == "user: 2 + {2}?\nassistant: 4\n\n"
    assert fill(r"{{{q}}}\t{n}", {"q": "why", "n": 3}, "text") == "{why}\t3"
    assert fill(template, {"messages": []}, "messages") == ""


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [{"role": "user"}]}, "no field 'content', only 'role'"),
        ({"messages": ["hello"]}, "a message is a str"),
        ({"messages": [{"role": "user", "content": None}]}, "field 'content' is null"),
        ({"conversation": CHAT}, "no field 'role', only 'conversation'"),
    ],
)
def test_what_does_not_fill_a_template_is_named(record: dict[str, object], words: str) -> None:
    with pytest.raises(Unfilled, match=words):
        fill("{role}: {content}", record, "messages")


@pytest.mark.parametrize("template", ["plain", "{role", "{}", "{a.}", "{a[0]}", "{a!r}", "{a:>9}"])
def test_a_template_has_plain_names_only(template: str) -> None:
    assert template_problem(template)


@pytest.mark.parametrize("template", ["{text}", r"{role}: {content}\n", "{{{a_b-c}}}", "{a.b}"])
def test_a_template_with_names_is_fine(template: str) -> None:
    assert template_problem(template) == ""


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_lines_are_left_out_only_if_others_have_text(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"a": "x"}\n' * 2)
    (tmp_path / "some.jsonl").write_text('{"a": "x"}\n{"text": "x"}\n')
    for name, advised in (("none", False), ("some", True)):
        asked = ("-o", "p", "--tokenizer", tokenizer)
        refused = canzona("data", "prepare", f"{name}.jsonl", *asked, cwd=tmp_path, code=2)
        assert ("--max-bad" in refused.stderr) == advised
