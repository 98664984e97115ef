"""Narrow products of a processor without instructions for them, against torch's own kernels and fp64."""

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from canzona_cli.core.optimizers import cpu_matmuls

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FLAT: dict[str, Call] = {
    "mm": lambda a, b, c: torch.mm(a, b),
    "mm.out": lambda a, b, c: torch.mm(a, b, out=torch.empty_like(c)),
    "mm.out, resized": lambda a, b, c: torch.mm(a, b, out=c.new_empty(0)),
    "mm.out, transposed": lambda a, b, c: torch.mm(a, b, out=c.new_empty(c.shape[::-1]).t()),
    "matmul": lambda a, b, c: a @ b,
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b.t().contiguous(), c[0]),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.3, alpha=-2.0),
    "addmm_": lambda a, b, c: c.clone().addmm_(a, b, beta=0.3),
    "addmm.out": lambda a, b, c: torch.addmm(c, a, b, beta=0.0, out=torch.full_like(c, torch.nan)),
    "addmm of a row": lambda a, b, c: torch.addmm(c[1], a, b),
}
BATCHES: dict[str, Call] = {
    "bmm": lambda a, b, c: torch.bmm(a, b),
    "bmm.out": lambda a, b, c: torch.bmm(a, b, out=torch.empty_like(c)),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.5),
    "baddbmm_": lambda a, b, c: c.clone().baddbmm_(a, b, beta=0.5),
    "baddbmm.out": lambda a, b, c: torch.baddbmm(c, a, b, out=torch.empty_like(c)),
    "matmul": lambda a, b, c: a @ b,
    "einsum": lambda a, b, c: torch.einsum("bij,bjk->bik", a, b),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces products as on a processor that has no such instructions, whatever this one has; restores them."""
    before = bool(cpu_matmuls._library)
    monkeypatch.setattr(cpu_matmuls, "is_slow", lambda: True)
    cpu_matmuls.install()
    yield
    cpu_matmuls.uninstall()
    if before:
        cpu_matmuls.install()


def factors(dtype: torch.dtype, *batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((*batch, 33, 65), (*batch, 65, 17), (*batch, 33, 17))
    a, b, c = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return a, b, c


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", cpu_matmuls.NARROW, ids=str)
@pytest.mark.parametrize(("call", "batch"), [*((c, ()) for c in FLAT), *((c, (3,)) for c in BATCHES)], ids=str)
def test_a_product_is_fp32s_rounded_once(call: str, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    product, given = (BATCHES if batch else FLAT)[call], factors(dtype, *batch)
    found, wanted = product(*given), product(*(one.double() for one in given))
    assert found.dtype is dtype
    assert found.shape == wanted.shape
    # Half a unit in the last place, and what 65 sums in fp32 may be off.
    unit = torch.finfo(dtype).eps
    assert ((found.double() - wanted).abs() <= unit / 2 * 1.01 * wanted.abs() + 1e-4).all()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("call", "batch"), [*((c, ()) for c in FLAT), *((c, (3,)) for c in BATCHES)], ids=str)
def test_wider_ones_keep_torchs_bits(call: str, batch: tuple[int, ...]) -> None:
    product = (BATCHES if batch else FLAT)[call]
    found = [product(*factors(dtype, *batch)) for dtype in (torch.float32, torch.float64)]
    cpu_matmuls.uninstall()
    wanted = [product(*factors(dtype, *batch)) for dtype in (torch.float32, torch.float64)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("installed")
def test_gradients_go_through_them() -> None:
    inputs, weight, bias = (one.requires_grad_() for one in factors(torch.bfloat16))
    output = torch.addmm(bias, inputs, weight)
    found = torch.autograd.grad(output, (inputs, weight, bias), torch.ones_like(output))
    wide = [one.detach().double().requires_grad_() for one in (inputs, weight, bias)]
    output = torch.addmm(wide[2], wide[0], wide[1])
    wanted = torch.autograd.grad(output, wide, torch.ones_like(output))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).abs().max() <= 2**-8 * theirs.abs().max()


@pytest.mark.usefixtures("installed")
def test_products_leave_nothing_behind() -> None:
    """An object each would be 5,000; torch keeps at most some tens (seen 25 to 88)."""
    a, b, c = factors(torch.bfloat16)
    torch.mm(a, b, out=c)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(5000):
        torch.mm(a, b, out=c)
    gc.collect()
    assert sys.getallocatedblocks() - before < 500


def test_torchs_own_kernels_stay_where_they_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come back."""
    cpu_matmuls.uninstall()
    monkeypatch.setattr(cpu_matmuls, "is_slow", lambda: False)
    cpu_matmuls.install()
    assert not cpu_matmuls._library
    monkeypatch.undo()
    cpu_matmuls.install()
    assert bool(cpu_matmuls._library) is cpu_matmuls.is_slow()
    cpu_matmuls.uninstall()
