"""Equal matrices that are evenly spaced are updated as one tensor: bit by bit as if each lay by itself, by as many
operations as one of them takes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch

from canzona_cli.core.optimizers.facts import Form
from canzona_cli.core.optimizers.matrix_optimizer import runs, view_run
from canzona_cli.optimizers import Muon, NorMuon

STEPS = 4
ROWS, COLS = 12, 40
Precision = Literal["bf16", "fp32"]


def places(*columns: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(run.start, run.stop) for run in runs(*columns)]


def test_the_experts_of_a_layer_are_one_run() -> None:
    """The order is that of Megatron's buffer: gate and up of each, `[gate; up]`, and then every down."""
    flat = torch.arange(4 * (2 * 3 * 5 + 5 * 3))
    fc1, fc2 = flat[: 4 * 2 * 3 * 5].view(4, 2, 3, 5), flat[4 * 2 * 3 * 5 :].view(4, 5, 3)
    gates, both = [expert[0] for expert in fc1], [part for expert in fc1 for part in expert]
    assert places(gates) == [(0, 4)]
    assert torch.equal(view_run(gates), fc1[:, 0])
    assert view_run(gates).data_ptr() == flat.data_ptr()
    assert torch.equal(view_run(both), fc1.view(8, 3, 5))
    assert torch.equal(view_run(list(fc2)[1:]), fc2[1:])


def test_a_run_ends_where_the_spacing_does() -> None:
    flat = torch.zeros(10, 2, 3)
    assert places([flat[place] for place in (0, 1, 3, 5, 9)]) == [(0, 2), (2, 4), (4, 5)]
    assert places([flat[2], flat[1], flat[0]]) == [(0, 1), (1, 2), (2, 3)], "torch has no negative strides"
    assert places([flat[0], flat[0]]) == [(0, 1), (1, 2)]
    assert places([flat[0], torch.zeros(2, 3)]) == [(0, 1), (1, 2)], "two memories"
    assert places([flat[0], flat[1].view(3, 2), flat[2].view(3, 2)]) == [(0, 1), (1, 3)]
    assert places([flat[0], flat[1].T.contiguous().T]) == [(0, 1), (1, 2)]
    assert places([]) == []


def test_a_run_is_one_in_every_column() -> None:
    one, other = torch.zeros(6, 2), torch.zeros(6, 2)
    assert places(list(one), list(other)) == [(0, 6)]
    assert places(list(one), [other[place] for place in (0, 2, 4, 5, 1, 3)]) == [(0, 3), (3, 4), (4, 6)]


def experts(count: int, *, apart: bool) -> list[torch.nn.Parameter]:
    """Matrices whose weights, gradients and state are evenly spaced, or each in a memory of its own."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(count, ROWS, COLS, generator=generator)
    # The other half of fc1 lies between the gradients.
    gradients = torch.zeros(count, 2, ROWS, COLS)[:, 0]
    params = [torch.nn.Parameter(weight.clone() if apart else weight) for weight in weights]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = torch.zeros(ROWS, COLS) if apart else gradient
    return params


def stepped(
    make: Callable[..., Muon],
    params: Sequence[torch.nn.Parameter],
    between: Callable[[int, Muon], None] = lambda step, optimizer: None,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    optimizer = make(params, 0.02, stack=True)
    for step in range(STEPS):
        between(step, optimizer)
        for p in params:
            assert p.grad is not None
            p.grad.copy_(torch.randn(ROWS, COLS, generator=generator))
        optimizer.step()
    return [p.detach() for p in params]


def forget(step: int, optimizer: Muon) -> None:
    """Forgets an update as a repair does for one matrix, and a checkpoint for all."""
    params = optimizer.param_groups[0]["params"]
    if step == 1:
        optimizer.state.pop(params[2])
    if step == 3:
        for p in params:
            optimizer.state[p] = {
                key: value.clone() if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()
            }


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", [Muon, NorMuon])
def test_a_run_is_its_matrices(
    kind: type[Muon], precision: Precision, form: Form, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one product, so that only the passes differ; with CUDA's passes, and with blocks of two matrices."""
    if on_cuda:
        monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr("canzona_cli.core.optimizers.muon_cpu.BLOCK", 2 * ROWS * COLS)

    def make(*given: Any, **named: Any) -> Muon:
        return kind(*given, precision=precision, form=form, **named)

    apart = stepped(make, experts(7, apart=True), forget)
    together = stepped(make, experts(7, apart=False), forget)
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_norms_of_every_size_are_those_of_the_matrices(nesterov: bool) -> None:
    """Zero, and those whose squares fp32 cannot represent, beside ordinary ones."""
    params: list[list[torch.nn.Parameter]] = []
    for apart in (True, False):
        params.append(experts(6, apart=apart))
        optimizer = Muon(params[-1], 0.02, stack=True, nesterov=nesterov)
        generator = torch.Generator().manual_seed(4)
        for p, size in zip(params[-1], (1.0, 0.0, 1e-30, 1e30, torch.nan, 1.0), strict=True):
            assert p.grad is not None
            p.grad.copy_(size * torch.randn(ROWS, COLS, generator=generator))
        optimizer.step()
    for one, other in zip(*params, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
