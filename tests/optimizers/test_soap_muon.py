"""SOAP-Muon is SOAP, orthogonalised: the paper's at any period."""

from functools import partial

import pytest
import torch

from canzona_cli.optimizers import SOAPMuon
from canzona_cli.optimizers.muon import scale
from canzona_cli.optimizers.muon_facts import ScaleMode

from . import reference as reference

# As in test_soap: square matrices, and an eps that keeps rounding by rounding out of the comparison.
SQUARES = [(10, 10), (13, 13)]
EPS = 0.5


@pytest.mark.parametrize(("period", "mode"), [(1, "spectral"), (3, "unit_rms_norm"), (10, "shape_scaling")])
def test_is_the_papers_rule_at_any_period(period: int, mode: ScaleMode) -> None:
    """Newton-Schulz multiplies what rounds in SOAP's update, 1e-6 of it, by up to 500 where singular values are small;
    an update is of about 0.02 * 0.2. Seen: 2e-6."""
    settings = {"weight_decay": 0.3, "betas": (0.8, 0.9), "shampoo_beta": 0.9, "eps": EPS}

    def finish(update: torch.Tensor) -> torch.Tensor:
        return 0.2 * scale(update.size(0), update.size(1), mode) * reference.orthogonalised(update)

    reference.assert_rule(
        lambda p: SOAPMuon(
            p, 0.02, precondition_frequency=period, iterated_in="fp32", scale_mode=mode, **settings,  # type: ignore[arg-type]
        ),
        SQUARES,
        reference.gradients(SQUARES, 9),
        partial(reference.soap, lr=0.02, period=period, finish=finish, **settings),  # type: ignore[arg-type]
        rtol=1e-5,
        atol=2e-5,
    )  # fmt: skip


def test_bf16_is_for_the_iteration_alone() -> None:
    """Half the digits of an update of 0.02 * 0.2 * sqrt(16) at most; factors, bases and moments to the last bit."""
    shapes, grads = [(8, 16)], reference.gradients([(8, 16)], 1)
    (low,), one = reference.run(lambda p: SOAPMuon(p, 0.02), shapes, grads)
    (exact,), other = reference.run(lambda p: SOAPMuon(p, 0.02, iterated_in="fp32"), shapes, grads)
    assert 0 < (low - exact).abs().max() < 0.016 * 4 * 2**-8
    for (_, mine), (_, same) in zip(reference.states(one), reference.states(other), strict=True):
        torch.testing.assert_close(mine, same, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_the_size_of_an_update_is_of_rows_and_cols_in_their_order(shape: tuple[int, int], mode: ScaleMode) -> None:
    """Each of 8 singular values is within 0.7 to 1.25 after five steps of a Gaussian matrix; swapped sides make 2 to 4
    times the size where a mode distinguishes them."""
    start, (gradient,) = torch.zeros(shape), reference.gradients([shape], 1)[0]
    p = torch.nn.Parameter(start.clone())
    p.grad = gradient.clone()
    SOAPMuon([p], 1.0, weight_decay=0.0, iterated_in="fp32", scale_mode=mode).step()
    rows, cols = shape
    wanted = {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1.0, rows / cols) ** 0.5,
    }[mode]
    assert float(p.detach().norm()) == pytest.approx(0.2 * wanted * 8**0.5, rel=0.3)


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-41, 1e-44])
def test_gradients_near_the_smallest_number_move_as_others_and_zeros_do_not(size: float) -> None:
    p = torch.nn.Parameter(torch.zeros(16, 32))
    optimizer = SOAPMuon([p], 0.02, weight_decay=0.0, iterated_in="fp32")
    for (gradient,) in reference.gradients([(16, 32)], 3):
        p.grad = gradient * size
        optimizer.step()
        assert bool(p.isfinite().all())
    still = torch.nn.Parameter(torch.ones(16, 32))
    still.grad = torch.zeros(16, 32)
    SOAPMuon([still], 0.02, weight_decay=0.0).step()
    assert torch.equal(still.detach(), torch.ones(16, 32))


def test_it_iterates() -> None:
    with pytest.raises(ValueError, match="ns_steps is 0"):
        SOAPMuon(reference.weights([(2, 3)]), 0.02, ns_steps=0)
