"""`canzona train` with real workers: it executes the plan that `canzona plan` shows, with a user's own optimizer too,
and leaves the profiles and the samples it was asked for, the plan beside the measured. `canzona eval` finds
what the run itself found."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from canzona_cli.config.compose import load_resolved
from canzona_cli.model.families import flops_per_token
from canzona_cli.planner.plan_file import read_plan
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import load_timelines
from tests.commands.support import canzona, canzona_process, importable

RUN = ("recipe=tiny", "gpus=2", "parallel.tp=2", "optimizer=custom", "optimizer.source=sign.py:Sign")
OPTIONS = ("optimizer.options.momentum=0.8", "optimizer.cost_like=adamw", "optimizer.lr=1e-4", "optimizer.min_lr=0")
SMALL = ("model.num_layers=2", "train.seq_length=32", "train.global_batch_size=2", "train.eval_interval=6")
SAMPLES = ("train.eval_sequences=6", "train.sample_every=4", "train.sample_prompt='import '", "train.sample_tokens=5")
RECORDED = ("train.steps=6", "run.profile_steps=[4,4]")
SIGN = """
import os
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, momentum=0.9):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        hidden = torch.cuda.is_available()
        before = os.environ.pop("CUDA_VISIBLE_DEVICES")
        with open(f"gpu-{os.getpid()}", "w") as file:
            file.write(f"{hidden} {torch.cuda.is_available()}")
        os.environ["CUDA_VISIBLE_DEVICES"] = before

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.sign())
"""
"""It says whether torch tells of a GPU: to the rank, and where nothing hides it."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended well."""

    folder: Path
    """The folder it was started in, which contains `run`."""
    text: str
    """The output of the command."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains with all options, on a machine on which torch reports a GPU."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "sign.py").write_text(SIGN, encoding="utf-8")
    canzona("plan", *RUN, *OPTIONS, *SMALL, *RECORDED, "--out", "mine.json", cwd=folder, code=0)
    with_gpu = os.pathsep.join([str(Path(__file__).parents[1] / "visible_gpu"), importable()["PYTHONPATH"]])
    wanted = ("train.steps=6", "run.dir=run", "run.trackers=[tensorboard]", "--profile", "4")
    done = canzona_process(
        *("train", *RUN, *OPTIONS, *SMALL, *SAMPLES, *wanted),
        cwd=folder,
        environment={"PYTHONPATH": with_gpu, "CUDA_VISIBLE_DEVICES": "0", "COLUMNS": "120"},
        code=0,
    )
    return Trained(folder=folder, text=done.stdout)


def test_beside_a_gpu_the_run_keeps_the_very_plan_that_plan_writes_and_says_which_it_is(trained: Trained) -> None:
    told = [file.read_text() for file in trained.folder.glob("gpu-*")]
    assert set(told) == {"False True"}, "hidden from each rank, and else visible"
    names = ("mine.json", "run/plan.json")
    mine, runs = (json.loads((trained.folder / name).read_text(encoding="utf-8")) for name in names)
    assert mine.pop("about") == {"recipe": "qwen3-tiny", "gpus": 2}
    runs.pop("about", None)
    assert json.dumps(mine) == json.dumps(runs)
    plan = read_plan(trained.folder / "run" / "plan.json")
    assert plan.hash == mine["hash"] == read_plan(trained.folder / "mine.json").hash
    assert f"{plan.name}: load balance" in trained.text
    assert "custom sign.py:Sign (canzona)" in trained.text
    lines = [json.loads(line) for line in (trained.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped"], line["fallbacks"]) for line in lines] == [(n, 0, 0) for n in range(1, 7)]
    assert "skipped" not in trained.text


def test_a_run_leaves_the_profiles_and_the_timelines_whose_phases_are_the_step(trained: Trained) -> None:
    text = " ".join(trained.text.split())
    for part in ("planned run `canzona calibrate` on this machine", "3 steps measured", "1 profiled"):
        assert part in text
    run = trained.folder / "run"
    assert f"{run}/profile/" in trained.text
    timelines = load_timelines(RunFiles(run))
    for rank, timeline in enumerate(timelines):
        assert [step.number for step in timeline.steps] == [5, 6]
        for step in timeline.steps:
            seconds = math.fsum(phase.end_s - phase.start_s for phase in step.phases)
            assert seconds == pytest.approx(step.end_s - step.start_s, rel=0.01)
            assert {"data", "forward", "backward", "norm_clip", "matrix_update"} <= {
                phase.name for phase in step.phases
            }
            exchanges = [transfer for transfer in step.transfers if transfer.name == "exchange"]
            assert exchanges, "two TP ranks exchange fragments"
            assert all(step.start_s <= transfer.start_s <= step.end_s for transfer in exchanges)
        profiled = json.loads((run / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in profiled if event.get("cat") == "user_annotation"]
        assert {"canzona: forward", "canzona: backward", "canzona: matrix_update"} <= set(names)
        assert names.count("canzona: adamw_update") == 1, "one step"
    # A rank cannot end a step before the others have begun it, by the one clock of their machine.
    for steps in zip(*(timeline.steps for timeline in timelines), strict=True):
        assert max(step.start_s for step in steps) < min(step.end_s for step in steps)

    report = json.loads(canzona("report", run, "--json").stdout)["breakdown"]
    assert report["planned"]["strategy"] == "canzona"
    assert report["tokens_per_s_per_gpu"] == pytest.approx(report["tokens_per_s"] / 2), "two ranks, DP 1"
    tflops = report["tokens_per_s"] / 2 * flops_per_token(load_resolved(run / "config.yaml").model, 32) / 1e12
    assert report["mfu"] * report["peak_tflops_per_gpu"] == pytest.approx(tflops)
    assert report["planned"]["phases"]["matrix_update"] > 0
    assert report["why"]["text"]
