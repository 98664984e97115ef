"""Symmetric products are what float64 says, whichever way they are blocked."""

import pytest
import torch

from canzona_cli.core.optimizers.newton_schulz import strip_count, symmetric_gram, symmetric_product

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
"""The unit in the last place of a result in its type."""


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def assert_near(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, terms: int) -> None:
    """Sums of `terms` products in fp32, in any order, err by terms 2^-24 of the sum of magnitudes, `scale` (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.5)."""
    assert bool(((found.double() - exact).abs() <= (ROUNDING[found.dtype] + terms * 2.0**-24) * scale).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 7), (64, 40), (3, 12, 40), (800, 1600), (770, 1541)])
@pytest.mark.parametrize("tall", [False, True])
def test_gram_is_exact_to_rounding(shape: tuple[int, ...], dtype: torch.dtype, tall: bool) -> None:
    x = random(*shape, dtype=dtype)
    if tall:
        x = x.mT.contiguous().mT
    exact = x.double() @ x.double().mT
    out = torch.full((*shape[:-1], shape[-2]), float("nan"), dtype=dtype)
    assert symmetric_gram(x, out) is out
    assert_near(out, exact, x.double().abs() @ x.double().mT.abs(), shape[-1])
    if strip_count(*shape[-2:]) > 1 and dtype == torch.bfloat16 and x.ndim == 2:
        assert torch.equal(out, out.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33,), (2, 12), (800,)])
def test_product_of_polynomials_is_exact_to_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, 40, dtype=torch.float64) / 40
    a = (x @ x.mT).to(dtype)
    p = a.double()
    p = (0.5 * torch.eye(shape[-1]) - p).to(dtype)  # of a: they commute, but for its rounding
    exact = -1.5 * a.double() @ p.double()
    scale = 1.5 * a.double().abs() @ p.double().abs()
    for add, beta in ((None, 1.0), (a, 0.75)):
        out = torch.full_like(a, float("nan"))
        symmetric_product(a, p, out, add=add, beta=beta, alpha=-1.5)
        whole = exact if add is None else exact + beta * add.double()
        full = scale if add is None else scale + beta * add.double().abs()
        assert_near(out, whole, full, shape[-1])
