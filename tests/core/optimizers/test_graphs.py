"""Replayed updates are those that run kernel by kernel, bit by bit; and those again where nothing can be captured."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakSet

import pytest
import torch

from canzona_cli.core.optimizers import graphs
from canzona_cli.core.optimizers.gram_form import gram_newton_schulz
from canzona_cli.core.optimizers.graphs import Replayed
from canzona_cli.core.optimizers.matrix_optimizer import Run
from canzona_cli.optimizers import Muon, NorMuon
from tests.cuda_graph_stand_in import Device, Version, cuda_graphs

from . import reference as reference

SHAPES = [(16, 16), (12, 40), (40, 12), (12, 40)]
RATES = [(0.02, 0.1), (0.01, 0.2), (0.03, 0.0), (0.005, 0.1), (0.02, 0.3), (0.0, 0.1)]
"""Learning rate and decay of each step."""


@pytest.fixture(params=["2.11"])
def version(request: pytest.FixtureRequest) -> Version:
    """The torch that the stand-in behaves like."""
    version: Version = request.param
    return version


EVERY_VERSION = pytest.mark.parametrize("version", get_args(Version), indirect=True)


@pytest.fixture(autouse=True)
def on_cuda(version: Version, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Whole-tensor passes, as on CUDA; nobody waits for the device, and the allocator keeps what it has."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr(Replayed, "refusal", "")
    monkeypatch.setattr(Replayed, "_living", WeakSet())
    monkeypatch.setattr(graphs, "_abandoned", [])
    with cuda_graphs(version) as device:
        yield device
        assert device.waits == device.emptied == 0
        assert device.current == 0, "the stream that was current before is current again"
        assert not device.allocating


def train(
    make: Callable[..., Muon],
    *,
    graph: bool,
    between: Callable[[int, Muon], None] = lambda step, optimizer: None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> list[torch.Tensor]:
    """Six steps with gradients that stay where they are, of which the rates change every time."""
    weights = reference.weights(shapes)
    optimizer = make(weights, 0.02, graph=graph)
    for p in weights:
        p.grad = torch.empty_like(p)
    for step, of_step in enumerate(reference.gradients(shapes, len(RATES))):
        between(step, optimizer)
        for p, new in zip(weights, of_step, strict=True):
            assert p.grad is not None
            p.grad.copy_(new)
        optimizer.param_groups[0].update(lr=RATES[step][0], weight_decay=RATES[step][1])
        optimizer.step()
    return [p.detach() for p in weights]


def assert_equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("kind", [Muon, NorMuon])
def test_replays_are_the_steps_themselves(
    kind: type[Muon], stack: bool, precision: Literal["bf16", "fp32"], on_cuda: Device
) -> None:
    make = partial(kind, stack=stack, precision=precision)
    eager = train(make, graph=False)
    assert not on_cuda.made
    assert_equal(train(make, graph=True), eager)
    [graph] = on_cuda.made
    assert graph.replays == len(RATES) - 1, "all but the first step, which makes state and scratch"


def test_in_gram_form_a_new_decay_is_captured_a_rate_is_not(on_cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def descend(p: torch.Tensor, x: torch.Tensor, rate: torch.Tensor, decay: float, *, skip: torch.Tensor) -> None:
        p.copy_(torch.where(skip == 1, p, p - rate * (x + decay * p)))

    # CUDA's kernel takes the rate from the device, which torch reads back on a processor, and so do we numbers.
    monkeypatch.setattr("canzona_cli.core.optimizers.gram_form._number", lambda of_each: of_each[..., None, None])
    monkeypatch.setattr("canzona_cli.core.optimizers.muon_cuda._descend", descend)
    make = partial(Muon, form="gram", precision="fp32", fused=True)
    assert_equal(train(make, graph=True), train(make, graph=False))
    assert not on_cuda.made
    monkeypatch.setattr(f"{__name__}.RATES", [(lr, 0.1 if step < 3 else 0.2) for step, (lr, _) in enumerate(RATES)])
    assert_equal(train(make, graph=True), train(make, graph=False))
    assert [graph.replays for graph in on_cuda.made] == [2, 2], "all but the first step of each decay"


@pytest.mark.parametrize("standard", [100, 1])
def test_replays_leave_out_what_is_left_out(standard: int, on_cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gram form's own verdict is on the device, and stays readable. A doubt costs no capture: the group runs kernel
    by kernel while one of its matrices is in standard form, and then replays the graph it had."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon_facts.STANDARD_STEPS", standard)
    monkeypatch.setattr(f"{__name__}.RATES", [(lr, 0.1) for lr, _ in [*RATES, *RATES[:2]]])
    doubts = torch.zeros(4, dtype=torch.bool)

    def doubtful(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, trusted = gram_newton_schulz(x, *given)
        return result, trusted & ~doubts[: x.size(0)]

    monkeypatch.setattr("canzona_cli.core.optimizers.muon.gram_newton_schulz", doubtful)
    verdicts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    standards: dict[bool, int] = {}
    captures: dict[bool, int] = {}

    def run(graph: bool) -> list[torch.Tensor]:
        def between(step: int, optimizer: Muon) -> None:
            doubts[0], doubts[1] = step == 3, step == 5
            standards[graph] = sum(optimizer.is_distrusted(p) for p in optimizer.param_groups[0]["params"])
            doubted = optimizer.untrusted_count()
            left_out = 0 if doubted is None else int(doubted)
            verdicts[graph].append((left_out, len(optimizer.distrust_skipped()) if left_out else 0))
            captures[graph] = optimizer.captures

        doubts.zero_()
        return train(
            partial(Muon, stack=True, form="gram"), graph=graph, between=between, shapes=[(12, 40), (40, 12)] * 4
        )

    assert_equal(run(True), run(False))
    assert verdicts[True] == verdicts[False]
    assert standards == dict.fromkeys((True, False), 4 if standard > 1 else 0), "before the last step"
    # The first of each shape, then the second of those in Gram form: in a replay, or a step as it is.
    assert [left_out for left_out, _ in verdicts[True]] == [0, 0, 0, 0, 2, 0, 2, 0]
    assert all(left_out == settled for left_out, settled in verdicts[True])
    assert captures == {True: 1, False: 0}
    # The first step makes state; steps 4 and 6 are in standard form, and where that is all, the others are replays.
    assert [graph.replays for graph in on_cuda.made] == [3 if standard > 1 else 5]


@EVERY_VERSION
def test_graphs_of_several_optimizers_outlive_one_another(on_cuda: Device) -> None:
    """Each has a stream and a pool; nothing that cuBLAS keeps is in a pool, and all of a graph's memory is given back
    with it."""

    def step(x: torch.Tensor) -> None:
        x.copy_(x @ x)

    squares, steps = [torch.eye(3) for _ in range(3)], [Replayed() for _ in range(3)]
    for _ in range(3):
        for x, replayed in zip(squares, steps, strict=True):
            replayed.run(partial(step, x), lambda: 0)
    del replayed, steps[0]
    for x, replayed in zip(squares[1:], steps, strict=True):
        replayed.run(partial(step, x), lambda: 0)
        assert replayed.captures == 1
    del replayed
    steps.clear()
    later = Replayed()
    for _ in range(3):
        later.run(partial(step, squares[0]), lambda: 0)
    assert Replayed.refusal == ""
    assert [graph.replays for graph in on_cuda.made] == [2, 3, 3, 2]
    assert [workspace.pool for graph in on_cuda.made for workspace in graph.workspaces if workspace.pool] == []
    del later
    assert {pool.users for pool in on_cuda.pools.values()} == {0}


def test_a_graph_more_than_there_are_streams_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    x, steps = torch.zeros(3), [Replayed() for _ in range(graphs.STREAMS + 2)]
    for _ in range(2):
        for replayed in steps:
            replayed.run(lambda: x.add_(1.0), lambda: 0)
    assert [replayed.captures for replayed in steps] == [1] * graphs.STREAMS + [0, 0]
    assert x.tolist() == [2.0 * len(steps)] * 3
    assert len(caplog.records) == 1
    del steps[0]
    assert graphs._free_stream([replayed._stream for replayed in Replayed._living]) is not None


def test_what_has_moved_or_changed_is_captured_anew(on_cuda: Device) -> None:
    def between(step: int, optimizer: Muon) -> None:
        [p, *_] = optimizer.param_groups[0]["params"]
        if step == 2:
            p.grad = torch.empty_like(p)
        if step == 4:
            del optimizer.state[p]

    assert_equal(train(Muon, graph=True, between=between), train(Muon, graph=False, between=between))
    assert [graph.replays for graph in on_cuda.made] == [1, 1, 1], "a step as it is behind each change"

    def momentum(step: int, optimizer: Muon) -> None:
        optimizer.param_groups[0]["momentum"] = 0.5 if step > 2 else 0.9

    assert_equal(train(Muon, graph=True, between=momentum), train(Muon, graph=False, between=momentum))


def test_scratch_that_has_grown_is_not_written_where_it_was(on_cuda: Device) -> None:
    def between(step: int, optimizer: Muon) -> None:
        if step == 3:
            optimizer.workspace.get("muon_x", (64, 64), torch.bfloat16, torch.device("cpu"))

    assert_equal(train(Muon, graph=True, between=between), train(Muon, graph=False))
    assert len(on_cuda.made) == 2


@EVERY_VERSION
def test_what_reads_back_from_the_device_goes_on_in_kernels(on_cuda: Device, caplog: pytest.LogCaptureFixture) -> None:
    """And is not done twice: what was captured until then has no effect. The allocators capture no more (the fixture
    looks) and follow no pointer to a graph that is gone, and nothing else is tried: it is said once."""

    class Waiting(Muon):
        def _apply(self, run: Run, *given: Any) -> None:
            super()._apply(run, *given)
            assert float(run.weights.sum()) is not None

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_equal(train(Waiting, graph=True), train(Muon, graph=False))
    [record] = caplog.records
    assert "kernel by kernel" in record.getMessage()
    assert "not permitted when stream is capturing" in record.getMessage()
    assert torch.__version__ in record.getMessage()
    assert [graph.replays for graph in on_cuda.made] == [0]
    gc.collect()
    on_cuda.pin()
    on_cuda.empty()
    on_cuda.emptied = 0
