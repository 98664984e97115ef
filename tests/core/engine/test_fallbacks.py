"""A fallback is logged under the matrix's name and counted until it is asked for."""

import logging
from dataclasses import dataclass

import pytest
import torch

from canzona_cli.core.engine.masters import Fallbacks, distrust_skipped, skipped_updates
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.optimizers.shampoo import Shampoo
from tests.sizes import layout, model

MATRICES = matrices_of(model("tiny"), layout(), "split")[:3]


@dataclass(frozen=True, kw_only=True)
class Group:
    hosted: tuple[Matrix, ...]
    optimizer: torch.optim.Optimizer | None


def _masters() -> dict[int, torch.nn.Parameter]:
    return {matrix.index: torch.nn.Parameter(torch.ones(4, 6)) for matrix in MATRICES}


def test_counted_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    masters = _masters()
    fallbacks = Fallbacks(MATRICES, masters)
    assert fallbacks.take() == 0
    with caplog.at_level(logging.WARNING):
        fallbacks(masters[MATRICES[1].index], "no convergence")
        fallbacks(masters[MATRICES[2].index], "no convergence")
    assert caplog.messages == [f"{matrix.name}: no convergence" for matrix in MATRICES[1:]]
    assert fallbacks.take() == 2
    assert fallbacks.take() == 0


def test_matrices_are_told_apart_by_identity(caplog: pytest.LogCaptureFixture) -> None:
    """Masters that are equal in value are not the same matrix; for what is not in its list another rank speaks."""
    masters = _masters()
    fallbacks = Fallbacks(MATRICES, masters)
    with caplog.at_level(logging.WARNING):
        for matrix in MATRICES:
            fallbacks(masters[matrix.index], "x")
        fallbacks(torch.ones(4, 6), "x")
    assert caplog.messages == [f"{matrix.name}: x" for matrix in MATRICES]
    assert fallbacks.take() == len(MATRICES)


def test_an_optimizer_names_its_masters(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    masters = _masters()
    fallbacks = Fallbacks(MATRICES, masters)
    optimizer = Shampoo(list(masters.values()), 0.01, on_fallback=fallbacks)

    def give_up(matrix: torch.Tensor) -> object:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    masters[MATRICES[1].index].grad = torch.randn(4, 6)
    monkeypatch.setattr(torch.linalg, "eigh", give_up)
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    # One for each side of the one matrix that had a gradient.
    assert fallbacks.take() == 2
    assert {message.split(":")[0] for message in caplog.messages} == {MATRICES[1].name}
    assert all(bool(master.isfinite().all()) for master in masters.values())


def test_what_was_left_out_without_waiting_is_counted_named_and_standard_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The passes are CUDA's: Muon's flags stay on the device until the step's one wait has brought their number."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr("canzona_cli.core.optimizers.gram_form.DOUBT", -1.0)
    masters = _masters()
    optimizer = Muon(list(masters.values()), 0.01, form="gram")
    groups = [Group(hosted=tuple(MATRICES), optimizer=optimizer), Group(hosted=(), optimizer=None)]
    for master in masters.values():
        master.grad = torch.randn(4, 6)
    before = [master.detach().clone() for master in masters.values()]
    assert skipped_updates(groups, torch.device("cpu")).tolist() == [0]
    optimizer.step()
    assert skipped_updates(groups, torch.device("cpu")).tolist() == [len(MATRICES)]
    with caplog.at_level(logging.WARNING):
        distrust_skipped(groups, masters)
    assert [message.partition(":")[0] for message in caplog.messages] == [matrix.name for matrix in MATRICES]
    assert skipped_updates(groups, torch.device("cpu")).tolist() == [0]
    for old, master in zip(before, masters.values(), strict=True):
        torch.testing.assert_close(master.detach(), old * (1 - 0.01 * 0.1))
    optimizer.step()
    assert skipped_updates(groups, torch.device("cpu")).tolist() == [0]
    assert all(bool((old - new).abs().max() > 2e-3) for old, new in zip(before, masters.values(), strict=True))
