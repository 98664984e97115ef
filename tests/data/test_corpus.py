"""A run gets an intact corpus that fits its model, made once however many runs ask for it."""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import EnvironmentProblem
from canzona_cli.core.writing import Busy, exclusive_lock
from canzona_cli.data.build import BuiltPair
from canzona_cli.data.corpus import ensure_corpus, token_bytes
from canzona_cli.data.indexed import bin_path, idx_path, inspect_pair, saved_tokenizer_path, sidecar_path
from canzona_cli.data.order import split_tokens
from canzona_cli.data.prepare import PrepareRequest, prepare
from canzona_cli.data.sources import stdlib_sources
from canzona_cli.records.corpus import supply
from canzona_cli.records.files import cache_root
from tests.refusals import refused
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANZONA_CACHE", str(tmp_path / "cache"))


def config(*overrides: str) -> RunConfig:
    return compose_run(["recipe=qwen3-tiny", *overrides]).config


def prepared(tmp_path: Path, text: str, *overrides: str) -> tuple[RunConfig, BuiltPair]:
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    request = PrepareRequest(inputs=(str(tmp_path / "in.txt"),), output=str(tmp_path / "p"), document="line")
    built = prepare(request, lambda progress: None)
    return config("data=prepared", f"data.path={tmp_path / 'p'}", *overrides), built


def problems(run: RunConfig) -> dict[str, str]:
    return {p.key: f"{p.reason}; {p.fix}" for p in refused(ensure_corpus, run)}


LONG = "".join(f"line {i} of a text that is long enough to train and to validate on\n" for i in range(2000))


def test_the_built_in_corpus_is_made_once_then_found(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    first = ensure_corpus(config(), lambda what, share: told.append((what, share)))
    stamp = bin_path(first.prefix).stat().st_mtime_ns
    assert first.tokens == bin_path(first.prefix).stat().st_size // 2 > 5_000_000
    assert first.tokens == sum(source.size or 0 for source in stdlib_sources()) + first.documents
    assert (first.tokenizer, first.vocab_size, first.eod, first.max_token_id) == ("byte", 257, 256, 256)
    assert first.train_tokens + first.validation_tokens == first.tokens
    assert 0.005 < first.validation_tokens / first.tokens < 0.05
    # What is said of it before it is made; Python's versions differ in size.
    run = config()
    layout = resolve(run)[1]
    guess, fact = supply(run, layout), supply(run, layout, first)
    assert guess is not None
    assert fact is not None
    assert guess.available == pytest.approx(fact.available, rel=0.25)
    assert told
    assert all(0 <= share <= 1 for _, share in told)
    assert ensure_corpus(config()) == first
    assert bin_path(first.prefix).stat().st_mtime_ns == stamp
    assert not [path for path in first.prefix.parent.iterdir() if path.name.startswith(".")]

    # Damage in the cache is ours to mend, and the result is the same.
    content = bin_path(first.prefix).read_bytes()
    bin_path(first.prefix).write_bytes(content[:1000])
    assert ensure_corpus(config()) == first
    assert bin_path(first.prefix).read_bytes() == content


def _tokens_and_told(_: int) -> tuple[int, set[str]]:
    told: set[str] = set()
    corpus = ensure_corpus(config(), lambda what, share: told.add(what.split()[0]))
    return corpus.tokens, told


def test_two_runs_at_once_share_one_preparation(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        runs = [*pool.map(_tokens_and_told, range(2), timeout=PATIENCE_S)]
    assert len({tokens for tokens, _ in runs}) == 1
    assert ["tokenising" in told for _, told in runs].count(True) == 1
    folder = tmp_path / "cache" / "corpora"
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".idx", ".json"]


def test_the_cache_is_where_the_variable_or_the_home_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("CANZONA_CACHE")
    assert cache_root() == Path.home() / ".cache" / "canzona"


def test_a_cache_that_cannot_be_made_is_an_environment_problem(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem) as caught:
        ensure_corpus(config())
    assert caught.value.problems[0].key == "CANZONA_CACHE"
    assert "CANZONA_CACHE=FOLDER" in caught.value.problems[0].fix


def test_prepared_data_comes_with_what_its_sidecar_says(tmp_path: Path) -> None:
    run, built = prepared(tmp_path, LONG)
    corpus = ensure_corpus(run)
    assert (corpus.tokens, corpus.documents, corpus.eod) == (built.sidecar.tokens, 2000, 256)
    assert built.sidecar.inputs[0].bytes == len(LONG)


def test_ids_beyond_the_vocabulary_are_told_with_the_least_size(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path, LONG, "model.vocab_size=256")
    text = problems(run)["model.vocab_size"]
    assert "at least 257" in text
    assert "model.vocab_size=384" in text


def test_several_misfits_are_told_at_once(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path, "short\n", "model.vocab_size=256")
    assert set(problems(run)) == {"model.vocab_size", "train.seq_length"}


def test_a_split_that_leaves_nothing_names_one_that_does(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path, LONG, "data.validation_fraction=0.0002")
    text = problems(run)["data.validation_fraction"]
    assert "data.validation_fraction=0.01" in text
    share = float(text.split("data.validation_fraction=")[1].split(",")[0])
    assert ensure_corpus(prepared_again(tmp_path, share)).validation_tokens > 256


def test_a_split_that_is_too_short_is_told_with_its_size(tmp_path: Path) -> None:
    text = "".join(f"{number} more\n" for number in range(40))
    run, built = prepared(tmp_path, text, "data.validation_fraction=0.4")
    train, validation = split_tokens(inspect_pair(built.prefix), "drawn", run.data)
    assert validation < train < run.train.seq_length
    assert f"leaves {train} tokens for training" in problems(run)["data.validation_fraction"]


def prepared_again(tmp_path: Path, share: float) -> RunConfig:
    return config("data=prepared", f"data.path={tmp_path / 'p'}", f"data.validation_fraction={share}")


def test_without_validation_all_tokens_train(tmp_path: Path) -> None:
    run, built = prepared(tmp_path, LONG, "train.eval_interval=0", "data.validation_fraction=0")
    corpus = ensure_corpus(run)
    assert (corpus.train_tokens, corpus.validation_tokens) == (built.sidecar.tokens, 0)


def test_a_pair_of_another_tool_is_scanned_once(tmp_path: Path) -> None:
    """For its largest id and for the documents to hold out."""
    run, built = prepared(tmp_path, LONG)
    sidecar_path(built.prefix).unlink()
    scans: list[str] = []
    corpus = ensure_corpus(run, lambda what, share: scans.append(what))
    assert (corpus.tokenizer, corpus.eod, corpus.max_token_id, corpus.vocab_size) == ("unknown", None, 256, 257)
    assert len({*scans}) == len(scans) == 2
    assert ensure_corpus(run, lambda what, share: scans.append(what)) == corpus
    assert len(scans) == 2
    os.utime(bin_path(built.prefix), ns=(1, 1))  # other content would have another time
    ensure_corpus(run, lambda what, share: scans.append(what))
    assert len(scans) == 4
    for memo in (tmp_path / "cache" / "scans").iterdir():
        memo.write_bytes(memo.read_bytes()[:-1] + b"?")
    assert ensure_corpus(run, lambda what, share: scans.append(what)) == corpus
    assert len(scans) == 6, "what is damaged is found again"


def test_a_sidecar_of_other_data_is_told(tmp_path: Path) -> None:
    run, built = prepared(tmp_path, LONG)
    said = json.loads(sidecar_path(built.prefix).read_text()) | {"tokens": 1}
    sidecar_path(built.prefix).write_text(json.dumps(said))
    assert "it describes 1 tokens" in problems(run)["data.path"]


def test_a_damaged_tokenizer_is_told_with_its_file(tmp_path: Path) -> None:
    run, built = prepared(tmp_path, LONG)
    said = json.loads(sidecar_path(built.prefix).read_text()) | {"tokenizer": "bpe"}
    sidecar_path(built.prefix).write_text(json.dumps(said))
    path, corpus = saved_tokenizer_path(built.prefix), ensure_corpus(run)
    path.write_text('{"version": ')
    [problem] = refused(token_bytes, corpus)
    assert (problem.key, problem.value) == ("data.path", str(path))
    assert "--overwrite" in problem.fix


def test_missing_and_damaged_data_are_told(tmp_path: Path) -> None:
    assert "no such file" in problems(config("data=prepared", f"data.path={tmp_path}/none"))["data.path"]
    run, built = prepared(tmp_path, LONG)
    idx_path(built.prefix).write_bytes(b"")
    assert "empty" in problems(run)["data.path"]


def test_the_lock_excludes_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / ".p.lock"
    code = (
        "import sys, time; from pathlib import Path; from canzona_cli.core.writing import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(3600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(Busy), exclusive_lock(path):
        pass
    waits: list[None] = []

    def on_wait() -> None:
        if not waits:
            holder.kill()
        waits.append(None)

    with exclusive_lock(path, on_wait=on_wait):
        assert waits
        assert path.exists()
    assert not path.exists()
    holder.wait()


def test_a_validation_set_of_its_own_takes_no_documents_from_training(tmp_path: Path) -> None:
    run, built = prepared(tmp_path, LONG, f"data.validation={tmp_path / 'own'}")
    (tmp_path / "own.txt").write_text(LONG.replace("line", "verse"))
    asked = PrepareRequest(inputs=(str(tmp_path / "own.txt"),), output=str(tmp_path / "own"), document="line")
    own = prepare(asked, lambda progress: None)
    corpus = ensure_corpus(run)
    assert (corpus.train_tokens, corpus.validation_tokens) == (built.sidecar.tokens, own.sidecar.tokens)
    assert [(part.name, part.documents, part.train_tokens) for part in corpus.validation_sets] == [("own", 2000, 0)]


def test_what_is_no_validation_set_is_refused_with_its_reason(tmp_path: Path) -> None:
    def reason(name: str, *overrides: str) -> str:
        run = config(f"data.path={tmp_path / 'p'}", f"data.validation={tmp_path / name}", *overrides)
        found = problems(run)
        assert [*found] == ["data.validation"]
        return found["data.validation"]

    def write(name: str, text: str, tokenizer: str = "byte") -> None:
        (tmp_path / "in.txt").write_text(text)
        size = 270 if tokenizer == "bpe" else None
        asked = PrepareRequest(
            inputs=(str(tmp_path / "in.txt"),),
            output=str(tmp_path / name),
            document="line",
            tokenizer=tokenizer,
            vocab_size=size,
        )
        prepare(asked, lambda progress: None)

    write("p", LONG)
    write("copy", LONG)
    write("words", LONG, "bpe")
    write("short", "a short text\n")
    assert "no such file; create it" in reason("none")
    assert f"has the same contents as {tmp_path / 'p'}, which is trained on" in reason("copy")
    assert "the same id means different text" in reason("words")
    assert "has 13 tokens, but a sample needs 257" in reason("short")
    ensure_corpus(config(f"data.path={tmp_path / 'p'}", f"data.validation={tmp_path / 'short'}",
                         "train.eval_interval=0"))  # fmt: skip
    both = refused(ensure_corpus, config(f"data.path={tmp_path / 'x'}", f"data.validation={tmp_path / 'y'}"))
    assert {problem.key for problem in both} == {"data.path", "data.validation"}
    (tmp_path / "short.idx").rename(tmp_path / "short_document.idx")
    assert f"did you mean data.validation={tmp_path / 'short_document'}?" in reason("short")
    for data in (f"data.path={tmp_path / 'p'}", f"data.blend={{{tmp_path / 'p'}:1,{tmp_path / 'copy'}:1}}"):
        found = refused(compose_run, ["recipe=tiny", data, f"data.validation={tmp_path}/./p"])
        assert [(problem.key, problem.reason) for problem in found] == [("data.validation", "is trained on too")]
    sidecar = json.loads(sidecar_path(tmp_path / "copy").read_text()) | {"max_token_id": 999}
    sidecar_path(tmp_path / "copy").write_text(json.dumps(sidecar))
    large = config(f"data.path={tmp_path / 'p'}", f"data.validation={tmp_path / 'copy'}")
    assert f"{tmp_path / 'copy'}.bin" in problems(large)["model.vocab_size"]
