"""The core attention of layers without Transformer Engine: causal, for grouped queries, and for sequences
that context parallelism (cp) cuts.

Attention scores are not stored for the backward pass: torch's kernel stores the log-sum-exp of each row. Megatron cuts
a sequence into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r (`get_batch_on_this_cp_rank`), so that
the queries of every rank attend to equally many keys.
"""

from functools import lru_cache

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """Causal attention that computes the same as Megatron's `DotProductAttention` without dropout, for any
    cp.

    Keys and values of the whole sequence are gathered in one collective, and their gradients are
    reduce-scattered in another. A chunk of queries is multiplied only with the keys up to the end of the
    chunk.
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
        """Computes the attention of this rank's queries to their own and all earlier positions.

        Args:
            query: `[seq / cp, batch, heads, head_dim]`.
            key, value: `[seq / cp, batch, groups, head_dim]`.
            attention_mask: ignored, because the mask is causal.

        Returns:
            `[seq / cp, batch, heads * head_dim]`.
        """
        assert attn_mask_type is AttnMaskType.causal
        assert attention_bias is None
        assert packed_seq_params is None
        if self._cp.size() == 1:
            return self._attend(query, key, value)
        keys, values = self._gather_sequence(key, value)
        chunk_length = len(query) // 2
        ends = ((self._cp.rank() + 1) * chunk_length, (2 * self._cp.size() - self._cp.rank()) * chunk_length)
        return torch.cat(
            [self._attend(part, keys[:end], values[:end]) for part, end in zip(query.chunk(2), ends, strict=True)]
        )

    def _gather_sequence(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers the keys and the values of the whole sequence, in the order of positions: each `[seq,
        batch, groups, head_dim]`. Collective over the cp ranks."""
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._cp)
        first_chunks, second_chunks = both.unflatten(0, (self._cp.size(), 2, -1)).unbind(1)
        keys, values = torch.cat([first_chunks, second_chunks.flip(0)]).flatten(0, 1).chunk(2, dim=-1)
        return keys, values

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Computes causal attention: the last query attends to all keys, the query before the last to all but
        the last key, and so on.

        Args:
            query: `[queries, batch, heads, head_dim]`.
            key, value: `[keys, batch, groups, head_dim]`.

        Returns:
            `[queries, batch, heads * head_dim]`.
        """
        if not _kernel_knows_groups(query):
            repeats = query.size(2) // key.size(2)
            key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        context = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if len(query) == len(key) else _causal_mask(query, len(key)),
            is_causal=len(query) == len(key),
            scale=self._scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _causal_mask(query: torch.Tensor, keys: int) -> torch.Tensor:
    """Returns the mask with which the last query attends to all keys. On GPUs, it selects a kernel without a mask."""
    if not query.is_cuda:
        return _mask(len(query), keys)
    from torch.nn.attention.bias import causal_lower_right  # importing it loads torch's compiler

    return causal_lower_right(len(query), keys)


@lru_cache(maxsize=4)
def _mask(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _kernel_knows_groups(query: torch.Tensor) -> bool:
    """Returns True if torch's kernel supports grouped queries. In fp32 on GPUs, the only kernel that does not
    store scores is memory-efficient attention, which does not support grouped queries."""
    return not (query.is_cuda and query.dtype is torch.float32)
