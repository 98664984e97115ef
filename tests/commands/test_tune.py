"""`canzona tune` for real: layouts take turns on ranks of their own, and what is left is a recipe to train."""

import json
from pathlib import Path

import pytest

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.run.phases import IN_STEP
from tests.commands.support import canzona, canzona_process

RUN = ("recipe=tiny", "gpus=2", "model.num_layers=2", "train.seq_length=64", "train.global_batch_size=4")
TYPED = ("train.micro_batch_size=1", "train.recompute=none", "parallel.cp=1")
FAILS = """import torch
from megatron.core import parallel_state


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, dict(lr=lr))

    def step(self):
        if parallel_state.get_tensor_model_parallel_world_size() == 2 and torch.distributed.get_rank() == 1:
            raise RuntimeError("no room")
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad.sign(), alpha=-group["lr"])
"""
"""An optimizer that fails on one of two tensor-parallel ranks while the other one waits for it."""


@pytest.mark.sweep  # the same sitting as that of `canzona bench`, on ranks of several layouts
def test_every_layout_is_measured_on_the_same_work_and_the_fastest_is_kept(tmp_path: Path) -> None:
    """One of three fails, and the report names it."""
    (tmp_path / "sign.py").write_text(FAILS, encoding="utf-8")
    source = f"optimizer.source={tmp_path / 'sign.py'}:Sign"
    mine = (*RUN, *TYPED, "optimizer=custom", source, "optimizer.lr=1e-3")
    turns = ("--all", "--rounds", "1", "--steps", "1")
    done = canzona_process("tune", *mine, *turns, "--json", "--out", "mine.yaml", cwd=tmp_path, code=0)
    content = json.loads(done.stdout)
    found = content["result"]["layouts"]
    assert {(one["layout"]["tp"], one["layout"]["pp"], one["layout"]["dp"]) for one in found.values()} == {
        (1, 1, 2), (1, 2, 1),
    }  # fmt: skip
    ((name, reason),) = content["failed"].items()
    assert name == "tp2-pp1-cp1-dp1-mb1-none"
    assert reason.endswith("RuntimeError: no room")
    for name, one in found.items():
        assert len(one["measured"]) == 1, "a turn in each round"
        for turn in one["measured"]:
            assert len(turn["iteration_s"]) == 1
            assert len(turn["losses"]) == 3, "two steps to warm up"
            assert len(turn["tensor_bytes"]) == 2, "of both ranks"
            # Equal weights and batches: only the order of sums differs.
            first = next(iter(found.values()))["measured"][0]["losses"]
            assert turn["losses"] == pytest.approx(first, rel=2e-3)
        phases = one["measured"][0]["phases"]
        assert sum(phases[phase]["mean_s"] for phase in IN_STEP if phase in phases) == pytest.approx(
            one["measured"][0]["iteration_s"][0], rel=0.5
        )
        assert ("pipeline" in content["layouts"][name]["phases"]) == (one["layout"]["pp"] == 2)
    kept = compose_run([f"recipe={tmp_path / 'mine.yaml'}", source]).config
    best = content["layouts"][content["best"]]["layout"]
    layout = resolve(kept)[1]
    assert (layout.tp, layout.pp, layout.dp, layout.global_batch_size) == (best["tp"], best["pp"], best["dp"], 4)
    (folder,) = (tmp_path / "tune").iterdir()
    assert json.loads((folder / "tune.json").read_text(encoding="utf-8"))["result"] == content["result"]


def test_a_recipe_that_is_there_is_not_replaced_and_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "qwen3-tiny-2-tuned.yaml").write_text("mine", encoding="utf-8")
    told = canzona("tune", *RUN, cwd=tmp_path, code=2)
    assert "--out = ./qwen3-tiny-2-tuned.yaml" in told.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3-tiny-2-tuned.yaml"]
