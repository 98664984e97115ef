"""Whole steps on CUDA tensors that have no data (torch's `FakeTensorMode`), which needs no GPU: every branch for CUDA
runs, torch checks types, shapes and devices, and a number that the host reads raises unless it is counted here."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Literal, get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from canzona_cli.core.optimizers import gram_form
from canzona_cli.core.optimizers.facts import Form
from canzona_cli.core.optimizers.matrix_optimizer import MatrixOptimizer
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Shape
from canzona_cli.optimizers import SOAP, Muon, NorMuon, Shampoo

from .operations import Counted
from .test_shared import alone, muon

SHAPES = [(32, 32), (24, 80), (80, 24), (24, 80)]
STEPS = 2  # the first makes the state


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records the host's reads in order; their answers are those of matrices of full rank without a NaN."""
    found: list[str] = []

    def answer(name: str, value: Callable[[torch.Tensor], object]) -> None:
        def read(tensor: torch.Tensor) -> object:
            found.append(name)
            return value(tensor)

        monkeypatch.setattr(FakeTensor, name, read)

    answer("__bool__", lambda tensor: True)
    answer("__int__", lambda tensor: 1 << 20)
    answer("tolist", lambda tensor: [True] * tensor.numel())
    monkeypatch.setattr(torch, "_fused_sgd_", _fused)
    gram_form._table.cache_clear()  # a cached table belongs to one mode
    with FakeTensorMode():
        yield found
    gram_form._table.cache_clear()


def _fused(p: list[torch.Tensor], grad: list[torch.Tensor], buffers: list[torch.Tensor], **named: object) -> None:
    """Stands in for a kernel without a fake one; on processors, tests of the Gram form in fp16 run the real one."""
    tensors = [*p, *grad, *buffers, named["lr"], named["found_inf"]]
    assert all(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)
    assert p[0].shape == grad[0].shape
    assert {p[0].dtype, grad[0].dtype} == {torch.float32}


def stepped(make: Callable[[Sequence[torch.nn.Parameter]], MatrixOptimizer]) -> MatrixOptimizer:
    params = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
    optimizer = make(params)
    for p in params:
        p.grad = torch.empty_like(p)
    for _ in range(STEPS):
        optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert len(tensors) >= len(SHAPES)
    assert all(tensor.is_cuda for tensor in tensors)
    return optimizer


EVERYDAY = (
    *((Muon, form, *how, True) for form in get_args(Form) for how in ((False, "bf16"), (True, "fp32"))),
    *((kind, "gram", False, "bf16", kind is NorMuon) for kind in (Muon, NorMuon)),
)


@pytest.mark.parametrize(
    ("kind", "form", "stack", "precision", "fused"),
    [
        pytest.param(*case, marks=[] if case in EVERYDAY else [pytest.mark.sweep])
        for case in product((Muon, NorMuon), get_args(Form), (False, True), ("bf16", "fp32"), (True, False))
    ],
)
def test_muon_reads_nothing_back(
    kind: type[Muon], form: Form, stack: bool, precision: Literal["bf16", "fp32"], fused: bool, reads: list[str]
) -> None:
    optimizer = stepped(lambda params: kind(params, 0.02, form=form, stack=stack, precision=precision, fused=fused))
    assert isinstance(optimizer, Muon)
    assert reads == []
    doubted = optimizer.untrusted_count()
    assert (doubted is not None and doubted.is_cuda) is (form == "gram")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("kind", [Muon, pytest.param(NorMuon, marks=pytest.mark.sweep)])
def test_experts_read_nothing_back_and_take_no_more_operations_if_they_are_more(
    kind: type[Muon], form: Form, precision: Literal["bf16", "fp32"], reads: list[str]
) -> None:
    counts = []
    for count in (2, 16):
        params = [torch.nn.Parameter(weight) for weight in torch.empty(count, 24, 80, device="cuda")]
        for p, fc1 in zip(params, torch.empty(count, 48, 80, device="cuda"), strict=True):
            p.grad = fc1[:24]  # of [gate; up]
        optimizer = kind(params, 0.02, form=form, stack=True, precision=precision)
        optimizer.step()  # makes the state
        with Counted() as counted:
            optimizer.step()
        counts.append(counted.count)
    assert counts[0] == counts[1]
    assert reads == []


@pytest.mark.parametrize("kind", [SOAP, Shampoo])
def test_others_read_whether_a_decomposition_succeeded(kind: Callable[..., MatrixOptimizer], reads: list[str]) -> None:
    stepped(lambda params: kind(params, 0.02))
    # Two sides of each matrix, at the first step and with the period: the rank and whether it is finite.
    assert len(reads) <= 2 * 2 * len(SHAPES) * STEPS
    assert reads


@pytest.mark.parametrize(
    ("whole", "precision"),
    [
        *(((24, 80), "bf16"), ((80, 24), "fp32")),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (((24, 80), "fp32"), ((80, 24), "bf16"))),
    ],
)
def test_a_fragment_reads_nothing_back(whole: Shape, precision: Literal["bf16", "fp32"], reads: list[str]) -> None:
    """Collectives leave what is there, which has no data anyway."""

    def nothing(*tensors: torch.Tensor) -> Callable[[], None]:
        assert all(tensor.is_cuda for tensor in tensors)
        return lambda: None

    rows, cols = whole
    half = (rows, cols // 2) if rows < cols else (rows // 2, cols)
    p = torch.nn.Parameter(torch.empty(half, device="cuda"))
    optimizer = muon(p, precision)
    p.grad = torch.empty_like(p)
    ranks = FragmentGroup(index=0, count=2, total=nothing, swap=nothing, gather=nothing)
    with torch.no_grad():
        for _ in range(STEPS):
            alone(optimizer.update_together(p, whole=whole, ranks=ranks))
        optimizer.update_alone(p, whole=whole, total=nothing)
    assert reads == []
    assert all(value.is_cuda for value in optimizer.state[p].values() if torch.is_tensor(value))
