"""`canzona train` with real workers executes the plan that `canzona plan` shows, with a user's own optimizer too."""

import json
import os
import subprocess
import sys
from pathlib import Path

from canzona_cli.planner.plan_file import read_plan
from tests.commands.support import canzona, importable

RUN = ("recipe=tiny", "gpus=2", "parallel.tp=2", "optimizer=custom", "optimizer.source=sign.py:Sign")
OPTIONS = ("optimizer.options.momentum=0.8", "optimizer.cost_like=adamw", "optimizer.lr=1e-4", "optimizer.min_lr=0")
SMALL = ("train.steps=3", "train.seq_length=32", "train.global_batch_size=2", "train.eval_interval=0")
SIGN = """
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, momentum=0.9):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.sign())
"""


def train(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the 60 seconds that commands have which start no workers; where torch would tell of a GPU."""
    command = [sys.executable, "-m", "canzona_cli.app", "train", *arguments]
    environment = {**os.environ, **importable(), **beside_a_gpu(), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


def beside_a_gpu() -> dict[str, str]:
    """Variables under which torch tells of a GPU, as long as they stay as they are."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "visible_gpu"), importable()["PYTHONPATH"]])
    environment = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0"}
    code = "import torch; print(torch.cuda.is_available())"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout
    assert told == "True\n"
    return environment


def test_beside_a_gpu_the_run_keeps_the_very_plan_that_plan_writes_and_says_which_it_is(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text(SIGN, encoding="utf-8")
    planned = canzona("plan", *RUN, *OPTIONS, *SMALL, "--out", "mine.json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    trained = train(tmp_path, *RUN, *OPTIONS, *SMALL, "run.dir=run")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    mine, runs = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("mine.json", "run/plan.json"))
    assert mine.pop("about") == {"recipe": "qwen3-tiny", "gpus": 2}
    runs.pop("about", None)
    assert json.dumps(mine) == json.dumps(runs)
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.hash == mine["hash"] == read_plan(tmp_path / "mine.json").hash
    assert f"{plan.name}: load balance" in trained.stdout
    assert "custom sign.py:Sign (canzona)" in trained.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["skipped"], line["fallbacks"]) for line in lines] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert "skipped" not in trained.stdout


def test_a_dry_run_shows_the_plan_and_where_it_comes_from(tmp_path: Path) -> None:
    arguments = ("recipe=tiny", "gpus=2", "parallel.tp=2")
    shown = " ".join(canzona("train", *arguments, "--dry-run", cwd=tmp_path).stdout.split())
    assert "plan " in shown
    assert "load balance 1." in shown
    assert "from plans/" not in shown
    assert canzona("plan", *arguments, cwd=tmp_path).returncode == 0
    (path,) = (tmp_path / "plans").iterdir()
    for more in ((), (f"engine.plan=plans/{path.name}",)):
        shown = "".join(canzona("train", *arguments, *more, "--dry-run", cwd=tmp_path).stdout.split())
        assert f"fromplans/{path.name}" in shown
    shown = canzona("train", *arguments, "engine.strategy=layerwise", "--dry-run", cwd=tmp_path).stdout
    assert "load balance" not in shown


def test_what_cannot_be_planned_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    for override, key in (("engine.c_max_mib=0.01", "engine.c_max_mib"), ("engine.plan=other.json", "engine.plan")):
        done = canzona("train", "recipe=tiny", "gpus=2", "parallel.tp=2", override, "run.dir=run", cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert key in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
