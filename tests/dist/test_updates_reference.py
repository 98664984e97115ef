"""Updates through Megatron's stack are the updates of the papers.

Three fp32 steps over tp, dp and pp ranks, clipped, with weight decay, against one process that runs Hugging Face's
Qwen3 over the whole batch and updates whole matrices: `torch.optim.AdamW`, and Muon as written out below. That the
engine moves any other optimizer's matrices as exactly is what `test_engine_exact` shows.
"""

import math
from collections.abc import Callable
from itertools import starmap

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron import quick_import
from canzona_cli.core.setup import Layout, MuonConfig
from tests.core.optimizers.reference import orthogonalised
from tests.dist import jobs
from tests.dist.jobs import SMALL, Runs, ranks_of
from tests.dist.ranks import run_ranks
from tests.dist.reference import hugging_face_model, token_losses, weights_of
from tests.dist.trained import different, run_trainings, samples
from tests.dist.whole import Weights

STEPS, LR, CLIP = 3, 1e-2, 0.25
FIXED = (
    *SMALL,
    "train.precision=fp32",
    f"train.steps={STEPS}",
    f"optimizer.lr={LR}",
    f"optimizer.clip_grad={CLIP}",
    "optimizer.weight_decay=0.2",
    # Adam divides by the gradient's own size; with the usual 1e-8 it would blow rounding up to whole steps.
    "optimizer.eps=1e-4",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
)
# The largest deviation of a weight after three steps, in learning rates; an Adam step moves a weight by up to one, a
# forgotten decay or a wrong momentum by far more than the bound. Seen: 3e-5, rounding.
BOUND = 3e-4

Parameters = dict[str, torch.nn.Parameter]
Update = Callable[[float], None]
"""Updates the reference's parameters from their clipped gradients, given the step's rate as a share of the peak."""


_known: dict[tuple[object, ...], tuple[Weights, Weights, list[float]]] = {}
"""References that a test has already computed, by what they depend on: the starting weights, and `_reference`'s
result."""


def _reference(
    config: RunConfig, layout: Layout, before: Weights, updates: Callable[[Parameters, RunConfig], Update]
) -> tuple[Weights, list[float]]:
    """Hugging Face's model, trained from the same weights on the same batches, whole, in one process; once for all
    layouts of one global batch, which start from the same weights.

    Returns:
        The weights it comes to, and each step's gradient norm before clipping.
    """
    taken = layout.global_batch_size, config.train.seq_length
    key = (updates, config.model, config.optimizer, _stacked(config), *taken)
    if key not in _known:
        _known[key] = (before, *_train_whole(config, layout, before, updates))
    start, after, norms = _known[key]
    assert different(start, before) == []
    return after, norms


def _train_whole(
    config: RunConfig, layout: Layout, before: Weights, updates: Callable[[Parameters, RunConfig], Update]
) -> tuple[Weights, list[float]]:

    def rank() -> tuple[dict[str, np.ndarray], list[float]]:
        # Run without compiling: what is compiled is this code, and loading the compiler takes seconds.
        setattr(quick_import, "_compile", lambda function, **_: function)  # noqa: B010  # of this rank
        model = hugging_face_model(config.model, before, max_length=config.train.seq_length)
        params: Parameters = dict(model.named_parameters())
        update = updates(params, config)
        steps = config.train.steps
        taken, norms = samples(config, layout, steps), []
        for step in range(steps):
            model.zero_grad()
            batch = default_collate(
                [taken[step * layout.global_batch_size + i] for i in range(layout.global_batch_size)]
            )
            torch.autograd.backward(token_losses(model, batch["tokens"], batch["labels"]).mean())
            clip = config.optimizer.clip_grad or math.inf
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), clip)))
            update(_share(config, step))
        return {name: weight.numpy() for name, weight in weights_of(model).items()}, norms

    ((after, norms),) = run_ranks(1, rank)
    return {name: torch.from_numpy(weight) for name, weight in after.items()}, norms


def _share(config: RunConfig, step: int) -> float:
    """The rate of a step, from 0, as a share of the peak: constant, or linear from 1 to the minimum."""
    if config.schedule.decay == "constant":
        return 1.0
    lowest = config.optimizer.min_lr / config.optimizer.lr
    return 1 - (1 - lowest) * step / (config.schedule.decay_steps or config.train.steps)


def _adamw(params: Parameters, config: RunConfig) -> Update:
    """`torch.optim.AdamW` with two rates and weight decays; no decay on what is 1-D."""
    settings = config.optimizer
    decay = settings.weight_decay
    own_lr = settings.lr if settings.adamw_lr is None else settings.adamw_lr
    own_decay = decay if settings.adamw_weight_decay is None else settings.adamw_weight_decay
    matrices = [p for name, p in params.items() if "_proj" in name]
    others = [p for name, p in params.items() if "_proj" not in name]
    peaks = (settings.lr, own_lr, own_lr)
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": decay},
            {"params": [p for p in others if p.dim() > 1], "weight_decay": own_decay},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )

    def update(share: float) -> None:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = share * peak
        optimizer.step()

    return update


def _muon(params: Parameters, config: RunConfig) -> Update:
    """Muon on whole matrices, AdamW on the rest (Jordan et al. 2024; decay and scale as in Moonshot, arXiv:2502.16982).

    q, k and v are matrices of their own, gate and up only where the engine splits them: Megatron's own ways keep
    `[gate; up]`.
    """
    settings = config.optimizer
    assert isinstance(settings, MuonConfig)
    matrices, adamw = _apart(params, config)
    stacked = _stacked(config)
    groups = [
        [p, matrices[name.replace("gate", "up")]] if stacked and "gate_proj" in name else [p]
        for name, p in matrices.items()
        if not (stacked and "up_proj" in name)
    ]
    momenta = [torch.zeros_like(torch.cat(list(group))) for group in groups]

    @torch.no_grad()
    def update(share: float) -> None:
        adamw(share)
        lr = share * settings.lr
        for group, momentum in zip(groups, momenta, strict=True):
            gradient = torch.cat([_gradient(p) for p in group])
            momentum.mul_(settings.momentum).add_(gradient)
            direction = gradient + settings.momentum * momentum if settings.nesterov else momentum
            scale = settings.scale_factor * math.sqrt(max(direction.shape))
            step = scale * orthogonalised(direction.double(), settings.coefficients).float()
            for p, part in zip(group, torch.split(step, [p.shape[0] for p in group]), strict=True):
                p.mul_(1 - lr * settings.weight_decay).sub_(lr * part)

    return update


def _stacked(config: RunConfig) -> bool:
    """Returns whether `[gate; up]` is one matrix."""
    return config.engine.strategy == "sc"


def _apart(params: Parameters, config: RunConfig) -> tuple[Parameters, Update]:
    """The matrices, and the update of everything else."""
    matrices = {name: p for name, p in params.items() if "_proj" in name}
    return matrices, _adamw({name: p for name, p in params.items() if name not in matrices}, config)


def _gradient(param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


TP2_DP2 = ("gpus=4", "parallel.tp=2", "parallel.pp=1")
Settings = tuple[str, ...]
# A rate and a weight decay of their own for embeddings and norms, whose schedule is that of the matrices.
APART = (
    *("train.steps=3", "optimizer.adamw_lr=0.003", "optimizer.adamw_weight_decay=0.05"),
    *("schedule.decay=linear", "schedule.decay_steps=8", "optimizer.min_lr_ratio=0.1"),
)
ADAMW: dict[str, Settings] = {
    name: ("optimizer=adamw", *layout)
    for name, layout in {
        "tp2 dp2": TP2_DP2,
        "pp2 dp2 tied": ("gpus=4", "parallel.tp=1", "parallel.pp=2"),
        "dp2 without overlap": ("gpus=2", "parallel.tp=1", "parallel.pp=1", "parallel.overlap_grad_reduce=false"),
    }.items()
}
# One micro-batch each; AdamW's runs add up several.
SC = ("optimizer=muon", "engine.strategy=sc")
MUON: dict[str, Settings] = {
    "Megatron's, tp2 dp2": (*SC, *TP2_DP2, "train.micro_batch_size=4"),
    "Megatron's, pp2, simple coefficients without nesterov": (
        *(*SC, "gpus=2", "parallel.tp=1", "parallel.pp=2", "optimizer.nesterov=false", "optimizer.coefficients=simple"),
    ),
    "canzona's, tp2 dp2": ("optimizer=muon", "engine.strategy=canzona", *TP2_DP2, "train.micro_batch_size=4"),
}
TWO_RATES: dict[str, tuple[Settings, Callable[[Parameters, RunConfig], Update]]] = {
    "adamw, dp2": (("optimizer=adamw", "gpus=2", "parallel.tp=1", "parallel.pp=1", *APART), _adamw),
    "Megatron's Muon, tp2": ((*SC, "gpus=2", "parallel.tp=2", "parallel.pp=1", *APART), _muon),
    "Muon, dp2": (("optimizer=muon", "gpus=2", "parallel.tp=1", "parallel.pp=1", *APART), _muon),
}


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


RUNS = Runs(
    [*ADAMW.values(), *MUON.values(), *(settings for settings, _ in TWO_RATES.values())],
    ranks_of,
    lambda runs: run_trainings([(config, layout, config.train.steps) for config, layout in starmap(_resolve, runs)]),
)


def _check(settings: Settings, updates: Callable[[Parameters, RunConfig], Update]) -> None:
    """Asserts that every weight is within `BOUND` learning rates of the reference, and moved by half of one."""
    ours, (config, layout) = RUNS[settings], _resolve(*settings)
    assert min(ours.grad_norms) > 2 * config.optimizer.clip_grad, "clipping is not active, so it is not tested"
    after, grad_norms = _reference(config, layout, ours.before, updates)
    assert ours.grad_norms == pytest.approx(grad_norms, rel=1e-5)
    assert ours.after.keys() == after.keys()
    for name, weight in ours.after.items():
        moved = (weight - ours.before[name]).abs().max() / LR
        assert moved > 0.5, f"{name} was hardly updated"
        deviation = float((weight - after[name]).abs().max() / LR)
        assert deviation <= BOUND, f"{name} deviates by {deviation:.1e} learning rates"


@pytest.mark.parametrize("where", ADAMW)
def test_adamw_over_any_layout_is_torchs_adamw_on_whole_weights(where: str) -> None:
    _check(ADAMW[where], _adamw)


@pytest.mark.parametrize("how", MUON)
def test_muon_over_any_layout_is_muon_on_whole_matrices(how: str) -> None:
    _check(MUON[how], _muon)


@pytest.mark.parametrize("how", TWO_RATES)
def test_embeddings_and_norms_have_the_rate_and_the_decay_of_their_own(how: str) -> None:
    settings, updates = TWO_RATES[how]
    ours, (config, layout) = RUNS[settings], _resolve(*settings)
    after, _ = _reference(config, layout, ours.before, updates)
    for name, weight in ours.after.items():
        assert float((weight - after[name]).abs().max()) <= 1e-6, name
