"""`canzona bench` for real: workers under torchrun, JSON and files as promised, mistakes without a traceback."""

import json
import subprocess
from pathlib import Path

import pytest

from canzona_cli.bench.results import BenchResult
from canzona_cli.cli.commands.bench import conclude
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.core.reading import parse
from tests.bench.benches import bench, with_measured
from tests.cli.commands.support import canzona

RUN = (
    *("recipe=tiny", "gpus=2", "parallel.tp=2", "model.num_layers=1", "train.seq_length=32"),
    *("train.micro_batch_size=2", "train.global_batch_size=2"),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A bench of two strategies, two measured rounds of two steps, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("bench")
    turns = ("--strategies", "canzona,sc", "--rounds", "2", "--steps-per-turn", "2")
    return folder, canzona("bench", *RUN, *turns, "--json", cwd=folder)


def test_json_has_every_strategy_measured_and_predicted(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, finished = done
    assert finished.returncode == 0, finished.stderr
    content = json.loads(finished.stdout)
    assert set(content["strategies"]) == set(content["predicted"]) == {"canzona", "sc"}
    assert set(content["speedup"]) >= {"optimizer_vs_sc", "iteration_vs_sc", "optimizer_vs_layerwise"}
    assert content["speedup"]["optimizer_vs_layerwise"] is None
    for name, value in content["speedup"].items():
        assert (value is None) == (name in content["withheld"])
    assert content["disagreements"] == []
    assert content["layout"]["tp"] == 2
    result = parse(BenchResult, content["result"])
    assert result.reference == "canzona"
    for found in result.strategies.values():
        assert len(found.measured.iteration_s) == len(found.measured.optimizer_s) == 2
        assert len(found.measured.losses) == 6


def test_a_bench_directory_keeps_settings_plan_and_result(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, finished = done
    (run,) = (folder / "bench").iterdir()
    assert run.name.startswith("qwen3-tiny-")
    assert json.loads((run / "bench.json").read_text(encoding="utf-8")) == json.loads(finished.stdout)
    assert read_plan(run / "plan-canzona.json").subject.settings.splitting == "qkv"
    assert not (run / "plan-sc.json").exists()
    assert {path.name for path in run.glob("config-*.yaml")} == {"config-canzona.yaml", "config-sc.yaml"}
    assert json.loads((run / "ranks" / "result.json").read_text(encoding="utf-8"))["status"] == "done"
    assert "canzona_cli.bench.worker" in (run / "ranks" / "command.txt").read_text(encoding="utf-8")


def test_mistakes_are_told_at_once_and_leave_nothing(tmp_path: Path) -> None:
    told = canzona(
        "bench", "recipe=tiny", "gpus=3", "parallel.tp=2", "--strategies", "best", "--rounds", "0",
        cwd=tmp_path,
    code=2)  # fmt: skip
    for word in ("--strategies = best", "--rounds = 0", "gpus = 3"):
        assert word in told.stderr
    assert "Traceback" not in told.stderr
    assert not [*tmp_path.iterdir()]


def test_numbers_of_strategies_that_disagree_are_printed_before_the_command_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = with_measured(bench(), "sc", losses=tuple(3.0 for _ in range(8)))
    with pytest.raises(CanzonaError, match="step 1"):
        conclude(result, None, as_json=True)
    assert parse(BenchResult, json.loads(capsys.readouterr().out)["result"]) == result
