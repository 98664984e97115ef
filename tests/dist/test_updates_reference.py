"""Updates through Megatron's stack are the updates of the papers.

Three fp32 steps over tp, dp and pp ranks, clipped, with weight decay, against one process that runs Hugging Face's
Qwen3 over the whole batch and updates whole matrices: `torch.optim.AdamW`, and Muon written out below.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Layout, MuonConfig, RunConfig
from canzona_cli.megatron.optimizer import overlaps_param_gather
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist.jobs import SMALL, build
from tests.dist.ranks import run_ranks
from tests.dist.reference import hugging_face_model, token_losses, weights_of
from tests.dist.samples import RandomTokens
from tests.dist.whole import Part, Weights, assemble, part_of

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
Update = Callable[[], None]
"""Updates the reference's parameters from their clipped gradients."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where training started and ended, and the gradient norm before clipping of each step."""

    before: Weights
    after: Weights
    grad_norms: list[float]


def _samples(config: RunConfig, layout: Layout) -> RandomTokens:
    return RandomTokens(
        samples=STEPS * layout.global_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=config.model.vocab_size,
    )


def _ours(config: RunConfig, layout: Layout) -> Trained:
    """Train on the layout's ranks, through our optimizer, schedule and loop."""

    def rank() -> tuple[Part, Part, list[float]]:
        trainee = build(config, layout)
        before = part_of(trainee.model, trainee.world)
        batches = BatchStream(_samples(config, layout), trainee.world)
        norms = [train_step(trainee, batches).grad_norm for _ in range(STEPS)]
        if overlaps_param_gather(config):
            # The last step's parameters would be gathered during the next forward, which does not come.
            trainee.model.start_param_sync(force_sync=True)
        return before, part_of(trainee.model, trainee.world), norms

    ranks = run_ranks(layout.world_size, rank)
    assert all(norms == ranks[0][2] for _, _, norms in ranks), "ranks disagree about the gradient norm"
    return Trained(
        before=assemble([before for before, _, _ in ranks], config.model),
        after=assemble([after for _, after, _ in ranks], config.model),
        grad_norms=ranks[0][2],
    )


def _reference(
    config: RunConfig, layout: Layout, before: Weights, updates: Callable[[Parameters, RunConfig], Update]
) -> Trained:
    """Train Hugging Face's model from the same weights on the same batches, whole, in one process."""

    def rank() -> tuple[dict[str, np.ndarray], list[float]]:
        model = hugging_face_model(config.model, before, max_length=config.train.seq_length)
        params: Parameters = dict(model.named_parameters())
        update = updates(params, config)
        samples, norms = _samples(config, layout), []
        for step in range(STEPS):
            model.zero_grad()
            batch = default_collate(
                [samples[step * layout.global_batch_size + i] for i in range(layout.global_batch_size)]
            )
            torch.autograd.backward(token_losses(model, batch["tokens"], batch["labels"]).mean())
            clip = config.optimizer.clip_grad or math.inf
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), clip)))
            update()
        return {name: weight.numpy() for name, weight in weights_of(model).items()}, norms

    ((after, norms),) = run_ranks(1, rank)
    return Trained(
        before=before, after={name: torch.from_numpy(weight) for name, weight in after.items()}, grad_norms=norms
    )


def _adamw(params: Parameters, config: RunConfig) -> Update:
    """`torch.optim.AdamW`; weight decay on everything that is not 1-D."""
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )

    def update() -> None:
        optimizer.step()

    return update


def _muon(params: Parameters, config: RunConfig) -> Update:
    """Muon on whole matrices, AdamW on the rest (Jordan et al. 2024; decay and scale as in Moonshot, arXiv:2502.16982).

    q, k and v are matrices of their own; gate and up are one, `[gate; up]`, as Megatron-core keeps them.
    """
    settings = config.optimizer
    assert isinstance(settings, MuonConfig)
    matrices = {name: p for name, p in params.items() if "_proj" in name}
    adamw = _adamw({name: p for name, p in params.items() if name not in matrices}, config)
    groups = [
        [p, matrices[name.replace("gate", "up")]] if "gate_proj" in name else [p]
        for name, p in matrices.items()
        if "up_proj" not in name
    ]
    momenta = [torch.zeros_like(torch.cat(list(group))) for group in groups]

    @torch.no_grad()
    def update() -> None:
        adamw()
        for group, momentum in zip(groups, momenta, strict=True):
            gradient = torch.cat([_gradient(p) for p in group])
            momentum.mul_(settings.momentum).add_(gradient)
            direction = gradient + settings.momentum * momentum if settings.nesterov else momentum
            scale = settings.scale_factor * math.sqrt(max(direction.shape))
            step = scale * _orthogonalised(direction, COEFFICIENTS[settings.coefficients])
            for p, part in zip(group, torch.split(step, [p.shape[0] for p in group]), strict=True):
                p.mul_(1 - settings.lr * settings.weight_decay).sub_(settings.lr * part)

    return update


def _gradient(param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


# For each Newton-Schulz step; `simple` is Jordan's, `quintic` You Jiacheng's, as modded-nanogpt publishes them.
COEFFICIENTS = {
    "simple": [(3.4445, -4.7750, 2.0315)] * 5,
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


def _orthogonalised(matrix: torch.Tensor, coefficients: Sequence[tuple[float, float, float]]) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, in fp64."""
    x: torch.Tensor = matrix.double()
    x = x / x.norm()
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


def _check(config: RunConfig, layout: Layout, updates: Callable[[Parameters, RunConfig], Update]) -> None:
    ours = _ours(config, layout)
    assert min(ours.grad_norms) > 2 * config.optimizer.clip_grad, "clipping is not active, so it is not tested"
    reference = _reference(config, layout, ours.before, updates)
    assert ours.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert ours.after.keys() == reference.after.keys()
    for name, weight in ours.after.items():
        moved = (weight - ours.before[name]).abs().max() / LR
        assert moved > 0.5, f"{name} was hardly updated"
        deviation = float((weight - reference.after[name]).abs().max() / LR)
        assert deviation <= BOUND, f"{name} deviates by {deviation:.1e} learning rates"


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return fit.resolve(compose_run([*FIXED, *overrides]).config)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("gpus=4", "parallel.tp=2"), id="tp2 dp2"),
        pytest.param(("gpus=4", "parallel.pp=2"), id="pp2 dp2 tied"),
        pytest.param(("gpus=4", "parallel.tp=2", "parallel.pp=2", "model.tied_embeddings=false"), id="tp2 pp2 untied"),
        pytest.param(("gpus=2", "parallel.tp=1", "parallel.overlap_grad_reduce=false"), id="dp2 without overlap"),
    ],
)
def test_adamw_over_any_layout_is_torchs_adamw_on_whole_weights(overrides: tuple[str, ...]) -> None:
    config, layout = _resolve("optimizer=adamw", *overrides)
    _check(config, layout, _adamw)


@pytest.mark.parametrize("coefficients", ["quintic", "simple"])
def test_muon_over_tp_and_dp_is_muon_on_whole_matrices(coefficients: str) -> None:
    config, layout = _resolve(
        "optimizer=muon", "engine.strategy=sc", "gpus=4", "parallel.tp=2", f"optimizer.coefficients={coefficients}"
    )
    _check(config, layout, _muon)


def test_muon_without_nesterov_and_over_stages() -> None:
    config, layout = _resolve(
        "optimizer=muon", "engine.strategy=sc", "gpus=2", "parallel.pp=2", "optimizer.nesterov=false"
    )
    _check(config, layout, _muon)


def test_without_clipping_gradients_are_used_as_they_are() -> None:
    config, layout = _resolve("optimizer=adamw", "gpus=2", "parallel.tp=2", "optimizer.clip_grad=0")
    _check(config, layout, _adamw)
