"""The settings that a run takes from a Slurm step, and the batch script it becomes."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import settings
from canzona_cli.core.errors import ConfigError, EnvironmentProblem
from canzona_cli.core.setup import ClusterConfig
from canzona_cli.launch import slurm
from canzona_cli.launch.slurm import (
    JobOptions,
    SlurmStep,
    current_step,
    directives_of,
    fill_in_step,
    first_host,
    job_problems,
    render,
    template_text,
    write_arguments,
)
from tests.faults.support import run_config
from tests.refusals import refused

STEP = SlurmStep(job_id=41, step_id=0, nodes=2, tasks=2, node_rank=1, node_list="localhost,n2", name="41")
VARIABLES = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,n2",
    "SLURM_NODEID": "1",
}


def two_nodes(**cluster: object) -> RunConfig:
    config = run_config(gpus=4, nodes=2)
    changed: ClusterConfig = replace(config.cluster, **cluster)  # type: ignore[arg-type]
    return replace(config, cluster=changed)


def job(*options: str, requeues: int = 20, signal_before: int = 180) -> JobOptions:
    return JobOptions(directives=directives_of(options, "--sbatch"), requeues=requeues, signal_before=signal_before)


def directives(script: str) -> list[str]:
    """The `#SBATCH` lines that sbatch would read: those before the first line that is neither comment nor empty."""
    found = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found.append(line.removeprefix("#SBATCH").strip())
    return found


def test_a_step_is_recognised_and_a_batch_script_is_none() -> None:
    assert current_step(VARIABLES) == STEP
    for lacking in VARIABLES:
        assert current_step({name: value for name, value in VARIABLES.items() if name != lacking}) is None
    assert current_step(VARIABLES | {"SLURM_STEP_ID": str(0xFFFFFFFB)}) is None, "the batch script's own step"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "41"),
        ({"SLURM_STEP_ID": "2"}, "41-2"),
        ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"}, "40_7"),
        ({"SLURM_ARRAY_JOB_ID": "../x", "SLURM_ARRAY_TASK_ID": "7"}, "41"),
    ],
)
def test_a_run_is_called_after_job_and_task_which_a_requeue_keeps(more: dict[str, str], name: str) -> None:
    step = current_step(VARIABLES | more)
    assert step is not None
    adopted, _ = fill_in_step(two_nodes(), step)
    assert adopted.run.dir == f"runs/tiny-{name}"


def test_what_the_user_has_not_set_comes_from_slurm_and_is_said() -> None:
    adopted, note = fill_in_step(two_nodes(), STEP)
    cluster = adopted.cluster
    assert cluster.node_rank == 1
    host, _, port = (cluster.rdzv_endpoint or "").rpartition(":")
    assert host == "localhost"
    assert 20_000 <= int(port) < 30_000
    filled_in = "the run directory, machine 1 of 2, the rendezvous endpoint localhost:"
    assert note.startswith(f"from Slurm job 41: {filled_in}")


def test_flags_win() -> None:
    config = two_nodes(node_rank=0, rdzv_endpoint="h:1")
    config = replace(config, run=replace(config.run, dir="d"))
    assert fill_in_step(config, STEP) == (config, "")
    assert fill_in_step(two_nodes(), None) == (two_nodes(), ""), "outside of Slurm nothing changes"


def test_a_step_of_another_shape_is_refused_with_the_srun_that_fits() -> None:
    [few, *_] = refused(fill_in_step, two_nodes(), replace(STEP, nodes=1, tasks=1))
    assert "needs 2 machines" in few.reason
    assert "--nodes=2" in few.fix
    [many, *_] = refused(fill_in_step, run_config(gpus=4, nodes=1), replace(STEP, nodes=1, tasks=4))
    assert "starts canzona train 4 times on one machine" in many.reason
    fitting, _ = fill_in_step(run_config(gpus=4, nodes=1), replace(STEP, nodes=1, tasks=1))
    assert fitting.cluster.rdzv_endpoint is None


def test_machine_0_takes_a_free_port_and_has_a_name_that_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "port_in_use", lambda host, port: port % 2 == 1)
    on_machine_0, _ = fill_in_step(two_nodes(), replace(STEP, node_rank=0))
    assert int((on_machine_0.cluster.rdzv_endpoint or "").rpartition(":")[2]) % 2 == 0
    monkeypatch.setattr(slurm, "port_in_use", lambda host, port: True)
    with pytest.raises(EnvironmentProblem, match="are in use"):
        fill_in_step(two_nodes(), replace(STEP, node_rank=0))
    with pytest.raises(EnvironmentProblem, match=r"no-such-host\.invalid"):
        fill_in_step(two_nodes(), replace(STEP, node_list="no-such-host.invalid,n2"))


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("n1", "n1"), ("n[01-03,7],m2", "n01"), ("a,b[1-2]", "a"), ("r[0-1]n[4-7]", "r0n4"), ("x[3,5]-ib,y", "x3-ib")],
)
def test_the_first_host_of_slurms_notation(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_a_script_says_what_was_asked_for_and_keeps_the_rest_of_the_template() -> None:
    asked_for = ("--time=1-00:00:00", "--partition=big,small", "--account=a.b", "--qos=q", "--array=0-3%2")
    options = job(*asked_for, requeues=5, signal_before=90)
    script = render(two_nodes(device="cuda"), options, ["recipe=qwen3-tiny"])
    for text in (script, template_text()):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "--signal=USR2@180" in directives(template_text())
    asked = directives(script)
    for directive in (
        *("--job-name=tiny", "--nodes=2", "--gpus-per-node=2", "--time=1-00:00:00", "--partition=big,small"),
        *("--account=a.b", "--qos=q", "--array=0-3%2", "--signal=USR2@90", "--output=%x-%A_%a.out"),
        *("--ntasks-per-node=1", "--exclusive", "--open-mode=append", "--requeue"),
    ):
        assert asked.count(directive) == 1, directive
    assert "\nrequeues=5\n" in script
    shared = directives(render(two_nodes(), job("--cpus-per-task=4", requeues=0), []))
    assert {"--cpus-per-task=4", "--no-requeue"} <= set(shared)
    assert not {"--exclusive", "--mem=0", "--requeue"} & set(shared)


@pytest.mark.parametrize("name", ["job-name", "time", "partition", "account", "qos", "array"])
def test_no_value_can_be_more_than_itself(name: str) -> None:
    """A value of several lines is refused; any other one is a single word for sbatch."""
    for several in ("x\ny", "x\n#SBATCH --uid=0", "x\r", "x\n"):
        (problem,) = refused(directives_of, [f"--{name}={several}"], "--sbatch")
        assert "single-line" in problem.reason
    for value in ("x y", "#x", "-x", "x;y", "$(x)", "x'", "é"):
        asked = directives(render(two_nodes(), job(f"--{name}={value}"), []))
        assert [shlex.split(line) for line in asked].count([f"--{name}={value}"]) == 1


@pytest.mark.parametrize(
    ("time", "fits"), [("3", False), ("4", True), ("3:00", False), ("0:03:01", True), ("1-0", True)]
)
def test_a_time_limit_leaves_time_to_train(time: str, fits: bool) -> None:
    problems = [problem.reason for problem in job_problems(two_nodes(), job(f"--time={time}"))]
    assert [reason.partition(":")[0] for reason in problems] == [] if fits else ["leaves no time to train"]


def test_further_directives_are_added_as_they_are_and_only_as_one_each() -> None:
    more = ("--constraint=h100&ib", "--reservation=a b", "--hold")
    asked = directives(render(two_nodes(), job(*more), []))
    assert {"--constraint='h100&ib'", "--reservation='a b'", "--hold"} <= set(asked)
    assert set(directives(render(two_nodes(), JobOptions(), []))) < set(asked), "nothing else has changed"
    assert "--mem=64G" in directives(render(two_nodes(), job("--mem=64G", "--cpus-per-task=4"), []))


@pytest.mark.parametrize(
    "directive",
    [
        *("-C h100", "constraint=h100", "--constraint=a\n#SBATCH --uid=0", "--constraint=", "--Constraint=x"),
        "--a b=c",
        *("--nodes=4", "--exclusive", "--signal=B:USR2@9"),
    ],
)
def test_a_directive_that_is_none_or_contradicts_canzona_is_refused_with_a_way_out(directive: str) -> None:
    (problem,) = refused(directives_of, [directive, "--comment=x"], "--sbatch")
    assert (problem.key, problem.value) == ("--sbatch", directive)
    assert problem.fix


def test_every_directive_of_canzonas_own_script_is_its_own() -> None:
    free = ("--gpus-per-node=", "--output=", "--mem=", "--job-name=", "--time=", "--cpus-per-task=")
    for script in (render(two_nodes(device="cuda"), job("--time=1:00:00", requeues=0), []), template_text()):
        for directive in directives(script):
            if directive.startswith(free):
                directives_of([directive], "--sbatch")
                continue
            with pytest.raises(ConfigError, match="contradicts"):
                directives_of([directive], "--sbatch")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4))
def test_overrides_reach_bash_as_they_are_and_never_the_directives(overrides: list[str]) -> None:
    plain = directives(render(two_nodes(), JobOptions(), []))
    arguments = [*overrides, "a=\n#SBATCH --uid=0\n"]
    script = render(two_nodes(), JobOptions(), arguments)
    assert directives(script) == plain
    assert not any("uid=0" in line for line in script.splitlines() if line.lstrip().startswith("#"))
    begin, end = script.index("overrides=("), script.index("\n)\n") + 3
    code = f"{script[begin:end]}printf '%s\\0' \"${{overrides[@]}}\""
    said = subprocess.run(["bash", "-c", code], capture_output=True, check=True).stdout
    assert said == b"".join(argument.encode() + b"\0" for argument in arguments)


def test_a_filled_in_script_takes_no_arguments_and_needs_no_canzona_on_the_host() -> None:
    script = render(two_nodes(), JobOptions(), ["recipe=x"])
    assert "sbatch scripts/train.sbatch" not in script
    assert f"\nneeded='2 0 {Path.cwd()}/runs/slurm'\n" in script
    done = subprocess.run(["bash", "-s", "gpus=8"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "takes no arguments: gpus=8" in done.stderr


def test_set_up_lines_srun_options_and_a_container_are_in_the_script() -> None:
    config = two_nodes(
        setup=("module load cuda", "export A='b c'"),
        srun_args=("--container-image=/a b.sqsh",),
        command=("apptainer", "exec", "x y.sif", "canzona"),
    )
    script = render(config, JobOptions(), [])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "\nmodule load cuda\nexport A='b c'\ntrap - ERR\n" in script
    assert "\nsrun_args=('--container-image=/a b.sqsh')\n" in script
    assert "\ncanzona=(apptainer exec 'x y.sif' canzona)\n" in script
    assert directives(script) == directives(render(two_nodes(), JobOptions(), []))


@pytest.mark.parametrize(
    "lines",
    [
        ["if true; then"],
        ["export A='b"],
        ["module load cuda", "cat <<END"],
        ["cat <<-END > x\nEND of the story"],
        ["setup() {"],
        ["(cd /"],
        ["A=$(date"],
        ["fi"],
        ["while read -r x; do"],
        ["module load cuda \\"],
        ["for x in a b; do echo $x; done", "case $x in a)"],
    ],
)
def test_set_up_lines_that_leave_something_open_are_refused(lines: list[str]) -> None:
    """The rest of the script would be a part of what they opened."""
    (problem,) = refused(render, two_nodes(setup=tuple(lines)), JobOptions(), [])
    assert (problem.key, problem.value) == ("cluster.setup", lines[-1].splitlines()[-1])


def test_set_up_lines_are_checked_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the file that bash runs first in every script."""
    startup = tmp_path / "startup"
    startup.write_text(f"touch {tmp_path / 'made'}")
    monkeypatch.setenv("BASH_ENV", str(startup))
    lines = (
        "shopt -s extglob",
        f"touch {tmp_path / 'made'}; ls !(x)",
        "cat <<END",
        "x",
        "END",
        "if true",
        "then :",
        "fi",
    )
    script = render(two_nodes(setup=lines), JobOptions(), [])
    assert "\n".join(lines) in script
    assert not (tmp_path / "made").exists()


def test_examples_of_the_manual_are_yaml_and_their_settings_exist() -> None:
    manual = (Path(slurm.__file__).parent / "README.md").read_text(encoding="utf-8")
    recipe, job, task = (yaml.safe_load(text.partition("```")[0]) for text in manual.split("```yaml\n")[1:])
    assert {f"cluster.{name}" for name in recipe["cluster"]} <= set(settings())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands = [container["command"][2].removeprefix("exec "), task["run"].replace("\\\n", "")]
    for command in commands:
        program, verb, *overrides = command.split()
        assert (program, verb) == ("canzona", "train")
        keys = {word.partition("=")[0] for word in overrides if "=" in word}
        assert keys - {"recipe"} <= set(settings())
        assert {"cluster.nodes", "cluster.node_rank", "cluster.rdzv_endpoint", "run.dir"} <= keys


def test_kept_arguments_are_private_and_read_back_as_they_were(tmp_path: Path) -> None:
    arguments = ["recipe=x", "a=b c\nd", "name=é'\"$(id)"]
    path = write_arguments(tmp_path / "jobs here", "tiny", arguments)
    assert path.stat().st_mode & 0o777 == 0o600
    script = render(two_nodes(), JobOptions(), path)
    assert "$(id)" not in script
    line = next(line for line in script.splitlines() if line.startswith("mapfile"))
    code = f"{line}\nprintf '%s\\0' \"${{overrides[@]}}\""
    said = subprocess.run(["bash", "-c", code], capture_output=True, check=True).stdout
    assert said.decode().split("\0")[:-1] == arguments


@pytest.mark.parametrize(
    ("option", "replaced"),
    [
        ("--gres=gpu:h100:2,nvme:1", "--gpus-per-node=2"),
        ("--gpus=h100:4", "--gpus-per-node=2"),
        ("--gpus-per-task=2", "--gpus-per-node=2"),
        ("--gpus-per-node=h100:2", "--gpus-per-node=2"),
        ("--mem=500G", "--mem=0"),
        ("--mem-per-gpu=60G", "--mem=0"),
        ("--output=logs/%x-%j.log", "--output=%x-%j.out"),
    ],
)
def test_a_sites_own_way_to_ask_takes_the_place_of_canzonas(option: str, replaced: str) -> None:
    config, options = two_nodes(device="cuda"), job(option)
    assert list(job_problems(config, options)) == []
    before, after = (directives(render(config, each, [])) for each in (JobOptions(), options))
    assert replaced in before
    assert set(before) - set(after) == {replaced}
    assert set(after) - set(before) == {option}


@pytest.mark.parametrize(
    ("option", "needed"),
    [("--gres=gpu:h100:8", 2), ("--gpus=2", 4), ("--gpus-per-node=a100:1", 2), ("--gpus-per-task=4", 2)],
)
def test_gpus_in_another_number_than_ranks_are_refused(option: str, needed: int) -> None:
    [problem] = job_problems(two_nodes(device="cuda"), job(option))
    assert problem.value == option
    assert f"the run needs {needed}" in problem.reason
    assert [*job_problems(two_nodes(device="cpu"), job(option))] == []


def test_the_command_line_replaces_what_the_recipe_says_of_the_job() -> None:
    recipe = {"account": "physics", "time": "1:00:00", "gres": "gpu:h100:2", "constraint": "a"}
    assert JobOptions().beside(recipe).directives == recipe
    disk = job("--gres=nvme:1").beside({"gpus-per-node": "h100:8"})
    assert disk.directives == {"gres": "nvme:1", "gpus-per-node": "h100:8"}, "a disk takes no GPUs' place"
    typed = job("--time=2:00:00", "--gpus-per-node=2", "--constraint=b").beside(recipe)
    assert typed.directives == {"account": "physics", "time": "2:00:00", "gpus-per-node": "2", "constraint": "b"}
