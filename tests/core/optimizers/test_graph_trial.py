"""Graphs are tried before updates use them."""

import pytest
import torch

from canzona_cli.core.optimizers import graphs
from tests.cuda_graph_stand_in import cuda_graphs


def test_graphs_are_tried_before_updates_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Replayed, "refusal", "")
    with cuda_graphs() as device:
        assert graphs.try_out(torch.device("cpu")) == ""
        assert [graph.replays for graph in device.made] == [2, 2]
        monkeypatch.setattr(graphs, "_free_stream", lambda taken: torch.cuda.current_stream())
        assert "non-default stream" in graphs.try_out(torch.device("cpu"))


def test_a_graph_that_replays_something_else_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Replayed, "refusal", "")
    with cuda_graphs():
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
        assert "wrong result" in graphs.try_out(torch.device("cpu"))
        assert "wrong result" in graphs.Replayed.refusal, "and no update is captured"
