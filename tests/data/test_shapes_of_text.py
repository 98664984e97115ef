"""Text in the shapes in which people keep it: nested fields, chats with parts, tables, arrays, unknown words."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from canzona_cli.data.reading import Unfilled, fill
from canzona_cli.data.view import view
from tests.cli.commands.support import canzona

CHAT = ("--text-key", "messages", "--template", "{role}: {content}\\n")
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
]


def command(path: Path, *options: str) -> tuple[str | Path, ...]:
    """The words that prepare a file by bytes."""
    return "data", "prepare", path, "--output", "d", "--tokenizer", "byte", "--overwrite", *options


def prepared(path: Path, *options: str) -> list[str]:
    """Prepares a file by bytes; returns its documents."""
    canzona(*command(path, *options), cwd=path.parent, code=0)
    shown = view(path.parent / "d", documents=9, tokens=999)
    return [document.text for document in shown.documents]


def refusal(path: Path, *options: str) -> str:
    return " ".join(canzona(*command(path, *options), cwd=path.parent, code=2).stderr.split())


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def columns(path: Path, **named: list[object]) -> Path:
    parquet.write_table(pyarrow.table(named), path)
    return path


def test_a_field_of_a_nested_object_is_named_by_both(tmp_path: Path) -> None:
    nested = jsonl(tmp_path / "x.jsonl", {"doc": {"text": "one"}}, {"doc": {"text": "two"}})
    assert prepared(nested, "--text-key", "doc.text") == ["one", "two"]
    assert "it has 'doc.text' → name the field with --text-key NAME, NAME.NAME for a nested one" in refusal(nested)
    assert prepared(nested, "--template", "<{doc.text}>") == ["<one>", "<two>"]
    table = columns(tmp_path / "x.parquet", doc=[{"text": "one"}, None, {"text": "two"}])
    assert prepared(table, "--text-key", "doc.text", "--max-bad", "1") == ["one", "two"]
    dotted = jsonl(tmp_path / "y.jsonl", {"a.b": "itself", "a": {"b": "nested"}})
    assert prepared(dotted, "--text-key", "a.b") == ["itself"]


def test_chats_are_read_from_lines_and_from_parquet(tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "x.jsonl", {"messages": MESSAGES, "label": True})
    assert prepared(lines, *CHAT) == ["user: ab\nassistant: c\n"]
    plain = [{"role": "user", "content": "a"}]
    table = columns(tmp_path / "x.parquet", messages=[plain, plain], label=[True, False])
    assert prepared(table, *CHAT) == ["user: a\n", "user: a\n"]
    for path in (lines, table):
        assert "--text-key messages --template '{role}: {content}\\n'" in refusal(path)
        assert "--template '{role}: {content}\\n'" in refusal(path, "--text-key", "messages")


def test_content_that_is_null_or_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    call = [{"role": "assistant", "content": None}]
    path = jsonl(tmp_path / "x.jsonl", {"messages": MESSAGES}, {"messages": image}, {"messages": call})
    assert "is a list with 'image_url'" in refusal(path, *CHAT)
    assert "field 'content' is null" in refusal(path, *CHAT)
    assert prepared(path, *CHAT, "--max-bad", "2") == ["user: ab\nassistant: c\n"]
    shown = canzona("data", "show", "d", cwd=tmp_path, code=0)
    assert "2 does not fill --template" in shown.stdout


@pytest.mark.parametrize("content", [["a", "b"], [{"type": "text", "text": "a"}, {"text": "b"}], "ab"])
def test_parts_of_text_are_joined(content: object) -> None:
    assert fill("{content}", {"content": content}, "text") == "ab"
    with pytest.raises(Unfilled, match="is a dict"):
        fill("{content}", {"content": {"text": content}}, "text")


@pytest.mark.parametrize(
    ("name", "text", "options", "reason", "fix"),
    [
        ("x.json", '[\n {"text": "a"}\n]', (), "may be one array", "jq -c '.[]'"),
        ("x.jsonl", '[{"text": "a"}]', (), "is a JSON array", "jq -c '.[]'"),
        ("x.json", '[{"text": "a"}]', ("--format", "jsonl"), "is a JSON array", "jq -c '.[]'"),
        ("x.csv", "id,text\n1,a", (), ".csv may be a table", "--format text"),
        ("x.tsv", "id\ttext\n1\ta", (), ".tsv may be a table", "delimiter="),
        ("x.jsonl", "{'text': 1}", (), "not JSON", "one object per line"),
        ("x.jsonl", '"a"', (), "not an object", "one object per line"),
        ("x.jsonl", '{"text": null}', (), "field 'text' is null", "a field with text"),
        ("x.jsonl", '{"text": 1}', ("--template", "{q}"), "no field 'q', only 'text'", "that every line has"),
    ],
)
def test_the_fix_fits_the_fault(
    tmp_path: Path, name: str, text: str, options: tuple[str, ...], reason: str, fix: str
) -> None:
    (tmp_path / name).write_text(text)
    message = refusal(tmp_path / name, *options)
    assert reason in message.partition("→")[0]
    assert fix in message.partition("→")[2]


def test_the_line_that_converts_a_table_works(tmp_path: Path, run: Callable[[str, Path], str]) -> None:
    table = tmp_path / "x.tsv"
    table.write_text('id\ttext\n0\t"one, two"\n1\tthree\n')
    line = refusal(table).partition("convert the table: ")[2]
    run(line, tmp_path)
    assert prepared(tmp_path / "x.jsonl") == ["one, two", "three"]


@pytest.fixture
def run() -> Callable[[str, Path], str]:
    import subprocess
    import sys

    def run(line: str, folder: Path) -> str:
        assert line.startswith("python ")
        command = f"{sys.executable} {line.removeprefix('python ')}"
        return subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True, text=True).stdout

    return run


def test_unknown_tokens_are_counted_and_shown(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "red": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["[UNK]", "</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("red green blue red")
    command = ("data", "prepare", "x.txt", "--output", "d", "--tokenizer", "tokenizer.json")
    counted = "2 of 5 tokens (40.0%) stand for text that the tokenizer does not know"
    assert counted in canzona(*command, cwd=tmp_path, code=0).stdout
    shown = canzona("data", "show", "d", cwd=tmp_path, code=0).stdout
    assert counted in shown
    assert "red [UNK] [UNK] red" in shown
