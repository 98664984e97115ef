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
    from canzona_cli.launch.slurm_job import JobOptions, SubmittedJob


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
        int | None, Option(metavar="N", help="Share nodes: request N cores on each instead of exclusive nodes.")
    ] = None,
    requeues: Annotated[
        int, Option(metavar="N", help="How many times the job may be requeued, at most 3 of them after failures.")
    ] = 20,
    signal_before: Annotated[
        int, Option(metavar="S", help="Save and requeue this many seconds before the time limit.")
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
    from canzona_cli.launch.slurm_job import JobOptions, needed

    options = JobOptions(
        job_name=job_name,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
        array=array,
        more=tuple(sbatch or ()),
        cpus_per_task=cpus_per_task,
        requeues=requeues,
        signal_before=signal_before,
    )
    arguments = [*(overrides or []), *([f"cluster.nodes={nodes}"] if nodes else [])]
    config, layout, options = (_resolve_sweep if sweep else _resolve)(arguments, options, recipes_dir or [])
    if needs:
        typer.echo(needed(config))
        return
    refuse(container_problems(config))
    obtain_plan(config.setup, layout)  # refuses the run if it cannot be planned
    check_inputs(config, layout)
    arguments += ["--sweep"] if sweep else []
    arguments += [word for folder in recipes_dir or [] for word in ("--recipes-dir", str(folder.absolute()))]
    (_submit if submit else _print_script)(config, options, arguments, as_json=as_json)


def _resolve(
    arguments: list[str], options: "JobOptions", recipes_dirs: list[Path]
) -> tuple["RunConfig", "Layout", "JobOptions"]:
    """Composes and resolves the run, and checks it and the job's options; returns the options with the recipe's.

    Raises:
        CanzonaError: the run or the options have mistakes; all are reported at once.
    """
    from canzona_cli.checkpoint.huggingface.folder import compose_with_weights
    from canzona_cli.config.resolve import resolve
    from canzona_cli.launch.slurm_job import option_problems

    if options.array is not None:
        reason = "all tasks would train the same run"
        fix = "add --sweep and the values that differ: train.seed=1,2,3,4 --sweep"
        raise ConfigError(Problem(key="--array", value=options.array, reason=reason, fix=fix))
    problems = [*option_problems(options)]
    with collect_problems(problems):
        composed = compose_with_weights(arguments, recipes_dirs)
    refuse(problems)
    warn_about(composed)
    config, layout = resolve(composed.config)
    return config, layout, _beside_recipe(config, options)


def _print_script(config: "RunConfig", options: "JobOptions", arguments: list[str], *, as_json: bool) -> None:
    from canzona_cli.launch.slurm_job import render

    script = render(config, options, arguments)
    if as_json:
        show(_content(config, script=script))
    else:
        typer.echo(script, nl=False)


def _submit(config: "RunConfig", options: "JobOptions", arguments: list[str], *, as_json: bool) -> None:
    from canzona_cli.launch.slurm_job import render, submit, write_arguments

    name = options.job_name or config.name
    file = write_arguments(Path(config.run.root) / "slurm", name, arguments)
    try:
        output = options.directives.get("output")
        job = submit(render(config, options, file), name=name, array=options.array is not None, output=output)
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


def _resolve_sweep(
    arguments: list[str], options: "JobOptions", recipes_dirs: list[Path]
) -> tuple["RunConfig", "Layout", "JobOptions"]:
    """Resolves all runs of a sweep; returns the first run and its layout, and the options with `array` set.

    Raises:
        CanzonaError: a run is refused (see `swept_runs`), the options are wrong, or the runs need different
            numbers of nodes or ranks.
    """
    from canzona_cli.config.resolve import swept_runs
    from canzona_cli.launch.slurm_job import check_options, task_indices
    from canzona_cli.launch.torchrun import node_count, ranks_per_node

    check_options(options)
    runs = swept_runs(arguments, recipes_dirs)
    options = _beside_recipe(runs[0].config, replace(options, array=options.array or f"0-{len(runs) - 1}"))
    problems = []
    if max(task_indices(options.array or "")) >= len(runs):
        reason = f"the sweep has only tasks 0 to {len(runs) - 1}"
        problems.append(Problem(key="--array", value=options.array, reason=reason, fix=f"--array 0-{len(runs) - 1}"))
    needed = {(node_count(run.config), ranks_per_node(run.config)) for run in runs}
    if len(needed) > 1:
        sizes = " or ".join(f"{nodes} x {ranks}" for nodes, ranks in sorted(needed))
        reason, fix = "all tasks of an array get the same nodes", "submit a sweep for each number of GPUs"
        problems.append(Problem(key="--sweep", value=sizes, reason=reason, fix=fix))
    refuse(problems)
    return runs[0].config, runs[0].layout, options


def _beside_recipe(config: "RunConfig", options: "JobOptions") -> "JobOptions":
    """Returns the options with those of the recipe, `cluster.sbatch`, where the command line has no other.

    Raises:
        ConfigError: Slurm would refuse or misread an option of the recipe, or GPUs are asked for in another number than
            the run needs.
    """
    from canzona_cli.launch.slurm_job import gpu_problems, option_problems

    written = config.cluster.sbatch
    both = options.beside(written)
    problems = [*option_problems(both), *gpu_problems(config, both)]
    in_recipe = {directive.partition("=")[2]: directive for directive in written} | {each: each for each in written}
    refuse(
        replace(problem, key="cluster.sbatch", value=in_recipe[problem.value])
        if problem.value in in_recipe
        else problem
        for problem in problems
    )
    return both


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
