"""Comparisons on a GPU let pass what agrees with its reference, and nothing that does not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from gpu_parts.outcome import Outcome, PartResult, Setup, verified

from canzona_cli.bench.calibrate import fast_paths
from canzona_cli.bench.calibrate.fast_paths import Compared, compare, compare_all
from canzona_cli.bench.calibrate.profile import FastPathCheck, Record, verified_paths
from canzona_cli.core.optimizers import graphs, muon, muon_cuda
from canzona_cli.core.optimizers.gram_form import gram_dtype, gram_newton_schulz
from canzona_cli.core.optimizers.graphs import Replayed
from canzona_cli.core.setup import FastPath
from tests.cuda_graph_stand_in import cuda_graphs
from tests.sizes import H100

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whole-tensor passes, products in fp16, and CUDA graphs, all on a processor."""
    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr(muon, "gram_dtype", lambda dtype, _: gram_dtype(dtype, torch.device("cuda")))
    monkeypatch.setattr("canzona_cli.core.optimizers.gram_form._number", lambda of_each: of_each[..., None, None])
    monkeypatch.setattr(Replayed, "refusal", "")
    monkeypatch.setattr(Replayed, "_living", WeakSet())
    monkeypatch.setattr(graphs, "_abandoned", [])
    with cuda_graphs("2.15"):
        yield


@pytest.mark.parametrize("path", ["gram", "graphs", "fused"])
def test_what_agrees_passes(path: Compared) -> None:
    check = compare(path, CPU)
    assert check.agrees, check.summary
    assert check.path == path


def test_calibration_compares_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[None] = []
    assert compare_all(CPU, lambda: alive.append(None)) == ()
    passed = FastPathCheck(path="gram", agrees=True, summary="")
    monkeypatch.setattr(fast_paths, "compare", lambda path, device: replace(passed, path=path))
    checks = compare_all(torch.device("cuda"), lambda: alive.append(None))
    assert [check.path for check in checks] == ["gram", "graphs", "fused"], "a single GPU shares nothing"
    assert len(alive) == len(checks)


def test_a_gram_form_with_the_wrong_result_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is off by 2%, which is more than the rounding of the standard form in bf16, and it is trusted."""

    def wrong(*given: object) -> object:
        result, trusted = gram_newton_schulz(*given)  # type: ignore[arg-type]
        return result.mul_(1.02), trusted

    monkeypatch.setattr(muon, "gram_newton_schulz", wrong)
    assert not compare("gram", CPU).agrees


def test_a_gram_form_that_doubts_or_writes_what_is_not_finite_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubting(*given: object) -> object:
        result, trusted = gram_newton_schulz(*given)  # type: ignore[arg-type]
        return result, torch.zeros_like(trusted)

    with monkeypatch.context() as patched:
        patched.setattr(muon, "gram_newton_schulz", doubting)
        check = compare("gram", CPU)
    assert not check.agrees
    assert "not trusted" in check.summary

    def trusting(*given: object) -> object:
        result, trusted = gram_newton_schulz(*given)  # type: ignore[arg-type]
        return result, torch.ones_like(trusted)

    monkeypatch.setattr(muon, "gram_newton_schulz", trusting)
    check = compare("gram", CPU)
    assert not check.agrees
    assert "not finite" in check.summary


@pytest.mark.parametrize("error", ["ignores found_inf", "multiplies by 0", "moves too far", "raises"])
def test_a_fused_kernel_that_does_something_else_falls_short(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = muon_cuda._descend

    def other(p: torch.Tensor, x: torch.Tensor, rate: torch.Tensor, decay: float, *, skip: torch.Tensor) -> None:
        if error == "raises":
            raise RuntimeError("no such kernel\non this GPU")
        if error == "multiplies by 0":  # right, except where x is not finite
            p.sub_(rate * (1 - skip) * (x + decay * p))
            return
        if error == "ignores found_inf":
            skip = torch.zeros_like(skip)
        real(p, x, rate * 1.01 if error == "moves too far" else rate, decay, skip=skip)

    monkeypatch.setattr(muon_cuda, "_descend", other)
    check = compare("fused", CPU)
    assert not check.agrees
    if error == "raises":
        assert check.summary == "RuntimeError: no such kernel"


@pytest.mark.parametrize("error", ["keeps the old rate", "captures nothing", "leaves another stream"])
def test_graphs_that_do_something_else_fall_short(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if error == "keeps the old rate":
        rates = muon.Muon._set_rates

        def once(self: muon.Muon, p: torch.Tensor, group: dict[str, float]) -> None:
            if not (self.graph and self._rates):
                rates(self, p, group)

        monkeypatch.setattr(muon.Muon, "_set_rates", once)
    elif error == "captures nothing":
        monkeypatch.setattr(Replayed, "refusal", "no graphs here")
    else:
        streams = iter(range(100))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: next(streams))

        def unreplayed(self: Replayed, step: Callable[[], object], key: object) -> None:
            step()
            self.captures = 1

        monkeypatch.setattr(Replayed, "run", unreplayed)
    check = compare("graphs", CPU)
    assert not check.agrees
    expected = {"keeps the old rate": "weights differ", "captures nothing": "no graphs here"}
    assert expected.get(error, "the current stream has changed") in check.summary


def test_limits_are_those_that_are_stated() -> None:
    assert fast_paths.GRAM_ERROR == 1, "no worse than the standard form"
    assert fast_paths.ROUNDED == 2 * 2**-11, "fp16 has eleven bits of significand"


def test_a_profile_gets_what_agreed_and_keeps_what_was_not_compared() -> None:
    base = replace(H100, verified=("gram", "shared"))
    gram = FastPathCheck(path="gram", agrees=False, summary="")
    record = Record(fast_paths=(gram, replace(gram, path="graphs", agrees=True)))
    assert verified_paths(base, record) == ("graphs", "shared")
    assert verified_paths(replace(base, verified=()), Record()) == ()


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["gram", "shared"]), ("cpu", [])])
def test_a_gpu_check_lists_the_paths_that_its_parts_verified(device: str, expected: list[FastPath]) -> None:
    outcomes = {
        "shared": Outcome(status="pass", summary=""),
        "train": Outcome(status="pass", summary=""),
        "calibrate": Outcome(status="short", summary="", verified=["gram"]),
    }
    results = [PartResult(part=part, seconds=1.0, outcome=outcome) for part, outcome in outcomes.items()]
    setup = Setup(
        device=device,  # type: ignore[arg-type]
        name="", memory_gib=0.0, gpus=2, work="",
    )  # fmt: skip
    assert verified(setup, results) == expected
