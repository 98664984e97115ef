"""Does the work of `canzona train`: resolves, checks, prepares, launches, watches and reports a run.

This module is separate from the command's options, so that help and completion do not need its imports.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import typer
from rich.console import Console

from canzona_cli.checkpoint.huggingface.folder import compose_with_weights, is_hugging_face, open_folder
from canzona_cli.checkpoint.huggingface.foreign import foreign_problems
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.cli.commands.output import announce, check_inputs, progress, show, tell, tell_batch, warn, warn_about
from canzona_cli.cli.views.errors import show_failure
from canzona_cli.cli.views.header import outlook
from canzona_cli.cli.views.run import BreakdownView
from canzona_cli.cli.views.train import make_view
from canzona_cli.cli.views.train_dry_run import RUN_DIR_TIME, DryRun
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.sharing import mode_warnings
from canzona_cli.core.errors import CanzonaError, ExitCode, refuse
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.core.planner.plan_file import ObtainedPlan, obtain_plan
from canzona_cli.core.reading import expanded
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.fast_paths import fast_paths
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.card import card_of, judge
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.outcome import Outcome, failed_outcome
from canzona_cli.launch.preflight import container_problems
from canzona_cli.launch.processes import alert, run_trackers
from canzona_cli.launch.restarts import Restarts, note_failure, resume_command, resume_hint, run_with_restarts
from canzona_cli.launch.resume import Resumption, choose_resumption
from canzona_cli.launch.resumed_data import check_tokenizer, data_changes
from canzona_cli.launch.run_dir import RunDirectory, check_free, predict_here
from canzona_cli.launch.slurm import current_step, fill_in_step
from canzona_cli.launch.stop import Preempted, Requests, early_stop_outcome
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.launch.torchrun import LaunchCommand
from canzona_cli.launch.view import TrainView
from canzona_cli.records.breakdown import load_breakdown
from canzona_cli.records.codec import JsonLines, load_if_valid
from canzona_cli.records.corpus import PreparedCorpus, data_warnings, read_corpus
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import CheckpointEvent, describe, event_of
from canzona_cli.records.summary import load_summary


def run(
    overrides: list[str],
    recipes_dirs: list[Path],
    requests: Requests,
    *,
    dry_run: bool,
    prepare_only: bool = False,
    show_config: bool = False,
    quiet: bool = False,
    name: str = "",
    printed: set[str] | None = None,
    present: Callable[[DryRun], None] = show,
) -> None:
    """Runs `canzona train` for one run.

    Args:
        requests: the requests to stop that signals make. Until the workers run, they raise exceptions.
        dry_run: True prints the resolved run; nothing is started, and nothing except caches is written.
        prepare_only: True writes the run directory and prints the command that starts the workers.
        show_config: True, with `dry_run` or `prepare_only`, also prints the resolved configuration.
        quiet: True prints only warnings, errors and one line at the end.
        name: the name of the run in the line of a quiet run; empty for the recipe's name.
        printed: the warnings that earlier runs of the same command have printed; they are not repeated.
        present: shows the description of a run that is not started.

    Raises:
        Preempted: a request to stop arrived before the run was resolved.
        typer.Exit: the run ended with an exit code other than 0.
    """
    console = Console(highlight=False)
    composed = compose_with_weights(overrides, recipes_dirs)
    warn_about(composed, printed=printed)
    config, layout = resolve(composed.config)
    warn(mode_warnings(config.setup, layout), printed)
    config, from_slurm = fill_in_step(config, current_step())
    if not quiet:
        tell_batch(composed.config, layout)
        if from_slurm:
            progress(from_slurm)
    quiet_name = (name or config.name) if quiet else ""
    job = _Job(
        config=config, layout=layout, plan=obtain_plan(config.setup, layout), quiet_name=quiet_name, printed=printed
    )
    if dry_run or prepare_only:
        (_show_dry_run if dry_run else _prepare_only)(job, present, show_config=show_config)
        return
    run_dir = None if config.run.dir is None else Path(config.run.dir).absolute()
    try:
        outcome, directory = _launch(job, console, requests, command_line=(overrides, recipes_dirs))
    except Preempted as request:
        outcome = early_stop_outcome(None if run_dir is None else RunFiles(run_dir), request)
        tell(outcome.message)
        _alert(outcome, run_dir, job)
        raise typer.Exit(outcome.exit_code) from None
    except CanzonaError as error:
        _alert(failed_outcome(str(error), error.exit_code), run_dir, job)
        raise
    _report_end(outcome, directory, job, console)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A resolved run on this node."""

    config: RunConfig
    layout: Layout
    plan: ObtainedPlan | None
    """The plan that the run executes; None for a strategy without a plan."""
    quiet_name: str = ""
    """The name of a quiet run in the line that is printed at its end; empty to print everything."""
    printed: set[str] | None = None
    """The warnings that have already been printed; None to print every warning."""

    @property
    def node_rank(self) -> int:
        """The rank of this node in the run, counted from 0."""
        return 0 if torchrun.node_count(self.config) == 1 else self.config.cluster.node_rank or 0

    @cached_property
    def predicted(self) -> Prediction:
        """The predicted time of a step."""
        return predict_here(self.config, self.layout, None if self.plan is None else self.plan.plan)

    def write_inputs(self, run: RunDirectory, corpus: PreparedCorpus) -> None:
        run.write_inputs(
            config_yaml=dump_resolved(self.config),
            layout=self.layout,
            corpus=corpus,
            command=torchrun.build(self.config, run.path),
            plan=None if self.plan is None else self.plan.plan.to_json(),
            predicted=self.predicted,
            routing=routing(self.config.setup),
        )


def _show_dry_run(job: _Job, present: Callable[[DryRun], None], *, show_config: bool) -> None:
    """Checks a run as far as this machine can, and prints it; starts nothing, and writes only caches."""
    config, layout = job.config, job.layout
    refuse(container_problems(config))
    check_free(config, resumes=True)
    checkpoint = choose_resumption(config, layout)
    samples = None if checkpoint is None else checkpoint.samples_needed(config, layout)
    saved = None if checkpoint is None else checkpoint.data
    corpus = check_inputs(config, layout, samples=samples, saved=saved, printed=job.printed)
    run_dir = Path(config.run.dir or f"{config.run.root}/{config.name}-{RUN_DIR_TIME}").absolute()
    present(_describe(job, corpus, run_dir, show_config=show_config, samples=samples))
    if preflight.needs_gpu_machine(config):
        unchecked = "no GPU is visible here, so this machine is not checked; run canzona doctor where you train"
        warn([unchecked], job.printed, kind="note")
    else:
        preflight.check_machine(config, layout)
    if checkpoint is not None:
        progress(f"note: without --dry-run, the run would {checkpoint.words}")
        if (save := _last_save(config)) is not None and (told := describe(save)) is not None:
            progress(f"note: this run {told.text}")
        _print_differences(checkpoint)
        known = corpus or _earlier_corpus(config)
        warn([] if known is None else data_changes(checkpoint, config, layout, known))


def _last_save(config: RunConfig) -> CheckpointEvent | None:
    """Returns the record of the last save in the run directory; None if there is none."""
    if config.run.dir is None:
        return None
    events = map(event_of, JsonLines(RunFiles(Path(config.run.dir)).events).read())
    return max((event for event in events if isinstance(event, CheckpointEvent)), key=attrgetter("step"), default=None)


def _check_tokenizer(checkpoint: Resumption | None, config: RunConfig, corpus: PreparedCorpus | None) -> None:
    """Refuses data with another tokenizer than that of the checkpoint, before anything is written."""
    if checkpoint is not None and corpus is not None:
        check_tokenizer(checkpoint.data, checkpoint.origin, config, corpus)


def _earlier_corpus(config: RunConfig) -> PreparedCorpus | None:
    """Returns the corpus of an earlier launch in the run directory; None without an earlier launch."""
    return None if config.run.dir is None else load_if_valid(RunFiles(Path(config.run.dir)).corpus, PreparedCorpus)


def _prepare_only(job: _Job, present: Callable[[DryRun], None], *, show_config: bool) -> None:
    """Writes everything that the workers need to the run directory, so that another launcher can start
    them."""
    config, layout = job.config, job.layout
    check_free(config, resumes=True)
    checkpoint = choose_resumption(config, layout)
    corpus = ensure_corpus(config, announce, saved=None if checkpoint is None else checkpoint.data)
    _check_tokenizer(checkpoint, config, corpus)
    run = RunDirectory.create(config, resumes=True)
    _import_weights(config, run)
    checkpoint = run.resume(config, layout)
    _print_resumption(run, checkpoint)
    warn([] if checkpoint is None else data_changes(checkpoint, config, layout, corpus))
    job.write_inputs(run, corpus)
    warn(data_warnings(config, layout, corpus, samples=_samples(run)))
    present(_describe(job, corpus, run.path, show_config=show_config, prepared=True, samples=_samples(run)))


def _samples(run: RunDirectory) -> int | None:
    """Returns the number of samples of a resumed run; None for a run that starts at its first step."""
    return None if run.earlier is None else run.earlier.samples


def _describe(
    job: _Job,
    corpus: PreparedCorpus | None,
    run_dir: Path,
    *,
    show_config: bool,
    prepared: bool = False,
    samples: int | None = None,
) -> DryRun:
    """Describes the resolved run and the command that starts it."""
    config = replace(job.config, run=replace(job.config.run, dir=str(run_dir))) if prepared else job.config
    return DryRun(
        config=config,
        config_yaml=dump_resolved(config) if show_config else None,
        layout=job.layout,
        corpus=corpus,
        plan=job.plan,
        outlook=outlook(config, job.layout, job.predicted.iteration_s),
        predicted=job.predicted,
        fast_paths=fast_paths(config.setup, job.layout, simulated=True),
        memory=memory_of(config.setup, job.layout, None if job.plan is None else job.plan.plan),
        command=torchrun.build(config, run_dir),
        card=card_of(config),
        prepared=prepared,
        samples=samples,
    )


def _launch(
    job: _Job, console: Console, requests: Requests, *, command_line: tuple[list[str], list[Path]]
) -> tuple[Outcome, RunDirectory]:
    """Checks the run, prepares data and run directory, and supervises the ranks of this node until they end.

    Args:
        command_line: the overrides and recipe folders on the command line, for the command that resumes the
            run.
    """
    config, layout, node_rank = job.config, job.layout, job.node_rank
    checkpoint = _check_before_launch(job)
    console.quiet = node_rank > 0  # node 0 shows the run; all nodes often write to the same file
    first_view = make_view(config, layout, console, short=job.quiet_name)
    with _show_progress(first_view, requests) as on_progress:
        corpus = ensure_corpus(config, on_progress, saved=None if checkpoint is None else checkpoint.data)
        _check_tokenizer(checkpoint, config, corpus)
        if node_rank == 0:
            run = RunDirectory.create(config, resumes=True)
            _import_weights(config, run)
        else:  # node 0 creates it, and the other nodes wait in it for node 0's address (`_prepare_attempt`)
            run = RunDirectory(RunFiles(Path(config.run.dir or "").absolute()))
        first_attempt = _prepare_attempt(run, job, corpus, restarts=0)
    if node_rank:
        machine = f"machine {node_rank} (of 0 to {torchrun.node_count(config) - 1})"
        tell(f"{machine} starts its ranks; machine 0 shows the run; run directory: {run.path}")
    per_node = torchrun.ranks_per_node(config)
    command_to_resume = resume_command(*command_line, config, run.path)
    restarts = Restarts(most=config.run.restarts)

    def attempt() -> Outcome:
        requests.raising = True
        view, (machines, command) = first_view, first_attempt
        if restarts.done:
            view = make_view(config, layout, console, short=job.quiet_name)
            machines, command = _prepare_attempt(run, job, corpus, restarts=restarts.done)
        if node_rank == 0:
            job.write_inputs(run, corpus)
            machines.gather(config.cluster.rdzv_endpoint or "", say=tell)
            warn(() if restarts.done else data_warnings(config, layout, corpus, samples=_samples(run)), job.printed)
        view.header(run_dir=run.path, corpus=corpus, plan=job.plan, earlier=run.earlier)
        requests.raising = False
        # On a terminal, the view's console prints above the live frame. On a pipe its output may be
        # invisible, so use standard error.
        say = console.print if console.is_terminal else tell
        trackers = () if node_rank else config.run.trackers
        start = 0 if run.earlier is None else run.earlier.step
        with run_trackers(run.files, trackers, start=start, environment=command.environment, say=say):
            return Supervision(
                run.files,
                command,
                view,
                ranks=range(node_rank * per_node, (node_rank + 1) * per_node),
                machines=machines,
                hang_timeout_s=config.run.hang_timeout_s,
                requests=requests,
                say=say,
                restarts=restarts,
                resume_command=command_to_resume,
            ).run()

    with run.record_failure(command_to_resume):
        return run_with_restarts(attempt, restarts, run.files, requests, node_rank=node_rank, say=tell), run


def _check_before_launch(job: _Job) -> Resumption | None:
    """Checks that a run can start here, before anything is written. Returns the checkpoint that node 0 would
    resume from; None without one, and on other nodes."""
    preflight.check_machine(job.config, job.layout)
    preflight.check_nodes(job.config)
    if job.node_rank == 0:
        check_free(job.config, resumes=True)
        return choose_resumption(job.config, job.layout)
    return None


@contextmanager
def _show_progress(view: TrainView, requests: Requests) -> Iterator[Callable[[str, float], None]]:
    """Shows the progress of preparations before the launch, and restores the terminal before an error is
    shown."""
    shown = False

    def on_progress(what: str, fraction: float) -> None:
        nonlocal shown
        shown = True
        view.progress(what, fraction)

    try:
        yield on_progress
    except KeyboardInterrupt as request:
        if shown:
            view.close("interrupted", "before training began")
        if shown and requests.reason == "interrupted":
            raise typer.Exit(ExitCode.INTERRUPTED) from request
        raise
    except Exception:
        if shown:
            view.close("failed", "before training began")
        raise


def _import_weights(config: RunConfig, run: RunDirectory) -> None:
    """Imports the weights of a Hugging Face folder as the checkpoint of step 0. Does nothing if the run does
    not start from such a folder or already has a checkpoint."""
    source = config.checkpoint.weights_from
    folder = expanded(source or "")
    saved = CheckpointStore(run.files.checkpoints).latest()
    if source is None or not is_hugging_face(folder) or saved is not None:
        return
    from canzona_cli.checkpoint.huggingface.weights import import_weights  # imports torch

    progress(f"note: importing the weights in {folder}")
    pretrained = open_folder(folder, key="checkpoint.weights_from")
    pretrained.check(config.model)
    if (warning := pretrained.length_warning(config.train.seq_length)) is not None:
        progress(f"warning: {warning}")
    import_weights(pretrained, config, run.files)


def _prepare_attempt(
    run: RunDirectory, job: _Job, corpus: PreparedCorpus, *, restarts: int
) -> tuple[Machines, LaunchCommand]:
    """Prepares an attempt: node 0 chooses the checkpoint to resume from, and the other nodes wait for the
    rendezvous address.

    Args:
        restarts: the number of restarts before this attempt.

    Returns:
        The connection to the other nodes, and the command that starts this node's ranks.
    """
    config = job.config
    nodes = torchrun.node_count(config)
    machines = Machines(run.files, node_rank=job.node_rank, nodes=nodes, restarts=restarts)
    if job.node_rank:
        config = replace(config, cluster=replace(config.cluster, rdzv_endpoint=machines.arrive()))
    else:
        checkpoint = run.resume(config, job.layout)
        _print_resumption(run, checkpoint)
        if checkpoint is not None:
            warn(data_changes(checkpoint, config, job.layout, corpus))
    return machines, torchrun.build(config, run.path)


def _print_resumption(run: RunDirectory, resumption: Resumption | None) -> None:
    """Prints what happens to the files of earlier launches, and how a resumed run differs from the saved
    run."""
    for note in run.notes:
        progress(f"note: {note}")
    if resumption is not None and resumption.weights_only:
        progress(f"note: {resumption.words}")
    if resumption is not None:
        _print_differences(resumption)


def _print_differences(resumption: Resumption) -> None:
    """Prints the settings, and the layout, that differ from the saved run."""
    warn(resumption.warnings)
    if resumption.spread:
        progress(f"note: different layout: {resumption.spread}")


def _report_end(outcome: Outcome, run: RunDirectory, job: _Job, console: Console) -> None:
    """Shows how the run ended, then exits if its exit code is not 0. An error while showing the end does not
    change the exit code."""
    why_not_requeued = note_failure(outcome)
    try:
        show_end(outcome, run, job.config, console, node_rank=job.node_rank, full=not job.quiet_name)
        if why_not_requeued and job.node_rank == 0:
            tell(why_not_requeued)
    except Exception as error:
        show_failure(error)
    _alert(outcome, run.path, job)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _alert(outcome: Outcome, run_dir: Path | None, job: _Job) -> None:
    if job.node_rank == 0:
        alert(outcome, run_dir, say=tell)


def show_end(
    outcome: Outcome, run: RunDirectory, config: RunConfig, console: Console, *, node_rank: int, full: bool
) -> None:
    """Shows how a run ended on this node.

    Args:
        full: True to show figures and further commands; False for a quiet run, which prints one line.
    """
    done = outcome.status == "done"
    if node_rank:  # node 0 reports everything else, and all nodes often write to the same file
        if outcome.exit_code:
            tell(f"machine {node_rank}: {outcome.message}")
        return
    if outcome.failed:
        _show_reason(outcome)
    elif full and run.files.breakdown.exists():
        console.print()
        console.print(BreakdownView(breakdown=load_breakdown(run.path), brief=True))
    rows = [] if outcome.failed else [*_profile_rows(run, config)]
    if done and full:
        rows += _card_rows(run, config)
    if full or rows or not done:
        console.print()
    if full or not done or config.run.dir is None:  # otherwise the user or a sweep chose the directory
        rows.append(f"run directory: {run.path}")
    if done and full:
        rows += _next_rows(run, config)
    for row in filter(None, [*rows, resume_hint(outcome, run.files, config)]):
        console.print(row, markup=False, soft_wrap=True)


def _card_rows(run: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Yields a line that compares the run with its recipe's card, if there is a card for these settings."""
    card = card_of(config)
    verdict = None if card is None else judge(card, load_summary(run.path), read_corpus(run.files))
    if verdict is not None:
        yield f"card: {verdict}"


def _next_rows(run: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Yields the most useful commands after a run."""
    path = shlex.quote(os.path.relpath(run.path))
    if CheckpointStore(run.files.checkpoints).latest() is not None and not foreign_problems(config.model):
        prompt = "'def main'" if config.data.source == "stdlib" else "TEXT"
        yield f"next: canzona generate {path} --prompt {prompt}"
    yield f"next: canzona report {path} --html run.html"


def _profile_rows(run: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Yields a line with the path of the profiler's traces, if they were requested, or the reason why there are
    none."""
    if config.run.profile_steps is not None:
        first_step = config.run.profile_steps[0]
        traces = f"{run.files.profile}/rank-N.json (open one in ui.perfetto.dev)"
        missing = f"no traces, because the run ended before step {first_step}"
        yield f"torch's profiler: {traces if run.files.profile.exists() else missing}"


def _show_reason(outcome: Outcome) -> None:
    """Shows the error of the rank that failed, then its traceback, then the path of its log."""
    show_failure(outcome.error())
    if outcome.traceback:
        tell("\n".join(("", *outcome.traceback)), "dim")
    if outcome.log is not None:
        source = "the launcher" if outcome.rank is None else f"rank {outcome.rank}"
        tell(f"\nfull output of {source}: {outcome.log}")
