"""`canzona train --sweep`: trains one run after another, each in a directory named after its values.

A task of a Slurm array trains only the run with the task's index.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import typer

from canzona_cli.cli.commands import train_run
from canzona_cli.cli.commands.output import show, tell
from canzona_cli.cli.views.errors import show_failure
from canzona_cli.cli.views.ranking import RankingView
from canzona_cli.cli.views.train_dry_run import DryRun, SweepDryRun
from canzona_cli.config.changes import curve_differences, value_text
from canzona_cli.config.compose import load_resolved
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.resolve import SweptRun, swept_runs
from canzona_cli.core.errors import CanzonaError, ConfigError, ExitCode, Problem, refuse, write_error
from canzona_cli.core.writing import Busy, exclusive_lock
from canzona_cli.launch.resume import finished_result, next_free
from canzona_cli.launch.slurm import SlurmStep, current_step
from canzona_cli.launch.stop import Requests
from canzona_cli.records.codec import load_if_valid, save
from canzona_cli.records.compare import load_runs
from canzona_cli.records.files import RunFiles, sweep_file, sweep_root
from canzona_cli.records.groups import rank
from canzona_cli.records.records import SweepPlan
from canzona_cli.records.summary import holds_run
from canzona_cli.records.words import plural

_STOPPED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
_ELSEWHERE = "choose another directory with run.dir=DIR"


def sweep(
    arguments: list[str],
    recipes_dirs: list[Path],
    requests: Requests,
    *,
    dry_run: bool,
    prepare_only: bool,
    show_config: bool,
) -> None:
    """Runs `canzona train --sweep`.

    Args:
        requests: the requests to stop that signals make. While no run trains, they raise exceptions.

    Raises:
        CanzonaError: a run cannot be composed; no run has been started.
        typer.Exit: a run failed or the sweep was stopped. The exit code is the largest exit code of the runs,
            or the exit code of the stop.
    """
    runs, step = swept_runs(arguments, recipes_dirs), current_step()
    root = _sweep_directory(runs, step)
    refuse(_other_settings(runs, root))
    planned = [run.combination.name for run in runs]
    if step is not None and step.array_task is not None:
        runs = (_run_of_task(runs, step.array_task),)
        tell(f"task {step.array_task} of the sweep: {runs[0].combination.words}")
    if dry_run or prepare_only:
        _describe_all(runs, root, recipes_dirs, requests, prepare_only=prepare_only, show_config=show_config)
        return
    with _alone(root, step):
        _write_plan(planned, root)
        if len(runs) > 1:
            compare = f"canzona report --compare {shlex.quote(str(root))}"
            tell(f"{len(runs)} runs in {root}; while they train: {compare}", "dim")
        code = _train_all(runs, root, recipes_dirs, requests)
    if len(runs) > 1:
        _summarise(root, stopped=code in _STOPPED)
    if code:
        raise typer.Exit(code)


def _describe_all(
    runs: Sequence[SweptRun],
    root: Path,
    recipes_dirs: list[Path],
    requests: Requests,
    *,
    prepare_only: bool,
    show_config: bool,
) -> None:
    """Checks the runs one after another without starting them, and shows them: in a table, or each with its command
    if the runs are prepared or `show_config` is True."""
    rows: dict[str, DryRun | None] = {}
    printed, in_full = set[str](), prepare_only or show_config
    try:
        for run in runs:
            name = run.combination.name
            if in_full:
                tell(f"\n{run.combination.words}", "bold")
            if finished_result(_files(run, root), run.config) is not None:
                rows[name] = None
                if in_full:
                    tell("is already finished")
                continue
            train_run.run(
                _run_overrides(run, root),
                recipes_dirs,
                requests,
                dry_run=not prepare_only,
                prepare_only=prepare_only,
                show_config=show_config,
                printed=printed,
                present=show if in_full else partial(rows.__setitem__, name),
            )
    finally:
        if not in_full and rows:
            show(SweepDryRun(root=root, runs=rows))


def _train_all(runs: Sequence[SweptRun], root: Path, recipes_dirs: list[Path], requests: Requests) -> int:
    """Trains the runs one after another until the sweep is stopped; a run that fails does not end the sweep,
    and finished runs are skipped. Returns the largest exit code, or that of the stop."""
    codes, printed = [int(ExitCode.OK)], set[str]()
    for number, run in enumerate(runs, 1):
        title = f"run {number} of {len(runs)}: {run.combination.words}"
        if finished_result(_files(run, root), run.config) is not None:
            tell(f"{title}: is already finished", "bold")
            continue
        codes.append(_train(_run_overrides(run, root), recipes_dirs, requests, title, printed))
        if codes[-1] in _STOPPED:
            return codes[-1]
    return max(codes)


def _train(overrides: list[str], recipes_dirs: list[Path], requests: Requests, name: str, printed: set[str]) -> int:
    """Trains one run, prints one line at its end, and returns its exit code.

    A request to stop that arrives too late for the run still stops the sweep; the exit code of the stop is
    then returned.
    """
    code = int(ExitCode.OK)
    try:
        requests.raising = True
        if requests.reason is None:  # otherwise a stop was requested between two runs
            train_run.run(overrides, recipes_dirs, requests, dry_run=False, quiet=True, name=name, printed=printed)
    except typer.Exit as end:
        code = end.exit_code
    except KeyboardInterrupt:
        pass
    except Exception as error:
        code = show_failure(error)
    requests.raising = False
    if requests.reason is None or code in _STOPPED:
        return code
    return int(ExitCode.PREEMPTED if requests.reason == "preempted" else ExitCode.INTERRUPTED)


def _summarise(root: Path, *, stopped: bool) -> None:
    """Shows the ranking of the sweep's runs, and the commands that resume and report the sweep."""
    typer.echo()
    if started := any(map(holds_run, root.glob("*"))):
        show(RankingView(ranking=rank(load_runs([root]))))
    if stopped:
        tell(f"stopped; the same command with run.dir={shlex.quote(str(root))} resumes each run")
    if started:
        tell(f"canzona report --compare {shlex.quote(str(root))}  shows this again; --html FILE.html writes a page")


def _other_settings(runs: Sequence[SweptRun], root: Path) -> Iterator[Problem]:
    """Yields a problem for each setting with which an earlier sweep in this directory trained the same runs
    differently."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    found = 0
    for run in runs:
        with suppress(CanzonaError, OSError):  # there is no run, or one that cannot be continued
            saved = load_resolved(_files(run, root).config)
            found += 1
            for key, (before, now) in curve_differences(saved, run.config).items():
                name = "optimizer" if key == "optimizer.name" else key
                cases.setdefault((name, value_text(before), value_text(now)), []).append(run.combination.name)
    for (key, before, now), names in cases.items():
        having = names[0] if len(names) == 1 else plural(len(names), "run")
        reason = f"is {before} in {having} of the earlier sweep in {root}; to go on there would mix runs with both"
        if 2 * len(names) >= found:
            fix = f"run.dir={text_value(str(next_free(root)))} for another sweep, or {key}={before} to go on"
        else:  # such as a run that was resumed with more steps
            them = "it" if len(names) == 1 else "them"
            fix = f"move {them} out of the directory, and the sweep trains {them} anew"
        yield Problem(key, reason, fix, value=now)


@contextmanager
def _alone(root: Path, step: SlurmStep | None) -> Iterator[None]:
    """Keeps other sweeps out of the directory during the block, but for tasks of an array, which train other runs.

    Raises:
        ConfigError: another sweep is running there.
        EnvironmentProblem: the directory cannot be written.
    """
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            if step is None or step.array_task is None:
                stack.enter_context(exclusive_lock(root / ".lock"))
        except Busy:
            fix = f"canzona report --compare {shlex.quote(str(root))} shows it; wait for it, or run.dir=DIR for another"
            raise ConfigError(Problem("run.dir", "another sweep is running there", fix, value=root)) from None
        except OSError as error:
            raise write_error("run.dir", root, error, fix=_ELSEWHERE) from None
        yield


def _write_plan(names: Sequence[str], root: Path) -> None:
    """Writes the names of a sweep's runs to its directory, after those that it already has.

    Raises:
        EnvironmentProblem: the directory cannot be written.
    """
    earlier = load_if_valid(sweep_file(root), SweepPlan)
    runs = dict.fromkeys((*(() if earlier is None else earlier.runs), *names))
    try:
        save(sweep_file(root), SweepPlan(runs=tuple(runs)))
    except OSError as error:
        raise write_error("run.dir", root, error, fix=_ELSEWHERE) from None


def _sweep_directory(runs: Sequence[SweptRun], step: SlurmStep | None) -> Path:
    """Returns the parent directory of the runs: run.dir, or a directory named after the Slurm job (requeued
    jobs keep their id), or a new directory named after the time."""
    settings = runs[0].config.run
    if settings.dir is not None:
        return Path(settings.dir).absolute()
    if step is not None:
        return sweep_root(settings.root, step.sweep).absolute()
    root = sweep_root(settings.root, time.strftime("%Y%m%d-%H%M%S")).absolute()
    return next_free(root) if root.exists() else root


def _files(run: SweptRun, root: Path) -> RunFiles:
    return RunFiles(root / run.combination.name)


def _run_overrides(run: SweptRun, root: Path) -> list[str]:
    others = [override for override in run.combination.overrides if key_of(override) != "run.dir"]
    return [*others, f"run.dir={text_value(str(_files(run, root).root))}"]


def _run_of_task(runs: Sequence[SweptRun], task: int) -> SweptRun:
    if task < len(runs):
        return runs[task]
    reason = f"the sweep has {plural(len(runs), 'run')}, for tasks 0 to {len(runs) - 1}"
    raise ConfigError(Problem(key="--array", value=task, reason=reason, fix=f"--array 0-{len(runs) - 1}"))
