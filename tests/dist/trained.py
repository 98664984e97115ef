"""Training for real: forward, backward, reduction, clipping, update; whole weights before and after.

Samples are numbered, and a step takes the same ones in every layout with the same global batch size.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.update import algorithm_of
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.engine.wire import Fragments
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.facts import Form
from canzona_cli.core.optimizers.muon import Muon, NorMuon
from canzona_cli.core.optimizers.shampoo import Shampoo
from canzona_cli.core.optimizers.shared_muon import SharedMuon
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Shape, Turns
from canzona_cli.core.optimizers.soap import SOAP
from canzona_cli.core.setup import Layout, MuonConfig, NorMuonConfig, Setup, ShampooConfig, SoapConfig
from canzona_cli.training.assemble import assemble as assemble_trainee
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import Routing, StepResult, train_step
from tests.dist.jobs import SMALL, on_ranks, planned
from tests.dist.samples import RandomTokens, samples_of
from tests.dist.synthetic import exact_muon, farther, finish_gathering
from tests.dist.whole import Part, Weights, assemble, part_of

STEPS, LR = 20, 1e-2
FIXED = (
    *SMALL,
    "train.precision=fp32",
    f"train.steps={STEPS}",
    f"optimizer.lr={LR}",
    # Of gradients of norm 0.3 to 0.7: clipping is active.
    "optimizer.clip_grad=0.25",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
    "engine.strategy=canzona",
    # All ranks are data-parallel unless a test says otherwise.
    "parallel.tp=1",
    "parallel.pp=1",
)
LAYOUTS = {
    "tp1 dp4": ("gpus=4",),
    "tp2 dp2": ("gpus=4", "parallel.tp=2"),
    "tp4 dp1": ("gpus=4", "parallel.tp=4"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "dp3": ("gpus=3", "train.global_batch_size=12"),
    "tp4 dp2": ("gpus=8", "parallel.tp=4"),
}
OPTIMIZERS = {
    "muon": ("optimizer=muon",),
    "shampoo": ("optimizer=shampoo", "optimizer.eps=1e-4", "optimizer.precondition_frequency=1"),
    "soap": ("optimizer=soap", "optimizer.eps=1e-2", "optimizer.max_preconditioner_dim=64"),
}
"""Settings whose 20 steps can be compared across orders of summation; see `tests.dist.test_engine_training`."""

# What rounding may come to in 20 steps, in learning rates; weights move by 2 to 20. Seen, of layouts and of one rank
# against itself alike: 1e-4, 6e-3, 3e-4.
ROUNDING = {"muon": 1e-3, "shampoo": 6e-2, "soap": 3e-3}
GRAM = ("optimizer=muon", "optimizer.form=gram")
MODES = {mode: (*GRAM, f"engine.mode={mode}") for mode in ("hosted", "shared", "auto")}
"""The modes of Muon, the one optimizer that shares matrices, in the form in which it does."""
CUT = {where: layout for where, layout in LAYOUTS.items() if "tp" in where and "tp1" not in where} | {
    "tp2": ("gpus=2", "parallel.tp=2"),
    "tp2 cp2": ("gpus=4", "parallel.tp=2", "parallel.cp=2"),
    "tp2 pp2 dp2": ("gpus=8", "parallel.tp=2", "parallel.pp=2"),
}
"""The layouts with TP ranks to share with."""

_Recorded = dict[str, list[np.ndarray]]
_WEIGHTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "proj": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Hugging Face's name of each of the plan's split matrices."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The start and end of training, with the loss and the gradient norm before clipping of each step."""

    before: Weights
    after: Weights
    losses: list[float]
    grad_norms: list[float]
    gradients: list[Weights]
    """The matrices' gradients at each step, as the optimizer received them: whole and clipped. Recorded of dense models
    under canzona and asc with splitting=split; else empty."""
    shared: frozenset[str]
    """Matrices that TP groups updated together."""
    routing: list[Routing]
    """The routing of each step; empty for dense models."""
    kept: list[object]
    """The results of `look`, by rank."""
    fallbacks: int
    """Updates that were not finite, or needed a fallback, but for those of the last step."""


def one_rank(where: str) -> tuple[str, ...]:
    """One rank with a layout's global batch."""
    return ("gpus=1", *(setting for setting in (LAYOUTS | CUT)[where] if "batch" in setting))


def samples(config: RunConfig, layout: Layout, steps: int) -> RandomTokens:
    """Returns as many samples as `steps` need."""
    return samples_of(config.setup, steps * layout.global_batch_size)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The part of a run that one rank saw."""

    before: Part
    after: Part
    facts: list[StepResult]
    kept: object
    recorded: _Recorded
    fragments: _Recorded
    """The fragments of shared matrices, as whole matrices that are 0 elsewhere."""


def run_trainings(
    runs: Sequence[tuple[RunConfig, Layout, int]],
    *,
    read: Callable[[Setup, int], RandomTokens] = samples_of,
    prepare: Callable[[int, Trainee], object] = lambda number, trainee: None,
    look: Callable[[Trainee], object] = lambda trainee: None,
) -> list[Trained]:
    """Train runs that are cut over ranks alike on the same ranks, through our optimizer, schedule and loop.

    Args:
        read: makes the samples that a run trains on.
        prepare: called with the number of each run before its first step.
        look: called after each run's last step.

    Raises:
        AssertionError: ranks disagree about what they should all know.
    """
    plans = [planned(config, layout) for config, layout, _ in runs]

    def work(number: int, world: World) -> _Rank:
        config, layout, steps = runs[number]
        trainee = assemble_trainee(config, world, plans[number])
        before = part_of(trainee.chunks, world)
        prepare(number, trainee)
        batches = BatchStream(read(config.setup, steps * layout.global_batch_size), world)
        recorded, fragments = _record_gradients(trainee), _record_fragments(trainee)
        found = [train_step(trainee, batches) for _ in range(steps)]
        kept = look(trainee)
        finish_gathering(trainee)
        return _Rank(
            before=before,
            after=part_of(trainee.chunks, world),
            facts=found,
            kept=kept,
            recorded=dict(recorded),
            fragments=dict(fragments),
        )

    found = on_ranks({number: (config, layout) for number, (config, layout, _) in enumerate(runs)}, work)
    return [_trained(ranks, config, steps) for (config, _, steps), ranks in zip(runs, found.values(), strict=True)]


def _trained(ranks: list[_Rank], config: RunConfig, steps: int) -> Trained:
    facts = ranks[0].facts
    assert all(rank.facts == facts for rank in ranks), "ranks disagree about losses or gradient norms"
    recorded = {name: values for rank in ranks for name, values in rank.recorded.items()}
    shared = frozenset(name for rank in ranks for name in rank.fragments)
    assert not shared & recorded.keys()
    for name in shared:
        held = (rank.fragments[name] for rank in ranks if name in rank.fragments)
        recorded[name] = [np.sum(parts, axis=0) for parts in zip(*held, strict=True)]
    assert all(len(values) == steps for values in recorded.values())
    return Trained(
        before=assemble([rank.before for rank in ranks], config.model),
        after=assemble([rank.after for rank in ranks], config.model),
        losses=[step.loss for step in facts],
        grad_norms=[step.grad_norm for step in facts],
        gradients=[
            {name: torch.from_numpy(values[step]) for name, values in recorded.items()} for step in range(steps)
        ],
        shared=shared,
        routing=[step.routing for step in facts if step.routing is not None],
        kept=[rank.kept for rank in ranks],
        fallbacks=sum(step.fallbacks for step in facts),
    )


def _records(setup: Setup) -> bool:
    return setup.engine.splitting == "split" and not setup.model.num_experts


def _record_gradients(trainee: Trainee) -> _Recorded:
    """Records the gradient of each step to come, by matrix hosted on this rank."""
    recorded: _Recorded = defaultdict(list)
    optimizer = trainee.optimizer
    if not isinstance(optimizer, CanzonaOptimizer) or not _records(trainee.setup):
        return recorded

    def keep(name: str, master: torch.nn.Parameter, *_: object) -> None:
        assert master.grad is not None
        recorded[name].append(master.grad.numpy().copy())

    for group in optimizer.matrices.groups:
        for matrix in group.hosted:
            assert group.optimizer is not None
            master = optimizer.matrices.masters[matrix.index]
            group.optimizer.register_step_pre_hook(partial(keep, _hugging_face_name(matrix), master))
    return recorded


def _hugging_face_name(matrix: Matrix) -> str:
    _, layer, kind = matrix.name.split(".")
    return f"model.layers.{layer}.{_WEIGHTS[kind]}.weight"


def _record_fragments(trainee: Trainee) -> _Recorded:
    """Records the gradient's fragment of each step to come, by shared matrix of which this rank has a fragment."""
    recorded: _Recorded = defaultdict(list)
    optimizer, world = trainee.optimizer, trainee.world
    held = optimizer.matrices.fragments if isinstance(optimizer, CanzonaOptimizer) else []
    if not held or not _records(trainee.setup):
        return recorded
    form, places = held[0].optimizer, Fragments(trainee.setup.model, world.layout.tp, world.tp_rank, {})
    assert isinstance(form, SharedMuon)
    matrices: dict[torch.Tensor, Matrix] = {one.master: one.matrix for one in held}
    together = form.update_together

    def keep(p: torch.Tensor) -> None:
        matrix, whole = matrices[p], torch.zeros(matrices[p].shape)
        place = places.view_in_whole(matrix, whole, world.tp_rank)
        assert p.grad is not None
        place.copy_(p.grad.view(place.shape))
        recorded[_hugging_face_name(matrix)].append(whole.numpy())

    def recording(p: torch.Tensor, *, whole: Shape, ranks: FragmentGroup) -> Turns[bool]:
        keep(p)
        return together(p, whole=whole, ranks=ranks)

    form.update_together = recording  # type: ignore[method-assign]
    return recorded


def replay(trained: Trained, config: RunConfig) -> Weights:
    """The matrices after an ordinary optimizer has stepped them whole, in this process, with the recorded gradients."""
    params = {name: torch.nn.Parameter(trained.before[name].clone()) for name in trained.gradients[0]}
    optimizer = ordinary(config, list(params.values()))
    for gradients in trained.gradients:
        for name, param in params.items():
            param.grad = gradients[name].clone()
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def ordinary(config: RunConfig, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer of whole matrices, as a single process would make it."""
    o = config.optimizer
    if isinstance(o, NorMuonConfig):
        return NorMuon(params, o.lr, weight_decay=o.weight_decay, precision=config.train.precision)
    if isinstance(o, MuonConfig):
        form: Form = "gram" if o.form == "gram" else "standard"
        return Muon(params, o.lr, weight_decay=o.weight_decay, precision=config.train.precision, form=form)
    assert isinstance(o, SoapConfig | ShampooConfig)
    if isinstance(o, SoapConfig):
        return SOAP(
            params, o.lr, weight_decay=o.weight_decay, betas=(o.beta1, o.beta2), eps=o.eps,
            shampoo_beta=o.shampoo_beta, precondition_frequency=o.precondition_frequency,
            max_preconditioner_dim=o.max_preconditioner_dim, spread=o.stagger,
        )  # fmt: skip
    return Shampoo(
        params, o.lr, weight_decay=o.weight_decay, betas=(o.beta1, o.beta2), eps=o.eps, shampoo_beta=o.shampoo_beta,
        shampoo_eps=1e-12, precondition_frequency=o.precondition_frequency,
        max_preconditioner_dim=o.max_preconditioner_dim, roots=algorithm_of(config.setup).roots,
        spread=o.stagger,
    )  # fmt: skip


def inexactness(trained: Trained, config: RunConfig) -> tuple[float, float]:
    """`farther`, of the shared matrices and an ordinary optimizer's in one process, with the run's gradients."""
    exact = exact_muon(trained.before, trained.gradients, config.optimizer.lr)
    shared = {name: right for name, right in exact.items() if name in trained.shared}
    return farther(trained.after, replay(trained, config), shared)


def deviation(first: Weights, second: Weights, lr: float) -> float:
    """The largest of any weight, in learning rates."""
    assert first.keys() == second.keys()
    return max(float((weight - second[name]).abs().max()) for name, weight in first.items()) / lr


def different(first: Weights, second: Weights) -> list[str]:
    """Weights of `second` that are not the same in `first` to the last bit."""
    return [name for name, weight in second.items() if not torch.equal(first[name], weight)]
