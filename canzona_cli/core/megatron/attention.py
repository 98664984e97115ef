"""The core attention of layers without Transformer Engine: causal, for grouped queries, and for sequences
that context parallelism (cp) cuts.

Attention scores are not stored for the backward pass: torch's kernel stores the log-sum-exp of each row, and
`attend` recomputes the scores. Megatron cuts a sequence into 2 * cp chunks and gives rank r the chunks r and
2 * cp - 1 - r (`get_batch_on_this_cp_rank`), so that the queries of every rank attend to equally many keys.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch.autograd.function import FunctionCtx
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
        if _on_cpu(query):
            scale = query.size(-1) ** -0.5 if self._scale is None else self._scale
            return attend(query, key, value, scale).flatten(2)
        if not _kernel_knows_groups(query):
            repeats = query.size(2) // key.size(2)
            key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        context = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if len(query) == len(key) else _causal_mask(len(query), len(key)),
            is_causal=len(query) == len(key),
            scale=self._scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _causal_mask(queries: int, keys: int) -> torch.Tensor:
    """Returns the mask with which the last query attends to all keys."""
    from torch.nn.attention.bias import causal_lower_right  # importing it loads torch's compiler

    return causal_lower_right(queries, keys)


def _on_cpu(query: torch.Tensor) -> bool:
    return query.device.type == "cpu"


def _kernel_knows_groups(query: torch.Tensor) -> bool:
    """Returns True if torch's kernel supports grouped queries. In fp32 on GPUs, the only kernel that does not
    store scores is memory-efficient attention, which does not support grouped queries."""
    return not (query.is_cuda and query.dtype is torch.float32)


_SCORES, _QUERIES = 1 << 21, 128
"""The maximum numbers of scores and of queries in a block; a block may always have 32 queries."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes causal attention on a CPU, multiplying each block of queries only with the keys that it
    attends to.

    The last query attends to all keys, the query before the last to all but the last key, and so on. torch's
    own kernel computes in fp32 on CPUs. In bf16, with heads of 32 to 64 features and 256 to 2,048 tokens,
    this function took 0.35 to 0.65 of that kernel's time for forward and backward (one thread, AVX512-BF16).

    Args:
        query: `[queries, batch, heads, head_dim]`.
        key, value: `[keys, batch, groups, head_dim]`, with at least as many keys as queries.
        scale: The factor of scores before the softmax.

    Returns:
        `[queries, batch, heads, head_dim]`.
    """
    attended = _BlockwiseAttention.apply(query, key, value, scale)
    assert isinstance(attended, torch.Tensor)
    return attended


class _BlockwiseAttention(torch.autograd.Function):
    """The autograd function of `attend`. The heads of a group are stacked, so that every matmul is a batch of
    batch * groups matmuls."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale  # type: ignore[attr-defined]
        keys, values = _stack_keys(key), _stack_keys(value)
        context = torch.empty_like(query)
        for start, end, attended in _blocks(query, key):
            queries = _stack_queries(query[start:end], keys)
            weights = _attention_weights(queries, keys[:, :attended], end - start, scale)
            context[start:end] = _unstack_queries(torch.bmm(weights, values[:, :attended]), query[start:end])
        return context

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value = ctx.saved_tensors  # type: ignore[attr-defined]
        scale: float = ctx.scale  # type: ignore[attr-defined]
        keys, values = _stack_keys(key), _stack_keys(value)
        grad_query, grad_keys, grad_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for start, end, attended in _blocks(query, key):
            queries, grads = _stack_queries(query[start:end], keys), _stack_queries(grad[start:end], keys)
            weights = _attention_weights(queries, keys[:, :attended], end - start, scale)
            grad_values[:, :attended].baddbmm_(weights.mT, grads)
            grad_weights = torch.bmm(grads, values[:, :attended].mT)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_queries = torch.bmm(grad_scores, keys[:, :attended]).mul_(scale)
            grad_query[start:end] = _unstack_queries(grad_queries, query[start:end])
            grad_keys[:, :attended].baddbmm_(grad_scores.mT, queries, alpha=scale)
        return grad_query, _unstack_keys(grad_keys, key), _unstack_keys(grad_values, value), None


def _blocks(query: torch.Tensor, key: torch.Tensor) -> list[tuple[int, int, int]]:
    """Returns three numbers for each block of queries: the index of its first query, the index after its last
    query, and the number of keys that its last query attends to."""
    count, _, heads, _ = query.shape
    size = max(32, min(_QUERIES, _SCORES // (query.size(1) * heads * len(key))))
    blocks = [(start, min(start + size, count)) for start in range(0, count, size)]
    return [(start, end, end + len(key) - count) for start, end in blocks]


def _attention_weights(queries: torch.Tensor, keys: torch.Tensor, block: int, scale: float) -> torch.Tensor:
    """Returns the attention weights of a block of queries: `[batch * groups, heads of a group * block,
    keys]`.

    Args:
        queries: stacked, `[batch * groups, heads of a group * block, head_dim]`.
        keys: stacked, `[batch * groups, keys, head_dim]`, up to the last key that the block attends to.
        block: the number of queries in the block.
    """
    mask = torch.full((block, keys.size(1)), float("-inf"), dtype=keys.dtype).triu(keys.size(1) - block + 1)
    masks = mask.repeat(queries.size(1) // block, 1)
    return torch.softmax(torch.baddbmm(masks, queries, keys.mT, alpha=scale), dim=-1)


def _stack_keys(tensor: torch.Tensor) -> torch.Tensor:
    """Reshapes `[keys, batch, groups, head_dim]` to `[batch * groups, keys, head_dim]`."""
    return tensor.permute(1, 2, 0, 3).flatten(0, 1)


def _unstack_keys(stacked: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Inverts `_stack_keys`."""
    return stacked.view(*like.shape[1:3], len(like), -1).permute(2, 0, 1, 3)


def _stack_queries(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Reshapes `[block, batch, heads, head_dim]` to `[batch * groups, heads of a group * block,
    head_dim]`."""
    return tensor.permute(1, 2, 0, 3).reshape(len(keys), -1, tensor.size(-1))


def _unstack_queries(stacked: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Inverts `_stack_queries`."""
    block, batch, heads, _ = like.shape
    return stacked.view(batch, heads, block, -1).permute(2, 0, 1, 3)
