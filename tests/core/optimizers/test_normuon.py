"""NorMuon is the paper's, and emerging-optimizers' where that takes rows too."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon

from canzona_cli.optimizers import NorMuon

from . import reference as reference

# As in test_muon: rounding of products in fp32 comes to about 1e-6 of updates of about 0.1.
RTOL, ATOL = 1e-5, 5e-6


@pytest.mark.parametrize("stack", [False, True])
def test_is_the_papers_rule(stack: bool) -> None:
    shapes = [(16, 16), (12, 40), (40, 12), (12, 40)]
    grads = reference.gradients(shapes, 6)
    ours, _ = reference.run(
        lambda p: NorMuon(p, 0.02, momentum=0.8, row_beta=0.7, weight_decay=3.0, precision="fp32", stack=stack),
        shapes,
        grads,
    )
    for index, (mine, start) in enumerate(zip(ours, reference.weights(shapes), strict=True)):
        rule = {"lr": 0.02, "weight_decay": 3.0, "momentum": 0.8, "row_beta": 0.7, "size": 0.2 * max(mine.shape) ** 0.5}
        naive = reference.normuon(start.detach(), [of_step[index] for of_step in grads], **rule)
        torch.testing.assert_close(mine.double(), naive, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("nesterov", [False, True])
def test_is_emergings_where_that_takes_rows(nesterov: bool) -> None:
    """emerging-optimizers takes columns where a matrix is wider than high."""
    shapes = [(16, 16), (40, 12), (33, 17)]
    grads = reference.gradients(shapes, 6)
    ours, _ = reference.run(
        lambda p: NorMuon(p, 0.02, nesterov=nesterov, row_beta=0.9, precision="fp32"), shapes, grads
    )
    theirs, _ = reference.run(
        lambda p: AdaptiveMuon(
            p, 0.02, 0.95, 0.1, nesterov=nesterov, fp32_matmul_prec="highest", extra_scale_factor=0.2,
            moment2_method="normuon", beta2=0.9,
        ),
        shapes,
        grads,
    )  # fmt: skip
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=RTOL, atol=ATOL)


def test_rows_move_alike_and_the_matrix_as_far_as_with_muon() -> None:
    """The v of the first update is that of its rows: each row moves the same, and a row without gradient not at all."""
    (p,) = reference.weights([(8, 24)])
    before = p.detach().clone()
    [[grad]] = reference.gradients([(8, 24)], 1)
    grad *= torch.tensor([0.0, 1e-3, *[1.0] * 6]).unsqueeze(1)
    reference.step_through(NorMuon([p], 0.1, weight_decay=0.0, precision="fp32"), [p], [[grad]])
    moved = (p.detach() - before).norm(dim=1)
    whole = 0.1 * 0.2 * 24**0.5 * reference.orthogonalised(grad.double()).norm().item()
    assert moved[0] == 0
    torch.testing.assert_close(moved[1:], torch.full((7,), whole / 7**0.5), rtol=1e-4, atol=0)


def test_row_beta_is_a_decay() -> None:
    with pytest.raises(ValueError, match="row_beta is 1"):
        NorMuon(reference.weights([(2, 3)]), 0.02, row_beta=1.0)
