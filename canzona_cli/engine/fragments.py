"""Where the fragment of a matrix lies: in this rank's parameter, and in the whole matrix. Views, never copies.

A whole matrix is canonical: q, k and v hold their heads in order, fc1 is `[gate; up]`, whatever the tensor-parallel
size. Megatron stores it otherwise: a rank's linear_qkv goes query group by query group (the group's queries, its key,
its value), its linear_fc1 is `[gate_r; up_r]`, and linear_proj and linear_fc2 are cut along their columns.
"""

from collections.abc import Mapping

import torch

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.matrix import Matrix


class Fragments:
    """The fragments of one tensor-parallel rank.

    Args:
        model: heads and groups of the attention, to find q, k and v in linear_qkv.
        tp: Tensor-parallel ranks.
        rank: this one.
        parameters: this rank's parameters by the plan's names, in Megatron's buffers.
    """

    def __init__(self, model: ModelConfig, tp: int, rank: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._model, self.tp, self._rank, self._parameters = model, tp, rank, parameters

    def gradient(self, matrix: Matrix) -> torch.Tensor:
        """This rank's part of the reduced gradient; valid on the matrix's owner."""
        main_grad: object = getattr(self._parameters[matrix.parameter], "main_grad", None)
        assert isinstance(main_grad, torch.Tensor)
        return self.in_parameter(matrix, main_grad)

    def weight(self, matrix: Matrix) -> torch.Tensor:
        """This rank's part of the weight."""
        return self.in_parameter(matrix, self._parameters[matrix.parameter].detach())

    def in_parameter(self, matrix: Matrix, parameter: torch.Tensor) -> torch.Tensor:
        """The fragment as a view of `parameter`, (rows, columns) as Megatron stores them on this rank."""
        model, kind = self._model, matrix.kind
        if kind in ("q", "k", "v"):
            queries = model.num_attention_heads // model.num_query_groups
            first = {"q": 0, "k": queries, "v": queries + 1}[kind]
            count = queries if kind == "q" else 1
            # (query groups here, heads of a group, head_dim, hidden)
            heads = parameter.view(-1, queries + 2, model.head_dim, parameter.shape[1])
            number = head_of(matrix)
            if number is None:
                return heads[:, first : first + count]
            group, inside = divmod(number, count)
            return heads[group - (matrix.home or 0) * heads.shape[0], first + inside]
        if kind in ("gate", "up"):
            return parameter.view(2, -1, parameter.shape[1])[0 if kind == "gate" else 1]
        if kind == "fc1":
            return parameter.view(2, -1, parameter.shape[1])
        return parameter

    def in_whole(self, matrix: Matrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Where the fragment of TP rank `rank` goes in the whole (rows, columns), in the shape of `in_parameter`."""
        model, tp, kind = self._model, self.tp, matrix.kind
        rows, cols = matrix.rows, matrix.cols
        if matrix.home is not None or matrix.replicated or head_of(matrix) is not None:
            return whole
        if kind in ("q", "k", "v"):
            groups = model.num_query_groups // tp
            return whole.view(tp, groups, -1, model.head_dim, cols)[rank]
        if kind == "fc1":
            return whole.view(2, tp, -1, cols)[:, rank]
        if matrix.shard_dim == 0:
            return whole.view(tp, rows // tp, cols)[rank]
        return whole.view(rows, tp, cols // tp)[:, rank]


def head_of(matrix: Matrix) -> int | None:
    """The head a matrix is of, layers.3.q.5; None where it has all of them."""
    last = matrix.name.rpartition(".")[2]
    return int(last) if last.isdigit() and matrix.kind in ("q", "k", "v") else None
