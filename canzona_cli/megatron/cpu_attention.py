"""Causal attention of a processor: products of blocks of queries with the keys that they see.

torch's own kernel keeps to fp32 arithmetic on CPUs. In bf16, with heads of 32 to 64 at 256 to 2,048 tokens, products
took 0.35 to 0.65 of its processor time forward and backward (one thread, AVX512-BF16). Neither stores scores.
"""

import torch
from torch.autograd.function import FunctionCtx

_SCORES, _QUERIES = 1 << 21, 128
"""At most so many scores, and queries, in a block."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The last query sees all keys, the one before it all but one, and so on.

    Args:
        query: `[queries, batch, heads, head_dim]`.
        key: `[keys, batch, groups, head_dim]`, at least as many as queries; `value` likewise.

    Returns:
        `[queries, batch, heads, head_dim]`.
    """
    found = _Blocks.apply(query, key, value, scale)
    assert isinstance(found, torch.Tensor)
    return found


class _Blocks(torch.autograd.Function):
    """Heads of a group are stacked: every product is of a batch of batch * groups matrices."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale  # type: ignore[attr-defined]
        keys, values = _stacked(key), _stacked(value)
        context = torch.empty_like(query)
        for first, last, end in _blocks(query, key):
            shares = _shares(_queries(query[first:last], keys), keys[:, :end], last - first, scale)
            context[first:last] = _unstacked(torch.bmm(shares, values[:, :end]), query[first:last])
        return context

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value = ctx.saved_tensors  # type: ignore[attr-defined]
        scale: float = ctx.scale  # type: ignore[attr-defined]
        keys, values = _stacked(key), _stacked(value)
        grad_query, grad_keys, grad_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for first, last, end in _blocks(query, key):
            queries, grads = _queries(query[first:last], keys), _queries(grad[first:last], keys)
            shares = _shares(queries, keys[:, :end], last - first, scale)
            grad_values[:, :end].baddbmm_(shares.mT, grads)
            grad_shares = torch.bmm(grads, values[:, :end].mT)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_shares, shares, -1, shares.dtype)
            found = torch.bmm(grad_scores, keys[:, :end]).mul_(scale)
            grad_query[first:last] = _unstacked(found, query[first:last])
            grad_keys[:, :end].baddbmm_(grad_scores.mT, queries, alpha=scale)
        return grad_query, _apart(grad_keys, key), _apart(grad_values, value), None


def _blocks(query: torch.Tensor, key: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first query, last, keys that the last one sees) of each block."""
    count, _, heads, _ = query.shape
    size = max(32, min(_QUERIES, _SCORES // (query.size(1) * heads * len(key))))
    ends = [min(first + size, count) for first in range(0, count, size)]
    return [(first, last, last + len(key) - count) for first, last in zip(range(0, count, size), ends, strict=True)]


def _shares(queries: torch.Tensor, keys: torch.Tensor, block: int, scale: float) -> torch.Tensor:
    """What each query takes of each value, `[batch * groups, heads of a group * block, keys]`."""
    unseen = torch.full((block, keys.size(1)), float("-inf"), dtype=keys.dtype).triu(keys.size(1) - block + 1)
    masked = unseen.repeat(queries.size(1) // block, 1)
    return torch.softmax(torch.baddbmm(masked, queries, keys.mT, alpha=scale), dim=-1)


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    """`[keys, batch, groups, head_dim]` as `[batch * groups, keys, head_dim]`."""
    return tensor.permute(1, 2, 0, 3).flatten(0, 1)


def _apart(stacked: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_stacked`."""
    return stacked.view(*like.shape[1:3], len(like), -1).permute(2, 0, 1, 3)


def _queries(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[block, batch, heads, head_dim]` as `[batch * groups, heads of a group * block, head_dim]`."""
    return tensor.permute(1, 2, 0, 3).reshape(len(keys), -1, tensor.size(-1))


def _unstacked(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_queries`."""
    block, batch, heads, _ = like.shape
    return found.view(batch, heads, block, -1).permute(2, 0, 1, 3)
