"""One optimizer step, one validation and one sample of a Megatron-core model."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat, tee

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.config.schema import RunConfig
from canzona_cli.data.corpus import tokenizer_of
from canzona_cli.data.tokenizers import Tokenizer
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer, NonFiniteGradients
from canzona_cli.megatron.model import Model, Trainee
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.training.data import Batch

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The facts that ranks exchange in a step, between backward and update."""

    loss: float
    stop: bool = False
    """Somebody asked the run to stop after this step."""
    save: bool = False
    """A checkpoint is due after this step."""


@dataclass(frozen=True, kw_only=True)
class StepResult(Agreed):
    """The result of one step, the same on every rank."""

    grad_norm: float
    lr: float
    """The rate the step used."""
    skipped: bool = False
    """Gradients were not finite, no weight changed (`train.non_finite=skip`)."""
    fallbacks: int = 0
    """Matrices, on all ranks, whose update in the step before was replaced by what their optimizer does when
    it fails. (Of the last step: `CanzonaOptimizer.settle`.)"""
    captures: int = 0
    """CUDA graphs of updates captured before this step, on all ranks."""
    bad_ranks: tuple[int, ...] = ()
    """Ranks whose own loss was not finite."""


def train_step(
    trainee: Trainee,
    batches: Iterator[Batch],
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    save_due: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Makes one step: forward and backward over all micro-batches, update, schedule.

    The host waits for the device once: for the gradient norm. What the ranks tell one another is on its way
    by then, so asking for it at the end costs nothing, and the next step is launched while this one's update
    goes on.

    Args:
        stop_requested: True if this rank knows of a stop request; asked after the backward pass, so that a
            request that comes before stops after this step. All ranks learn of it with the loss, in one
            reduction.
        save_due: True if this rank thinks that a checkpoint is due after this step; asked and agreed on
            likewise.

    Raises:
        NonFiniteGradients: on every rank together, with the step's loss and the ranks whose own loss was not
            finite.
    """
    timer, optimizer = trainee.timer, trainee.optimizer
    timer.begin_step()
    for chunk in trainee.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = _forward_backward(trainee, batches, forward_only=False)
    lr = optimizer.param_groups[0]["lr"]
    try:
        with timer.phase("norm_clip"):
            agreed = _agree(trainee, losses, stop_requested=stop_requested(), save_due=save_due())
            # Children and parameter gathering open phases of their own inside; what remains is norm, clip and
            # copies.
            updated, grad_norm, _ = optimizer.step()
    except NonFiniteGradients as error:
        # Every rank is here, so they can still tell each other where it came from.
        where = bad_losses(_bad_ranks(trainee, losses)) or "the loss is finite, so it arose in the backward pass"
        problems = (replace(problem, reason=f"{problem.reason}; {where}") for problem in error.problems)
        raise NonFiniteGradients(*problems, loss=agreed().loss) from None
    trainee.schedule.step(increment=1)
    facts = agreed()
    timer.end_step()
    return StepResult(
        **vars(facts),
        grad_norm=float(grad_norm),
        lr=float(lr),
        skipped=not updated,
        fallbacks=optimizer.fallbacks if isinstance(optimizer, CanzonaOptimizer) else 0,
        captures=optimizer.captures if isinstance(optimizer, CanzonaOptimizer) else 0,
        bad_ranks=() if math.isfinite(facts.loss) else _bad_ranks(trainee, losses),
    )


@torch.no_grad()
def validate(model: Model, batches: Iterator[Batch], *, global_batches: int) -> float:
    """Returns the mean loss over `global_batches` batches, nats per token, the same on every rank."""
    with evaluating(model):
        losses = [loss for _ in range(global_batches) for loss in _forward_backward(model, batches, forward_only=True)]
    return _agree(model, losses)().loss


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Makes the model compute, inside the block, as it does where nothing is learnt."""
    for chunk in model.chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model.chunks:
            chunk.train()


def _forward_backward(trainee: Model, batches: Iterator[Batch], *, forward_only: bool) -> list[torch.Tensor]:
    layout = trainee.world.layout
    run = get_forward_backward_func()
    # Every model chunk asks for every micro-batch, at its own time.
    streams = [batches]
    if layout.vpp > 1:
        streams = list(tee(islice(batches, layout.num_microbatches), layout.vpp))
    stored: list[torch.Tensor] = run(
        forward_step_func=partial(_forward_step, trainee.timer),
        data_iterator=streams,
        model=list(trainee.chunks),
        num_microbatches=layout.num_microbatches,
        seq_length=trainee.config.train.seq_length,
        micro_batch_size=layout.micro_batch_size,
        forward_only=forward_only,
    )
    return stored


def _forward_step(
    timer: PhaseTimer, batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunction]:
    """Runs one micro-batch: `[micro_batch, seq_length]` tokens to the loss of each, on the last stage."""
    with timer.phase("data"):
        batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_mean_loss, batch["loss_mask"], batch["counted"])


def _mean_loss(mask: torch.Tensor, counted: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this context-parallel rank's part of the micro-batch's mean loss: for backward, and for the record.

    Megatron's schedule multiplies a loss by cp, for gradients are averaged over dp * cp ranks; so parts are
    what it wants (`schedules.forward_step_calc_loss`).
    """
    part = (losses.float() * mask).sum() / counted
    # A copy for the record: the schedule scales the loss in place.
    return part, part.detach().clone()


def _agree(
    trainee: Model, losses: list[torch.Tensor], *, stop_requested: bool = False, save_due: bool = False
) -> Callable[[], Agreed]:
    """Averages the losses of all last stages and spreads requests, in one small reduction; the function that is
    returned waits for it."""
    world = trainee.world
    facts = torch.zeros(4, device=world.device)
    if world.is_last_stage:
        facts[0] = torch.stack(losses).mean()
        facts[1].fill_(1.0 / world.layout.cp)  # their losses are parts of one
    # Filled in: `facts[2] = x` would have the host wait for the device below torch 2.14.
    facts[2].fill_(float(stop_requested))
    facts[3].fill_(float(save_due))
    torch.distributed.all_reduce(facts)
    arrived = trainee.timer.fetch(facts)

    def agreed() -> Agreed:
        total, count, stops, saves = arrived()
        return Agreed(loss=total / count, stop=stops > 0, save=saves > 0)

    return agreed


def _bad_ranks(trainee: Trainee, losses: list[torch.Tensor]) -> tuple[int, ...]:
    """Ranks that saw a loss which is not finite. Collective."""
    world = trainee.world
    bad = torch.zeros(world.world_size, device=world.device)
    if world.is_last_stage:
        bad[world.rank] = torch.isfinite(torch.stack(losses)).logical_not().any().float()
    torch.distributed.all_reduce(bad)
    return tuple(rank for rank, is_bad in enumerate(trainee.timer.read(bad)) if is_bad)


def bad_losses(ranks: Sequence[int]) -> str:
    """Names in words the ranks whose losses are not finite; empty when all are."""
    if not ranks:
        return ""
    numbers = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"the loss is not finite on rank{'s' if len(ranks) > 1 else ''} {numbers}"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Continues one prompt with the likeliest text of the model in training, on any layout.

    Every token is a forward pass of the training model over the whole sequence, without a cache, by the schedule
    that a validation takes; nothing is drawn at random and nothing of training is touched. The ranks take the
    same passes and collectives in the same order, and agree on every token before the next.
    """

    tokenizer: Tokenizer
    prompt: str
    """Empty: the beginning of a document."""
    tokens: int
    """The most tokens to write."""

    def text(self, model: Model) -> str:
        """Returns the model's continuation of the prompt, the same on every rank. Collective."""
        start: list[int] = self.tokenizer.encode_batch([self.prompt.encode()])[0].tolist()
        end = self.tokenizer.eod
        return self.tokenizer.decode(likeliest(model, start or [end], tokens=self.tokens, end=end))


def sampler_of(config: RunConfig, corpus: PreparedCorpus) -> Sampler | None:
    """Returns the sampler that a run's settings ask for; None if they ask for none."""
    train = config.train
    if train.sample_every == 0:
        return None
    return Sampler(tokenizer=tokenizer_of(corpus), prompt=train.sample_prompt or "", tokens=train.sample_tokens)


@torch.no_grad()
def likeliest(model: Model, prompt: Sequence[int], *, tokens: int, end: int) -> list[int]:
    """Returns the likeliest token after the prompt, the likeliest after both, and so on. Collective.

    Of tokens that are equally likely, the one of the lowest id.

    Args:
        prompt: at least one token, and fewer than `train.seq_length`.
        tokens: at most; fewer where the sequence ends.
        end: stops at this token, which is left out.
    """
    layout, longest = model.world.layout, model.config.train.seq_length
    length = min(longest, len(prompt) + tokens)
    unit = 2 * layout.cp * layout.tp  # what context and sequence parallelism cut is a whole number of slices
    padded = min(longest, -(-length // unit) * unit)
    sequence = torch.zeros(1, padded, dtype=torch.int64, device=model.world.device)
    sequence[0, : len(prompt)] = torch.tensor(prompt)
    written: list[int] = []
    with evaluating(model):
        for position in range(len(prompt) - 1, length - 1):
            token = _next(model, sequence, position)
            if token == end:
                break
            written.append(token)
            sequence[0, position + 1] = token
    return written


def _next(model: Model, sequence: torch.Tensor, position: int) -> int:
    """Returns the likeliest token after `position`, whatever stands there now: attention is causal.

    Args:
        sequence: token ids, `[1, seq]`.
    """
    world = model.world
    batch = {"tokens": sequence, "position_ids": torch.arange(sequence.size(1), device=world.device)[None]}
    if world.layout.cp > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=world.groups.cp)
    # One value and one id from every rank; those that do not have this position's logits do not count.
    none = torch.iinfo(torch.int64).max
    value = torch.full((1,), -torch.inf, device=world.device)
    token = torch.full((1,), none, device=world.device)
    for logits in _logits(model, batch):
        row = logits[batch["position_ids"] == position].float().nan_to_num(nan=-torch.inf)
        if len(row):  # `[1, vocab / tp]`
            value = row.amax(dim=1)
            token = row.argmax(dim=1) + world.tp_rank * row.size(1)
    best = value.clone()
    torch.distributed.all_reduce(best, torch.distributed.ReduceOp.MAX)
    token = torch.where(value == best, token, none)
    torch.distributed.all_reduce(token, torch.distributed.ReduceOp.MIN)
    [number] = model.timer.read(token)
    return int(number)


def _logits(model: Model, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the logits of each micro-batch, all alike, `[1, seq / cp, vocab / tp]`;
    none but on the last stage."""
    layout = model.world.layout
    stored: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=_logits_of,
        data_iterator=[repeat(batch) for _ in model.chunks],
        model=list(model.chunks),
        # Model chunks take turns with as many micro-batches as there are stages.
        num_microbatches=layout.pp if layout.vpp > 1 else 1,
        seq_length=batch["tokens"].size(1) * layout.cp,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return stored[:1]


def _logits_of(
    batches: Iterator[dict[str, torch.Tensor]], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor, bool], torch.Tensor]]:
    """Runs one micro-batch to its logits, and has the schedule keep all of them."""
    batch = next(batches)
    return chunk(batch["tokens"], batch["position_ids"], None), lambda logits, non_loss_data: logits
