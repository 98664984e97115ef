"""Where the fragment of a matrix lies: in this rank's parameter, and in the whole matrix. Views, never copies.

A whole matrix is canonical, whatever the tensor-parallel size; `model/geometry.py` says how Megatron stores it.
"""

from collections.abc import Mapping

import torch

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model import geometry
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
        """The fragment as a view of `parameter`, which this rank stores; 2-D or 3-D, see `geometry.in_parameter`."""
        view = geometry.in_parameter(matrix, self._model, self.tp)
        return parameter.view(view.shape)[view.index]

    def in_whole(self, matrix: Matrix, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Where the fragment of TP rank `rank` goes in the whole (rows, columns), in the shape of `in_parameter`."""
        view = geometry.in_whole(matrix, self._model, self.tp, rank)
        return whole.view(view.shape)[view.index]
