"""Jobs on a real Slurm of two nodes: the bare script and `canzona slurm` are one job, which trains on both."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from canzona_cli.records.files import RunFiles, read_json
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).parents[2]
CANZONA = Path(sys.executable).with_name("canzona")
SMALL = (
    *("recipe=qwen3-tiny", "gpus=2", "cluster.nodes=2", "parallel.tp=1", "parallel.pp=1", "train.seq_length=32"),
    *("train.global_batch_size=2", "train.eval_interval=0", "checkpoint.every_minutes=null"),
)
SAME = (
    *("Partition", "TimeLimit", "NumNodes", "NumCPUs", "NumTasks", "CPUs/Task", "NtasksPerN:B:S:C", "OverSubscribe"),
    *("Requeue", "MinMemoryNode", "TRES", "WorkDir", "JobName"),
)


@pytest.fixture
def environment(corpus_cache: Path) -> dict[str, str]:
    return {"CANZONA": str(CANZONA), "CANZONA_CACHE": str(corpus_cache), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def submit(slurm: Slurm, here: Path, environment: dict[str, str], *arguments: str) -> str:
    """`canzona slurm --submit`; the job's number."""
    done = slurm.command(str(CANZONA), "slurm", "--submit", "--time=15", *arguments, cwd=here, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n", 1)[0].removeprefix("job").strip().split(",")[0]


def test_the_bare_script_and_canzona_slurm_are_the_same_job_and_train_on_both_nodes(
    slurm: Slurm, here: Path, environment: dict[str, str]
) -> None:
    steps = ("train.steps=3", "checkpoint.at_end=false")
    script = str(REPOSITORY / "scripts" / "train.sbatch")
    bare = slurm.command(
        *("sbatch", "--parsable", "--time=15", "--nodes=2", script, *SMALL, *steps), cwd=here, environment=environment
    )
    assert bare.returncode == 0, bare.stderr
    number_of_bare = bare.stdout.strip()
    by_sbatch = slurm.wait_for(number_of_bare, "COMPLETED")

    rendered = submit(slurm, here, environment, "--job-name=canzona", *SMALL, *steps)
    by_canzona = slurm.wait_for(rendered, "COMPLETED")

    assert {key: by_sbatch[key] for key in SAME} == {key: by_canzona[key] for key in SAME}
    assert by_canzona["NumNodes"] == "2"
    for job, number in ((by_sbatch, number_of_bare), (by_canzona, rendered)):
        log = Path(job["StdOut"])
        assert log == here / f"canzona-{number}.out"
        assert f"from Slurm job {number}: the run directory, machine 1 of 2" in log.read_text()
        files = RunFiles(here / "runs" / f"qwen3-tiny-{number}")
        result = read_json(files.result)
        assert result is not None
        assert (result["status"], result["step"]) == ("done", 3)
        assert {read_json(files.rank(rank)) is not None for rank in range(2)} == {True}
        assert files.agent_log(1).exists(), "machine 1 had a launcher of its own"
    metrics = [RunFiles(here / "runs" / f"qwen3-tiny-{n}").metrics.read_text() for n in (number_of_bare, rendered)]
    assert [text.count("\n") for text in metrics] == [3, 3]
    shutil.rmtree(here / "runs")


def test_a_mistake_ends_the_job_with_its_code_for_good(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    script = str(REPOSITORY / "scripts" / "train.sbatch")
    done = slurm.command("sbatch", "--parsable", script, *SMALL, "train.stepz=3", cwd=here, environment=environment)
    job = slurm.wait_for(done.stdout.strip(), "FAILED")
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    assert "did you mean train.steps" in " ".join(Path(job["StdOut"]).read_text().split())


def test_a_job_with_a_container_and_set_up_lines_trains(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    """The container command is a stand-in, which notes its arguments and the environment and runs the rest."""
    container = here / "container"
    container.write_text(
        f'#!/bin/sh\necho "in $1 on node $SLURM_NODEID with $SET_UP" >>{here}/seen\nshift\nexec "$@"\n'
    )
    container.chmod(0o755)
    job_id = submit(
        *(slurm, here, environment, *SMALL, "train.steps=1", "checkpoint.at_end=false"),
        *("cluster.setup=['export SET_UP=modules']", "cluster.srun_args=['--label']"),
        f"cluster.command=['{container}','image.sif','{CANZONA}']",
    )
    log = Path(slurm.wait_for(job_id, "COMPLETED")["StdOut"]).read_text()
    seen = sorted((here / "seen").read_text().splitlines())
    assert seen == [f"in image.sif on node {node} with modules" for node in (0, 1)]
    assert re.search("^[01]: ", log, re.MULTILINE), "srun was given --label"
    assert (read_json(RunFiles(here / "runs" / f"qwen3-tiny-{job_id}").result) or {})["status"] == "done"


def test_links_are_checked_in_the_job_before_its_first_step(
    slurm: Slurm, here: Path, environment: dict[str, str]
) -> None:
    checked = environment | {"CANZONA_CHECK_LINKS": "1"}
    job_id = submit(slurm, here, checked, *SMALL, "--time=20", "train.steps=1", "checkpoint.at_end=false")
    log = Path(slurm.wait_for(job_id, "COMPLETED")["StdOut"]).read_text()
    check, trained = log.index("all-reduce over 2 ranks on n1, n2\n"), log.index("done, 1 steps")
    assert check < trained
    assert (read_json(RunFiles(here / "runs" / f"qwen3-tiny-{job_id}").result) or {})["status"] == "done"


def test_slow_links_end_the_job_before_its_first_step(slurm: Slurm, here: Path) -> None:
    """The bare script around a program that finds slow links."""
    stand_in = here / "canzona"
    stand_in.write_text(
        '#!/bin/sh\n[ "$1" = slurm ] && echo 1 && exit\nprintf "<%s>" "$@"\n[ "$1" = train ] || exit 3\n'
    )
    stand_in.chmod(0o755)
    script, checked = (
        str(REPOSITORY / "scripts" / "train.sbatch"),
        {"CANZONA": str(stand_in), "CANZONA_CHECK_LINKS": "1"},
    )
    done = slurm.command("sbatch", "--parsable", script, "recipe=a b", "gpus=1", cwd=here, environment=checked)
    ended = slurm.wait_for(done.stdout.strip(), "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("3:0", "0")
    assert "<doctor><--links><recipe=a b><gpus=1>" in Path(ended["StdOut"]).read_text()
    assert "<train>" not in Path(ended["StdOut"]).read_text()


def test_a_failing_set_up_line_ends_the_job_at_once(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    job_id = submit(slurm, here, environment, *SMALL, "cluster.setup=['true','module load no-such-module']")
    ended = slurm.wait_for(job_id, "FAILED")
    assert ended["ExitCode"] == "3:0"
    assert "cluster.setup: this line failed with code 127: module load" in Path(ended["StdOut"]).read_text()
    assert not (here / "runs" / f"qwen3-tiny-{job_id}").exists()


def test_each_task_of_an_array_has_its_own_run_and_log(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    one = ("cluster.nodes=1", "gpus=1", "train.steps=1", "checkpoint.at_end=false")
    alone = [argument for argument in SMALL if not argument.startswith(("gpus", "cluster.nodes"))]
    job_id = submit(slurm, here, environment, "--sweep", "train.seed=5,6,7,8,9", "--array=3-4", *alone, *one)
    for task, seed in ((3, 8), (4, 9)):
        slurm.wait_for(f"{job_id}_{task}", "COMPLETED")
        assert (here / f"qwen3-tiny-{job_id}_{task}.out").exists()
        files = RunFiles(here / "runs" / f"sweep-{job_id}" / f"seed={seed}")
        assert (read_json(files.result) or {})["status"] == "done"
        assert f"seed: {seed}\n" in files.config.read_text()


def test_a_job_is_what_its_recipe_asks_slurm_for(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    """The limit is two minutes: canzona's own signal, three minutes before it, would leave no time. Slurm sends signals
    up to a minute early. The command line's partition wins."""
    recipe = here / "ours.yaml"
    recipe.write_text(
        "# @package _global_\n"
        "defaults:\n  - qwen3-tiny\n  - _self_\n"
        "cluster:\n"
        "  sbatch: [--account=physics, --partition=nowhere, --time=2, --constraint=fast, --mem=1500, --nice=7,\n"
        "    --comment=for the test, --output=logs/%x.%j.log]\n"
    )
    (here / "logs").mkdir()
    settings = [setting for setting in SMALL if not setting.startswith(("recipe=", "gpus=", "cluster.nodes="))]
    done = slurm.command(
        *(str(CANZONA), "slurm", "--submit", "--partition=other", "--signal-before=30", f"recipe={recipe}", "gpus=1"),
        *("train.steps=100000", *settings),
        cwd=here,
        environment=environment,
    )
    assert done.returncode == 0, done.stderr
    number = done.stdout.split("\n", 1)[0].removeprefix("job").strip().split(",")[0]
    slurm.wait_for(number, "RUNNING")
    job = slurm.wait_for(number, "PENDING")
    log = here / "logs" / f"{job['JobName']}.{number}.log"
    expected = {
        "Account": "physics",
        "Partition": "other",
        "TimeLimit": "00:02:00",
        "Features": "fast",
        "MinMemoryNode": "1500M",
        "StdOut": str(log),
        "NumNodes": "1",
        "Restarts": "1",
        "Requeue": "1",
    }
    assert {key: job[key].removesuffix("-1") if key == "NumNodes" else job[key] for key in expected} == expected
    assert "Comment=for the test" in slurm.ask("scontrol", "show", "job", number)
    assert ": requeueing (1 of 20)" in log.read_text(), "a signal half a minute before the limit made it save and stop"


def test_what_slurm_refuses_is_said_and_leaves_nothing(slurm: Slurm, here: Path, environment: dict[str, str]) -> None:
    done = slurm.command(
        *(str(CANZONA), "slurm", "--submit", "--partition=nowhere", *SMALL), cwd=here, environment=environment
    )
    assert done.returncode == 3
    assert "invalid partition specified: nowhere" in " ".join(done.stderr.split())
    assert [path for path in here.rglob("*") if path.is_file()] == []
