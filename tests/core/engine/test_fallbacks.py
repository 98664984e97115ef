"""Updates that the device left out are logged under their matrices' names and counted."""

import logging
from dataclasses import dataclass

import pytest
import torch

from canzona_cli.core.engine.masters import distrust_skipped, skipped_updates
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.optimizers.muon import Muon
from tests.sizes import layout, model

MATRICES = matrices_of(model("tiny"), layout(), "split")[:3]


@dataclass(frozen=True, kw_only=True)
class Group:
    hosted: tuple[Matrix, ...]
    optimizer: torch.optim.Optimizer | None


def _masters() -> dict[int, torch.nn.Parameter]:
    return {matrix.index: torch.nn.Parameter(torch.ones(4, 6)) for matrix in MATRICES}


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
