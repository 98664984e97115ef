"""The comparison of optimizers: what is trained, what is read of it, and a page that says what the raw results say."""

import json
import re
from dataclasses import replace
from math import log2
from pathlib import Path

import evidence
import numpy as np
import pytest
from evidence import Evidence, Trained

from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.records.codec import load, record_dict, save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import RunResult, StepMetrics, ValidationLoss
from tests.records.runs import CORPUS

RAW = [load(path, Evidence, key="", fix="") for path in sorted(evidence.RAW.glob("*.json"))]
RUN = Trained(
    optimizer="muon",
    lr=0.01,
    adamw_lr=0.02,
    seed=1,
    ranks=1,
    validation=((0, 5.0), (20, 3.0), (40, 2.5)),
    loss=2.4,
    step_s=1.0,
)


def test_the_page_has_the_tables_of_the_raw_results() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.with_tables(page) == page
    markers = [f"{found.recipe} {name}" for found in RAW for name in evidence.TABLES]
    assert sorted(re.findall(r"<!-- figures: (.+) -->", page)) == sorted(markers)


@pytest.mark.parametrize("found", RAW, ids=lambda found: found.recipe)
def test_recipes_have_the_best_rates_of_the_raw_results(found: Evidence) -> None:
    """Rates of matrices may be those of a loss that is higher by less than seeds differ: 0.02."""
    for name in evidence.OPTIMIZERS:
        optimizer = compose_run([f"recipe={found.recipe}", f"optimizer={name}"]).config.optimizer
        tried = evidence.of(name, found.lr)
        (own,) = [run for run in tried if run.lr == optimizer.lr]
        assert own.final < evidence.lowest(tried).final + 0.02, name
        assert optimizer.adamw_lr == own.adamw_lr == evidence.best_adamw_lr(found.adamw_lr)


def test_every_optimizer_has_one_adamw_rate_and_a_ladder_that_ends_beyond_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the runs that are asked for, with losses from a formula: parabolas over the logarithm of the rate."""
    best = {"adamw": 0.0005, "muon": 0.02, "normuon": 0.005, "soap": 0.002, "shampoo": 0.001}
    asked: list[dict[str, str]] = []
    done: dict[str, dict[Trained, None]] = {}

    def swept(folder: Path, recipe: str, *overrides: str) -> tuple[Trained, ...]:
        settings = dict(override.split("=", 1) for override in overrides)
        asked.append({"folder": folder.name, "recipe": recipe, **settings})
        rates = settings.get("optimizer.lr", "").replace(":", ",").split(",")
        names = settings["optimizer"].split(",")
        name = ""
        for word in rates if len(rates) > 1 else [word for name in names for word in (name, "0.002")]:
            if word in names:
                name = word
                continue
            for adamw in settings["optimizer.adamw_lr"].split(","):
                for seed in settings.get("train.seed", "0").split(","):
                    loss = 2 + log2(float(word) / best[name]) ** 2 / 100 + log2(float(adamw) / 0.002) ** 2 / 100
                    ends = ((0, 5.0), (60, loss + 0.001 * (int(seed) % 5)))
                    run = replace(RUN, optimizer=name, lr=float(word), adamw_lr=float(adamw), seed=int(seed))
                    done.setdefault(folder.name, {})[replace(run, validation=ends)] = None
        return evidence.finished(folder)

    monkeypatch.setattr(evidence, "sweep", swept)
    monkeypatch.setattr(evidence, "finished", lambda folder: tuple(done.get(folder.name, ())))
    monkeypatch.setattr(evidence, "RAW", tmp_path / "raw")
    run_dir = tmp_path / "lr" / "run"
    _write_run(run_dir, steps=12)
    evidence.train(tmp_path, "qwen3-tiny", ("gpus=1",), ("muon", "adamw"), extensions=20)
    found = evidence.results(tmp_path, "qwen3-tiny", ("gpus=1",))
    assert {request["recipe"] for request in asked} == {"qwen3-tiny"}
    assert {request["gpus"] for request in asked} == {"1"}
    ladders = [request for request in asked if request["folder"] == "adamw_lr"]
    assert [request["optimizer.adamw_lr"] for request in ladders] == [
        *("0.01,0.02,0.05", "0.005,0.01,0.02,0.05", "0.002,0.005,0.01,0.02,0.05"),
        "0.001,0.002,0.005,0.01,0.02,0.05",
    ], "from the recipe's rate and its neighbours until the best has a worse one on both sides"
    assert {request["optimizer"] for request in ladders} == {"muon,adamw"}
    assert {request["optimizer.adamw_lr"] for request in asked[len(ladders) :]} == {"0.002"}
    for name, rate in best.items():
        ladder = sorted({run.lr for run in found.lr if run.optimizer == name})
        assert {rate / 2, rate, rate * 2} <= set(ladder), "the best has a worse rate on both sides"
        assert np.allclose(np.diff(np.log2(ladder)), 1)
        assert {(run.lr, run.seed) for run in evidence.of(name, found.seeds)} == {(rate, 2), (rate, 3)}
    del done["lr"]
    evidence.train(tmp_path, "qwen3-tiny", ("gpus=1",), ("muon", "adamw"), extensions=1)
    rates = {name: sorted(run.lr for run in evidence.of(name, [*done["lr"]])) for name in best}
    assert (rates["muon"], rates["soap"]) == ([0.0025, 0.005, 0.01], [0.0005, 0.001, 0.002]), "one rate further"
    found.save()
    (path,) = (tmp_path / "raw").iterdir()
    assert load(path, Evidence, key="", fix="") == found
    rows = {row[0]: row for row in evidence.seeds_table(found).rows}
    assert [rows[f"`{name}`"][1] for name in best] == [f"{rate:g}" for rate in best.values()]


def test_what_is_read_of_a_run(tmp_path: Path) -> None:
    times = _write_run(tmp_path, steps=30)
    run = evidence.read(tmp_path)
    assert run is not None
    assert (run.optimizer, run.lr, run.adamw_lr, run.seed, run.ranks) == ("soap", 0.004, 0.03, 7, 1)
    assert run.step_s == pytest.approx(np.convolve(times, np.ones(10) / 10, "valid").min(), abs=1e-4)
    assert (run.validation, run.loss) == (((0, 5.0), (15, 3.0), (30, 2.0)), 3.0)
    (tmp_path / "result.json").unlink()
    assert evidence.read(tmp_path) is None, "it has not finished"


def test_the_mean_curve_is_that_of_the_losses_at_each_validation() -> None:
    other = replace(RUN, seed=2, validation=((0, 6.0), (20, 3.5), (40, 2.0)))
    assert evidence.mean_curve([RUN, other]) == [(0, 5.5), (20, 3.25), (40, 2.25)]


def test_an_interrupted_comparison_says_what_it_has() -> None:
    """Two optimizers, of which one has a single rate and a single seed, and the other's best rate is the highest."""
    ladder = [replace(RUN, lr=lr, validation=((0, 5.0), (40, loss))) for lr, loss in ((0.005, 2.5), (0.01, 2.4))]
    soap = replace(RUN, optimizer="soap", lr=0.001, validation=((0, 5.0), (40, 2.6)))
    parts = {"adamw_lr": (RUN,), "lr": (*ladder, soap), "seeds": (replace(ladder[1], seed=2),)}
    found = Evidence(recipe="mine", overrides=(), corpus="text", tokens_per_step=1024, **parts)
    table = evidence.seeds_table(found)
    assert [row[:5] for row in table.rows] == [
        ["`muon`", "0.01!", "2", "2.400 ± 0.000", "-"],
        ["`soap`", "0.001!", "1", "2.600", "0.200"],
    ]
    assert [row[5] for row in table.rows] == [f"{np.interp(-2.6, [-5.0, -2.4], [0, 40]):.0f}", "40"]
    assert [row[0] for row in evidence.lr_table(found).rows] == ["`muon`", "`soap`"]


def _write_run(run_dir: Path, steps: int) -> list[float]:
    """Writes a finished run's records; returns the times of its steps."""
    files = RunFiles(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    overrides = ["optimizer=soap", "optimizer.lr=0.004", "optimizer.adamw_lr=0.03", "train.seed=7", "gpus=1"]
    files.config.write_text(dump_resolved(compose_run(["recipe=qwen3-tiny", *overrides]).config))
    times = [1 + 0.3 * ((step * 7) % 11) / 11 for step in range(steps)]
    metrics = [StepMetrics(step=n + 1, loss=3.0, step_s=s, tokens=4096 * (n + 1)) for n, s in enumerate(times)]
    files.metrics.write_text("\n".join(json.dumps(record_dict(line)) for line in metrics))
    losses = [ValidationLoss(step=n * steps // 2, loss=loss) for n, loss in enumerate((5.0, 3.0, 2.0))]
    files.validation.write_text("\n".join(json.dumps(record_dict(line)) for line in losses))
    save(files.result, RunResult(status="done", exit_code=0, step=steps))
    save(files.corpus, CORPUS)
    return times
