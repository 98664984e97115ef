"""`make gpu-check`: what it measures of updates, here on the CPU; where there is nothing to check it does not pass."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.errors import WorkerCrashed
from canzona_cli.model.matrices import layer_shapes
from canzona_cli.planner.cost import flops
from canzona_cli.planner.plan import Algorithm
from tests.sizes import model

ROOT = Path(__file__).parents[2]
ALGORITHMS = {
    "muon/standard/5": Algorithm(name="muon"),
    "muon/standard/5/stacked": Algorithm(name="muon", stack=True),
    "soap": Algorithm(name="soap"),
    "shampoo": Algorithm(name="shampoo"),
}


SCRIPT = ROOT / "scripts" / "gpu_check.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.sweep
def test_updates_of_every_algorithm_and_shape_beside_products(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = _run("--device", "cpu", "--sizes", "qwen3-tiny", "--budget", "0.01", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["device"] == "cpu"
    shapes = {*layer_shapes(model("tiny"), "split"), *layer_shapes(model("tiny"), "fused")[2:3]}
    updates = found["kernels"]
    assert {(u["algorithm"], u["rows"], u["cols"]) for u in updates} == {(a, *s) for a in ALGORITHMS for s in shapes}
    for update in updates:
        spread = update["seconds"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        counted = flops(ALGORITHMS[update["algorithm"]], update["rows"], update["cols"])
        assert update["tflops"] == pytest.approx(counted / spread["median"] / 1e12)
        assert update["share"] == pytest.approx(update["tflops"] / update["product_tflops"])
        assert update["precision"] == ("bf16" if update["algorithm"].startswith("muon") else "fp32")
        # As large as the update's own: between the matrix's sides.
        assert min(update["rows"], update["cols"]) <= update["side"] <= max(update["rows"], update["cols"])
    lines = [line for line in done.stdout.splitlines() if "share" not in line and " squared's " in line]
    assert len(lines) == len(updates)


def test_without_a_gpu_it_fails_and_says_so(tmp_path: Path) -> None:
    done = _run("--out", str(tmp_path / "found.json"))
    assert done.returncode == 3
    assert "nothing was checked" in done.stderr
    assert "canzona doctor" in done.stderr
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(("gpu", "profile"), [("NVIDIA H100 80GB HBM3", "h100-80g"), ("NVIDIA H200", "h200")])
def test_on_a_gpu_a_part_that_fails_is_told_after_the_others(
    gpu: str, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU and the commands are stand-ins: what they are started with has to be a run that is possible."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", script)
    spec.loader.exec_module(script)
    started: list[tuple[str, ...]] = []

    def canzona(*arguments: str) -> int:
        started.append(arguments)
        return 4 if arguments[0] == "train" else 0

    monkeypatch.setattr(script, "canzona", canzona)
    monkeypatch.setattr(script, "require", lambda: gpu)
    monkeypatch.setattr(script, "measure", lambda *_: iter(()))
    with pytest.raises(WorkerCrashed, match="canzona train"):
        script.check("cuda", (), script.PARTS, 0.01, tmp_path / "found.json")
    assert [arguments[0] for arguments in started] == ["train", "calibrate"]
    for _, *arguments in started:
        config = compose_run([argument for argument in arguments if "=" in argument]).config
        assert (config.name, config.gpus, config.cluster.name) == ("qwen3-mini", 1, profile)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["train"]["exit_code"] == 4
    assert found["kernels"] == []
