"""A run that goes on has the settings that it was started with, and what the command line changes on top of them."""

from dataclasses import fields
from pathlib import Path

import pytest

from canzona_cli.config.compose import CHOSEN, compose_run, dump_resolved, load_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError
from tests.refusals import refused


def written(folder: Path, *overrides: str) -> RunConfig:
    """The settings of a run that was started in `folder`."""
    recipe = [] if any(each.startswith("recipe=") for each in overrides) else ["recipe=qwen3-tiny"]
    config, _ = resolve(compose_run([*recipe, f"run.dir={folder}", *overrides]).config)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_resolved(config))
    return config


def again(folder: Path, *overrides: str) -> RunConfig:
    return resolve(compose_run([f"run.dir={folder}", *overrides]).config)[0]


def test_a_run_goes_on_with_what_is_written_there(tmp_path: Path) -> None:
    started = written(
        tmp_path / "run", "gpus=2", "train.steps=50", "optimizer.lr=0.003", "parallel.tp=2", "train.seed=7"
    )
    assert again(tmp_path / "run") == started
    changed = again(tmp_path / "run", "optimizer.lr=0.001")
    assert (changed.optimizer.lr, changed.optimizer.min_lr, changed.train.seed) == (0.001, 0.0001, 7)


def test_another_number_of_gpus_or_cluster_has_a_layout_of_its_own(tmp_path: Path) -> None:
    """And the batch that the curve needs, where it is possible."""
    started = written(tmp_path / "run", "gpus=2", "parallel.tp=2")
    for change in ("gpus=8", "cluster=h100-80g"):
        layout = compose_run([f"run.dir={tmp_path / 'run'}", change]).config
        assert (layout.parallel.tp, layout.train.micro_batch_size, layout.cluster.nodes) == (None, None, None)
        assert layout.train.global_batch_size == started.train.global_batch_size
    assert again(tmp_path / "run", "gpus=8", "parallel.tp=4").parallel.tp == 4
    assert compose_run([f"run.dir={tmp_path / 'run'}", "cluster=h100-80g"]).config.cluster.device == "cuda"


def test_a_run_with_divided_experts_goes_on_where_they_cannot_be_divided_so(tmp_path: Path) -> None:
    assert written(tmp_path / "run", "recipe=qwen3-moe-tiny", "gpus=8", "parallel.ep=8").parallel.ep == 8
    assert again(tmp_path / "run", "gpus=2").parallel.ep == 1


def test_each_setting_of_the_layout_that_was_chosen_is_chosen_again() -> None:
    asked = compose_run(["recipe=qwen3-moe-tiny", "gpus=8"]).config
    resolved, _ = resolve(asked)
    chosen = {
        f"parallel.{field.name}"
        for field in fields(asked.parallel)
        if getattr(asked.parallel, field.name) is None and getattr(resolved.parallel, field.name) is not None
    }
    assert {"parallel.tp", "parallel.ep"} <= chosen <= set(CHOSEN)


def test_a_longer_run_decays_to_its_own_end(tmp_path: Path) -> None:
    """It decays as it would by the command that started it; settings typed for the schedule stay."""
    written(tmp_path / "run", "train.steps=50")
    assert again(tmp_path / "run", "train.steps=100").schedule.decay_steps == 100
    written(tmp_path / "typed", "train.steps=50", "schedule.decay_steps=40")
    assert again(tmp_path / "typed", "train.steps=100").schedule.decay_steps == 40


def test_a_new_run_with_the_settings_of_another_derives_anew_what_that_one_had_derived(tmp_path: Path) -> None:
    """Its `config.yaml` has resolved values, beside the layout that they were chosen for. A recipe of one's own that
    happens to have that name keeps its values."""
    folder = tmp_path / "run"
    written(folder, "gpus=2", "parallel.tp=2", "train.steps=50")
    recipe = f"recipe={folder / 'config.yaml'}"
    mine = tmp_path / "mine" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text((folder / "config.yaml").read_text())
    assert compose_run([f"recipe={mine}", "train.steps=100"]).config.schedule.decay_steps == 50
    fresh = resolve(compose_run(["recipe=qwen3-tiny", "gpus=2", "train.steps=100"]).config)[0]
    longer = resolve(compose_run([recipe, "train.steps=100", "gpus=2"]).config)[0]
    assert longer.schedule.complete(100) == fresh.schedule.complete(100)
    assert longer.parallel == fresh.parallel
    assert compose_run([recipe, "train.steps=100", "schedule.decay_steps=80"]).config.schedule.decay_steps == 80
    assert compose_run([recipe]).config.parallel.tp == 2


def test_a_batch_that_follows_from_its_tokens_follows_the_sequence_length(tmp_path: Path) -> None:
    """4,096 tokens are 16 sequences of 256; a batch that was typed stays."""
    assert written(tmp_path / "run", "gpus=1").train.global_batch_size == 16
    assert again(tmp_path / "run", "train.seq_length=128").train.global_batch_size == 32
    assert again(tmp_path / "run", "train.seq_length=128", "train.global_batch_size=8").train.global_batch_size == 8
    written(tmp_path / "typed", "gpus=1", "train.global_batch_size=8")
    assert again(tmp_path / "typed", "train.seq_length=128").train.global_batch_size == 8


def test_a_run_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    written(tmp_path / "run", "gpus=1")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("eval_sequences: 64", "eval_batches: 3").replace("seed: ", "seeds: "))
    for refusals in (
        refused(load_resolved, file),
        refused(compose_run, [f"run.dir={tmp_path / 'run'}", "train.steps=no"]),
    ):
        (problem,) = [problem for problem in refusals if problem.key == str(file)]
        assert len(refusals) == 1
        assert "another version of canzona, or edited: this version has no setting train.seeds" in problem.reason
        assert "start a new run from a recipe" in problem.fix


def test_without_a_run_there_a_recipe_is_needed_and_a_recipe_that_is_named_counts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe is given"):
        compose_run([f"run.dir={tmp_path}"])
    written(tmp_path / "run", "train.steps=50")
    assert compose_run(["recipe=qwen3-tiny", f"run.dir={tmp_path / 'run'}"]).config.train.steps != 50
