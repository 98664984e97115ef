"""`canzona train`: resolve, check, prepare, launch, watch, report."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from canzona_cli.commands.arguments import RecipesDirs, overrides_argument
from canzona_cli.commands.output import progress, tell, warn, warn_about
from canzona_cli.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from canzona_cli.config.schema import Layout, RunConfig
    from canzona_cli.data.corpus import PreparedCorpus
    from canzona_cli.launch.machines import Machines
    from canzona_cli.launch.outcome import Outcome
    from canzona_cli.launch.resume import Resumption
    from canzona_cli.launch.run_dir import RunDirectory
    from canzona_cli.launch.stop import Requests
    from canzona_cli.launch.view import TrainView
    from canzona_cli.planner.plan_file import Obtained


def train(
    overrides: Annotated[
        list[str] | None, overrides_argument("recipe=qwen3-tiny gpus=4 parallel.tp=2 train.steps=100 ...")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved run and its torchrun command; start nothing.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FIRST-LAST", help="Write a Chrome trace of these steps (run.trace_steps)."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="FIRST-LAST", help="Run torch's profiler on these steps (run.profile_steps)."
        ),
    ] = None,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Train a model, or continue the run in run.dir. Ctrl-C saves after the current step; twice stops at once."""
    from canzona_cli.launch.stop import Preempted, Requests, before_workers, handled

    requests = Requests(raising=True)
    with handled(requests.add):
        try:
            _train([*(overrides or []), *_recorded_steps(trace=trace, profile=profile)], dry_run, recipes_dir, requests)
        except Preempted as asked:
            _exit(before_workers(None, asked))


def _train(overrides: list[str], dry_run: bool, recipes_dir: list[Path] | None, requests: "Requests") -> None:
    from rich.console import Console

    from canzona_cli.cluster.fit import resolve
    from canzona_cli.config.compose import compose_run
    from canzona_cli.launch.slurm import adopt, current_step
    from canzona_cli.launch.stop import Preempted, before_workers
    from canzona_cli.planner.plan_file import obtain_plan
    from canzona_cli.run.files import RunFiles

    console = Console(highlight=False)
    composed = compose_run(overrides, recipes_dirs=recipes_dir or [])
    warn_about(composed)
    config, layout = resolve(composed.config)
    adopted = adopt(config, current_step())
    config = adopted.config
    for note in adopted.notes:
        progress(note)
    plan = obtain_plan(config, layout)
    if dry_run:
        _show(config, layout, plan, console)
        return
    try:
        outcome, run = _launch(config, layout, plan, console, requests)
    except Preempted as asked:
        files = None if config.run.dir is None else RunFiles(Path(config.run.dir).absolute())
        _exit(before_workers(files, asked))
    _conclude(outcome, run, config, console)


def _exit(outcome: "Outcome") -> NoReturn:
    """End a command that was asked to stop before its workers started."""
    tell(outcome.message)
    raise typer.Exit(outcome.exit_code) from None


def _recorded_steps(**options: str | None) -> list[str]:
    """`--trace 5-7` as the override run.trace_steps=[5,7]; `--trace 5` is one step.

    Raises:
        ConfigError: with every option that names no steps.
    """
    from canzona_cli.errors import ConfigError, Problem

    overrides, problems = [], []
    for name, text in options.items():
        if text is None:
            continue
        steps = [part.strip() for part in text.split("-")]
        if len(steps) <= 2 and all(part.isdecimal() for part in steps):
            overrides.append(f"run.{name}_steps=[{int(steps[0])},{int(steps[-1])}]")
        else:
            reason, fix = "is not the first and the last step to record", f"for example --{name} 5-7"
            problems.append(Problem(key=f"--{name}", value=text, reason=reason, fix=fix))
    if problems:
        raise ConfigError(*problems)
    return overrides


def _show(config: "RunConfig", layout: "Layout", plan: "Obtained | None", console: "Console") -> None:
    from canzona_cli.config.compose import dump_resolved
    from canzona_cli.errors import CanzonaError
    from canzona_cli.launch import preflight, torchrun
    from canzona_cli.launch.resume import resumption
    from canzona_cli.planner.memory import estimate
    from canzona_cli.report.train_dry_run import RUN_DIR_TIME, DryRun

    run_dir = Path(config.run.dir or f"{config.run.root}/{config.name}-{RUN_DIR_TIME}").absolute()
    shown = DryRun(
        config=config,
        config_yaml=dump_resolved(config),
        layout=layout,
        plan=plan,
        memory=estimate(config, layout),
        command=torchrun.build(config, layout, run_dir),
    )
    console.print(shown, soft_wrap=True)
    try:
        found = resumption(config, layout)
    except CanzonaError as error:
        tell(f"note: it would be refused: {error}", "yellow")
    else:
        if found is not None:
            progress(f"note: it would continue from step {found.step:,} ({found.origin})")
    for problem in preflight.machine_problems(config, layout):
        tell(f"note: this machine could not run it: {problem.reason}", "yellow")


def _launch(
    config: "RunConfig",
    layout: "Layout",
    plan: "Obtained | None",
    console: "Console",
    requests: "Requests",
) -> "tuple[Outcome, RunDirectory]":
    """Check, prepare data and run directory, and supervise the ranks of this machine until they end."""
    from canzona_cli.config.compose import dump_resolved
    from canzona_cli.data.corpus import ensure_corpus
    from canzona_cli.launch import preflight, torchrun
    from canzona_cli.launch.resume import resumption
    from canzona_cli.launch.run_dir import check_free, prediction_here
    from canzona_cli.launch.supervisor import Supervision
    from canzona_cli.report.train_views import make_view

    node_rank = 0 if torchrun.node_count(config) == 1 else config.cluster.node_rank or 0
    preflight.check_machine(config, layout)
    preflight.check_nodes(config)
    if node_rank == 0:
        check_free(config, goes_on=True)
        resumption(config, layout)
    else:  # machine 0 shows the run; its output and this one's often go to one file
        console.quiet = True
    view = make_view(config, layout, console)
    with _progress_of(view, requests) as on_progress:
        corpus = ensure_corpus(config, on_progress)
        run, machines, config = _claim(config, layout, node_rank, corpus)
    command = torchrun.build(config, layout, run.path)
    per_node = torchrun.ranks_per_node(config)
    with run.never_without_result():
        if node_rank == 0:
            run.write_inputs(
                config_yaml=dump_resolved(config),
                layout=layout,
                corpus=corpus,
                command=command,
                plan=None if plan is None else plan.plan.to_json(),
                predicted=prediction_here(config, layout, None if plan is None else plan.plan),
            )
            machines.gather(config.cluster.rdzv_endpoint or "", say=tell)
        view.header(run_dir=run.path, corpus=corpus, plan=plan, earlier=run.earlier)
        requests.raising = False
        outcome = Supervision(
            run.files,
            command,
            view,
            ranks=range(node_rank * per_node, (node_rank + 1) * per_node),
            machines=machines,
            hang_timeout_s=config.run.hang_timeout_s,
            requests=requests,
            # On a terminal the view's own console prints above the live frame; a pipe's reader would not see it.
            say=console.print if console.is_terminal else tell,
        ).run()
    return outcome, run


@contextmanager
def _progress_of(view: "TrainView", requests: "Requests") -> "Iterator[Callable[[str, float], None]]":
    """Shows the progress of what happens before the launch; gives the terminal back before an error is shown."""
    shown = False

    def on_progress(what: str, fraction: float) -> None:
        nonlocal shown
        shown = True
        view.progress(what, fraction)

    try:
        yield on_progress
    except KeyboardInterrupt as asked:
        if shown:
            view.close("interrupted", "before training began")
        if shown and requests.reason == "interrupted":
            raise typer.Exit(ExitCode.INTERRUPTED) from asked
        raise
    except Exception:
        if shown:
            view.close("failed", "before training began")
        raise


def _claim(
    config: "RunConfig", layout: "Layout", node_rank: int, corpus: "PreparedCorpus"
) -> "tuple[RunDirectory, Machines, RunConfig]":
    """The run directory: machine 0 creates it or continues in it, the others wait there for machine 0's address."""
    from dataclasses import replace

    from canzona_cli.launch import torchrun
    from canzona_cli.launch.machines import Machines
    from canzona_cli.launch.resume import reordered
    from canzona_cli.launch.run_dir import RunDirectory
    from canzona_cli.run.files import RunFiles

    nodes = torchrun.node_count(config)
    if node_rank == 0:
        run = RunDirectory.create(config, goes_on=True)
        found = run.go_on(config, layout)
        _say_resumption(run, found)
        if found is not None and (warning := reordered(found, config, layout, corpus.train_tokens)) is not None:
            warn([warning])
        return run, Machines(run.files, nodes=nodes), config
    run = RunDirectory(RunFiles(Path(config.run.dir or "").absolute()))
    machines = Machines(run.files, node_rank=node_rank, nodes=nodes)
    return run, machines, replace(config, cluster=replace(config.cluster, rdzv_endpoint=machines.arrive()))


def _say_resumption(run: "RunDirectory", found: "Resumption | None") -> None:
    """How a run that continues differs from the one before, said before anything starts."""
    for note in run.notes:
        progress(f"note: {note}")
    warn(() if found is None else found.warnings)
    if found is not None and found.spread:
        progress(f"note: different layout: {found.spread}")


def _conclude(outcome: "Outcome", run: "RunDirectory", config: "RunConfig", console: "Console") -> None:
    from canzona_cli.launch import torchrun
    from canzona_cli.report.run_breakdown import BreakdownView
    from canzona_cli.run.breakdown import load_breakdown

    if config.cluster.node_rank and torchrun.node_count(config) > 1:
        # machine 0 has reported everything; both often write to one file
        if outcome.exit_code:
            tell(f"machine {config.cluster.node_rank}: {outcome.message}")
    elif outcome.status == "failed":
        _say_why(outcome)
    elif run.files.breakdown.exists():
        console.print()
        console.print(BreakdownView(breakdown=load_breakdown(run.path)))
    console.print()
    for line in _recordings(run, config) if outcome.status != "failed" else ():
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"run directory: {run.path}", markup=False, soft_wrap=True)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _recordings(run: "RunDirectory", config: "RunConfig") -> "Iterator[str]":
    """Where the requested traces are, or why there are none."""
    from canzona_cli.errors import CanzonaError
    from canzona_cli.report.run_trace import write_trace
    from canzona_cli.run.words import plural

    if config.run.trace_steps is not None:
        try:
            ranks = write_trace(run.path, run.files.trace)
            shown = f"trace of {plural(ranks, 'rank')}, measured and planned"
            yield f"{shown}: {run.files.trace} (open it in ui.perfetto.dev)"
        except CanzonaError as error:  # the run itself went well
            yield f"no trace of steps {config.run.trace_steps[0]} to {config.run.trace_steps[1]}: {error}"
    if config.run.profile_steps is not None:
        first = config.run.profile_steps[0]
        found = f"{run.files.profile}/rank-N.json (open one in ui.perfetto.dev)"
        missing = f"nothing: the run ended before step {first}"
        yield f"torch's profiler: {found if run.files.profile.exists() else missing}"


def _say_why(outcome: "Outcome") -> None:
    """The error of the rank that failed, then its traceback, then the path of its log."""
    from canzona_cli.report.errors import show_failure

    show_failure(outcome.error())
    if outcome.traceback:
        tell("\n".join(("", *outcome.traceback)), "dim")
    if outcome.log is not None:
        place = "the launcher" if outcome.rank is None else f"rank {outcome.rank}"
        tell(f"\nwhole output of {place}: {outcome.log}")
