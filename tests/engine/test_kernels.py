"""The ladder of symmetric products: the fastest of the right ones, the same on all ranks, and cuBLAS where none is."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from packaging.version import Version

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.update import algorithm_of, form_of
from canzona_cli.engine import kernels
from canzona_cli.engine.kernels import Call, choose_kernels, matmul_shapes
from canzona_cli.model.matrices import matrix_shapes
from canzona_cli.optimizers import Muon, gram_form, graphs, muon, muon_cuda, symmetric
from canzona_cli.optimizers.facts import Form
from canzona_cli.optimizers.symmetric import Kernel, full_matmul
from canzona_cli.run.records import KernelChoice
from tests.cuda_graph_stand_in import cuda_graphs
from tests.cuda_stand_in import DEVICE, cuda_stand_in
from tests.dist.ranks import run_ranks

EVERY_CALL: tuple[Call, ...] = get_args(Call)
SECONDS = {"quick": 1.0, "slow": 3.0, "hardly": 1.98, "plain": 2.0}
"""The numbers of products of the kernels with these names."""


def _config(*overrides: str) -> RunConfig:
    return compose_run(["recipe=tiny", "train.precision=bf16", *overrides]).config


def _named(name: str, calls: list[str], times: float = 1.0) -> Kernel:
    def kernel(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
    ) -> None:
        calls.append(name)
        full_matmul(a, b, out, add, beta, alpha)
        out.mul_(times)

    return kernel


def _missing() -> Kernel:
    raise ImportError("No module named 'quack'\nand more")


def _half(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scalars: object) -> None:
    """Leaves what is above the diagonal as it was."""
    out.copy_((a @ b).tril() + out.triu(1))


def _only_transposes(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
) -> None:
    full_matmul(a, a.mT, out, add, beta, alpha)


def _climb(ladder: dict[str, Callable[[], Kernel]], calls: list[str], config: RunConfig) -> list[KernelChoice]:
    """Chooses with the times that kernels of these names would take, on as many ranks as there are."""

    def seconds(operation: Callable[[], None]) -> float:
        calls.clear()
        operation()
        return SECONDS[calls[-1]] if calls else SECONDS["plain"]

    with pytest.MonkeyPatch.context() as patched, cuda_stand_in():
        patched.setattr(kernels, "LEAST_SIDE", 1)
        return list(choose_kernels(config, DEVICE, ladder=ladder, seconds=seconds).choices)


def _rank() -> dict[str, list[KernelChoice]]:
    torch.distributed.init_process_group("gloo")
    rank, calls = torch.distributed.get_rank(), list[str]()
    quick, slow, wrong = _named("quick", calls), _named("slow", calls), _named("quick", calls, 1.02)
    hardly = _named("hardly", calls)
    # Processors multiply fp16, the Gram form's type on GPUs, very slowly.
    config = _config("optimizer.form=standard")
    found = {
        "quickest": _climb({"a": lambda: slow, "b": lambda: quick, "c": _missing}, calls, config),
        "none is quicker": _climb({"a": lambda: slow, "b": lambda: hardly}, calls, config),
        "wrong": _climb(
            {"a": lambda: wrong, "b": lambda: _half, "c": lambda: _only_transposes, "d": lambda: hardly}, calls, config
        ),
        "wrong on one rank": _climb({"a": lambda: quick if rank else wrong}, calls, config),
        "slow on one rank": _climb({"a": lambda: slow if rank else quick}, calls, config),
        "missing on one rank": _climb({"a": _missing if rank else lambda: quick}, calls, config),
    }
    found["in use"] = _climb({"a": lambda: quick}, calls, config)
    calls.clear()
    side, long, dtype = list(matmul_shapes(config, DEVICE))[-1]
    x = torch.randn(side, long).to(dtype)
    symmetric.gram(x, torch.empty(side, side, dtype=dtype))
    assert calls == ["quick"]
    with pytest.MonkeyPatch.context() as patched, cuda_stand_in():
        patched.setattr(graphs, "try_out", lambda device: "torch cannot" if rank else "")
        for graph, reason in ((True, "torch cannot"), (False, "")):
            told: list[str] = []
            on_gpus = _config("cluster=h100-80g", "optimizer.stack=false", f"optimizer.graph={graph}")
            chosen = choose_kernels(on_gpus, DEVICE, ladder={}, begin=told.append)
            assert chosen.no_graphs == reason, "one rank's reason is everybody's"
            assert told == [f"{choice.side} x {choice.long} in {choice.dtype}" for choice in chosen.choices] != []
    return found


@pytest.fixture(scope="module")
def climbed() -> dict[str, list[KernelChoice]]:
    one, other = run_ranks(2, _rank)
    assert one == other, "every rank multiplies as the others do"
    return one


def _of(choices: list[KernelChoice]) -> Iterator[tuple[str, dict[str, str]]]:
    for choice in choices:
        yield choice.kernel, {trial.kernel: trial.refused for trial in choice.trials}


def test_the_quickest_is_taken_and_one_that_is_not_there_passed_over(climbed: dict[str, list[KernelChoice]]) -> None:
    assert climbed["quickest"]
    for kernel, refused in _of(climbed["quickest"]):
        assert kernel == "b"
        assert refused["b"] == ""
        assert refused["c"] == "ImportError: No module named 'quack'"
        assert refused["a"] == refused["plain"] == "slower than b, or hardly faster"
    [times] = {tuple((trial.kernel, trial.seconds) for trial in choice.trials) for choice in climbed["quickest"]}
    assert dict(times) == {"a": 3.0, "b": 1.0, "c": None, "plain": 2.0}
    for kernel, refused in _of(climbed["none is quicker"]):
        assert (kernel, refused["plain"]) == ("plain", "")
        assert refused["a"]
        assert refused["b"]


def test_one_whose_results_are_wrong_is_refused(climbed: dict[str, list[KernelChoice]]) -> None:
    """The error is 2%, above the diagonal, or that it takes two polynomials for one and its transpose."""
    for choice in climbed["wrong"]:
        refused = {trial.kernel: trial.refused for trial in choice.trials}
        assert choice.kernel == "plain"
        assert refused["a"] == refused["b"] == "its results differ from cuBLAS's"
        assert "cuBLAS" not in refused["c"], "in standard form two polynomials are the same one"
    [polynomials, _] = kernels._cases((24, 24, torch.float16), ["square"], torch.device("cpu"))
    assert polynomials.is_wrong(_only_transposes), "in Gram form they are not"


def test_one_rank_that_cannot_use_it_decides_for_all(climbed: dict[str, list[KernelChoice]]) -> None:
    reasons = {"wrong on one rank": "cuBLAS's", "slow on one rank": "slower", "missing on one rank": "ImportError"}
    for case, reason in reasons.items():
        for kernel, refused in _of(climbed[case]):
            assert kernel == "plain"
            assert reason in refused["a"]


def test_a_compiler_that_fails_on_this_gpu_costs_no_run() -> None:
    def kernel(*given: object) -> None:
        raise RuntimeError("no kernel image\nand a page more")

    cases = list(kernels._cases((24, 40, torch.bfloat16), ["wide"], torch.device("cpu")))
    trial = kernels._trial("a", kernel, cases, lambda operation: 1.0)
    assert (trial.seconds, trial.refused) == (None, "RuntimeError: no kernel image")


@pytest.mark.parametrize("optimizer", ["soap", "adamw"])
def test_what_has_no_symmetric_products_has_no_choices(optimizer: str) -> None:
    assert matmul_shapes(_config(f"optimizer={optimizer}"), DEVICE) == {}
    assert matmul_shapes(_config("train.precision=fp32"), DEVICE) == {}
    assert choose_kernels(_config(f"optimizer={optimizer}"), torch.device("cpu")).choices == ()


def test_a_kernel_is_tried_in_the_type_that_the_shape_has_in_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares that both forms multiply are tried in both types."""
    config = _config("model=qwen3-8b", "cluster=h100-80g", "cluster.verified=[gram]", "optimizer.stack=false")
    forms = {form_of(algorithm_of(config), *shape, config.cluster) for shape in matrix_shapes(config)}
    assert forms == {"standard", "gram"}, "the test is of nothing"
    found = matmul_shapes(config, DEVICE)
    for rows, cols in matrix_shapes(config):
        gram = form_of(algorithm_of(config), rows, cols, config.cluster) == "gram"
        side, dtype = min(rows, cols), torch.float16 if gram else torch.bfloat16
        assert {(side, max(rows, cols), dtype), (side, side, dtype)} <= set(found)
    monkeypatch.setattr(kernels, "LEAST_SIDE", 1)
    seen = set()

    def kernel(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scalars: Any) -> None:
        seen.add((a.dtype, b.dtype, out.dtype))
        full_matmul(a, b, out, *scalars)

    choice = kernels._try_kernels(
        (24, 40, torch.float16), ["wide"], torch.device("cpu"), {"a": kernel}, [], lambda run: 1.0
    )
    assert (choice.side, choice.long, choice.dtype) == (24, 40, "fp16")
    assert seen == {(torch.float16,) * 3}
    [trial, _] = choice.trials
    assert trial.refused == ""
    rough = kernels._try_kernels(
        (24, 40, torch.float16), ["wide"], torch.device("cpu"), {"a": _to_bf16}, [], lambda run: 1.0
    )
    assert rough.trials[0].refused == "its results differ from cuBLAS's", "rounded to bf16"


def _to_bf16(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *scalars: Any) -> None:
    full_matmul(a, b, out, *scalars)
    out.copy_(out.bfloat16())


def test_on_cpus_it_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("model=qwen3-0.6b")
    monkeypatch.setattr("canzona_cli.optimizers.symmetric._has_amx", lambda: False)
    choices = {(c.side, c.long): c.kernel for c in choose_kernels(config, torch.device("cpu")).choices}
    assert choices[1024, 3072] == choices[1024, 1024] == "strips"
    assert {(*shape, torch.bfloat16) for shape in choices} == set(matmul_shapes(config, torch.device("cpu")))
    assert {c.kernel for c in choose_kernels(_config(), torch.device("cpu")).choices} == {"plain"}
    monkeypatch.setattr(kernels, "gram_dtype", lambda *_: torch.float16)  # as without instructions for bf16
    narrow = choose_kernels(_config("cluster.bf16_in_fp32=true"), torch.device("cpu")).choices
    assert {(c.side, c.long, c.dtype) for c in narrow} >= {(256, 768, "fp16"), (256, 256, "fp16"), (256, 256, "bf16")}


def test_quacks_kernel_is_called_as_torchs_copy_of_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages need CUDA to be imported; the copy in torch from 2.15 on says in its text what it takes.

    The ladder has no other kernel: emerging-optimizers' would be compiled 24 times for every shape.
    """
    spec = importlib.util.find_spec("torch._vendor.quack")
    assert (spec is None) == (Version(torch.__version__).release < (2, 15))
    if spec is None:
        with pytest.raises(ImportError):
            symmetric.LADDER["torch's quack"]()
    else:
        assert spec.origin is not None
        text = (Path(spec.origin).parent / "gemm_interface.py").read_text(encoding="utf-8")
        [declared] = [
            node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "gemm_symmetric"
        ]
        assert {"C", "out", "alpha", "beta"} < {argument.arg for argument in declared.args.args}
        assert [argument.arg for argument in declared.args.args[:2]] == ["A", "B"]

    calls: list[torch.dtype] = []

    def gemm_symmetric(
        A: torch.Tensor, B: torch.Tensor, *, C: torch.Tensor | None, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        calls.append(A.dtype)
        full_matmul(A, B, out, C, beta, alpha)

    stand_in = ModuleType("gemm_interface")
    stand_in.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    for name in ("quack.gemm_interface", "torch._vendor.quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    assert {"quack", "torch's quack"} <= set(symmetric.LADDER)
    for load in symmetric.LADDER.values():
        for dtype in (torch.bfloat16, torch.float16):
            calls.clear()
            cases = list(kernels._cases((24, 24, dtype), EVERY_CALL, torch.device("cpu")))
            assert not any(case.is_wrong(load()) for case in cases)
            assert calls == [dtype] * len(cases)


def test_a_kernel_that_writes_before_it_has_read_what_it_adds_is_refused_in_gram_form() -> None:
    """There a product is added to what lies where it is written."""

    def late(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None, beta: float, alpha: float
    ) -> None:
        out.zero_()
        full_matmul(a, b, out, add, beta, alpha)

    gram: tuple[tuple[tuple[int, int, torch.dtype], Call], ...] = (
        ((24, 40, torch.float16), "wide"),
        ((24, 24, torch.float16), "square"),
    )
    for shape, call in gram:
        assert all(case.is_wrong(late) for case in kernels._cases(shape, [call], torch.device("cpu"))), call
        assert not any(case.is_wrong(full_matmul) for case in kernels._cases(shape, [call], torch.device("cpu"))), call
    standard = kernels._cases((24, 24, torch.bfloat16), ["square"], torch.device("cpu"))
    assert not any(case.is_wrong(late) for case in standard), "it adds A, which lies elsewhere"


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)])
def test_what_is_tried_is_what_updates_do(shape: tuple[int, int], form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared by what they are compiled for: types, strides, the added tensor and its place, and which
    factors are 1."""
    config = _config("optimizer.form=" + form, "cluster=h100-80g", "optimizer.stack=false")
    monkeypatch.setattr(kernels, "matrix_shapes", lambda config: [shape])
    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr(muon_cuda, "_descend", lambda *given, **named: None)
    monkeypatch.setattr(gram_form, "_number", lambda of_each: of_each[..., None, None])
    seen: set[Hashable] = set()
    products = matmul_shapes(config, DEVICE)
    symmetric.use({product: partial(_compiled, seen) for product in products})
    try:
        p = torch.nn.Parameter(torch.randn(shape))
        p.grad = torch.randn(shape)
        optimizer = Muon([p], 0.02, form=form)
        optimizer.dtype = torch.float16
        optimizer.step()
    finally:
        symmetric.use({})
    tried: set[Hashable] = set()
    for product, calls in products.items():
        for case in kernels._cases(product, calls, torch.device("cpu")):
            case.run(partial(_compiled, tried))
    assert seen
    assert tried == seen


def _compiled(
    seen: set[Hashable],
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: torch.Tensor | None,
    beta: float,
    alpha: float,
) -> None:
    """Notes what QuACK compiles a kernel for (`gemm_symmetric` of its interface), and multiplies."""
    strides = tuple(tensor.stride(-1) == 1 for tensor in (a, b.mT, out))
    where = None if add is None else add.data_ptr() == out.data_ptr()
    seen.add((a.dtype, strides, where, beta == 1 or add is None, alpha == 1))
    if a.device.type != "meta":
        full_matmul(a, b, out, add, beta, alpha)


@pytest.mark.parametrize(("size", "most"), [("0.6b", 0), ("1.7b", 0), ("4b", 4), ("8b", 8), ("14b", 8), ("32b", 8)])
def test_few_kernels_are_compiled_for_a_start(size: str, most: int) -> None:
    """Stacks are cuBLAS's: 0.6B and 1.7B have nothing else."""
    config = compose_run([f"recipe=qwen3-{size}", "optimizer=muon", "cluster=h100-80g"]).config
    compiled: set[Hashable] = set()
    for product, calls in matmul_shapes(config, DEVICE).items():
        for case in kernels._cases(product, calls, torch.device("meta")):
            case.run(partial(_compiled, compiled))
    assert len(compiled) <= most <= 24
    assert bool(compiled) == bool(most)


def test_the_ladder_tries_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "module", ["training/worker.py", "calibrate/worker.py", "bench/worker.py", "library/engine.py"]
)
def test_whatever_updates_matrices_chooses_kernels_as_training_does(module: str) -> None:
    """Otherwise benches and calibrations would measure other kernels than those of a run. Where somebody watches for
    hangs, a rank that compiles is heard of."""
    text = (Path(kernels.__file__).parents[1] / module).read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if ast.unparse(call.func) == "choose_kernels"]
    assert [keyword.arg for keyword in call.keywords] == ([] if module == "library/engine.py" else ["begin"])
