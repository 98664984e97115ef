"""The command that goes on with a run which ended early: what was typed, and the directory that the run got."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from canzona_cli.checkpoint.manifest import step_of
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.config.overrides import text_value
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import ExitCode
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.slurm import current_step
from canzona_cli.launch.slurm_job import quoted
from canzona_cli.launch.torchrun import node_count
from canzona_cli.run.files import RunFiles
from canzona_cli.run.machine import tool_output

_CHANGED_FIRST = (ExitCode.CONFIG, ExitCode.MEMORY, ExitCode.CHECKPOINT)
"""Exit codes of runs that would end the same way if started again unchanged."""


def command_again(
    overrides: Sequence[str],
    recipes_dirs: Sequence[Path],
    config: RunConfig,
    run_dir: Path,
    *,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """A line for a shell that starts this run again, in the directory it has.

    In a batch job of Slurm it submits another one with that job's limits, in an allocation it is a step's command.

    Args:
        overrides: as they were typed.
        config: resolved.
    """
    kept = [text for text in overrides if not _is_replaced(text)]
    folders = [word for folder in recipes_dirs for word in ("--recipes-dir", str(folder.absolute()))]
    words = [*_program(config, environment), *kept, f"run.dir={text_value(str(run_dir))}", *folders]
    return " ".join(quoted(word) for word in words)


def with_command(outcome: Outcome, command: str | None) -> Outcome:
    """The end of a run, and what to type if it goes on from there."""
    final = outcome.status == "done" or outcome.exit_code in _CHANGED_FIRST
    return replace(outcome, go_on=None if final else command)


def said(outcome: Outcome, files: RunFiles, config: RunConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The command as it is shown, with what to know of it; empty where there is none."""
    if outcome.go_on is None:
        return ""
    saved = CheckpointStore(files.checkpoints).latest() is not None
    words = "to go on" if saved else "nothing was saved; to start again in this directory"
    if outcome.status == "diverged":
        words += ", with what is said above added"
    if current_step(environment) is not None:
        words += ", unless Slurm queues this job again" if outcome.status == "preempted" else ""
    elif node_count(config) > 1:
        words += ", on every machine with its own cluster.node_rank"
    return f"{words}: {outcome.go_on}"


def _is_replaced(text: str) -> bool:
    """Returns True if an override says where to begin this once: a directory, or a checkpoint by its name in it."""
    key, _, value = (part.strip() for part in text.partition("="))
    return key == "run.dir" or (key == "checkpoint.resume" and step_of(value.strip("'\"")) is not None)


def _program(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    if current_step(environment) is None:
        yield from ("canzona", "train")
    elif environment.get("ENVIRONMENT") == "BATCH":
        # Of batch scripts alone, in all versions of Slurm, though no manual has it; what runs in the job inherits it.
        yield from ("canzona", "slurm", "--submit")
        limit = tool_output("squeue", "--noheader", "--format=%l", f"--jobs={environment['SLURM_JOB_ID']}") or ""
        if limit[:1].isdigit():  # it may be UNLIMITED
            yield f"--time={limit.strip()}"
        for name in ("partition", "account", "qos"):
            if value := environment.get(f"SLURM_JOB_{name.upper()}"):
                yield f"--{name}={value}"
    else:
        yield from ("srun", f"--nodes={node_count(config)}", "--ntasks-per-node=1", "canzona", "train")
