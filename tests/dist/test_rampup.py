"""A run whose batch grows, on two data-parallel ranks: it is the runs of its batches one after the other, and stopping
in the ramp-up changes nothing."""

from pathlib import Path

import pytest

from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.records.files import RunFiles
from tests.dist.jobs import SMALL
from tests.dist.whole_runs import Run, checkpoint, lines, train

FIXED = (
    *(*SMALL, "gpus=2", "parallel.tp=1", "parallel.pp=1", "optimizer=muon", "engine.strategy=canzona"),
    *("model.num_layers=1", "train.steps=6", "train.micro_batch_size=1", "train.eval_interval=0"),
    *("checkpoint.every_minutes=null", "checkpoint.every_steps=3"),
)
RUNS = {
    "small": Run(settings=(*FIXED, "train.global_batch_size=2"), validates=False),
    "large": Run(settings=(*FIXED, "train.global_batch_size=6"), validates=False, start="small"),
    "grown": Run(settings=(*FIXED, "train.global_batch_size=6", "train.batch_rampup=[[2,3]]"), validates=False),
    "twice": Run(settings=(*FIXED, "train.global_batch_size=6", "train.batch_rampup=[[2,2],[4,2]]"), validates=False),
}
RESUMED = {"resumed": Run(settings=RUNS["twice"].settings, validates=False, start="twice")}
TOKENS = {"grown": (2, 2, 2, 6, 6, 6), "twice": (2, 2, 4, 4, 6, 6), "resumed": (4, 6, 6)}
"""The sequences of each step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, {**RUNS, **RESUMED})
    return folder


def _column(folder: Path, name: str, key: str) -> list[object]:
    return [line[key] for line in lines(RunFiles(folder / name).metrics)]


def test_a_ramp_up_is_a_run_with_the_small_batch_that_goes_on_with_the_large_one(folder: Path) -> None:
    """Bitwise, though the runs that it is compared with have one batch each, and so do the weights at the end."""
    losses = {name: _column(folder, name, "loss") for name in RUNS}
    assert losses["grown"] == losses["small"][:3] + losses["large"]
    assert losses["grown"][3:] != losses["small"][3:]
    files = [read_manifest(checkpoint(folder / name, 6)).files for name in ("grown", "large")]
    assert files[0] == files[1]


def test_stopping_in_the_ramp_up_and_going_on_changes_nothing(folder: Path) -> None:
    for key in ("loss", "grad_norm", "tokens"):
        assert _column(folder, "resumed", key) == _column(folder, "twice", key)[3:]
    assert read_manifest(checkpoint(folder / "twice", 3)).progress.samples == 8


def test_tokens_and_throughput_are_of_the_sequences_of_each_step(folder: Path) -> None:
    for name, sequences in TOKENS.items():
        done = 0 if name != "resumed" else 8
        found = lines(RunFiles(folder / name).metrics)
        for line, batch in zip(found, sequences, strict=True):
            done += batch
            assert line["tokens"] == 64 * done
            assert line["tokens_per_s"] == pytest.approx(64 * batch / line["step_s"])  # type: ignore[operator]
