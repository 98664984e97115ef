"""`make gpu-check`: its parts on CPU ranks, its table where parts fail, and that it does not pass without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gpu_check
import pytest
from gpu_check import PARTS, Part, check
from gpu_parts import parts
from gpu_parts.outcome import Outcome, Setup
from gpu_parts.runs import Event, compare_curves, on_device, read_steps

from canzona_cli.core.errors import WorkerCrashed
from canzona_cli.core.setup import Mode

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPTS / "gpu_check.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)},
    )


def _parts(path: Path) -> dict[str, dict[str, Any]]:
    return {part["part"]: part for part in json.loads(path.read_text(encoding="utf-8"))["parts"]}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    setup = Setup(device="cpu", name="cpu", memory_gib=0.0, gpus=1, work=str(tmp_path))
    setup.save()
    return setup


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_parts_pass_on_cpu_ranks(tmp_path: Path) -> None:
    """All but those tested below, and parts that differ by a few overrides from `train` and `cp2`."""
    out = tmp_path / "checked.json"
    parts = [name for name in PARTS if name not in ("overlap", "te", "experts", "tp2", "dp2", "pp2")]
    asked = [name for name in parts if name not in ("demo", "train")]  # the others need them
    done = _run("--device", "cpu", "--only", *asked, "--minutes", "28", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    checked = _parts(out)
    assert {name: part["status"] for name, part in checked.items()} == dict.fromkeys(parts, "pass")
    for name in parts:
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines())
    compared = {row["what"].strip(): row for part in checked.values() for row in part["comparisons"]}
    assert {"step of qwen3-tiny", "matrix_update", "fp32_tflops"} <= set(compared)


def test_without_a_gpu_it_fails_and_says_so(tmp_path: Path) -> None:
    done = _run("--out", str(tmp_path / "checked.json"))
    assert done.returncode == 3
    assert "nothing was checked" in done.stderr
    assert "canzona doctor" in done.stderr
    assert not (tmp_path / "checked.json").exists()


def test_a_part_that_crashes_hangs_or_falls_short_costs_the_others_nothing(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script of the parts' processes is a stand-in."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "part, work = sys.argv[2], pathlib.Path(sys.argv[4])\n"
        "if part == 'demo': sys.exit('out of luck')\n"
        'answer = \'{"status": "%s", "summary": "so so", "numbers": {"step_s": 0.5}, "comparisons": []}\'\n'
        "(work / f'{part}.result.json').write_text(answer % ('short' if part == 'step' else 'pass'))\n"
        "if part == 'train': time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.0)
    monkeypatch.setitem(PARTS, "train", Part(limit_s=1))
    out = tmp_path / "checked.json"
    with pytest.raises(WorkerCrashed) as raised:
        check(setup, list(PARTS), 600, out)
    parts = _parts(out)
    alone = [name for name, part in PARTS.items() if part.gpus == 1]
    short = ["demo", "train", "step"]
    assert {name for name in alone if parts[name]["status"] == "short"} == set(short)
    assert {parts[name]["status"] for name in alone if name not in short} == {"pass"}
    assert {parts[name]["status"] for name in PARTS if name not in alone} == {"not run"}
    assert "ended with code 1" in str(parts["demo"]["summary"])
    # What a part had before it was stopped is kept.
    assert parts["train"]["summary"] == "stopped after 5 s; so far: so so"
    assert parts["train"]["numbers"] == parts["step"]["numbers"] == {"step_s": 0.5}
    assert [problem.key for problem in raised.value.problems] == short
    shown = capfd.readouterr().out
    assert any(line.split()[:2] == ["checkpoint", "pass"] for line in shown.splitlines())
    assert any(line.startswith("tp2") and "2 GPUs" in line for line in shown.splitlines())


def test_a_run_that_failed_is_named_with_its_last_words(setup: Setup) -> None:
    gpu_check.answer(setup, "checkpoint")
    outcome = Outcome.read(setup.result("checkpoint"))
    assert outcome.status == "short"
    assert "needs the run `gpu`" in outcome.summary


def test_curves_may_be_as_far_apart_as_rounding_puts_them() -> None:
    exact = {1: 2.0, 2: 1.5, 3: 1.0}
    cpu = {1: 2.001, 2: 1.497, 3: 1.002}  # at most 0.003 off
    near, far = {1: 1.999, 2: 1.506, 3: 1.01}, {1: 2.001, 2: 1.51, 3: 1.002}
    assert compare_curves(near, cpu, exact).holds
    assert not compare_curves(far, cpu, exact).holds
    assert compare_curves(far, cpu, exact, steps=1).holds
    assert not compare_curves({**near, 3: float("nan")}, cpu, exact).holds
    # Half a unit in the last place of bf16 is allowed even where the CPU rounded to the very value.
    assert compare_curves({1: 2.003}, {1: 2.0}, exact).holds
    assert not compare_curves({1: 2.005}, {1: 2.0}, exact).holds


def _event(name: str, category: str, begin: float, lasted: float) -> Event:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": lasted}


STEP = [
    _event("cudaDeviceSynchronize", "cuda_runtime", 0, 5),  # the profiler's own, before the step
    _event("forward", "user_annotation", 10, 40),
    _event("norm_clip", "user_annotation", 50, 50),
    _event("cudaLaunchKernel", "cuda_runtime", 11, 1),
    _event("gemm", "kernel", 12, 30),
    _event("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 30, 20),
    _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 60, 4),
    _event("cudaStreamSynchronize", "cuda_runtime", 64, 3),
    _event("gemm", "kernel", 120, 30),
    _event("cudaStreamSynchronize", "cuda_runtime", 130, 3),
]


def test_a_trace_tells_kernels_waits_and_how_much_communication_is_hidden() -> None:
    trace = read_steps(STEP)
    assert trace.kernels == 3
    assert dict(trace.waits) == {"cudaStreamSynchronize": 1}
    assert dict(trace.collectives) == {"Reduce": 1, "AllReduce": 1}
    assert trace.collective_s == pytest.approx(24e-6)
    assert trace.hidden == pytest.approx(12 / 24)  # of microseconds 30 to 50, those up to 42
    assert read_steps([]).hidden is None


def test_reductions_that_run_one_by_one_fall_short() -> None:
    trace = read_steps(STEP)
    assert parts.judge(trace, buckets=1).status == "pass"
    more = [_event(f"ncclDevKernel_Reduce_Sum_f32_RING_LL_{n}", "kernel", 13 + n, 1) for n in range(5)]
    outcome = parts.judge(read_steps([*STEP, *more]), buckets=1)
    assert outcome.status == "short"
    assert "one by one" in outcome.summary
    assert parts.judge(read_steps([]), buckets=1).status == "not run"


def test_runs_on_a_gpu_are_ones_that_compose(tmp_path: Path) -> None:
    from canzona_cli.config.compose import compose_run
    from canzona_cli.core.simulate import fit

    setup = Setup(device="cuda", name="NVIDIA H200", memory_gib=47.5, gpus=2, work=str(tmp_path))
    runs = [
        (parts.continued(setup, *on_device(setup)), 1),
        (parts.continued(setup, *on_device(setup, fused=True)), 1),
        (parts.step_overrides(setup), 1),
        (parts.experts_overrides(replace(setup, gpus=1)), 1),
        (parts.experts_overrides(setup), 2),
        (parts.overlap_overrides(setup), 2),
        *((parts.split_overrides(setup, axis), 2) for axis in ("tp", "dp", "cp", "pp")),
        *((parts.shared_overrides(setup, mode), 2) for mode in get_args(Mode)),
    ]
    for overrides, ranks in runs:
        config, layout = fit.resolve(compose_run(list(overrides)).config.setup)
        assert (config.cluster.name, config.gpus, layout.world_size) == ("h200", ranks, ranks)
        assert config.cluster.memory_gib == 47.5
