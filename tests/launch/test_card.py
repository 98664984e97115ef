"""A run is compared with the card of its recipe where they may be compared; real runs give what the cards say."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.launch.card import Card, card_of, judge, load_card
from canzona_cli.records.corpus import PreparedCorpus, PreparedSet
from canzona_cli.records.summary import load_summary
from tests.cli.commands.support import canzona

NAMES = sorted(path.stem for path in (builtin_recipes_dir() / "cards").glob("*.yaml"))
CARDS = {name: card for name in NAMES if (card := load_card(name)) is not None}


def composed(*overrides: str) -> RunConfig:
    return resolve(compose_run(overrides).config)[0]


def test_the_small_recipes_have_cards() -> None:
    assert {"qwen3-tiny", "qwen3-moe-tiny"} <= {name for name, card in CARDS.items() if card.again == "tests"}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_complete_and_of_its_recipes_own_settings(name: str) -> None:
    card = CARDS[name]
    assert card_of(composed(f"recipe={name}")) == card, "without typed settings, a run is compared with its card"
    steps = composed(*shlex.split(card.command)[2:]).train.steps
    assert steps == composed(f"recipe={name}").train.steps or card.again == "person"
    assert max(card.loss) == max(card.validation) == steps
    assert all(0 < loss < 20 for loss in (*card.loss.values(), *card.validation.values()))
    assert 0 < card.tolerance < 0.2 * card.validation[steps]
    assert all((card.machine, card.date, card.commit, card.corpus))


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (("gpus=1",), True),
        (("gpus=4", "parallel.tp=4", "engine.strategy=sc", "train.micro_batch_size=2"), True),
        (("optimizer.lr=1e-3",), False),
        (("optimizer.adamw_lr_ratio=0.2",), False),
        (("train.precision=fp32",), False),
        (("train.seed=1",), False),
        (("model.init_std=0.1",), False),
        (("train.eval_sequences=8",), False),
        (("train.steps=60",), False),
        (("train.steps=60", "schedule.decay_steps=120"), True),
    ],
)
def test_a_run_has_a_card_if_nothing_that_changes_its_losses_differs(overrides: tuple[str, ...], same: bool) -> None:
    assert (card_of(composed("recipe=qwen3-tiny", *overrides)) is not None) == same


def test_a_recipe_that_was_never_trained_has_none() -> None:
    assert card_of(composed("recipe=qwen3-8b", "gpus=8")) is None


def run_of(folder: Path, *, validation: float, loss: float, corpus: str) -> tuple[Path, PreparedCorpus]:
    folder.mkdir()
    metrics = [{"step": step, "loss": loss, "time": 1.0} for step in (1, 20, 120)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    (folder / "validation.jsonl").write_text(json.dumps({"step": 120, "loss": validation, "time": 1.0}) + "\n")
    part = PreparedSet(
        name="stdlib", prefix=folder / corpus, tokens=9, documents=1, train_tokens=8, validation_tokens=1
    )
    return folder, PreparedCorpus(sets=(part,), tokenizer="byte", vocab_size=257, max_token_id=256, eod=256)


CARD = Card(
    command="canzona train recipe=qwen3-tiny",
    machine="2 cores",
    date="2026-11-26",
    commit="abc",
    corpus="stdlib-3.12",
    loss={20: 3.0},
    validation={40: 2.5, 120: 1.9},
    tolerance=0.02,
)


@pytest.mark.parametrize(("loss", "good"), [(1.91, True), (1.8805, True), (1.93, False), (1.87, False)])
def test_a_run_is_as_good_as_its_card_within_the_tolerance(tmp_path: Path, loss: float, good: bool) -> None:
    folder, corpus = run_of(tmp_path / "run", validation=loss, loss=9.0, corpus="stdlib-3.12")
    verdict = judge(CARD, load_summary(folder), corpus)
    assert verdict is not None
    assert f"validation {loss:.4f} at step 120, card 1.9000 ± 0.02" in verdict
    assert ("outside the tolerance" in verdict) == (not good)
    assert "trained on" not in verdict


def test_other_text_is_named_and_training_losses_serve_without_a_validation(tmp_path: Path) -> None:
    folder, corpus = run_of(tmp_path / "run", validation=math.nan, loss=3.01, corpus="stdlib-3.13")
    (folder / "validation.jsonl").unlink()
    verdict = judge(CARD, load_summary(folder), corpus)
    assert verdict is not None
    assert verdict == (
        "loss 3.0100 at step 20, card 3.0000 ± 0.02; the run was trained on stdlib-3.13, the card's run on stdlib-3.12"
    )
    assert judge(replace(CARD, loss={}), load_summary(folder), corpus) is None


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in NAMES if CARDS[name].again == "tests"])
def test_training_gives_what_the_card_says(name: str, tmp_path: Path) -> None:
    """It trains up to the first validation, with the schedule of the whole run."""
    card = CARDS[name]
    step, end = min(card.validation), max(card.validation)
    typed = [*shlex.split(card.command)[1:], f"train.steps={step}", f"schedule.decay_steps={end}"]
    done = canzona(*typed, f"run.dir={tmp_path / 'run'}", environment={"HOME": str(Path.home())}, code=0)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("card: ")]
    assert f" at step {step}, card {card.validation[step]:.4f} ±" in line
    assert "differs more" not in line, line
