"""Runs training steps and validations with a Megatron-core model."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer, NonFiniteGradients
from canzona_cli.core.megatron.model import Model, Trainee
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.model.families import layer_models
from canzona_cli.core.setup import ModelConfig
from canzona_cli.training.data import Batch, padded_micro_batches

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function that turns a model's output into the mean loss, for backward and for the records."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts' token counts and the balancing loss of one step, the same on every rank."""

    balancing_loss: float
    """The balancing loss, as the mean over layers with experts and micro-batches, without its weight: 1 if tokens are
    spread evenly; 0 if the model has no balancing loss."""
    tokens: tuple[tuple[float, ...], ...]
    """The number of tokens of each expert, as `tokens[layer][expert]`; empty for a layer without experts. A token is
    counted for each of its experts."""

    @classmethod
    def from_sums(cls, sums: Sequence[float], model: ModelConfig, *, dp: int, micro_batches: int) -> "Routing":
        """Makes the record from the flattened result of `RoutingMeter.take`, summed over all ranks.

        With `balancing_loss=sequence`, each data-parallel rank contributes the loss of its own sequences, so
        the sum is divided by the number of these ranks. Otherwise the ranks contribute parts of a single loss
        for the global batch.
        """
        width, has_experts = 1 + model.num_experts, [kind.num_experts > 0 for kind in layer_models(model)]
        layers = [sums[start : start + width] for start in range(0, len(sums), width)]
        parts = micro_batches * (dp if model.balancing_loss == "sequence" else 1)
        return cls(
            balancing_loss=sum(layer[0] for layer in layers) / (sum(has_experts) * parts),
            tokens=tuple(tuple(layer[1:] if some else ()) for layer, some in zip(layers, has_experts, strict=True)),
        )

    @property
    def load(self) -> float:
        """The load of the busiest expert: its number of tokens divided by the mean over its layer's
        experts."""
        return max(max(layer) * len(layer) / sum(layer) for layer in self.tokens if layer)


@dataclass(frozen=True, kw_only=True)
class AgreedValues:
    """The values that all ranks agree on in a step, between backward and update."""

    loss: float
    """The mean loss over the global batch, in nats per token."""
    stop: bool = False
    """True if the run must stop after this step, because some rank has a stop request."""
    save: bool = False
    """True if a checkpoint is due after this step."""
    routing: Routing | None = None
    """The token counts of the experts; None for a dense model."""


@dataclass(frozen=True, kw_only=True)
class StepResult(AgreedValues):
    """The result of one step, the same on every rank."""

    grad_norm: float
    lr: float
    """The learning rate of the step."""
    adamw_lr: float | None = None
    """The learning rate of parameters that are not matrices; None if it is `lr`."""
    skipped: bool = False
    """True if no weight changed, because the gradients were not finite (`train.non_finite=skip`)."""
    fallbacks: int = 0
    """The number of matrices, on all ranks, whose update in the previous step failed or needed the
    optimizer's fallback. `CanzonaOptimizer.repair_failed_updates` returns this number for the last step."""
    captures: int = 0
    """The number of CUDA graphs of updates captured before this step, as in `CanzonaOptimizer`."""
    bad_ranks: tuple[int, ...] = ()
    """The ranks that computed a loss that was not finite."""


def train_step(
    trainee: Trainee,
    batches: Iterator[Batch],
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    save_due: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Runs one step: forward and backward over all micro-batches, update, schedule. Collective.

    Apart from decompositions and the repair of failed updates, the host waits for the device once, for the
    gradient norm; in models with experts, also in each layer, for the experts' token counts. The all-reduce
    of loss and requests is started before the norm, so its result is available at no extra cost, and the host
    can launch the next step while the device still executes this step's update.

    Args:
        stop_requested: A function that returns True if this rank has a stop request. It is called after the
            backward pass, so that an earlier request stops the run after this step. If it returns True on any
            rank, all ranks stop.
        save_due: A function that returns True if a checkpoint is due after this step. It is called at the
            same time; if it returns True on any rank, all ranks save.

    Raises:
        NonFiniteGradients: on every rank together. The error has the step's loss, and names the ranks that
            computed a loss that is not finite.
    """
    timer, optimizer = trainee.timer, trainee.optimizer
    timer.begin_step()
    for chunk in trainee.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    layout = trainee.world.layout
    sequences = trainee.setup.train.batch_at(layout.global_batch_size, trainee.schedule.num_steps + 1)
    micro_batches = sequences // (layout.micro_batch_size * layout.dp)
    losses = _forward_backward(trainee, batches, micro_batches=micro_batches, forward_only=False)
    lr, adamw_lr = step_rates(trainee)
    try:
        with timer.phase("norm_clip"):
            agreed = _start_agreement(
                trainee, losses, micro_batches, stop_requested=stop_requested(), save_due=save_due()
            )
            # Inner optimizers and the gathering of parameters have separate phases inside this one, which
            # therefore measures only norm, clipping and copies.
            updated, grad_norm, _ = optimizer.step()
    except NonFiniteGradients as error:
        # The error is raised on every rank, so the ranks can still use a collective to find its origin.
        cause = (
            describe_bad_losses(_bad_ranks(trainee, losses))
            or "the loss is finite, so the cause is in the backward pass"
        )
        problems = (replace(problem, reason=f"{problem.reason}; {cause}") for problem in error.problems)
        raise NonFiniteGradients(*problems, loss=agreed().loss) from None
    trainee.schedule.step(increment=1)
    values = agreed()
    timer.end_step()
    return StepResult(
        **vars(values),
        grad_norm=float(grad_norm),
        lr=lr,
        adamw_lr=adamw_lr,
        skipped=not updated,
        fallbacks=optimizer.fallbacks if isinstance(optimizer, CanzonaOptimizer) else 0,
        captures=optimizer.captures if isinstance(optimizer, CanzonaOptimizer) else 0,
        bad_ranks=() if math.isfinite(values.loss) else _bad_ranks(trainee, losses),
    )


def step_rates(trainee: Trainee) -> tuple[float, float | None]:
    """Returns the learning rates of the next step: `lr` and `adamw_lr` of its `StepResult`."""
    optimizer, schedule = trainee.setup.optimizer, trainee.schedule
    own = optimizer.adamw_rates
    adamw_lr = None if own.lr == optimizer.lr else schedule.get_lr({"max_lr": own.lr, "min_lr": own.min_lr})
    return schedule.get_lr({}), adamw_lr


@torch.no_grad()
def validate(model: Model, batches: Iterator[Batch], *, samples: int) -> float:
    """Returns the mean loss over all tokens of `samples` samples, in nats per token, on every rank.
    Collective.

    Args:
        batches: A stream of these samples, with masked samples after them (`BatchStream` with `count`).
    """
    layout = model.world.layout
    left = padded_micro_batches(layout, samples)
    sums = torch.zeros(2, dtype=torch.float64, device=model.world.device)
    with evaluation_mode(model):
        while left > 0:
            count = min(left, layout.num_microbatches)
            for part in _forward_backward(model, batches, micro_batches=count, forward_only=True):
                sums += part
            left -= count
    if isinstance(model, Trainee) and model.routing is not None:
        model.routing.take()  # the next step must not count the tokens of the validation
    torch.distributed.all_reduce(sums)
    loss, tokens = model.timer.read(sums)
    return loss / tokens


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """Puts the model into evaluation mode inside the block, and into training mode after it."""
    for chunk in model.chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model.chunks:
            chunk.train()


def _forward_backward(
    trainee: Model, batches: Iterator[Batch], *, micro_batches: int, forward_only: bool
) -> list[torch.Tensor]:
    """Runs Megatron's schedule over some micro-batches.

    Returns:
        On the last stage, the mean loss of each micro-batch of this rank; with `forward_only`, the sum of the
        losses of its tokens and the number of these tokens. On other stages, an empty list.
    """
    layout = trainee.world.layout
    run_schedule = get_forward_backward_func()
    # With virtual pipeline stages, every model chunk reads all micro-batches, at different times.
    streams = [batches]
    if layout.vpp > 1:
        streams = list(tee(islice(batches, micro_batches), layout.vpp))
    losses: list[torch.Tensor] = run_schedule(
        forward_step_func=partial(_forward_step, trainee.timer, sums=forward_only),
        data_iterator=streams,
        model=list(trainee.chunks),
        num_microbatches=micro_batches,
        seq_length=trainee.setup.train.seq_length,
        micro_batch_size=layout.micro_batch_size,
        forward_only=forward_only,
    )
    return losses


def _forward_step(
    timer: PhaseTimer, batches: Iterator[Batch], model: torch.nn.Module, *, sums: bool
) -> tuple[torch.Tensor, LossFunction]:
    """Runs the forward pass of one micro-batch, as Megatron's schedule requires.

    Returns:
        The model's output, which on the last stage is the loss of each token, `[micro_batch, seq_length /
        cp]`; and the function that turns the output into the mean loss.
    """
    with timer.phase("data"):
        batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_summed_loss, batch["loss_mask"]) if sums else partial(
        _mean_loss, batch["loss_mask"], batch["counted"]
    )


def _summed_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of a micro-batch's losses, and, for the records, `[2]`, this sum and the number of
    tokens in it: on this context-parallel rank."""
    total = (losses.float() * mask).sum()
    return total, torch.stack([total.double(), mask.sum().double()])


def _mean_loss(mask: torch.Tensor, counted: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this context-parallel rank's part of the micro-batch's mean loss, once for backward and once
    for the records.

    Summed over the context-parallel ranks, the parts are the mean loss. Megatron's schedule multiplies each
    part by cp, because gradients are averaged over dp * cp ranks (`schedules.forward_step_calc_loss`).
    """
    part = (losses.float() * mask).sum() / counted
    # The records need a copy, because the schedule scales the loss in place.
    return part, part.detach().clone()


def _start_agreement(
    trainee: Model, losses: list[torch.Tensor], micro_batches: int, *, stop_requested: bool, save_due: bool
) -> Callable[[], AgreedValues]:
    """Starts one small all-reduce that averages the losses over all last stages and combines the ranks'
    requests. Collective.

    Returns:
        A function that waits for the all-reduce and returns the values.
    """
    world = trainee.world
    message = torch.zeros(4, device=world.device)
    routing_sums = trainee.routing.take() if isinstance(trainee, Trainee) and trainee.routing is not None else None
    if routing_sums is not None:
        message = torch.cat([message, routing_sums.flatten()])
    if world.is_last_stage:
        message[0] = torch.stack(losses).mean()
        message[1].fill_(1.0 / world.layout.cp)  # the losses of cp ranks are parts of one loss
    # fill_, because before torch 2.14 `message[2] = x` makes the host wait for the device.
    message[2].fill_(float(stop_requested))
    message[3].fill_(float(save_due))
    torch.distributed.all_reduce(message)
    receive = trainee.timer.fetch(message)

    def agreed() -> AgreedValues:
        total, count, stops, saves, *rest = receive()
        model, dp = trainee.setup.model, world.layout.dp
        routing = Routing.from_sums(rest, model, dp=dp, micro_batches=micro_batches) if rest else None
        return AgreedValues(loss=total / count, stop=stops > 0, save=saves > 0, routing=routing)

    return agreed


def _bad_ranks(trainee: Trainee, losses: list[torch.Tensor]) -> tuple[int, ...]:
    """Returns the ranks that computed a loss that is not finite. Collective."""
    world = trainee.world
    bad = torch.zeros(world.world_size, device=world.device)
    if world.is_last_stage:
        bad[world.rank] = torch.isfinite(torch.stack(losses)).logical_not().any().float()
    torch.distributed.all_reduce(bad)
    return tuple(rank for rank, is_bad in enumerate(trainee.timer.read(bad)) if is_bad)


def describe_bad_losses(ranks: Sequence[int]) -> str:
    """Returns a clause, for an error, that names these ranks as having losses that are not finite; empty
    without ranks."""
    if not ranks:
        return ""
    named = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"the loss is not finite on rank{'s' if len(ranks) > 1 else ''} {named}"
