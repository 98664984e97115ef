"""Norms of long tensors on CPUs are numpy's in fp64, copy nothing, and see every NaN; on GPUs nothing waits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_cli.core.optimizers.matrix_optimizer import PIECE, matrix_norm, sum_of_squares

LONG = 20_000_000
VALUES: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda count: torch.randn(count, generator=torch.Generator().manual_seed(1)),
    # All roundings have the same direction.
    "equal": lambda count: torch.full((count,), 0.1),
    # Most of the norm comes from the first tenth.
    "decaying": lambda count: (
        torch.randn(count, generator=torch.Generator().manual_seed(2)) * torch.linspace(0, -20, count).exp_()
    ),
}


def exact(*tensors: torch.Tensor) -> float:
    """Sums the squares in fp64 with numpy."""
    parts = (part.float().numpy() for tensor in tensors for part in torch.split(tensor.reshape(-1), 1 << 22))
    return math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", VALUES)
def test_long_slices_have_numpys_norm(values: str, dtype: torch.dtype) -> None:
    """A norm differs by less than 1e-6, so a square by 2e-6. Torch's own norm differs by 6e-4 to 1e-2."""
    slices = [VALUES[values](count).to(dtype) for count in (LONG, 3, 0, PIECE, PIECE + 1)]
    assert float(sum_of_squares(slices)) == pytest.approx(exact(*slices), rel=2e-6)


@pytest.mark.parametrize("values", VALUES)
def test_large_matrices_have_numpys_norm(values: str) -> None:
    matrix = VALUES[values](LONG).view(5000, 4000)
    assert float(matrix_norm(matrix)) == pytest.approx(math.sqrt(exact(matrix)), rel=2e-6)
    assert float(matrix_norm(matrix.mT)) == pytest.approx(math.sqrt(exact(matrix)), rel=2e-6)


def test_a_stack_has_the_norms_of_its_matrices_bitwise() -> None:
    stack = VALUES["normal"](6 * 40 * 70).view(6, 40, 70)
    for strided in (stack, stack[::2], stack.mT):
        assert torch.equal(matrix_norm(strided), torch.stack([matrix_norm(matrix) for matrix in strided]))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(600, 500).mT,
    "columns": lambda x: x.view(600, 500)[:, ::3],
    "a fragment of query groups": lambda x: x.view(4, 3, 50, 500)[:, 1:],
    "every other element": lambda x: x[::2],
    "a scalar": lambda x: x[7],
}


@pytest.mark.parametrize("view", STRIDED)
def test_strided_views_are_summed_as_they_lie(view: str) -> None:
    x = VALUES["normal"](300_000)
    assert float(sum_of_squares([STRIDED[view](x)])) == pytest.approx(exact(STRIDED[view](x)), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5 * PIECE, 10 * PIECE])
def test_what_is_not_finite_is_seen_in_any_piece(bad: float, place: int) -> None:
    x = torch.ones(10 * PIECE + 1)
    x[place] = bad
    for found in (sum_of_squares([torch.ones(3), x]), matrix_norm(x.view(1, -1)), matrix_norm(x.view(-1, 1))):
        assert str(float(found)) == str(bad)


def test_sums_that_exceed_fp32_are_infinite_as_megatrons_are() -> None:
    """Wherever slices are cut. Neither Megatron nor torch on CUDA squares a norm of 1e20 in more than fp32."""
    for elements, value in ((1, 1e20), (10 * PIECE, 1e18)):
        assert float(sum_of_squares([torch.full((elements,), value)])) == math.inf
        assert float(sum_of_squares([torch.full((1,), value)] * elements)) == math.inf
    below = torch.full((300,), 1e18)
    assert float(sum_of_squares([below])) == pytest.approx(3e38, rel=1e-6)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the operations that ran, and of the sizes of the memory that they returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.bytes_by_address: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.operations.append(str(func))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            self.bytes_by_address[storage.data_ptr()] = storage.nbytes()
        return result


def test_nothing_is_copied() -> None:
    x = torch.ones(4096, 2048)
    with _Seen() as seen:
        sum_of_squares([x, x.mT, x[:, 1:], x.view(-1)[1:]])
        matrix_norm(x)
        matrix_norm(x.mT)
    seen.bytes_by_address.pop(x.data_ptr())
    assert 0 < max(seen.bytes_by_address.values()) < x.nbytes / 64


def test_on_a_gpu_any_number_of_slices_is_a_few_operations_that_do_not_wait() -> None:
    def operations(count: int) -> list[str]:
        with _Seen() as seen:
            found = sum_of_squares([torch.empty(5 * PIECE, device="meta")] * count)
        assert (found.shape, found.dtype) == ((), torch.float32)
        return [*seen.operations]

    few = operations(2)
    assert operations(100) == few
    assert "aten._foreach_norm.Scalar" in few
    assert not any("_local_scalar_dense" in name for name in few)
