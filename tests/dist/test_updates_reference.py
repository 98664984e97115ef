"""Updates through Megatron's stack are the updates of the papers.

Three fp32 steps over tp, dp and pp ranks, clipped, with weight decay, against one process that runs Hugging Face's
Qwen3 over the whole batch and updates whole matrices: `torch.optim.AdamW`, Muon written out below, NVIDIA's SOAP, and
our Shampoo, whose mathematics has tests of its own.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from emerging_optimizers.soap import SOAP as EmergingSOAP
from torch.utils.data import default_collate

import canzona_cli.megatron
from canzona_cli.config.schema import Layout, MuonConfig, RunConfig, ShampooConfig, SoapConfig
from canzona_cli.optimizers.shampoo import Shampoo
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
Update = Callable[[], None]
"""Updates the reference's parameters from their clipped gradients."""


_known: dict[tuple[object, ...], tuple[Weights, Weights, list[float]]] = {}
"""By what they depend on, references that a test has had already: where they started, and `_reference`'s result."""


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
        setattr(canzona_cli.megatron, "_compile", lambda function, **_: function)  # noqa: B010  # of this rank
        model = hugging_face_model(config.model, before, max_length=config.train.seq_length)
        params: Parameters = dict(model.named_parameters())
        update = updates(params, config)
        taken, norms = samples(config, layout, STEPS), []
        for step in range(STEPS):
            model.zero_grad()
            batch = default_collate(
                [taken[step * layout.global_batch_size + i] for i in range(layout.global_batch_size)]
            )
            torch.autograd.backward(token_losses(model, batch["tokens"], batch["labels"]).mean())
            clip = config.optimizer.clip_grad or math.inf
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), clip)))
            update()
        return {name: weight.numpy() for name, weight in weights_of(model).items()}, norms

    ((after, norms),) = run_ranks(1, rank)
    return {name: torch.from_numpy(weight) for name, weight in after.items()}, norms


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


def _stacked(config: RunConfig) -> bool:
    """Whether `[gate; up]` is one matrix."""
    return config.engine.strategy == "sc" or config.engine.splitting == "qkv"


def _soap(params: Parameters, config: RunConfig) -> Update:
    """NVIDIA's SOAP on whole matrices, which renews its bases at every step; AdamW on the rest."""
    settings = config.optimizer
    assert isinstance(settings, SoapConfig)
    assert settings.precondition_frequency == 1
    matrices, adamw = _apart(params, config)
    soap = EmergingSOAP(
        list(matrices.values()), lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
        shampoo_beta=settings.shampoo_beta, weight_decay=settings.weight_decay, fp32_matmul_prec="highest",
        qr_fp32_matmul_prec="highest",
    )  # fmt: skip

    def update() -> None:
        adamw()
        soap.step()

    return update


def _shampoo(params: Parameters, config: RunConfig) -> Update:
    """Our Shampoo, without the engine, on whole matrices; AdamW on the rest."""
    settings = config.optimizer
    assert isinstance(settings, ShampooConfig)
    matrices, adamw = _apart(params, config)
    shampoo = Shampoo(
        list(matrices.values()), settings.lr, weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2), eps=settings.eps, shampoo_beta=settings.shampoo_beta,
        shampoo_eps=settings.shampoo_eps, precondition_frequency=settings.precondition_frequency,
        grafting=settings.grafting,
    )  # fmt: skip

    def update() -> None:
        adamw()
        shampoo.step()

    return update


def _apart(params: Parameters, config: RunConfig) -> tuple[Parameters, Update]:
    """The matrices, and the update of everything else."""
    matrices = {name: p for name, p in params.items() if "_proj" in name}
    return matrices, _adamw({name: p for name, p in params.items() if name not in matrices}, config)


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


TP2_DP2 = ("gpus=4", "parallel.tp=2", "parallel.pp=1")
# One micro-batch each; AdamW's runs add up several, and those of test_engine_training.
ENGINE = {
    "tp1 dp4": ("gpus=4", "parallel.tp=1", "parallel.pp=1"),
    "tp2 dp2": (*TP2_DP2, "train.micro_batch_size=4"),
    "tp4 dp1": ("gpus=4", "parallel.tp=4", "parallel.pp=1", "train.micro_batch_size=4"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=4"),
    "asc": (*TP2_DP2, "train.micro_batch_size=4", "engine.strategy=asc"),
}
USUALLY = ("tp2 dp2", "tp2 pp2")
"""Where rules are compared that `test_engine_exact` compares with one process everywhere; the rest is swept."""
Settings = tuple[str, ...]
ADAMW: dict[str, Settings] = {
    name: ("optimizer=adamw", *layout)
    for name, layout in {
        "tp2 dp2": TP2_DP2,
        "pp2 dp2 tied": ("gpus=4", "parallel.tp=1", "parallel.pp=2"),
        "tp2 pp2 untied": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "model.tied_embeddings=false"),
        "dp2 without overlap": ("gpus=2", "parallel.tp=1", "parallel.pp=1", "parallel.overlap_grad_reduce=false"),
    }.items()
}
SC = ("optimizer=muon", "engine.strategy=sc")
MEGATRONS_MUON: dict[str, Settings] = {
    **{name: (*SC, *ENGINE["tp2 dp2"], f"optimizer.coefficients={name}") for name in COEFFICIENTS},
    "without nesterov, over stages": (
        *SC, "gpus=2", "parallel.tp=1", "parallel.pp=2", "optimizer.nesterov=false",
    ),
}  # fmt: skip
EVERY_STEP = ("optimizer.precondition_frequency=1", "optimizer.stagger=false")
# As wide as the model.
SQUARE = ("model.num_attention_heads=4", "model.num_query_groups=4", "model.ffn_hidden_size=64")
CANZONA = "engine.strategy=canzona"
MUON: dict[str, Settings] = {
    **{f"split {where}": ("optimizer=muon", CANZONA, *layout) for where, layout in ENGINE.items()},
    "qkv tp2 dp2": ("optimizer=muon", CANZONA, *ENGINE["tp2 dp2"], "engine.splitting=qkv"),
}
SHAMPOO: dict[str, Settings] = {
    where: ("optimizer=shampoo", CANZONA, *layout, *EVERY_STEP) for where, layout in ENGINE.items()
}
SOAP: dict[str, Settings] = {
    where: ("optimizer=soap", CANZONA, *layout, EVERY_STEP[0], "optimizer.eps=1e-2", *SQUARE)
    for where, layout in ENGINE.items()
}
SELDOM = ("split tp1 dp4", "split asc")
EVERYWHERE = [pytest.param(where, marks=[] if where in USUALLY else pytest.mark.sweep) for where in ENGINE]
UNCLIPPED: Settings = ("optimizer=adamw", "gpus=2", "parallel.tp=2", "parallel.pp=1", "optimizer.clip_grad=0")


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


RUNS = Runs(
    [
        *(run for runs in (ADAMW, MEGATRONS_MUON) for run in runs.values()),
        *(run for how, run in MUON.items() if how not in SELDOM),
        *(runs[where] for runs in (SHAMPOO, SOAP) for where in USUALLY),
        UNCLIPPED,
    ],
    ranks_of,
    lambda runs: run_trainings([(*_resolve(*settings), STEPS) for settings in runs]),
)


def _check(
    settings: Settings,
    updates: Callable[[Parameters, RunConfig], Update],
    *,
    bound: float = BOUND,
    least: float = 0.5,
) -> None:
    """Every weight is within `bound` learning rates of the reference, and moved by `least` at least."""
    ours, (config, layout) = RUNS[settings], _resolve(*settings)
    assert min(ours.grad_norms) > 2 * config.optimizer.clip_grad, "clipping is not active, so it is not tested"
    after, grad_norms = _reference(config, layout, ours.before, updates)
    assert ours.grad_norms == pytest.approx(grad_norms, rel=1e-5)
    assert ours.after.keys() == after.keys()
    for name, weight in ours.after.items():
        moved = (weight - ours.before[name]).abs().max() / LR
        assert moved > least, f"{name} was hardly updated"
        deviation = float((weight - after[name]).abs().max() / LR)
        assert deviation <= bound, f"{name} deviates by {deviation:.1e} learning rates"


@pytest.mark.parametrize("where", ADAMW)
def test_adamw_over_any_layout_is_torchs_adamw_on_whole_weights(where: str) -> None:
    _check(ADAMW[where], _adamw)


@pytest.mark.parametrize("how", MEGATRONS_MUON)
def test_megatrons_muon_is_muon_on_whole_matrices(how: str) -> None:
    _check(MEGATRONS_MUON[how], _muon)


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.sweep] if how in SELDOM else []) for how in MUON])
def test_canzonas_muon_over_any_layout_is_muon_on_whole_matrices(how: str) -> None:
    _check(MUON[how], _muon)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_canzonas_shampoo_over_any_layout_is_shampoo_on_whole_matrices(where: str) -> None:
    """A factor of one gradient has a rank below its length: its root multiplies what is rounding there by up to
    (sqrt(192) epsilon)^(-1/4) = 28 for each side, 780 in all. Of gradients that differ by 1e-6 that leaves about 1e-3
    of a learning rate; seen 2e-3, and 1e-6 in the norm of the gradients that follow."""
    _check(SHAMPOO[where], _shampoo, bound=1e-2)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_canzonas_soap_over_any_layout_is_nvidias_on_whole_matrices(where: str) -> None:
    """Of square matrices, as wide as the model: the longer side of another has a factor of lower rank, whose null space
    has whatever basis rounding gives it, and Adam's steps depend on the basis. A large epsilon does the same for small
    eigenvalues that are too close to tell apart; steps are small then. Seen 2e-5."""
    _check(SOAP[where], _soap, least=30 * BOUND)


def test_without_clipping_gradients_are_used_as_they_are() -> None:
    _check(UNCLIPPED, _adamw)
