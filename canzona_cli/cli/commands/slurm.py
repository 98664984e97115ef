"""`canzona slurm`: prints or submits a run as a Slurm job."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import AsJson, RecipesDirs, check_inputs, key_values, show, warn_about
from canzona_cli.core.errors import ConfigError, Problem, collect_problems, refuse
from canzona_cli.records.files import sweep_root
from canzona_cli.records.words import plural

if TYPE_CHECKING:
    from canzona_cli.config.schema import RunConfig
    from canzona_cli.core.setup import Layout
    from canzona_cli.launch.slurm import JobOptions, SubmittedJob


def slurm(
    overrides: Annotated[list[str] | None, key_values("recipe=qwen3-32b gpus=256 ..., as for `canzona train`.")] = None,
    submit: Annotated[bool, Option("--submit", help="Submit the job instead of printing it.")] = False,
    time: Annotated[str | None, Option(metavar="TIME", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS.")] = None,
    partition: Annotated[str | None, Option(metavar="NAME", help="Partition to run in.")] = None,
    account: Annotated[str | None, Option(metavar="NAME", help="Account to charge.")] = None,
    qos: Annotated[str | None, Option(metavar="NAME", help="Quality of service.")] = None,
    nodes: Annotated[
        int | None, Option(min=1, help="Number of nodes (cluster.nodes). [default: as few as possible]")
    ] = None,
    array: Annotated[
        str | None, Option(metavar="TASKS", help="With --sweep: only these tasks, for example 0-3 or 0-7%2.")
    ] = None,
    sweep: Annotated[
        bool, Option("--sweep", help="Use a job array with a task for each combination of values: train.seed=1,2.")
    ] = False,
    job_name: Annotated[str | None, Option(metavar="NAME", help="Name of the job. [default: the recipe's]")] = None,
    cpus_per_task: Annotated[
        int | None, Option(min=1, metavar="N", help="Share nodes: request N cores on each instead of exclusive nodes.")
    ] = None,
    requeues: Annotated[
        int,
        Option(min=0, metavar="N", help="How often the job may be requeued, at most 3 times after failures."),
    ] = 20,
    signal_before: Annotated[
        int, Option(min=1, max=65_535, metavar="S", help="Save and requeue this many seconds before the time limit.")
    ] = 180,
    sbatch: Annotated[
        list[str] | None,
        Option(metavar="OPTION", help="An additional sbatch option: '--constraint=h100'; may be repeated."),
    ] = None,
    needs: Annotated[
        bool, Option("--needs", help="Only print the nodes, the GPUs per node, and the folder for notes of failures.")
    ] = False,
    as_json: AsJson = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Print a run's sbatch script, or submit it.

    The script is scripts/train.sbatch, filled in. A job that is preempted or close to its time limit saves a
    checkpoint, requeues itself and resumes from this checkpoint. After a crash or a hang it is requeued too, without
    the machine that failed.
    """
    from canzona_cli.core.planner.plan_file import obtain_plan
    from canzona_cli.launch.preflight import container_problems
    from canzona_cli.launch.slurm import JobOptions, directives_of, job_problems, last_task, needed

    typed = {
        "job-name": job_name,
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "array": array,
        "cpus-per-task": cpus_per_task,
    }
    given = [f"--{name}={value}" for name, value in typed.items() if value is not None]
    arguments = [*(overrides or []), *([f"cluster.nodes={nodes}"] if nodes else [])]
    problems: list[Problem] = []
    options, first = JobOptions(requeues=requeues, signal_before=signal_before), None
    with collect_problems(problems):
        options = replace(options, directives=directives_of([*given, *(sbatch or ())], "--sbatch"))
    with collect_problems(problems):
        first, runs = (_resolve_sweep if sweep else _resolve)(arguments, recipes_dir or [])
    refuse(problems)
    assert first is not None
    config, layout = first
    options = options.beside(directives_of(config.cluster.sbatch, "cluster.sbatch"))
    if sweep:
        options = replace(options, directives={"array": f"0-{runs - 1}", **options.directives})
        if last_task(tasks := options.directives["array"]) >= runs:
            reason = f"the sweep has only tasks 0 to {runs - 1}"
            problems.append(Problem("--array", reason, f"--array 0-{runs - 1}", tasks))
    elif options.is_array:
        reason, fix = "all tasks would train the same run", "add the values that differ: train.seed=1,2,3,4 --sweep"
        problems.append(Problem("--array", reason, fix, options.directives["array"]))
    refuse([*problems, *job_problems(config, options)])
    if needs:
        typer.echo(needed(config))
        return
    refuse(container_problems(config))
    obtain_plan(config.setup, layout)  # refuses the run if it cannot be planned
    check_inputs(config, layout)
    arguments += ["--sweep"] if sweep else []
    arguments += [word for folder in recipes_dir or [] for word in ("--recipes-dir", str(folder.absolute()))]
    (_submit if submit else _print_script)(config, options, arguments, as_json=as_json)


def _resolve(arguments: list[str], recipes_dirs: list[Path]) -> tuple[tuple["RunConfig", "Layout"], int]:
    """Composes and resolves the run; returns it with its layout, and 1, the number of runs."""
    from canzona_cli.checkpoint.huggingface.folder import compose_with_weights
    from canzona_cli.config.resolve import resolve

    composed = compose_with_weights(arguments, recipes_dirs)
    warn_about(composed)
    return resolve(composed.config), 1


def _print_script(config: "RunConfig", options: "JobOptions", arguments: list[str], *, as_json: bool) -> None:
    from canzona_cli.launch.slurm import render

    script = render(config, options, arguments)
    if as_json:
        show(_content(config, script=script))
    else:
        typer.echo(script, nl=False)


def _submit(config: "RunConfig", options: "JobOptions", arguments: list[str], *, as_json: bool) -> None:
    from canzona_cli.launch.slurm import render, submit, write_arguments

    name = options.directives.get("job-name", config.name)
    file = write_arguments(Path(config.run.root) / "slurm", name, arguments)
    try:
        output = options.directives.get("output")
        job = submit(render(config, options, file), name=name, array=options.is_array, output=output)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    if as_json:
        show(_content(config, job=job))
    else:
        _show_job(job, config)


def _content(config: "RunConfig", *, script: str | None = None, job: "SubmittedJob | None" = None) -> dict[str, object]:
    """Returns the output of `--json`. New fields do not change `version`."""
    from canzona_cli.launch.torchrun import node_count, ranks_per_node

    return {
        "version": 1,
        "nodes": node_count(config),
        "ranks_per_node": ranks_per_node(config),
        "script": script,
        "job_id": None if job is None else job.job_id,
        "log": None if job is None else str(job.log),
        "run_dir": None if job is None else _run_dir(job, config),
    }


def _run_dir(job: "SubmittedJob", config: "RunConfig") -> str:
    """Returns the run directory of a job, or the parent directory of a sweep's runs."""
    root = sweep_root(config.run.root, job.job_id) if job.array else f"{config.run.root}/{config.name}-{job.job_id}"
    return config.run.dir or str(root)


def _resolve_sweep(arguments: list[str], recipes_dirs: list[Path]) -> tuple[tuple["RunConfig", "Layout"], int]:
    """Resolves all runs of a sweep; returns the first run with its layout, and the number of runs.

    Raises:
        CanzonaError: a run is refused (see `swept_runs`), or the runs need different numbers of nodes or ranks.
    """
    from canzona_cli.config.resolve import swept_runs
    from canzona_cli.launch.torchrun import node_count, ranks_per_node

    runs = swept_runs(arguments, recipes_dirs)
    needed = {(node_count(run.config), ranks_per_node(run.config)) for run in runs}
    if len(needed) > 1:
        sizes = " or ".join(f"{nodes} x {ranks}" for nodes, ranks in sorted(needed))
        reason, fix = "all tasks of an array get the same nodes", "submit a sweep for each number of GPUs"
        raise ConfigError(Problem(key="--sweep", value=sizes, reason=reason, fix=fix))
    return (runs[0].config, runs[0].layout), len(runs)


def _show_job(job: "SubmittedJob", config: "RunConfig") -> None:
    from rich.console import Console

    from canzona_cli.launch.torchrun import node_count

    lines = {
        "job": f"{job.job_id}, {config.name} on {plural(node_count(config), 'machine')}",
        "log": str(job.log),
        "run": _run_dir(job, config),
        **({"setup": "; ".join(config.cluster.setup)} if config.cluster.setup else {}),
        "watch": f"squeue --jobs={job.job_id}",
        "requeue": f"scancel --signal=USR2 {job.job_id}  (saves a checkpoint, requeues, resumes from it)",
        "end": f"scancel {job.job_id}  (its checkpoints stay)",
    }
    console = Console(highlight=False)
    for label, value in lines.items():
        console.print(f"{label:<9}{value}", markup=False, soft_wrap=True)
