"""Checkpoints of real runs: going on is as if nothing had happened, and any layout and strategy reads any other's.

Compared are values, to the last bit: what a checkpoint holds in model space, and the weights that are trained on.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from canzona_cli.errors import CheckpointInvalid
from tests.dist.saved import Outcome, Units, manifest_of, resolve, run, units_of

TP2_DP2 = ("gpus=4", "parallel.tp=2", "train.micro_batch_size=4")
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "muon": ("optimizer=muon",),
    "soap": ("optimizer=soap", "optimizer.precondition_frequency=2"),
    "shampoo": ("optimizer=shampoo", "optimizer.precondition_frequency=2"),
}
LAYOUTS = {
    "dp4": ("gpus=4", "parallel.pp=1"),
    "tp4": ("gpus=4", "parallel.tp=4"),
    "pp2 tp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "pp2": ("gpus=2", "parallel.pp=2"),
    "one rank": ("gpus=1",),
    "dp2": ("gpus=2",),
    "tp2 dp4": ("gpus=8", "parallel.tp=2"),
    "alpha 0, contiguous": (*TP2_DP2, "engine.alpha=0", "engine.layout=contiguous"),
}
STRATEGIES = ("sc", "layerwise", "asc")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """A run of two steps on TP 2 x DP 2, saved; made once for the tests that begin with it."""

    @cache
    def saved(*overrides: str) -> Outcome:
        return run(tmp_path_factory.mktemp("saved") / "run", *TP2_DP2, *overrides, steps=2)

    return saved


def _same(one: Units, other: Units) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, different[:5]


def _same_weights(one: Outcome, other: Outcome) -> None:
    assert one.weights.keys() == other.weights.keys()
    different = [name for name in one.weights if not one.weights[name].equal(other.weights[name])]
    assert not different, different[:5]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_steps_and_two_more_are_four(optimizer: str, two_steps: Callable[..., Outcome], tmp_path: Path) -> None:
    """Losses, weights, masters and state, by way of a file and other processes, which start from another seed, so that
    nothing is left of what they started with."""
    overrides = (*TP2_DP2, *OPTIMIZERS[optimizer])
    straight = run(tmp_path / "straight", *overrides, steps=4)
    first = two_steps(*OPTIMIZERS[optimizer])
    second = run(tmp_path / "second", *overrides, "train.seed=99", steps=2, start=first.checkpoint)
    assert first.losses + second.losses == straight.losses
    assert len(set(straight.losses)) == 4
    _same_weights(second, straight)
    model = resolve(*overrides)[0].model
    _same(units_of(second.checkpoint, model), units_of(straight.checkpoint, model))


CASES = [("muon", "dp4"), ("muon", "pp2 tp2"), ("soap", "tp4"), ("adamw", "pp2"), ("shampoo", "one rank")]


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [
        pytest.param(optimizer, where, marks=[] if (optimizer, where) in CASES else pytest.mark.sweep)
        for optimizer in OPTIMIZERS
        for where in LAYOUTS
        if optimizer != "adamw" or not where.startswith("alpha")
    ],
)
def test_another_layout_reads_the_same_values_and_gives_them_back(
    optimizer: str, where: str, two_steps: Callable[..., Outcome], tmp_path: Path
) -> None:
    saved = two_steps(*OPTIMIZERS[optimizer])
    there = run(tmp_path / "there", *LAYOUTS[where], *OPTIMIZERS[optimizer], steps=0, start=saved.checkpoint)
    back = run(tmp_path / "back", *TP2_DP2, *OPTIMIZERS[optimizer], steps=0, start=there.checkpoint)
    model = resolve(*TP2_DP2)[0].model
    values = units_of(saved.checkpoint, model)
    assert any(name.endswith(("/momentum_buffer", "/exp_avg")) for name in values)
    _same(units_of(there.checkpoint, model), values)
    _same(units_of(back.checkpoint, model), values)
    _same_weights(there, saved)
    _same_weights(back, saved)


@pytest.mark.parametrize(
    ("saved_by", "read_by", "where"),
    [
        ("soap", ("optimizer=muon", "engine.splitting=fused"), "tp4"),
        pytest.param("muon", ("optimizer=adamw",), "pp2", marks=pytest.mark.sweep),
        pytest.param("adamw", ("optimizer=soap",), "one rank", marks=pytest.mark.sweep),
    ],
)
def test_weights_alone_are_taken_by_any_optimizer_splitting_and_layout(
    saved_by: str, read_by: tuple[str, ...], where: str, two_steps: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Every master to the last bit, and of the state nothing: no step counted, every average zero or not there."""
    saved = two_steps(*OPTIMIZERS[saved_by])
    there = run(tmp_path / "there", *LAYOUTS[where], *read_by, steps=0, start=saved.checkpoint, weights_only=True)
    _same_weights(there, saved)
    model = resolve(*TP2_DP2)[0].model
    before, now = units_of(saved.checkpoint, model), units_of(there.checkpoint, model)
    masters = {name for name in before if name.endswith("/master")}
    assert masters == {name for name in now if name.endswith("/master")}
    _same({name: now[name] for name in masters}, {name: before[name] for name in masters})
    assert not [name for name in now.keys() - masters if now[name].any()]
    assert not [
        name for name, value in manifest_of(there.checkpoint).scalars.items() if name.endswith("/step") and value
    ]


@pytest.mark.parametrize(
    ("saving", "reading"),
    [
        ("canzona", "layerwise"),
        ("sc", "canzona"),
        *(
            pytest.param(saving, reading, marks=pytest.mark.sweep)
            for saving, reading in [("canzona", "sc"), ("layerwise", "canzona"), ("asc", "sc"), ("layerwise", "asc")]
        ),
    ],
)
def test_strategies_read_each_others_checkpoints(
    saving: str, reading: str, two_steps: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Megatron's own Muon keeps masters and momentum in fragments of other matrices than canzona's; values are one."""
    saved = two_steps(f"engine.strategy={saving}")
    there = run(tmp_path / "there", *LAYOUTS["tp4"], f"engine.strategy={reading}", steps=0, start=saved.checkpoint)
    back = run(tmp_path / "back", *TP2_DP2, f"engine.strategy={saving}", steps=1, start=there.checkpoint)
    straight = run(tmp_path / "straight", *TP2_DP2, f"engine.strategy={saving}", steps=1, start=saved.checkpoint)
    model = resolve(*TP2_DP2)[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)
    _same(units_of(back.checkpoint, model), units_of(straight.checkpoint, model))
    assert back.losses == straight.losses


def test_sc_and_canzona_share_the_state_of_soap(two_steps: Callable[..., Outcome], tmp_path: Path) -> None:
    soap = OPTIMIZERS["soap"]
    saved = two_steps(*soap)
    there = run(tmp_path / "there", "gpus=2", "engine.strategy=sc", *soap, steps=0, start=saved.checkpoint)
    model = resolve(*TP2_DP2)[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)


COUNTING = """
import torch

class Counting(torch.optim.Optimizer):
    # Three places to keep state in: a tensor and a number of each matrix, and a number of all of them.
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(average=torch.zeros_like(p), sign=1.0, seen=torch.tensor(0.0))
                state["seen"] += 1
                state["sign"] = -state["sign"] * 1.5
                state["average"].lerp_(p.grad, 0.5)
                p.add_(state["average"], alpha=group["lr"] * group["k"] * state["sign"] / float(state["seen"]))
"""


def test_a_users_optimizer_goes_on_with_all_it_keeps(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    overrides = (*TP2_DP2, "optimizer=custom", f"optimizer.source={tmp_path}/counting.py:Counting", "optimizer.lr=0.01")
    straight = run(tmp_path / "straight", *overrides, steps=4)
    first = run(tmp_path / "first", *overrides, steps=2)
    second = run(tmp_path / "second", *overrides, steps=2, start=first.checkpoint)
    assert first.losses + second.losses == straight.losses
    _same_weights(second, straight)


@pytest.mark.parametrize("splitting", ["fused", "qkv", "per_head"])
def test_muon_goes_on_with_matrices_split_otherwise(
    splitting: str, two_steps: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Its state is of elements: what counts as one matrix may change."""
    saved = two_steps(*OPTIMIZERS["muon"])
    there = run(tmp_path / "there", "gpus=2", f"engine.splitting={splitting}", steps=0, start=saved.checkpoint)
    back = run(tmp_path / "back", *TP2_DP2, steps=0, start=there.checkpoint)
    model = resolve(*TP2_DP2)[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same(units_of(back.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)


def test_shampoo_does_not_and_says_what_to_set(tmp_path: Path) -> None:
    """Factors of a whole matrix are no factors of its parts."""
    shampoo = OPTIMIZERS["shampoo"]
    saved = run(tmp_path / "saved", "gpus=2", *shampoo, steps=1)
    with pytest.raises(AssertionError, match=r"engine\.splitting=split") as refused:
        run(tmp_path / "there", "gpus=2", *shampoo, "engine.splitting=fused", steps=0, start=saved.checkpoint)
    assert str(refused.value).count(CheckpointInvalid.__name__) >= 2, "one rank alone refused"


def test_untied_embeddings_and_fp32_come_back(tmp_path: Path) -> None:
    overrides = ("model.tied_embeddings=false", "train.precision=fp32")
    saved = run(tmp_path / "saved", *TP2_DP2, *overrides, steps=2)
    there = run(tmp_path / "there", *LAYOUTS["pp2 tp2"], *overrides, steps=0, start=saved.checkpoint)
    model = resolve(*TP2_DP2, *overrides)[0].model
    values = units_of(saved.checkpoint, model)
    assert "output_layer.weight/exp_avg" in values
    _same(units_of(there.checkpoint, model), values)
    _same_weights(there, saved)


def test_a_checkpoint_is_as_large_as_what_it_has_to_keep(tmp_path: Path) -> None:
    """fp32 master and momentum of every matrix, master and two moments of every other parameter, random states."""
    overrides = (*TP2_DP2, "model.hidden_size=128", "model.ffn_hidden_size=512")
    saved = run(tmp_path / "saved", *overrides, steps=1)
    shapes = {name: tensor.numel() for name, tensor in saved.weights.items()}
    matrices = sum(size for name, size in shapes.items() if "_proj" in name)
    rest = sum(size for name, size in shapes.items() if "_proj" not in name and "lm_head" not in name)
    on_disk = sum(file.stat().st_size for file in saved.checkpoint.iterdir())
    random = sum(
        np.prod(tensor.shape) * 8 for name, tensor in manifest_of(saved.checkpoint).tensors.items() if "random." in name
    )
    needed = 8 * matrices + 12 * rest
    assert needed < on_disk <= 1.02 * needed + random
