"""Samples of text by the model in training: its likeliest continuation of a prompt, on any layout.

Every token is a forward pass of the training model over the whole sequence, without a cache, by the schedule
that a validation takes; nothing is drawn at random and nothing of training is touched. The ranks take the
same passes and collectives in the same order, and agree on every token before the next.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from canzona_cli.config.schema import RunConfig
from canzona_cli.data.corpus import tokenizer_of
from canzona_cli.data.tokenizers import Tokenizer
from canzona_cli.megatron.model import Model
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.training.step import evaluating


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Goes on with one prompt."""

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
    """The likeliest token behind the prompt, the likeliest behind both, and so on. Collective.

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
    """The likeliest token behind `position`, whatever stands there now: attention is causal.

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
        forward_step_func=_forward_step,
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


def _forward_step(
    batches: Iterator[dict[str, torch.Tensor]], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor, bool], torch.Tensor]]:
    """One micro-batch to its logits, and what the schedule is to keep of them: all."""
    batch = next(batches)
    return chunk(batch["tokens"], batch["position_ids"], None), lambda logits, non_loss_data: logits
