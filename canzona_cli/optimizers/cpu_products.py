"""bf16 products on a processor without instructions for them: made in fp32, rounded once.

torch multiplies bf16 through oneDNN where the processor has AVX512 or better, and in plain loops elsewhere:
on AVX2, 1 to 20 GFLOP/s of a core that makes 92 in fp32. Most laptops are such. There, both types that are
narrower than fp32 (no processor but the newest has units for fp16) go through torch's own fp32 kernels. Sums
are fp32's, as in oneDNN's.
"""

from collections.abc import Callable
from typing import cast

import torch

NARROW = (torch.bfloat16, torch.float16)
PRODUCTS = tuple(f"{name}{kind}" for name in ("mm", "bmm") for kind in ("", ".out")) + tuple(
    f"{name}{kind}" for name in ("addmm", "baddbmm") for kind in ("", "_", ".out")
)
"""Operators that everything comes down to: `matmul`, `linear`, `einsum`, and backward passes."""


_library: list[torch.library.Library] = []
"""The library that keeps the replacements alive."""


def slow() -> bool:
    """Tells whether torch multiplies bf16 in plain loops here.

    Ranks of one run must have one answer, so it is the processor's instructions that decide, as they do in
    torch (`mkldnn_bf16_device_check`), not a measurement.
    """
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def installed() -> bool:
    """Tells whether products of this process go through fp32: bf16 and fp16 then take the same time."""
    return bool(_library)


def install() -> None:
    """Replace torch's CPU kernels of narrow products in this process, where they are slow; once."""
    if not slow() or installed():
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in PRODUCTS:
        kernel = _in_fp32(torch.library.get_kernel(f"aten::{name}", "CPU"), in_place=name.endswith("_"))
        library.impl(name, kernel, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    _library.append(library)


def uninstall() -> None:
    """Give torch its own kernels back (for tests)."""
    while _library:
        _library.pop()._destroy()  # type: ignore[no-untyped-call]


def _in_fp32(kernel: torch._C._SafeKernelFunction, *, in_place: bool) -> Callable[..., torch.Tensor]:
    """`kernel` on widened factors; what it returns or writes is rounded to their type."""

    def product(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> torch.Tensor:
        first, out = args[0], kwargs.get("out")
        assert isinstance(first, torch.Tensor)
        if first.dtype not in NARROW:
            return cast(torch.Tensor, kernel.call_boxed(keys, *args, **kwargs))
        if isinstance(out, torch.Tensor):
            kwargs["out"] = torch.empty_like(out, dtype=torch.float32)
        wide = (arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        result = cast(torch.Tensor, kernel.call_boxed(keys, *wide, **kwargs))
        if isinstance(out, torch.Tensor):
            return out.resize_(result.shape).copy_(result)
        return first.copy_(result) if in_place else result.to(first.dtype)

    return product
