"""Ranks of one machine that do something other than a training run, in a run directory of their own. No torch."""

from collections.abc import Callable
from dataclasses import replace

from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import CanzonaError
from canzona_cli.launch import torchrun
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.launch.supervisor import STOP_GRACE_S, Supervision
from canzona_cli.launch.view import TrainView
from canzona_cli.run.corpus import PreparedCorpus
from canzona_cli.run.files import RunFiles


def run_ranks(
    config: RunConfig,
    layout: Layout,
    corpus: PreparedCorpus,
    *,
    module: str,
    view: TrainView,
    say: Callable[[str], None],
    write_more: Callable[[RunFiles], None] = lambda files: None,
    grace_s: float = STOP_GRACE_S,
    hang_timeout_s: float | None = None,
) -> RunFiles:
    """Launch them and wait for their end; what they left.

    Args:
        config: resolved; `run.dir`, or a new directory under `run.root`, is theirs.
        module: what each rank runs.
        write_more: of what the ranks read, beside configuration, layout and corpus.
        grace_s, hang_timeout_s: as in `Supervision`.

    Raises:
        KeyboardInterrupt: somebody stopped it.
        CanzonaError: the directory is taken or cannot be written; or a rank failed: the error that it ended with.
    """
    run = RunDirectory.create(config)
    command = torchrun.build(config, run.path, module=module)
    with run.never_without_result():
        run.write_inputs(config_yaml=dump_resolved(config), layout=layout, corpus=corpus, command=command)
        write_more(run.files)
        outcome = Supervision(
            run.files,
            command,
            view,
            ranks=range(config.gpus),
            say=say,
            grace_s=grace_s,
            hang_timeout_s=hang_timeout_s,
        ).run()
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    if outcome.failed:
        raise _failure(outcome)
    return run.files


def _failure(outcome: Outcome) -> CanzonaError:
    """The error of the rank that failed, with its traceback and the path of its log."""
    error = outcome.error()
    first, *others = error.problems
    log = "" if outcome.log is None else f"its whole output: {outcome.log}"
    named = replace(first, reason="\n".join([first.reason, *outcome.traceback]), fix=first.fix or log)
    return type(error)(named, *others)
