"""Shows the end of `canzona train`: figures, the reason for a failure, paths, and the next commands."""

import os
import shlex
from collections.abc import Iterator

from rich.console import Console

from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.cli.commands.output import tell
from canzona_cli.cli.views.errors import show_failure
from canzona_cli.cli.views.run import BreakdownView
from canzona_cli.config.schema import RunConfig
from canzona_cli.launch.card import card_of, judge
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.restarts import resume_hint
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.records.breakdown import load_breakdown
from canzona_cli.records.corpus import read_corpus
from canzona_cli.records.summary import load_summary


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
        yield f"card: {verdict.words}"


def _next_rows(run: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Yields the most useful commands after a run."""
    path = shlex.quote(os.path.relpath(run.path))
    if CheckpointStore(run.files.checkpoints).latest() is not None:
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
