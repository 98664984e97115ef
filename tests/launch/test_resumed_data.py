"""A resumption compares its data with the checkpoint's: another tokenizer is refused, other text and another order are
said with numbers."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.reading import parse
from canzona_cli.core.setup import Layout
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.data.indexed import inspect_pair, saved_tokenizer_path
from canzona_cli.data.order import order_of
from canzona_cli.launch.resume import Resumption
from canzona_cli.launch.resumed_data import check_tokenizer, data_changes, other_text
from canzona_cli.records.codec import record_dict
from canzona_cli.records.corpus import DataPlan
from canzona_cli.records.words import jsonable
from tests.data.texts import drawn, prepare_documents

LENGTH = 32
STEP = 5
BATCH = 8


def run_of(folder: Path, *overrides: str) -> tuple[RunConfig, Layout]:
    small = (f"train.seq_length={LENGTH}", f"train.global_batch_size={BATCH}", "train.steps=10", "gpus=1")
    data = f"data.path={folder / 'a'}"
    where = () if any(override.startswith(("data.path", "data.blend")) for override in overrides) else (data,)
    own_set = any(override.startswith("data.validation=") for override in overrides)
    held_out = () if own_set else ("data.validation_fraction=0.25",)
    composed = compose_run(["recipe=qwen3-tiny", *small, *held_out, *where, *overrides])
    return resolve(composed.config)


def saved_at_step_five(config: RunConfig, layout: Layout) -> Resumption:
    """The checkpoint of this run after step 5, with the description of its data."""
    batch = layout.global_batch_size
    return Resumption(
        checkpoint=Path("run/checkpoints/step-00000005"),
        progress=Progress(step=STEP, samples=STEP * batch, tokens=STEP * batch * LENGTH),
        created=1.0,
        of_this_run=True,
        saved=config,
        batch_before=batch,
        data=DataPlan(corpus=ensure_corpus(config), samples=config.train.steps * batch),
    )


def changes(found: Resumption, config: RunConfig, layout: Layout) -> list[str]:
    return data_changes(found, config, layout, ensure_corpus(config))


def test_the_same_data_and_settings_are_no_change(tmp_path: Path) -> None:
    prepare_documents(tmp_path, "a", documents=60, seed=0)
    found = saved_at_step_five(*run_of(tmp_path))
    for overrides in ((), ("train.eval_interval=0",), ("train.steps=12",), ("data.validation_fraction=0.25",)):
        assert changes(found, *run_of(tmp_path, *overrides)) == [], overrides


def test_another_tokenizer_is_refused_and_other_text_is_said_with_its_step(tmp_path: Path) -> None:
    prepare_documents(tmp_path, "a", documents=60, seed=0)
    found = saved_at_step_five(*run_of(tmp_path))
    prepare_documents(tmp_path, "a", documents=60, seed=0, reverse=True)
    (said,) = changes(found, *run_of(tmp_path))
    assert f"{tmp_path / 'a'} has other text than up to step 5: also " in said
    prepare_documents(tmp_path, "a", documents=70, seed=0)
    (said,) = changes(found, *run_of(tmp_path))
    assert "tokens in 70 documents now" in said
    prepare_documents(tmp_path, "a", documents=60, seed=0, tokenizer="bpe")
    for weights_only in (False, True):
        with pytest.raises(ConfigError) as refused:
            changes(replace(found, weights_only=weights_only), *run_of(tmp_path))
        (problem,) = refused.value.problems
        assert (problem.key, problem.value) == ("data.path", str(tmp_path / "a"))
        assert "step-00000005 was trained on ids of byte (257 ids)" in problem.reason


def test_an_evaluation_says_of_text_that_it_is_not_the_runs(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        prepare_documents(tmp_path, name, documents=60, seed=seed)
    config, layout = run_of(tmp_path)
    saved = saved_at_step_five(config, layout).data
    assert saved is not None

    def said(*overrides: str) -> list[str]:
        return [*other_text(saved, ensure_corpus(run_of(tmp_path, *overrides)[0]))]

    assert said() == said("data.validation_fraction=0.5") == []
    (elsewhere,) = said(f"data.path={tmp_path / 'b'}")
    assert elsewhere.startswith(f"{tmp_path / 'b'} is none of the run's data, ")
    prepare_documents(tmp_path, "a", documents=60, seed=0, reverse=True)
    (changed,) = said()
    assert changed.startswith(f"{tmp_path / 'a'} has other text than when the checkpoint was saved (also ")
    assert [*other_text(None, ensure_corpus(config))] == []


def test_another_validation_set_leaves_the_order_and_one_in_place_of_held_out_documents_changes_it(
    tmp_path: Path,
) -> None:
    for seed, name in enumerate(("a", "b", "c")):
        prepare_documents(tmp_path, name, documents=60, seed=seed)
    own, other = (f"data.validation={tmp_path / name}" for name in ("b", "c"))
    found = saved_at_step_five(*run_of(tmp_path, own, "train.steps=20"))
    for same in ((own,), (other,), (own, "train.eval_interval=0")):
        assert changes(found, *run_of(tmp_path, *same, "train.steps=20")) == []
    (said,) = changes(found, *run_of(tmp_path, "train.steps=20"))
    assert said.startswith("data.validation=null, data.validation_fraction=0.25 changes the order of the data")
    prepare_documents(tmp_path, "b", documents=60, seed=1, reverse=True)
    (said,) = changes(found, *run_of(tmp_path, own, "train.steps=20"))
    assert said.startswith(f"{tmp_path / 'b'} has other text than up to step 5: also ")
    assert "Validation losses" in said
    evaluated = ensure_corpus(run_of(tmp_path, f"data.path={tmp_path / 'b'}")[0])
    (said,) = other_text(found.data, evaluated)
    assert "has other text than when the checkpoint was saved" in said
    prepare_documents(tmp_path, "b", documents=60, seed=1)
    assert [*other_text(found.data, ensure_corpus(run_of(tmp_path, f"data.path={tmp_path / 'b'}")[0]))] == []


def test_a_set_stays_divided_as_in_the_checkpoint(tmp_path: Path) -> None:
    """Of the earlier ones, whose files do not name a division, the last documents were held out."""
    prefix = prepare_documents(tmp_path, "a", documents=60, seed=0)
    config, layout = run_of(tmp_path)
    found = saved_at_step_five(config, layout)
    assert found.data is not None
    written = jsonable(record_dict(found.data))
    assert isinstance(written, dict)
    del written["corpus"]["sets"][0]["division"]
    earlier = parse(DataPlan, written)
    (last,) = ensure_corpus(config, saved=earlier).sets
    assert last.train_tokens == inspect_pair(prefix).lengths[:45].sum()
    (now,) = ensure_corpus(config, saved=found.data).sets
    assert now.train_tokens == inspect_pair(prefix).lengths[~drawn(prefix, 0.25)].sum()
    assert [part.division for part in (last, now)] == ["tail", "drawn"]
    for path in tmp_path.glob("a.*"):
        path.rename(tmp_path / f"moved{path.suffix}")
    (moved,) = ensure_corpus(run_of(tmp_path, f"data.path={tmp_path / 'moved'}")[0], saved=earlier).sets
    assert (moved.division, moved.train_tokens) == ("tail", last.train_tokens)


def test_the_tokenizer_of_a_hugging_face_folder_is_that_of_the_data_too(tmp_path: Path) -> None:
    words = prepare_documents(tmp_path, "a", documents=60, seed=0, tokenizer="bpe")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(saved_tokenizer_path(words), folder / "tokenizer.json")
    config, _ = run_of(tmp_path, "model.vocab_size=384")
    check_tokenizer(None, str(folder), config, ensure_corpus(config))
    prepare_documents(tmp_path, "a", documents=60, seed=0)
    with pytest.raises(ConfigError) as refused:
        check_tokenizer(None, str(folder), config, ensure_corpus(config))
    assert f"was trained on ids of {folder / 'tokenizer.json'}" in refused.value.problems[0].reason


@pytest.mark.parametrize(
    ("overrides", "batch", "steps"),
    [(("train.global_batch_size=64",), 64, 10), (("train.global_batch_size=32", "train.steps=20"), 32, 20)],
)
def test_another_batch_is_priced_from_where_the_run_is(
    tmp_path: Path, overrides: tuple[str, ...], batch: int, steps: int
) -> None:
    """Old steps have read the old batch: with 5 steps of 8 and 5 of 64, the run reads 360 samples, not 640."""
    prefix = prepare_documents(tmp_path, "a", documents=60, seed=0)
    found = saved_at_step_five(*run_of(tmp_path))
    config, layout = run_of(tmp_path, *overrides)
    (said,) = changes(found, config, layout)
    assert said.startswith(f"{'train.steps=20, ' if steps == 20 else ''}train.global_batch_size={batch} changes")
    needed = 40 + (steps - 5) * batch
    tokens = int(inspect_pair(prefix).lengths[~drawn(prefix, 0.25)].sum())
    new = order_of(tokens=tokens, samples=needed, seq_length=LENGTH, seed=1234)
    assert new.epochs == -(-(needed * LENGTH + 1) // tokens)
    assert f"on: {new.epochs} epochs" in said
    assert "instead of 1 epoch." in said


def test_other_weights_are_said_with_the_next_sample_of_each_set(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "c")):
        prepare_documents(tmp_path, name, documents=60, seed=seed)

    def blend(**weights: int) -> str:
        return f"data.blend={{{','.join(f'{tmp_path / name}:{weight}' for name, weight in weights.items())}}}"

    found = saved_at_step_five(*run_of(tmp_path, blend(a=9, b=1)))
    assert changes(found, *run_of(tmp_path, blend(a=90, b=10))) == []
    (said,) = changes(found, *run_of(tmp_path, blend(a=1, b=1)))
    assert "from step 6 on, each set continues with its own next sample: a with its sample about 37, b" in said
    (said,) = changes(found, *run_of(tmp_path, blend(b=1, c=1)))
    assert said.endswith("b with its sample about 5, c with its sample 1")
