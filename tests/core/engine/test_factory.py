"""A file in canzona_cli/core/optimizers and a recipe are a new optimizer: nothing else names it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import canzona_cli.core.optimizers
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.update import algorithm_of
from canzona_cli.core.engine.build import optimizer_factory
from canzona_cli.core.model.matrices import matrices
from canzona_cli.core.setup import CustomConfig, Execution
from tests.refusals import refused
from tests.sizes import layout

LION = """
from .matrix_optimizer import MatrixOptimizer

class ScratchLion(MatrixOptimizer):
    def __init__(self, params, lr, *, weight_decay=0.0, beta=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta = beta

    def _update(self, p, grad, group):
        average = self.state[p].setdefault("exp_avg", grad.new_zeros(grad.shape)).lerp_(grad, 1 - self.beta)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])
"""
RECIPE = """
name: custom
lr: 0.0001
source: canzona_cli.core.optimizers.scratch_lion:ScratchLion
options: {beta: 0.8}
cost_like: adamw
"""


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One Python file beside the built-in ones, and one recipe."""
    (tmp_path / "scratch_lion.py").write_text(LION)
    monkeypatch.setattr(canzona_cli.core.optimizers, "__path__", [*canzona_cli.core.optimizers.__path__, str(tmp_path)])
    folder = tmp_path / "recipes" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "lion.yaml").write_text(RECIPE)
    return folder.parent


def test_a_built_in_optimizer_is_a_file_and_a_recipe(recipes: Path) -> None:
    config = compose_run(["recipe=qwen3-tiny", "optimizer=lion"], recipes_dirs=(recipes,)).config
    assert config.execution is Execution.PLANNED
    members = matrices(config.model, layout(), "split")
    master = torch.nn.Parameter(torch.zeros(members[0].rows, members[0].cols))
    optimizer = optimizer_factory(config.setup)(members[:1], [master])
    assert optimizer.beta == 0.8  # type: ignore[attr-defined]
    optimizer.param_groups[0]["lr"] = 0.5
    master.grad = torch.ones_like(master)
    optimizer.step()
    assert bool((master == -0.5).all())


def test_an_optimizer_is_tried_on_the_runs_device(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer written for GPUs alone would fail on the host's matrices."""
    config = compose_run(["recipe=qwen3-tiny", "optimizer=lion"], recipes_dirs=(recipes,)).config
    moved: list[object] = []

    def to(tensor: torch.Tensor, device: object) -> torch.Tensor:
        moved.append(device)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    on_gpu = replace(config, cluster=replace(config.cluster, device="cuda"))
    optimizer_factory(on_gpu.setup)
    # Two weights, and their gradients of two steps.
    assert moved == [torch.device("cuda")] * 6


def test_only_our_own_modules_need_no_consent(recipes: Path) -> None:
    lion = (recipes / "optimizer" / "lion.yaml").read_text()
    (recipes / "optimizer" / "lion.yaml").write_text(
        lion.replace("canzona_cli.core.optimizers.", "canzona_cli_optimizers.")
    )
    problems = refused(compose_run, ["recipe=qwen3-tiny", "optimizer=lion"], recipes_dirs=(recipes,))
    assert {problem.key for problem in problems} == {"optimizer.source"}


def test_a_built_in_optimizer_that_is_not_there_is_refused(recipes: Path) -> None:
    config = compose_run(["recipe=qwen3-tiny", "optimizer=lion"], recipes_dirs=(recipes,)).config
    assert isinstance(config.optimizer, CustomConfig)
    absent = replace(config.optimizer, source="canzona_cli.core.optimizers.absent:Absent")
    with pytest.raises(ValueError, match="cannot be imported"):
        optimizer_factory(replace(config, optimizer=absent).setup)


@pytest.mark.parametrize("stagger", [True, False])
def test_a_run_decides_whether_refreshes_are_spread(stagger: bool) -> None:
    settings = ("optimizer=soap", f"optimizer.stagger={str(stagger).lower()}")
    config = compose_run(["recipe=qwen3-tiny", *settings]).config
    members = matrices(config.model, layout(), "split")[:1]
    optimizer = optimizer_factory(config.setup)(members, [torch.nn.Parameter(torch.zeros(members[0].shape))])
    assert optimizer.spread == stagger == algorithm_of(config.setup).spread  # type: ignore[attr-defined]
