"""`canzona slurm` prints a script that can be submitted; what sbatch is told when it submits; mistakes before that."""

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona, ran

REPOSITORY = Path(__file__).parents[3]


def test_the_printed_script_has_the_machines_that_the_gpus_need(tmp_path: Path) -> None:
    done = canzona("slurm", "recipe=qwen3-32b", "gpus=256", "--time", "12:00:00", cwd=tmp_path, code=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert {"#SBATCH --nodes=32", "#SBATCH --gpus-per-node=8", "#SBATCH --time=12:00:00"} <= set(lines)
    assert list(tmp_path.iterdir()) == [], "printing writes nothing"
    folder = tmp_path / "runs" / "slurm"
    assert canzona("slurm", "--needs", "recipe=qwen3-32b", "gpus=256", cwd=tmp_path).stdout == f"32 8 {folder}\n"
    tiny = ("slurm", "--needs", "recipe=qwen3-tiny", "gpus=4", "run.dir=a run")
    assert canzona(*tiny, cwd=tmp_path).stdout == f"1 0 {tmp_path}/a run\n"


def test_nodes_spread_the_run(tmp_path: Path) -> None:
    done = canzona("slurm", "recipe=qwen3-32b", "gpus=64", "--nodes", "16", cwd=tmp_path)
    assert {"#SBATCH --nodes=16", "#SBATCH --gpus-per-node=4", "    cluster.nodes=16"} <= set(done.stdout.splitlines())


def test_mistakes_of_the_run_and_of_the_job_are_told_together_and_no_directive_is_smuggled_in(tmp_path: Path) -> None:
    done = canzona(
        *("slurm", "--submit", "recipe=qwen3-32b", "gpu=8", "--time", "1\n#SBATCH --uid=0", "--account", "a\tb"),
        cwd=tmp_path,
        code=2,
    )
    said = " ".join(done.stderr.split())
    for key in ("--time=1", "--account=a", "did you mean gpus?"):
        assert key in said
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sbatch(tmp_path: Path) -> dict[str, str]:
    """A stand-in sbatch that keeps what it is given. What a real one makes of it: tests/slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'argv')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        f"open({str(tmp_path / 'script')!r}, 'w').write(sys.stdin.read())\nprint('77;cluster')\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_submitted_job_is_shown_with_its_log_and_how_to_end_it(tmp_path: Path, sbatch: dict[str, str]) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = canzona(
        "slurm", "--submit", "recipe=qwen3-8b", "gpus=16", "train.seed=4711", cwd=here, environment=sbatch, code=0
    )
    for part in (
        *("77, qwen3-8b on 2 machines", str(here / "qwen3-8b-77.out"), "runs/qwen3-8b-77", "squeue --jobs=77"),
        *("scancel --signal=USR2 77", "scancel 77"),
    ):
        assert part in done.stdout
    assert (tmp_path / "argv").read_text() == "--parsable", "Slurm shows a job's arguments to everybody"
    script = (tmp_path / "script").read_text()
    assert "4711" not in script, "overrides travel in a file"
    (kept,) = (here / "runs" / "slurm").iterdir()
    assert str(kept) in script
    assert kept.read_bytes() == b"recipe=qwen3-8b\0gpus=16\0train.seed=4711\0"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_without_sbatch_submitting_is_exit_3_and_leaves_nothing(tmp_path: Path) -> None:
    done = canzona("slurm", "--submit", "recipe=qwen3-8b", cwd=tmp_path, environment={"PATH": "/nowhere"}, code=3)
    assert "login node" in " ".join(done.stderr.split())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_inside_a_step_a_dry_run_shows_what_this_machine_would_start(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost,n2", "SLURM_NODEID": "1"}
    done = canzona(
        "train", "--dry-run", "--config", "recipe=qwen3-8b", "gpus=16", cwd=tmp_path, environment=step, code=0
    )
    assert "from Slurm job 9: the run directory, machine 1 of 2" in " ".join(done.stderr.split())
    said = " ".join(done.stdout.split())
    for part in ("--node-rank 1", "--rdzv-endpoint localhost:", "--rdzv-id qwen3-8b-9", "runs/qwen3-8b-9"):
        assert part in said
    refused = canzona("train", "--dry-run", "recipe=qwen3-8b", "gpus=8", cwd=tmp_path, environment=step, code=2)
    assert "--nodes=1" in " ".join(refused.stderr.split())


def test_environment_between_machines_is_chosen_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    done = canzona("train", "--dry-run", "--config", "recipe=qwen3-8b", "gpus=16", cwd=tmp_path)
    assert "export NCCL_SOCKET_IFNAME='^lo,docker," in done.stdout
    assert "GLOO_SOCKET_IFNAME, the network interface to machine 0, is detected on each machine." in " ".join(
        done.stdout.split()
    )
    together = canzona(
        *("train", "--dry-run", "--config", "recipe=qwen3-8b", "gpus=16", "cluster.rdzv_endpoint=127.0.0.1:29500"),
        cwd=tmp_path,
    )
    assert "export NCCL_SOCKET_IFNAME=lo" in together.stdout
    assert "--rdzv-backend canzona-loopback" in " ".join(together.stdout.split())


@pytest.mark.parametrize(
    ("dealt", "on_node", "nodes", "expected"),
    [
        ("gpu:8", "", "32", "--nodes=32 --gpus-per-node=8"),
        ("gpu:8", "8", "1", "--nodes=32 --gpus-per-node=8"),
        ("(null)", "", "1", "--nodes=32"),
        ("gpu:8", "8", "32", ""),
        ("(null)", "", "32", ""),
    ],
)
def test_a_bare_script_names_the_machines_and_gpus_that_it_lacks(
    tmp_path: Path, dealt: str, on_node: str, nodes: str, expected: str
) -> None:
    """Slurm's commands are stand-ins here, because no test machine has GPUs to deal out, and so is canzona, which says
    what the first test here asserts."""
    overrides = ("recipe=qwen3-32b", "gpus=256")
    needs = f"""[ "$*" = "slurm --needs {" ".join(overrides)}" ] && echo '32 8'"""
    for name, line in (("sinfo", f"echo '{dealt}'"), ("srun", "echo srun"), ("canzona", needs)):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{line}\n")
        command.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "canzona",
        "SLURM_JOB_PARTITION": "large",
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": on_node,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = ("bash", REPOSITORY / "scripts" / "train.sbatch", *overrides)
    told = {name: value for name, value in job.items() if value}
    said = ran(*script, cwd=tmp_path, environment=told, code=2 if expected else 0).stdout
    assert said.rstrip().endswith(f"Submit it with: sbatch {expected}") if expected else said == "srun\n"
