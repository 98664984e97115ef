"""What an optimizer could not do for a matrix and did otherwise: said with the matrix's name, and counted."""

import logging
from collections.abc import Iterable, Mapping

import torch

from canzona_cli.model.matrix import Matrix

_log = logging.getLogger(__name__)


class Fallbacks:
    """Given to optimizers as `on_fallback`.

    Args:
        masters: by matrix index; what the optimizers call their parameters.
    """

    def __init__(self, hosted: Iterable[Matrix], masters: Mapping[int, torch.nn.Parameter]) -> None:
        self._names = {id(masters[matrix.index]): matrix.name for matrix in hosted}
        self._count = 0

    def __call__(self, parameter: torch.Tensor, reason: str) -> None:
        self._count += 1
        _log.warning("%s: %s", self._names.get(id(parameter), "a matrix"), reason)

    def take(self) -> int:
        """How many since the last call."""
        count, self._count = self._count, 0
        return count
