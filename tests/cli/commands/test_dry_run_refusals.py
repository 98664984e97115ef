"""`canzona train --dry-run` and `canzona slurm`: everything wrong at once, with exit code 2."""

from pathlib import Path

import pytest

from tests.cli.commands.support import canzona


def test_five_mistakes_are_told_at_once_from_any_directory(tmp_path: Path) -> None:
    result = canzona(
        "train",
        "--dry-run",
        "recipe=qwen3-tinny",
        "gpus=0",
        "optimizer.lrr=1",
        "train.steps=1e3",
        "parallel.tp=3",
        cwd=tmp_path,
        code=2,
    )
    assert result.stdout == ""
    assert "5 problems" in result.stderr
    for expected in ("did you mean qwen3-tiny?", "optimizer.lr?", "train.steps=1000", "1, 2, 4", "at least 1"):
        assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_what_does_not_fit_is_exit_code_4() -> None:
    result = canzona("train", "--dry-run", "recipe=32b", "gpus=1", code=4)
    assert "does not fit" in result.stderr.lower()


def test_warnings_do_not_mix_with_the_answer() -> None:
    result = canzona("train", "--dry-run", "recipe=tiny", "optimizer=adamw", "engine.strategy=sc", code=0)
    assert "engine.strategy is ignored" in result.stderr
    assert "ignored" not in result.stdout


def test_markup_in_values_is_shown_as_it_is() -> None:
    result = canzona("train", "--dry-run", "recipe=tiny", "gpus=[red]x[/red]", code=2)
    assert "[red]x[/red]" in result.stderr


def test_prepared_data_is_opened(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 2000)
    missing = canzona("train", "--dry-run", "recipe=tiny", "data=prepared", "data.path=own", cwd=tmp_path, code=2)
    assert "data.path" in missing.stderr
    canzona("data", "prepare", "text.txt", "-o", "own", "--overwrite", cwd=tmp_path, code=0)
    arguments = ["data=prepared", "data.path=own", "data.validation_fraction=0", "train.eval_interval=0"]
    found = canzona("train", "--dry-run", "recipe=tiny", *arguments, cwd=tmp_path, code=0)
    assert "tokens, 1 document" in found.stdout


@pytest.mark.parametrize("command", [("slurm",), ("train", "--dry-run")], ids=" ".join)
def test_slurm_and_the_dry_run_look_at_the_same_things(command: tuple[str, ...], tmp_path: Path) -> None:
    """Data and the class of an optimizer, which none of them runs; a run on too little text is told as a trial."""
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')\nclass Signed: ...\n")
    custom, cluster = "optimizer=custom", ("recipe=tiny", "gpus=2")
    for override, said in (
        (("data=prepared", "data.path=absent"), "absent.bin"),
        (("data.tokenizer=bpee",), "data.tokenizer = bpee"),
        ((custom, "optimizer.source=owm.py:Signed"), "there is no file owm.py"),
        ((custom, "optimizer.source=absent.module:Own", "optimizer.allow=[absent]"), "no package absent here"),
        (("parallel.tp=2", "engine.c_max_mib=0.01"), "engine.c_max_mib"),
    ):
        refused = canzona(*command, *cluster, *override, cwd=tmp_path, code=2)
        assert said in " ".join(refused.stderr.split())
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 2000)
    assert canzona("data", "prepare", "text.txt", "-o", "own", cwd=tmp_path).returncode == 0
    data = ("data=prepared", "data.path=own", "train.eval_interval=0")
    accepted = canzona(*command, *cluster, custom, "optimizer.source=own.py:Signed", *data, cwd=tmp_path, code=0)
    said = " ".join(accepted.stderr.split())
    assert "own.py:Signed is not tested here; a run tests it before training" in said
    assert "the data is read 12 times" in said
    trial = canzona(*command, *cluster, "train.steps=100000", cwd=tmp_path, code=0)
    assert "THIS IS A TRIAL" in trial.stderr
