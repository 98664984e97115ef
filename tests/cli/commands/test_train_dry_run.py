"""`canzona train --dry-run` shows everything and touches nothing; what cannot run here is refused with ways out."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.launch import preflight
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import RunResult
from tests.cli.commands import support

REPOSITORY = Path(__file__).parents[3]


def canzona(*arguments: str, cwd: Path, code: int | None = None) -> subprocess.CompletedProcess[str]:
    return support.canzona(*arguments, cwd=cwd, code=code, environment={"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    here = tmp_path_factory.mktemp("large")
    result = canzona("train", "recipe=qwen3-32b", "gpus=256", "--dry-run", cwd=here)
    assert list(here.iterdir()) == [], "a dry run writes nothing"
    return result


def test_256_gpus_need_no_gpu_to_be_shown(large: subprocess.CompletedProcess[str]) -> None:
    assert large.returncode == 0, large.stderr
    assert "gpus: 256" not in large.stdout, "the configuration is behind --config"
    assert large.stdout.startswith("recipe ")
    assert "256 GPUs: TP 4 × PP 2 (11 chunks each) × DP 32" in large.stdout
    assert "machines     32, with 8 GPUs each" in large.stdout
    assert max(map(len, large.stdout.splitlines())) <= 80
    assert len(large.stdout.splitlines()) <= 25
    assert "no GPU is visible here, so this machine is not checked" in " ".join(large.stderr.split())


def test_a_dry_run_says_what_the_run_comes_to(large: subprocess.CompletedProcess[str]) -> None:
    text = " ".join(large.stdout.split())
    speed = re.search(r"speed ([\d.]+) k tokens/s, ([\d.]+) k per GPU, MFU ([\d.]+)%", text)
    assert speed is not None, text
    total, each, mfu = map(float, speed.groups())
    assert total == pytest.approx(256 * each, rel=0.01)
    # 6 FLOPs a parameter and token, and a little attention, of 989.4 TFLOP/s.
    assert mfu / 100 == pytest.approx(6 * 32.8e9 * each * 1e3 / 989.4e12, rel=0.1)
    days = re.search(r"training (\d+) h (\d+) min for 10,000 steps", text)
    assert days is not None, text
    assert 3600 * int(days[1]) + 60 * int(days[2]) == pytest.approx(1e4 * (1 << 20) / (total * 1e3), rel=0.01)
    # 31.2 B elements in matrices with master and momentum, 1.56 B of embedding and output with two moments.
    assert "checkpoints 250 GiB each, 3 kept: 750 GiB" in text
    assert "each machine writes about 7.8 GiB, from a copy in host memory (how fast: canzona calibrate)" in text, (
        "a 32nd"
    )
    assert "epochs about 3,616" in text


def test_a_dry_run_says_what_is_off_on_gpus_and_what_it_would_gain(
    large: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    """Those that the profile has verified are no longer off, and the run is the one that was announced."""
    text = " ".join(large.stdout.split())
    assert "(canzona doctor --gpu-check): gram, graphs, fused, shared; once verified (gram, graphs, fused): " in text
    run = ("train", "recipe=qwen3-32b", "gpus=256", "--dry-run", "--json")
    verified = "cluster.verified=[gram,graphs,fused,shared]"
    before, after = (json.loads(canzona(*run, *more, cwd=tmp_path).stdout) for more in ((), (verified,)))
    gained = before["fast_paths"]["once_verified"]
    assert before["fast_paths"]["off"] == ["gram", "graphs", "fused", "shared"]
    assert after["fast_paths"] == {"off": [], "once_verified": None}
    tokens_per_s = after["tokens_per_step"] / gained["iteration_s"]
    assert after["outlook"]["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert before["outlook"]["tokens_per_s"] < after["outlook"]["tokens_per_s"]


def test_the_configuration_is_shown_to_who_asks(tmp_path: Path) -> None:
    result = canzona("train", "recipe=qwen3-tiny", "gpus=2", "--dry-run", "--config", cwd=tmp_path, code=0)
    layout, configuration, command = map(result.stdout.index, ("layout ", "\n  tp: 1\n", "\ncommand\n"))
    assert layout < configuration < command


def test_the_batch_arithmetic_adds_up(large: subprocess.CompletedProcess[str]) -> None:
    text = " ".join(large.stdout.split())
    batch = re.search(
        r"batch (\S+) sequences × (\S+) = (\S+) tokens a step "
        r"\(micro-batch (\d+) × accumulation (\d+) × DP (\d+)\) data",
        text,
    )
    assert batch is not None, text
    sequences, length, tokens, micro, steps, dp = (int(number.replace(",", "")) for number in batch.groups())
    assert dp * micro * steps == sequences
    assert sequences * length == tokens
    assert length == 4096


def test_what_several_machines_need_is_marked_for_filling_in(
    large: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    asked = ("train", "recipe=qwen3-32b", "gpus=256", "--dry-run", "--config")
    text = " ".join(canzona(*asked, cwd=tmp_path, code=0).stdout.split())
    assert "NODE_RANK" not in large.stdout, "the command is behind --config"
    assert "--node-rank NODE_RANK" in text
    assert "NODE_RANK is cluster.node_rank: 0 to 31" in text
    assert "--rdzv-endpoint HOST:PORT" in text
    assert "HOST:PORT is cluster.rdzv_endpoint: an address of machine 0" in text


def test_the_command_can_be_copied_and_the_environment_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "a very long name for a directory so that eighty columns do not suffice" / "run"
    asked = ("train", "recipe=qwen3-tiny", "gpus=2", f"run.dir={run_dir}", "--dry-run")
    short = canzona(*asked, cwd=tmp_path)
    assert "export " not in short.stdout
    assert "canzona_cli.training" not in short.stdout
    result = canzona(*asked, "--config", cwd=tmp_path, code=0)
    command = result.stdout[result.stdout.index("\ncommand\n") + len("\ncommand\n") :]
    words = shlex.split(command.split("\nPrepared")[0].replace("\\\n", ""))
    assert words[:3] == [sys.executable, "-m", "canzona_cli.training.agent"]
    assert words[-3:] == ["-m", "canzona_cli.training.worker", str(run_dir)]
    assert "export OMP_NUM_THREADS=" in result.stdout
    assert not run_dir.parent.exists()


TINY = ("recipe=tiny", "gpus=2", "parallel.tp=2")
MANY = ("recipe=tiny", "gpus=4096", "cluster.gpus_per_node=4096", "train.global_batch_size=4096")
TYPED = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=1", "train.recompute=none")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("recipe=qwen3-32b",), 3, ("no GPU is visible here", "--dry-run", "Slurm", "recipe=qwen3-tiny")),
        ((*MANY, *TYPED), 3, ("4096 CPU ranks need about",)),
        (("recipe=tiny", "gpus=4", "cluster.nodes=2"), 2, ("cluster.rdzv_endpoint", "cluster.node_rank", "run.dir")),
        (("recipe=tiny", "gpus=2", "run.root=file/runs"), 3, ("is a file",)),
        (("recipe=tiny", "run.trackers=[tensorboard,wandb]", "run.dir=run"), 3, ("pip install 'canzona[wandb]'",)),
        ((*TINY, "engine.c_max_mib=0.01", "run.dir=run"), 2, ("engine.c_max_mib",)),
        ((*TINY, "engine.plan=file", "run.dir=run"), 2, ("engine.plan",)),
        ((*TINY, "--dry-run", "run.profile_steps=[3,2]", "train.steps=4"), 2, ("run.profile_steps = [3,2]",)),
        ((*TINY, "--dry-run", "run.profile_steps=[1,9]", "train.steps=4"), 2, ("run.profile_steps",)),
        ((*TINY, "--dry-run", "run.profile_steps=[1,2,3]"), 2, ("run.profile_steps",)),
        ((*TINY, "--dry-run", "run.trace_steps=[1,2]"), 2, ("use run.profile_steps",)),
    ],
)
def test_what_cannot_run_is_refused_with_ways_out_before_anything_is_prepared(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is a fork, in which there is no wandb either."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more))
    (tmp_path / "file").write_text("{}")
    result = canzona("train", *arguments, cwd=tmp_path, code=code)
    assert all(each in " ".join(result.stderr.split()) for each in words)
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "gpus", "words"),
    [
        ((*TINY, "run.trackers=[wandb]"), 0, "pip install 'canzona[wandb]'"),
        (("recipe=qwen3-0.6b", "gpus=8"), 2, "2 GPUs are visible here"),
    ],
)
def test_a_dry_run_where_the_run_would_lack_something_ends_with_3_after_showing_it(
    arguments: tuple[str, ...], gpus: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more))
    monkeypatch.setattr(preflight, "visible_gpus", lambda: gpus)
    result = canzona("train", *arguments, "--dry-run", cwd=tmp_path, code=3)
    assert result.stdout.startswith("recipe ")
    assert words in " ".join(result.stderr.split())


def test_a_dry_run_shows_no_run_that_is_refused_for_its_directory(tmp_path: Path) -> None:
    """The dry run is in the directory of a run that is done, by its recipe or by its own settings."""
    folder = tmp_path / "run"
    folder.mkdir()
    config, _ = resolve(compose_run([*TINY, f"run.dir={folder}", "train.steps=5"]).config)
    files = RunFiles(folder)
    files.config.write_text(dump_resolved(config))
    save(files.result, RunResult(status="done", exit_code=0, step=5))
    for typed in (("train", *TINY, "train.steps=5", f"run.dir={folder}"), ("resume", folder)):
        done = canzona(*map(str, typed), "--dry-run", cwd=tmp_path, code=2)
        assert done.stdout == ""
        assert "has finished all 5 steps" in " ".join(done.stderr.split())
    longer = canzona("resume", str(folder), "train.steps=9", "--dry-run", cwd=tmp_path, code=0)
    assert "9 steps" in longer.stdout
