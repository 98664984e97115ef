"""The number of times a run reads its data, and the notes about a run that hardly makes sense."""

from dataclasses import replace

import pytest

from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.records.corpus import MOST_EPOCHS, Supply, data_warnings, supply, tokens_needed
from tests.records.runs import CONFIG, CORPUS, LAYOUT, with_tokens


def run_of(steps: int, *, data: DataConfig | None = None, vocab_size: int = 16384) -> RunConfig:
    data = data or DataConfig(source="prepared", path="own")
    model, train = replace(CONFIG.model, vocab_size=vocab_size), replace(CONFIG.train, steps=steps)
    return replace(CONFIG, model=model, train=train, data=data)


def test_epochs_are_the_tokens_of_all_steps_over_those_of_one_pass() -> None:
    config = run_of(10)
    assert tokens_needed(config, LAYOUT) == 10 * 32 * 256
    rampup = replace(config, train=replace(config.train, batch_rampup=((8, 2), (16, 1))))
    assert tokens_needed(rampup, LAYOUT) == (2 * 8 + 16 + 7 * 32) * 256
    found = supply(config, LAYOUT, with_tokens(10 * 32 * 256 // 5))
    assert found is not None
    assert found.epochs == pytest.approx(5, rel=1e-3)
    assert supply(config, LAYOUT) is None, "a corpus that was not opened is not guessed"


@pytest.mark.parametrize(
    ("wanted", "times"), [(120, "0.12"), (3_456, "3.5"), (9_940, "9.9"), (99_600, "100"), (3_616_000, "3,616")]
)
def test_epochs_read_as_numbers(wanted: int, times: str) -> None:
    assert Supply(needed=wanted, available=1000).epochs_text == times


def test_only_more_than_four_passes_are_warned_of_and_the_fix_is_four() -> None:
    """The number of steps that the warning names reads the data four times at most, and one step more often does."""
    a_step = 32 * 256
    corpus = with_tokens(100 * a_step + 17)
    assert not list(data_warnings(run_of(400), LAYOUT, corpus))
    (said,) = data_warnings(run_of(1000), LAYOUT, corpus)
    assert "read 10 times" in said
    steps = int(said.rpartition("train.steps=")[2])
    epochs = [supply(run_of(count), LAYOUT, corpus) for count in (steps, steps + 1)]
    assert [found is not None and found.epochs > MOST_EPOCHS for found in epochs] == [False, True]


def test_of_a_blend_each_set_is_counted_and_the_one_that_is_read_most_often_is_warned_of() -> None:
    a_step = 32 * 256
    corpus = with_tokens(100 * a_step, 10 * a_step)
    found = supply(run_of(100), LAYOUT, corpus)
    assert found is not None
    assert {name: each.epochs for name, each in found.sets.items()} == pytest.approx({"set0": 0.5, "set1": 5})
    assert found.words.startswith("set0 0.5, set1 5 (819 k tokens needed")
    (said,) = data_warnings(run_of(100), LAYOUT, corpus)
    assert "train.steps=80" in said
    assert not list(data_warnings(run_of(80), LAYOUT, corpus))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "tokenizer.json"])
def test_a_large_run_on_the_demonstration_corpus_is_called_a_trial(tokenizer: str) -> None:
    """It is called a trial before anything is prepared, and afterwards."""
    config = run_of(100_000, data=DataConfig(source="stdlib", tokenizer=tokenizer))
    for corpus in (None, CORPUS):
        said = next(data_warnings(config, LAYOUT, corpus))
        assert said.startswith("THIS IS A TRIAL")
        assert "data=prepared data.path=" in said
    assert not list(data_warnings(run_of(120, data=config.data), LAYOUT, CORPUS))


def test_rows_of_the_embedding_that_never_occur_are_told() -> None:
    assert not list(data_warnings(run_of(1, vocab_size=2 * CORPUS.vocab_size), LAYOUT, CORPUS))
    (said,) = data_warnings(run_of(1, vocab_size=151_936), LAYOUT, CORPUS)
    assert "89%" in said
