"""Core attention of layers without Transformer Engine: causal, with grouped queries, over sequences that context
parallelism has cut.

Scores are never stored: torch's kernel keeps a logarithm a row for the backward pass, `cpu_attention` nothing. Megatron
cuts a sequence into 2 * cp chunks and gives rank r chunks r and 2 * cp - 1 - r (`get_batch_on_this_cp_rank`), so that
every rank has as many keys to look at.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.functional import scaled_dot_product_attention

from canzona_cli.megatron.cpu_attention import attend


class CausalAttention(torch.nn.Module):
    """What Megatron's `DotProductAttention` computes under a causal mask without dropout, for any cp.

    Keys and values of the whole sequence are gathered, and their gradients reduce-scattered, in one collective each; a
    chunk of queries looks only at the keys up to its own end.
    """

    def __init__(
        self,
        *,
        softmax_scale: float | None,
        attn_mask_type: AttnMaskType,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__()
        assert attn_mask_type is AttnMaskType.causal
        self._scale = softmax_scale
        self._cp = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to the whole sequence up to each.

        Args:
            query: `[seq / cp, batch, heads, head_dim]`.
            key: `[seq / cp, batch, groups, head_dim]`, and `value` likewise.
            attention_mask: ignored: the mask is causal.

        Returns:
            `[seq / cp, batch, heads * head_dim]`.
        """
        assert attn_mask_type is AttnMaskType.causal
        assert attention_bias is None
        assert packed_seq_params is None
        if self._cp.size() == 1:
            return self._attend(query, key, value)
        keys, values = self._whole(key, value)
        chunk = len(query) // 2
        ends = ((self._cp.rank() + 1) * chunk, (2 * self._cp.size() - self._cp.rank()) * chunk)
        return torch.cat(
            [self._attend(part, keys[:end], values[:end]) for part, end in zip(query.chunk(2), ends, strict=True)]
        )

    def _whole(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole sequence in its order, `[seq, batch, groups, head_dim]` each."""
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._cp)
        first, second = both.unflatten(0, (self._cp.size(), 2, -1)).unbind(1)
        keys, values = torch.cat([first, second.flip(0)]).flatten(0, 1).chunk(2, dim=-1)
        return keys, values

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The last query sees all keys, the one before it all but one, and so on."""
        if _on_processor(query):
            scale = query.size(-1) ** -0.5 if self._scale is None else self._scale
            return attend(query, key, value, scale).flatten(2)
        if not _kernel_knows_groups(query):
            times = query.size(2) // key.size(2)
            key, value = key.repeat_interleave(times, dim=2), value.repeat_interleave(times, dim=2)
        context = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if len(query) == len(key) else _lower_right(len(query), len(key)),
            is_causal=len(query) == len(key),
            scale=self._scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _lower_right(queries: int, keys: int) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right  # its import loads torch's compiler

    return causal_lower_right(queries, keys)


def _on_processor(query: torch.Tensor) -> bool:
    return query.device.type == "cpu"


def _kernel_knows_groups(query: torch.Tensor) -> bool:
    """The one kernel for fp32 on GPUs that stores no scores, memory-efficient attention, does not."""
    return not (query.is_cuda and query.dtype is torch.float32)
