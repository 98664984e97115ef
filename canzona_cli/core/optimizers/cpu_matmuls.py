"""Computes bf16 and fp16 matmuls in fp32, rounded once, on processors without instructions for these dtypes.

torch multiplies bf16 through oneDNN where the processor has AVX512 or better, and in plain loops elsewhere.
With AVX2 only, as on most laptops, these loops reach 1 to 20 GFLOP/s on a core that reaches 92 in fp32. On
these processors `install` sends bf16 and fp16 matmuls through torch's own fp32 kernels. They accumulate in
fp32, as oneDNN's kernels do.
"""

import warnings
from collections.abc import Callable
from typing import cast

import torch

NARROW = (torch.bfloat16, torch.float16)
"""The dtypes whose matmuls are replaced."""
OPERATORS = tuple(f"{name}{kind}" for name in ("mm", "bmm") for kind in ("", ".out")) + tuple(
    f"{name}{kind}" for name in ("addmm", "baddbmm") for kind in ("", "_", ".out")
)
"""The operators that are replaced: those to which `matmul`, `linear`, `einsum` and backward passes dispatch.
"""


_library: list[torch.library.Library] = []
"""The library that registers the replacements, while they are installed."""


def is_slow() -> bool:
    """Returns True if torch multiplies bf16 in plain loops on this processor.

    All ranks of a run must agree, so this depends on the processor's instruction set, as in torch
    (`mkldnn_bf16_device_check`), and not on a measurement.
    """
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_installed() -> bool:
    """Returns True if this process computes bf16 and fp16 matmuls in fp32, so that both take the same
    time."""
    return bool(_library)


def install() -> None:
    """Replaces torch's CPU kernels for bf16 and fp16 matmuls in this process if they are slow. Further calls
    have no effect."""
    if not is_slow() or is_installed():
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch 2.11 warns that a kernel is overridden, which is the purpose here.
        warnings.filterwarnings("ignore", r"Warning only once for all operators", UserWarning)
        for name in OPERATORS:
            kernel = _computed_in_fp32(torch.library.get_kernel(f"aten::{name}", "CPU"), in_place=name.endswith("_"))
            library.impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    _library.append(library)


def uninstall() -> None:
    """Restores torch's own kernels (for tests)."""
    while _library:
        _library.pop()._destroy()  # type: ignore[no-untyped-call]


def _computed_in_fp32(kernel: torch._C._SafeKernelFunction, *, in_place: bool) -> Callable[..., torch.Tensor]:
    """Returns `kernel` wrapped so that it computes in fp32: bf16 and fp16 operands are converted to fp32, and
    the result is converted back."""

    def matmul(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> torch.Tensor:
        operand = args[0]
        out = kwargs.get("out")
        assert isinstance(operand, torch.Tensor)
        if operand.dtype not in NARROW:
            return cast(torch.Tensor, kernel.call_boxed(keys, *args, **kwargs))
        if isinstance(out, torch.Tensor):
            kwargs["out"] = torch.empty_like(out, dtype=torch.float32)
        converted = (arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        result = cast(torch.Tensor, kernel.call_boxed(keys, *converted, **kwargs))
        if isinstance(out, torch.Tensor):
            return out.resize_(result.shape).copy_(result)
        return operand.copy_(result) if in_place else result.to(operand.dtype)

    return matmul
