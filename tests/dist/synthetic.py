"""The engine alone: known gradients in Megatron's buffers, steps, whole weights out. No forward, no backward.

Gradients of whole matrices are drawn per step from a seed and cut as `tests.dist.whole` puts fragments together, not by
the engine's own code; so whatever the layout, every matrix sees the same numbers, and its weights must come out the
same to the last bit.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.owner_bucket_group import bucket_groups
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.optimizers.newton_schulz import coefficients
from canzona_cli.core.setup import Layout, ModelConfig
from canzona_cli.training.assemble import assemble as assemble_trainee
from tests.dist.jobs import on_ranks, planned
from tests.dist.whole import Part, Weights, assemble, cut_of, named_parameters, part_of

FARTHER, FARTHEST = 2.0, 4.0
"""The allowed distance of shared matrices from the exact update, over the distance of one process in the same form: all
together, and any single one (`farther`). A contribution is rounded, and so is the sum: two roundings where one process
has one, hence 1.4 times. For one matrix the smallest singular value decides, which is one random number against
another."""

Gradient = Callable[[str, tuple[int, ...], int], torch.Tensor]
"""A function that returns a whole weight's gradient from its Hugging Face name, its shape and the step."""


def noise(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Standard normal numbers that depend on name and step alone."""
    digest = hashlib.sha256(f"{name}/{step}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


@dataclass(frozen=True, kw_only=True)
class Result:
    before: Weights
    after: Weights
    kept: list[object]
    """The results of `look`, by rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine's steps from known gradients."""

    config: RunConfig
    layout: Layout
    steps: int
    gradient: Gradient = noise
    look: Callable[[Trainee], object] = lambda trainee: None


def run_engine(
    config: RunConfig,
    layout: Layout,
    steps: int,
    *,
    gradient: Gradient = noise,
    look: Callable[[Trainee], object] = lambda trainee: None,
) -> Result:
    """Step the run's optimizer `steps` times on the layout's ranks."""
    [found] = run_engines([Case(config=config, layout=layout, steps=steps, gradient=gradient, look=look)])
    return found


def run_engines(cases: Sequence[Case]) -> list[Result]:
    """The same of several runs that are cut over ranks alike, on the same ranks."""
    plans = [planned(case.config, case.layout) for case in cases]

    def work(number: int, world: World) -> tuple[Part, Part, object]:
        case = cases[number]
        trainee = assemble_trainee(case.config, world, plans[number])
        before = part_of(trainee.chunks, world)
        for step in range(case.steps):
            optimizer_step(trainee, step, case.gradient)
        return before, part_of(trainee.chunks, world), case.look(trainee)

    found = on_ranks({number: (case.config, case.layout) for number, case in enumerate(cases)}, work)
    return [
        Result(
            before=assemble([before for before, _, _ in ranks], cases[number].config.model),
            after=assemble([after for _, after, _ in ranks], cases[number].config.model),
            kept=[kept for _, _, kept in ranks],
        )
        for number, ranks in found.items()
    ]


def optimizer_step(trainee: Trainee, step: int, gradient: Gradient = noise) -> None:
    """One step from known gradients; afterwards every rank has all its parameters."""
    fill_gradients(trainee, step, gradient)
    trainee.optimizer.step()
    finish_gathering(trainee)
    trainee.schedule.step(increment=1)


def finish_gathering(trainee: Trainee) -> None:
    """Waits for the gathering that the next forward pass would wait for."""
    config = trainee.chunks[0].ddp_config
    if not config.use_distributed_optimizer:
        return
    for group in reversed(bucket_groups(trainee.chunks)):
        if config.overlap_param_gather:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        group.param_gather_dispatched = False


@torch.no_grad()
def fill_gradients(trainee: Trainee, step: int, gradient: Gradient) -> None:
    """Reduced gradients: on every rank, as its owner has them after the reduction."""
    world, shape = trainee.world, trainee.setup.model
    for name, param in named_parameters(trainee.chunks):
        cut = cut_of(name, param)
        gradients = getattr(param, "main_grad", None)
        assert isinstance(gradients, torch.Tensor)
        gradients.copy_(fragment(name, tuple(param.shape), cut, world.layout.tp, world.tp_rank, shape, step, gradient))


def fragment(
    name: str,
    shape: tuple[int, ...],
    cut: int | None,
    tp: int,
    rank: int,
    model: ModelConfig,
    step: int,
    gradient: Gradient,
) -> torch.Tensor:
    """A TP rank's part of the gradient of one Megatron parameter."""
    if name == "output_layer.weight" and model.tied_embeddings:
        name = "embedding.word_embeddings.weight"
    if cut is None:
        tp, rank = 1, 0
    if len(shape) == 1:
        return gradient(name, shape, step)
    rows = shape[0] * tp if cut == 0 else shape[0]
    cols = shape[1] * tp if cut == 1 else shape[1]
    if "linear_fc1.weight" in name:
        halves = [gradient(f"{name}:{part}", (rows // 2, cols), step).chunk(tp)[rank] for part in ("gate", "up")]
        return torch.cat(halves)
    if name.endswith("linear_qkv.weight"):
        groups, head = model.num_query_groups, model.head_dim
        queries = model.num_attention_heads // groups
        sizes = {"q": queries * head, "k": head, "v": head}
        parts = [
            gradient(f"{name}:{part}", (groups * size, cols), step).view(groups, size, cols)
            for part, size in sizes.items()
        ]
        return torch.cat(parts, dim=1).chunk(tp)[rank].flatten(0, 1)
    return gradient(name, (rows, cols), step).chunk(tp, dim=cut or 0)[rank]


def whole_gradients(before: Weights, model: ModelConfig, step: int, gradient: Gradient = noise) -> Weights:
    """The same by Hugging Face name: what a single process would have."""
    found: Weights = {}
    for layer in range(model.num_layers):
        prefix, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        sources = {
            "self_attn.o_proj": f"{prefix}.self_attention.linear_proj.weight",
            "self_attn.q_proj": f"{prefix}.self_attention.linear_qkv.weight:q",
            "self_attn.k_proj": f"{prefix}.self_attention.linear_qkv.weight:k",
            "self_attn.v_proj": f"{prefix}.self_attention.linear_qkv.weight:v",
        }
        places = [("mlp", "mlp", "")]
        if model.num_experts:
            places = [("mlp.experts", f"mlp.experts.{expert}", str(expert)) for expert in range(model.num_experts)]
        for place, mine, number in places:
            sources |= {
                f"{mine}.gate_proj": f"{prefix}.{place}.linear_fc1.weight{number}:gate",
                f"{mine}.up_proj": f"{prefix}.{place}.linear_fc1.weight{number}:up",
                f"{mine}.down_proj": f"{prefix}.{place}.linear_fc2.weight{number}",
            }
        for matrix, source in sources.items():
            key = f"{theirs}.{matrix}.weight"
            found[key] = gradient(source, tuple(before[key].shape), step)
    return found


def single_process(
    before: Weights,
    config: RunConfig,
    steps: int,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    gradient: Gradient = noise,
) -> Weights:
    """The matrices after `steps` of an ordinary optimizer, in this process, at the schedule's rates."""
    names = list(whole_gradients(before, config.model, 0, gradient))
    params = {name: torch.nn.Parameter(before[name].clone()) for name in names}
    optimizer = make(list(params.values()))
    for step in range(steps):
        for name, value in whole_gradients(before, config.model, step, gradient).items():
            params[name].grad = value
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def exact_muon(before: Weights, gradients: Iterable[Weights], lr: float) -> Weights:
    """The matrices after a step of Muon at default settings for each of `gradients`. Momentum is fp32 as everywhere, as
    its rounding may be all that is seen else; behind it all is in fp64, whose rounding is nothing beside fp32's."""
    found: Weights = {}
    momenta: Weights = {}
    for of_step in gradients:
        for name, gradient in of_step.items():
            weight = found.get(name, before[name].double())
            average = momenta[name] = torch.lerp(momenta.get(name, torch.zeros_like(gradient)), gradient, 1 - 0.95)
            x = torch.lerp(gradient, average, 0.95).double()
            x /= x.norm()
            x = x.mT if x.size(0) > x.size(1) else x
            for a, b, c in coefficients("quintic", 5):
                gram = x @ x.mT
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x if x.shape == weight.shape else x.mT
            found[name] = weight * (1 - lr * 0.1) - lr * 0.2 * max(x.shape) ** 0.5 * x
    return found


def farther(found: Weights, other: Weights, exact: Weights) -> tuple[float, float]:
    """Returns the distance from `exact` over that of `other`: of all matrices together, and of the matrix where it is
    largest."""
    ours, theirs = (
        torch.stack([(one[name].double() - right).norm() for name, right in exact.items()]) for one in (found, other)
    )
    return float(ours.norm() / theirs.norm()), float((ours / theirs).max())
