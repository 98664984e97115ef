"""A class, its facts and a recipe are a new optimizer: plans, memory, help, routing and checkpoints know it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona_process, importable

CLASS = """
from canzona_cli.core.optimizers.matrix_optimizer import MatrixOptimizer

class Toy(MatrixOptimizer):
    def __init__(self, params, lr, *, weight_decay=0.0, beta=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta = beta

    def state_shapes(self, p):
        return {"average": tuple(p.shape)}

    def _update(self, p, grad, group):
        average = self.state[p].setdefault("average", grad.new_zeros(grad.shape)).lerp_(grad, 1 - self.beta)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])
"""
FACTS = """
from dataclasses import dataclass
from typing import Annotated, Literal

from canzona_cli.core.fields import CURVE, OPTIMIZER, PLAN, Share
from canzona_cli.core.optimizers.facts import Facts, OptimizerBase, Rule, Work

@dataclass(frozen=True, kw_only=True)
class ToyConfig(OptimizerBase):
    name: Annotated[Literal["toy"], "The optimizer.", OPTIMIZER | PLAN]
    beta: Annotated[Share, "Decay of the toy's momentum.", CURVE] = 0.9

def work(a, rows, cols):
    return Work(traffic=28.0 * rows * cols, launches=3), ()

FACTS = (Facts(settings=ToyConfig, rule=Rule(work=work, fragment_bytes=28, moments=1), update="toy:Toy"),)
"""
INSTALLED = """
import canzona_cli.core.optimizers
canzona_cli.core.optimizers.__path__.append({folder!r})
"""
RUN = ("recipe=qwen3-tiny", "gpus=2", "parallel.tp=2", "optimizer=toy", "model.num_layers=2", "train.seq_length=32",
       "train.batch_tokens=64", "train.eval_interval=50")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the three files, as if they lay beside the built-in ones."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(CLASS, encoding="utf-8")
    (folder / "toy_facts.py").write_text(FACTS, encoding="utf-8")
    (folder / "sitecustomize.py").write_text(INSTALLED.format(folder=str(folder)), encoding="utf-8")
    (folder / "recipes" / "optimizer").mkdir(parents=True)
    (folder / "recipes" / "optimizer" / "toy.yaml").write_text("name: toy\nlr: 0.0003\n", encoding="utf-8")
    return folder


def canzona(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), importable()["PYTHONPATH"]))
    environment = {"PYTHONPATH": path, "CANZONA_RECIPES_DIR": str(folder / "recipes")}
    return canzona_process(*arguments, cwd=folder, environment=environment)


def test_its_settings_are_checked_and_named(folder: Path) -> None:
    done = canzona(folder, "train", "--dry-run", *RUN, "optimizer.bete=0.8", "optimizer.beta=2")
    assert done.returncode != 0
    assert "did you mean optimizer.beta?" in done.stderr
    assert "optimizer.beta = 2" in done.stderr


def test_it_is_planned(folder: Path) -> None:
    planned = canzona(folder, "plan", *RUN, "--dry-run", "-v")
    assert planned.returncode == 0, planned.stderr
    assert "qwen3-tiny, toy, 2 CPU ranks" in planned.stdout
    assert "S matrix state 3.0 MiB" in planned.stdout, "one number in fp32 for each of 786,432 elements a rank"


@pytest.mark.sweep
def test_it_is_trained_saved_and_resumed(folder: Path) -> None:
    for steps in (2, 3):
        done = canzona(folder, "train", *RUN, f"train.steps={steps}", "run.dir=run")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run" / "routing.json").read_text(encoding="utf-8"))["optimizer"] == "toy"
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    manifest = json.loads(
        (folder / "run" / "checkpoints" / "step-00000003" / "manifest.json").read_text(encoding="utf-8")
    )
    assert sum(name.endswith("/average") for name in manifest["tensors"]) == 14
