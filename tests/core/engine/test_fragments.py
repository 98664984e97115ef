"""Fragments are views of Megatron's parameters, and put together they are the canonical matrices."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch

from canzona_cli.core.engine.wire import Fragments
from canzona_cli.core.model.geometry import head_of
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.setup import ModelConfig, Splitting
from tests.sizes import layout, model

SPLITTINGS: tuple[Splitting, ...] = get_args(Splitting)
# Three queries share a key; every size is its own, so that no wrong view fits by accident.
SHAPE = replace(
    model("tiny"),
    num_layers=1, hidden_size=20, ffn_hidden_size=28, num_attention_heads=12, num_query_groups=4, head_dim=6,
)  # fmt: skip
LAYER = "decoder.layers.0."
QKV, PROJ = LAYER + "self_attention.linear_qkv.weight", LAYER + "self_attention.linear_proj.weight"
FC1, FC2 = LAYER + "mlp.linear_fc1.weight", LAYER + "mlp.linear_fc2.weight"
CASES = list(product(SPLITTINGS, (1, 2, 4)))

Named = dict[str, torch.Tensor]


def _canonical(shape: ModelConfig) -> Named:
    """One layer's matrices by kind, every element another number."""
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    sizes = {
        "q": (heads, shape.hidden_size),
        "k": (groups, shape.hidden_size),
        "v": (groups, shape.hidden_size),
        "proj": (shape.hidden_size, heads),
        "gate": (shape.ffn_hidden_size, shape.hidden_size),
        "up": (shape.ffn_hidden_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.ffn_hidden_size),
    }
    return {kind: 1e5 * (n + 1) + torch.arange(r * c).view(r, c) for n, (kind, (r, c)) in enumerate(sizes.items())}


def _interleaved(whole: Named, shape: ModelConfig) -> torch.Tensor:
    """linear_qkv of one rank that has everything: group by query group, its queries, its key, its value."""
    rows = []
    queries = shape.num_attention_heads // shape.num_query_groups * shape.head_dim
    for group in range(shape.num_query_groups):
        rows.append(whole["q"][group * queries : (group + 1) * queries])
        rows += [whole[kind][group * shape.head_dim : (group + 1) * shape.head_dim] for kind in ("k", "v")]
    return torch.cat(rows)


def _stored(whole: Named, shape: ModelConfig, tp: int, rank: int) -> Named:
    """Cuts what Megatron stores on a tensor-parallel rank, by parameter."""
    return {
        QKV: _interleaved(whole, shape).chunk(tp)[rank].clone(),
        PROJ: whole["proj"].chunk(tp, dim=1)[rank].clone(),
        FC1: torch.cat([whole["gate"].chunk(tp)[rank], whole["up"].chunk(tp)[rank]]),
        FC2: whole["down"].chunk(tp, dim=1)[rank].clone(),
    }


def _expected(matrix: Matrix, whole: Named, shape: ModelConfig) -> torch.Tensor:
    """Returns the matrix as an optimizer has to see it."""
    if matrix.kind == "qkv":
        return _interleaved(whole, shape)
    if matrix.kind == "fc1":
        return torch.cat([whole["gate"], whole["up"]])
    head = head_of(matrix)
    full = whole[matrix.kind]
    return full if head is None else full[head * shape.head_dim : (head + 1) * shape.head_dim]


def _ranks(splitting: Splitting, tp: int, whole: Named) -> tuple[tuple[Matrix, ...], list[tuple[Fragments, Named]]]:
    found = []
    for rank in range(tp):
        stored = _stored(whole, SHAPE, tp, rank)
        parameters = {name: torch.nn.Parameter(value) for name, value in stored.items()}
        found.append((Fragments(SHAPE, tp, rank, parameters), {n: p.detach() for n, p in parameters.items()}))
    return matrices_of(SHAPE, layout(tp=tp), splitting), found


@pytest.mark.parametrize(("splitting", "tp"), CASES)
def test_fragments_of_all_ranks_make_the_canonical_matrix(splitting: Splitting, tp: int) -> None:
    whole = _canonical(SHAPE)
    members, ranks = _ranks(splitting, tp, whole)
    assert members
    for matrix in members:
        put_together = torch.full((matrix.rows, matrix.cols), -1.0)
        for rank in matrix.holders(tp):
            fragments = ranks[rank][0]
            view = fragments.view_in_whole(matrix, put_together, rank)
            assert view.numel() == matrix.held_elements(tp)
            view.copy_(fragments.weight(matrix))
        assert torch.equal(put_together, _expected(matrix, whole, SHAPE)), matrix.name


@pytest.mark.parametrize(("splitting", "tp"), CASES)
def test_a_written_matrix_is_what_megatron_would_store(splitting: Splitting, tp: int) -> None:
    """The way back: views share the parameters' memory, so that writing through them is enough."""
    whole = _canonical(SHAPE)
    members, ranks = _ranks(splitting, tp, whole)
    for _, parameters in ranks:
        for parameter in parameters.values():
            parameter.fill_(-1.0)
    for matrix in members:
        new = _expected(matrix, whole, SHAPE).clone()
        for rank in matrix.holders(tp):
            fragments, parameters = ranks[rank]
            view = fragments.weight(matrix)
            assert view.untyped_storage().data_ptr() == parameters[matrix.parameter].untyped_storage().data_ptr()
            view.copy_(fragments.view_in_whole(matrix, new, rank))
    for rank, (_, parameters) in enumerate(ranks):
        for name, value in _stored(whole, SHAPE, tp, rank).items():
            assert torch.equal(parameters[name], value), (name, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gradients_are_cut_as_weights(tp: int) -> None:
    members, ranks = _ranks("split", tp, _canonical(SHAPE))
    fragments, parameters = ranks[-1]
    for name, value in parameters.items():
        fragments._parameters[name].main_grad = value.clone()  # type: ignore[attr-defined]
    for matrix in members:
        gradient = fragments.gradient(matrix)
        assert torch.equal(gradient, fragments.weight(matrix))
        main_grad = fragments._parameters[matrix.parameter].main_grad  # type: ignore[attr-defined]
        assert gradient.untyped_storage().data_ptr() == main_grad.untyped_storage().data_ptr()
