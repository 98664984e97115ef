"""Kernels that know their product to be symmetric, as other packages have them for GPUs. None is needed.

A loader raises whatever keeps its kernel from being used here: most often ImportError.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

from .symmetric import Kernel, plain


def emerging() -> Kernel:
    """emerging-optimizers' Triton kernel over the lower triangle's tiles.

    Of its two the one that writes where it is told to, and tries 24 tilings of a shape rather than 180. It multiplies
    a matrix of bf16 by its own transpose alone; two polynomials of one matrix are left to cuBLAS, and in fp16, of the
    Gram form, it is refused.
    """
    syrk = import_module("emerging_optimizers.triton_kernels.syrk")
    if not syrk.HAS_TRITON_340:
        raise ImportError("it needs triton 3.4")
    tsyrk: Callable[..., torch.Tensor] = syrk.tsyrk_ex_small_matrix

    def kernel(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
    ) -> None:
        if b.data_ptr() != a.data_ptr():
            plain(a, b, out, add, beta, alpha)
        else:
            tsyrk(a, add, alpha=alpha, beta=0.0 if add is None else beta, out=out)

    return kernel


def quack() -> Kernel:
    """QuACK's CuTe kernel (quack-kernels), which takes two polynomials of one matrix too."""
    return _quack("quack.gemm_interface")


def torchs_quack() -> Kernel:
    """The copy of it that torch's compiler comes with; needs nvidia-cutlass-dsl."""
    return _quack("torch._vendor.quack.gemm_interface")


def _quack(module: str) -> Kernel:
    gemm: Callable[..., object] = import_module(module).gemm_symmetric

    def kernel(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
    ) -> None:
        gemm(a, b, C=add, out=out, alpha=float(alpha), beta=float(beta))

    return kernel


LADDER: Mapping[str, Callable[[], Kernel]] = {"emerging": emerging, "quack": quack, "torch's quack": torchs_quack}
"""By name, in the order they are tried in; what is left is `symmetric.plain`: cuBLAS."""
