"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from . import newton_schulz as iteration
from .matrix_optimizer import MatrixOptimizer, products
from .newton_schulz import CoefficientSet, newton_schulz
from .workspace import Workspace

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]

__all__ = ["Muon", "ScaleMode", "Workspace", "scale"]

EPS = 1e-7
"""Smallest norm a matrix is divided by."""
BLOCK = 128 * 1024
"""Elements of a block of rows that elementwise passes take together: a weight, its gradient, its momentum and scratch
stay in a 2 MB cache between passes. All passes of 2560x768 on one core: 3.5 ms, without blocks 4.5 ms."""


class MuonSettings(TypedDict, total=False):
    """What `Muon` takes by name, for subclasses that pass it on."""

    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    coefficients: CoefficientSet
    scale_mode: ScaleMode
    scale_factor: float
    precision: Literal["bf16", "fp32"]
    stack: bool
    workspace: Workspace | None


class Muon(MatrixOptimizer):
    """Each matrix moves equally far in all directions its momentum has: by the nearest orthogonal matrix.

        M = momentum M + (1 - momentum) G               the average of gradients G (rows, cols)
        D = momentum M + (1 - momentum) G               what is orthogonalised: a look ahead (nesterov), or M itself
        O = newton_schulz(D / |D|)                      U V^T where D = U S V^T: every singular value becomes about 1
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) O

    O needs all of D, however its rows and columns are spread over ranks: that is what this project is about. Muon is
    not for embeddings, the output layer and vectors; AdamW updates those.

    The rule is that of emerging-optimizers' Muon, which Megatron uses. What differs is how it runs. Products write into
    a workspace that is allocated once. On CPU, passes over memory go by blocks of rows that stay in cache; on CUDA they
    are whole-tensor operations, and nothing waits for the GPU.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: CoefficientSet = "quintic",
        scale_mode: ScaleMode = "spectral",
        scale_factor: float = 0.2,
        precision: Literal["bf16", "fp32"] = "bf16",
        stack: bool | Mapping[tuple[int, int], int] = False,
        workspace: Workspace | None = None,
    ) -> None:
        """Args:
        params: Matrices, or parameter groups of them.
        lr: Learning rate.
        weight_decay: p *= 1 - lr weight_decay, before the update.
        momentum: Decay of the gradients' moving average.
        nesterov: Orthogonalise gradient + momentum (average - gradient) rather than the average.
        ns_steps: Newton-Schulz iterations.
        coefficients: Their polynomials.
        scale_mode: See `scale`.
        scale_factor: Multiplies it. 0.2 with spectral gives the update AdamW's RMS (Liu et al. 2025,
            arXiv:2502.16982).
        precision: Of the iteration's products; they accumulate in fp32. Momentum and weights are fp32 always.
        stack: Orthogonalise matrices of one shape in batched products: all, or at most so many of a shape (rows, cols).
            Spares launches when matrices are small and many, and costs scratch for all of them at once.
        workspace: Scratch to share with other optimizers.
        """
        if ns_steps < 1:
            raise ValueError(f"ns_steps is {ns_steps}; at least one is needed")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.nesterov = nesterov
        self.steps = iteration.coefficients(coefficients, ns_steps)
        self.scale_mode = scale_mode
        self.scale_factor = scale_factor
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.stack = stack
        self.workspace = workspace or Workspace()

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        with products("fp32"):
            for _, same in groupby(sorted(matrices, key=_kind) if self.stack else matrices, key=_kind):
                of_shape = list(same)
                most = self._most(of_shape)
                for first in range(0, len(of_shape), most):
                    together = of_shape[first : first + most]
                    if len(together) > 1:
                        self._update_stack(together, group)
                    else:
                        super()._update_group(together, group)

    def _most(self, of_shape: Sequence[torch.Tensor]) -> int:
        """How many matrices of one shape are updated together."""
        if isinstance(self.stack, bool):
            return len(of_shape) if self.stack else 1
        rows, cols = of_shape[0].shape
        return self.stack.get((rows, cols), 1)

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        x = self.workspace.get("muon_x", p.shape, self.dtype, p.device)
        self._direction(p, grad, group["momentum"], x)
        self._apply(p, newton_schulz(x, self.steps, self.workspace), group)

    def _update_stack(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        first = matrices[0]
        x = self.workspace.get("muon_x", (len(matrices), *first.shape), self.dtype, first.device)
        for p, one in zip(matrices, x, strict=True):
            assert p.grad is not None
            self._direction(p, p.grad, group["momentum"], one)
        x = newton_schulz(x, self.steps, self.workspace)
        for p, one in zip(matrices, x, strict=True):
            self._apply(p, one, group)

    def _direction(self, p: torch.Tensor, grad: torch.Tensor, momentum: float, out: torch.Tensor) -> None:
        """Update the momentum, and write into `out` what is to be orthogonalised, of norm 1."""
        average = self._average(p)
        direction = self.workspace.like("muon_direction", p) if self.nesterov else average
        if not _by_blocks(p):
            average.lerp_(grad, 1 - momentum)
            if self.nesterov:
                torch.lerp(grad, average, momentum, out=direction)
            torch.div(direction, torch.linalg.vector_norm(direction).clamp_min_(EPS), out=out)
            return
        square = 0.0
        for mean, new, block in zip(_blocks(average), _blocks(grad), _blocks(direction), strict=True):
            mean.lerp_(new, 1 - momentum)
            if self.nesterov:
                torch.lerp(new, mean, momentum, out=block)
            square += float(torch.linalg.vector_norm(block)) ** 2
        # The factor could ride in the first product, but oneDNN compiles a kernel for every new alpha.
        inverse = 1 / max(math.sqrt(square), EPS)
        for block, low in zip(_blocks(direction), _blocks(out), strict=True):
            low.copy_(torch.mul(block, inverse, out=self.workspace.like("muon_block", block)))

    def _apply(self, p: torch.Tensor, x: torch.Tensor, group: Mapping[str, float]) -> None:
        """p <- (1 - lr weight_decay) p - lr scale x."""
        lr = group["lr"]
        decay = 1 - lr * group["weight_decay"]
        alpha = -lr * self.scale_factor * scale(p.size(0), p.size(1), self.scale_mode)
        if not _by_blocks(p):
            p.mul_(decay).add_(x, alpha=alpha)
            return
        for weight, block in zip(_blocks(p), _blocks(x), strict=True):
            if block.dtype != weight.dtype:
                block = self.workspace.get("muon_block", block.shape, p.dtype, p.device).copy_(block)
            weight.mul_(decay).add_(block, alpha=alpha)

    def kept(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {"momentum_buffer": tuple(p.shape)}

    def _average(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average: torch.Tensor = state["momentum_buffer"]
        return average


def scale(rows: int, cols: int, mode: ScaleMode) -> float:
    """How large the update of a (rows, cols) matrix is, a semi-orthogonal matrix being 1.

    - spectral: sqrt(max(rows, cols)), the same RMS for every shape (Liu et al. 2025, arXiv:2502.16982).
    - unit_rms_norm: sqrt(rows / cols), the same RMS-to-RMS operator norm (Bernstein 2025; Scion, arXiv:2502.07529).
    - shape_scaling: the same, and never below 1 (Jordan et al. 2024).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def _by_blocks(matrix: torch.Tensor) -> bool:
    return matrix.device.type == "cpu"


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows in blocks of about BLOCK elements; the same rows for tensors of the same shape."""
    return matrix.split(max(1, BLOCK // matrix.size(1)))  # type: ignore[no-untyped-call,no-any-return]


def _kind(matrix: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(matrix.shape), str(matrix.device)
