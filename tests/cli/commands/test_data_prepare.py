"""`canzona data prepare` as a person runs it: a process, real files and pipes, real signals."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.data.indexed import bin_path, inspect_pair
from tests.cli.commands import support
from tests.waiting import PATIENCE_S, wait_until

CANZONA = [sys.executable, "-c", "from canzona_cli.cli.app import main; main()"]
TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(3000))


def canzona(
    *arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    done = support.canzona("data", "prepare", *arguments, cwd=cwd, stdin=stdin, code=code)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def ids(prefix: Path) -> list[int]:
    stored: list[int] = np.fromfile(bin_path(prefix), dtype=inspect_pair(prefix).dtype).tolist()
    return stored


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("text", [TEXT, TEXT[:2000]])
def test_the_line_it_prints_at_the_end_is_a_configuration_that_accepts_the_data(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "it's a = folder"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    done = canzona(folder / "a.txt", "-o", folder / "corpus v1", "--tokenizer", "bpe", "--vocab-size", "300", code=0)
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:2] == ["canzona", "train"]
    corpus = ensure_corpus(compose_run(words[2:]).config)
    assert corpus.prefix == folder / "corpus v1"
    assert corpus.vocab_size <= 300
    assert f"{corpus.tokens:,}" in done.stdout
    assert "tokenise" in done.stderr


def test_bytes_from_a_pipe_are_stored_one_by_one_and_documents_end(tmp_path: Path) -> None:
    canzona("-", "--output", "p", "--document", "line", stdin=b"ab\nc\xff\n", cwd=tmp_path, code=0)
    assert ids(tmp_path / "p") == [97, 98, 256, 99, 255, 256]


def test_jsonl_from_a_pipe_is_recognised_and_a_bpe_needs_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert canzona(tmp_path / "a.jsonl", "-o", tmp_path / "file", "--text-key", "body").returncode == 0
    assert canzona("-", "-o", tmp_path / "pipe", "--text-key", "body", stdin=lines).returncode == 0
    assert ids(tmp_path / "file") == ids(tmp_path / "pipe")
    assert inspect_pair(tmp_path / "pipe").documents == 3000
    assert "name files" in canzona("-", "-o", tmp_path / "p", "--tokenizer", "bpe", stdin=lines, code=2).stderr
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_saved_tokenizer_prepares_more_data_with_the_same_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_bytes(TEXT.encode() + b"\xff\xfe")
    assert (
        canzona(tmp_path / "a.txt", "-o", tmp_path / "a", "--tokenizer", "bpe", "--vocab-size", "300").returncode == 0
    )
    done = canzona(tmp_path / "b.txt", "-o", tmp_path / "b", "--tokenizer", tmp_path / "a.tokenizer.json", code=0)
    assert "2 invalid characters" in done.stdout
    a, b = ids(tmp_path / "a"), ids(tmp_path / "b")
    assert b[: len(a) - 20] == a[:-20]


def test_the_standard_library_prepares_with_its_name_alone(tmp_path: Path) -> None:
    canzona("stdlib", "-o", tmp_path / "p", code=0)
    assert inspect_pair(tmp_path / "p").tokens > 5_000_000


def test_every_mistake_is_told_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "p.idx").write_text("x")
    arguments = ("none.txt", "*.zz", "-o", "p", "--tokenizer", "none.json", "--vocab-size", "9", "--workers", "0")
    done = canzona(*arguments, cwd=tmp_path, code=2)
    shown = " ".join((done.stdout + done.stderr).split())
    for word in ("none.txt", "*.zz", "--tokenizer", "--vocab-size", "--workers", "--output", "--overwrite"):
        assert word in shown, word
    assert names(tmp_path) == ["p.idx"]


@pytest.mark.parametrize(
    ("source", "output", "code", "word"),
    [
        ("empty.jsonl", "new/folder/p", 2, "no text"),
        ("half.jsonl", "new/folder/p", 2, "half.jsonl:2"),
        ("zeros.jsonl", "new/folder/p", 2, "binary"),
        *(("a.txt", output, 2, "--output ") for output in ("folder", "folder/", "p.bin", "")),
        ("a.txt", "a.txt/p", 3, "not a folder"),
        ("a.txt", "/proc/p", 3, "cannot be written"),  # not even root may
    ],
)
def test_what_cannot_be_prepared_leaves_nothing(tmp_path: Path, source: str, output: str, code: int, word: str) -> None:
    """Not even a folder."""
    (tmp_path / "folder").mkdir()
    files = {"a.txt": b"one", "empty.jsonl": b"", "half.jsonl": b'{"text": "ok"}\n{"tex": 1}\n', "zeros.jsonl": b"\0\0"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = canzona(source, "-o", output, cwd=tmp_path, code=code)
    assert word in done.stdout + done.stderr
    assert names(tmp_path) == sorted(["folder", *files])


def test_an_existing_pair_stays_until_overwrite_and_an_input_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "p.json").write_text('{"text": "two"}\n')
    assert canzona("p.json", "-o", "p", "--format", "jsonl", "--overwrite", cwd=tmp_path).returncode == 2
    assert (tmp_path / "p.json").read_text() == '{"text": "two"}\n'
    assert canzona("p.json", "-o", "q", "--format", "jsonl", cwd=tmp_path).returncode == 0
    assert canzona("a.txt", "-o", "q", cwd=tmp_path).returncode == 2
    assert ids(tmp_path / "q") == [*b"two", 256]
    assert canzona("a.txt", "-o", "q", "--overwrite", cwd=tmp_path).returncode == 0
    assert ids(tmp_path / "q") == [*b"one", 256]


def test_a_disk_that_fills_up_is_exit_3_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode() * 40)
    limited = (
        "import resource, signal, runpy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from canzona_cli.cli.app import main; main()"
    )
    command = [sys.executable, "-c", limited, "data", "prepare", "a.txt", "-o", "out/p"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    assert "MiB are free" in message
    assert "make room (0 MiB" not in message, "the folder is removed only after its disk has been looked at"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("number", "tokenizer"), [(signal.SIGINT, "byte"), (signal.SIGTERM, "byte")])
def test_an_interrupt_is_exit_130_and_leaves_the_older_pair(
    tmp_path: Path, number: signal.Signals, tokenizer: str
) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert canzona("a.txt", "-o", "p", cwd=tmp_path).returncode == 0
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    command = [*CANZONA, "data", "prepare", "-", "-o", "p", "--overwrite", "--tokenizer", tokenizer]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(TEXT * 20)  # and no end of input: it is in the middle of its work
    process.stdin.flush()
    wait_until(lambda: len(names(tmp_path)) > len(before) + 1, "the lock and a growing file", process)
    process.send_signal(number)
    process.wait(timeout=PATIENCE_S)  # its input has no end
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_an_interrupt_while_the_vocabulary_is_learnt_acts_at_once(tmp_path: Path) -> None:
    command = [*CANZONA, "data", "prepare", "stdlib", "-o", "p", "--tokenizer", "bpe", "--vocab-size", "60000"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "learn vocabulary" in process.stderr.readline()
    wait_until(lambda: psutil.Process(process.pid).cpu_times().user > 2.5, "seconds of learning", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) in (130, -signal.SIGINT)
    assert "Traceback" not in process.stderr.read()
    assert not [name for name in names(tmp_path) if not name.endswith(".lock")]


@pytest.mark.sweep  # several preparations
def test_a_foreign_tokenizers_ids_are_those_of_its_library(tmp_path: Path) -> None:
    """Over JSONL and Parquet, whatever the number of threads; corrupt lines keep their place."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    foreign = Tokenizer(models.WordLevel(unk_token="<unk>"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<unk>", "<stop>"]))
    (tmp_path / "tok").mkdir()
    foreign.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    lines = [json.dumps({"body": line * 4}) for line in TEXT.splitlines(keepends=True)] * 3
    for place in (17, 4321, 8999):
        lines[place - 1] = '{"body": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = pa.table({"body": [f"row {n} of the fox " * 20 for n in range(2000)]})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=200, compression="none", use_dictionary=False)
    arguments = ["a.jsonl", "b.parquet", "--text-key", "body", "--tokenizer", "tok", "--max-bad", "3", "-o"]
    done = canzona(*arguments, "p", "--workers", "1", cwd=tmp_path, code=0)
    assert "3: 3 not JSON (a.jsonl:17, a.jsonl:4321, a.jsonl:8999)" in " ".join(done.stdout.split())
    canzona(*arguments, "whole", cwd=tmp_path, code=0)
    for end in (".bin", ".idx", ".json", ".tokenizer.json"):
        assert (tmp_path / f"p{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes(), end
    texts = [json.loads(line)["body"] for line in lines if line != '{"body": '] + table["body"].to_pylist()
    stop, expected = foreign.token_to_id("<stop>"), []
    for encoding in foreign.encode_batch(texts):
        expected += [*encoding.ids, stop]
    assert ids(tmp_path / "p") == expected
    few = canzona(*arguments[:6], "--max-bad", "2", "-o", "few", cwd=tmp_path, code=2)
    assert "a.jsonl:8999" in " ".join(few.stderr.split())


def test_a_second_writer_of_the_same_output_is_refused(tmp_path: Path) -> None:
    first = subprocess.Popen([*CANZONA, "data", "prepare", "-", "-o", "p"], cwd=tmp_path, stdin=subprocess.PIPE)
    assert first.stdin is not None
    wait_until((tmp_path / ".p.lock").exists, "the lock", first)
    (tmp_path / "a.txt").write_text("one")
    done = canzona("a.txt", "-o", "p", cwd=tmp_path, code=2)
    assert "another canzona" in " ".join((done.stdout + done.stderr).split())
    first.communicate(b"text", timeout=PATIENCE_S)
    assert first.returncode == 0
    assert ids(tmp_path / "p") == [*b"text", 256]
