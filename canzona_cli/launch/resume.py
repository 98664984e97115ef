"""Chooses the checkpoint that a launch resumes from, and moves the files of earlier launches away. This
module does not import torch.

The checkpoint is chosen before anything is moved, written or started. Only the headers of big files are read
here: the workers hash these files together, once, before they open any.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.checkpoint.contents import as_checkpoint_errors, saved_data, saved_run
from canzona_cli.checkpoint.huggingface.folder import is_hugging_face, open_folder
from canzona_cli.checkpoint.manifest import BEGINNING, NO_OPTIMIZER, Progress, step_name, step_of
from canzona_cli.checkpoint.store import CheckpointStore, resolve
from canzona_cli.config.changes import changes, shape_problems
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, Problem, problem_with, refuse
from canzona_cli.core.model.families import family_problems
from canzona_cli.core.reading import Unreadable, expanded, read_plain
from canzona_cli.core.setup import Layout
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.codec import load_if_valid, read_lines
from canzona_cli.records.corpus import DataPlan, samples_needed
from canzona_cli.records.files import RunFiles, json_object
from canzona_cli.records.records import ResumePoint, RunResult, ValidationLoss, read_layout
from canzona_cli.records.words import layout_words

_KEY = "checkpoint.resume"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The checkpoint that a run starts from, with all of its state or only with its weights; or a Hugging Face
    folder, of which a run takes only the weights."""

    checkpoint: Path
    progress: Progress
    created: float
    """The time at which the checkpoint was saved, in seconds since 1970."""
    of_this_run: bool
    """True if the checkpoint is in this run directory; otherwise a new run starts from another run's
    checkpoint or from a Hugging Face folder."""
    saved: RunConfig | None = None
    """The settings of the saved run; None with only weights."""
    batch_before: int = 0
    """The global batch size of the saved run; not used with only weights."""
    data: DataPlan | None = None
    """The data of the saved run; None if the checkpoint does not describe it."""
    warnings: tuple[str, ...] = ()
    """The warnings for the user, such as changed settings that affect the loss curve from here on."""
    weights_only: bool = False
    """True if the run starts at its first step and takes only the weights of the checkpoint."""
    spread: str = ""
    """The changes in layout and distribution since the checkpoint; empty if there are none."""

    @property
    def origin(self) -> str:
        """The checkpoint as shown to the user: its name, or the path of another run's checkpoint."""
        return self.checkpoint.name if self.of_this_run else str(self.checkpoint)

    @property
    def words(self) -> str:
        """The start of the run as text: `continue from step 30 (step-00000030)`."""
        # `canzona checkpoint import` saves the weights as step 0 of the run.
        if self.weights_only and self.of_this_run and step_of(self.checkpoint.name) == 0:
            return f"start at step 1 with the imported weights ({self.origin})"
        if self.weights_only:
            return f"start at step 1 with the weights of {self.origin}"
        return f"continue from step {self.step:,} ({self.origin})"

    @property
    def step(self) -> int:
        return self.progress.step

    def samples_needed(self, config: RunConfig, layout: Layout) -> int:
        """Returns the number of samples that the run reads in all its steps."""
        done = self.progress
        return samples_needed(config.train, layout.global_batch_size, step=done.step, samples=done.samples)


def holds_run(files: RunFiles) -> bool:
    """Returns True if the directory has files of a run. Other files, such as a batch system's log, are
    ignored."""
    run_paths = (files.claim, files.config, files.result, files.metrics, files.ranks, files.logs, files.checkpoints)
    return any(path.exists() for path in run_paths)


def choose_resumption(config: RunConfig, layout: Layout, *, is_restart: bool = False) -> Resumption | None:
    """Chooses the checkpoint that a run starts from; returns None if there is none.

    Args:
        config: the resolved configuration.
        is_restart: True if this is a restart by the same launch.

    Raises:
        ConfigError: the run directory holds a finished run; two settings name different starts; or the
            checkpoint does not exist, or does not fit the model, the optimizer, the steps or the batch.
        CheckpointInvalid: the manifest, or the sizes and headers of the files, show that the checkpoint is
            damaged or does not match its model.
    """
    if config.checkpoint.weights_from is not None and config.checkpoint.resume != "auto":
        reason = f"checkpoint.resume={config.checkpoint.resume} already says what the run starts from"
        raise ConfigError(problem_with(config, "checkpoint.weights_from", reason, "leave one of them out"))
    files = RunFiles(Path(config.run.dir).absolute()) if config.run.dir is not None else None
    has_run = files is not None and holds_run(files)
    request = config.checkpoint.resume
    if files is not None and has_run:
        _refuse_finished(files, config)
        request = _unless_diverged(files, _unless_repeated(files, request, is_restart=is_restart))
    checkpoints = files.checkpoints if files is not None else Path(config.run.root) / "checkpoints"
    checkpoint = resolve(checkpoints, request) if files is not None or request != "auto" else None
    if checkpoint is None:
        return None if config.checkpoint.weights_from is None else _from_weights(config)
    of_this_run = files is not None and checkpoint.parent.resolve() == files.checkpoints.resolve()
    if has_run and not of_this_run and files is not None and CheckpointStore(files.checkpoints).latest() is not None:
        reason = f"belongs to another run, but {files.root} already has its own checkpoints"
        fix = "run.dir=DIR for a new run, or checkpoint.resume=auto to continue this one"
        raise ConfigError(Problem(_KEY, reason, fix, value=request))
    return _from_checkpoint(config, layout, checkpoint, of_this_run=of_this_run)


def _from_weights(config: RunConfig) -> Resumption:
    """Returns a resumption from only the weights in `checkpoint.weights_from`, which is another run's
    checkpoint or a Hugging Face folder."""
    key = "checkpoint.weights_from"
    path = expanded(str(config.checkpoint.weights_from)).absolute()
    if is_hugging_face(path):
        pretrained = open_folder(path, key=key)
        pretrained.check(config.model)
        # The tokenizer of prepared data is compared once the data is read.
        if config.data.source == "stdlib" and not pretrained.knows_ids_of(config.data.tokenizer):
            reason = f"the weights in {path} were trained on ids of its tokenizer.json: the same id means other text"
            fix = f"leave it out, or data.tokenizer={path}"
            raise ConfigError(problem_with(config, "data.tokenizer", reason, fix))
        return _first_step(config, path, created=path.stat().st_mtime, tokenizer="")
    checkpoint = resolve(path, str(path), key=key)
    assert checkpoint is not None  # only `auto` may give None
    return _from_weights_of(config, checkpoint)


def _from_weights_of(config: RunConfig, checkpoint: Path) -> Resumption:
    """Returns a resumption from only the weights of a checkpoint; the two models must have the same
    shapes."""
    manifest, saved = saved_run(checkpoint)
    source = str(checkpoint)
    refuse([*family_problems(saved.model, config.model, source), *shape_problems(saved, config, source)])
    start = _first_step(config, checkpoint, created=manifest.created, tokenizer=saved.data.tokenizer)
    return replace(start, data=saved_data(checkpoint, manifest))


def _first_step(config: RunConfig, weights: Path, *, created: float, tokenizer: str) -> Resumption:
    """Returns a resumption that starts at the first step, from existing weights.

    Args:
        tokenizer: the tokenizer that the weights were trained with; empty if it is unknown.
    """
    chosen = config.data.tokenizer
    comparable = config.data.source == "stdlib" and tokenizer != ""
    warning = f"data.tokenizer is {chosen}; the weights in {weights} were trained with the ids of {tokenizer}"
    return Resumption(
        checkpoint=weights,
        progress=BEGINNING,
        created=created,
        of_this_run=False,
        weights_only=True,
        warnings=(warning,) if comparable and tokenizer != chosen else (),
    )


def resume_point(files: RunFiles, resumption: Resumption, config: RunConfig) -> ResumePoint:
    """Returns the record that tells the workers where to resume. Call this after `set_aside`, which removes
    validations of later steps."""
    interval = config.train.eval_interval
    regular = interval > 0 and (resumption.step % interval == 0 or resumption.step == config.train.steps)
    due = regular or not resumption.of_this_run
    validations = read_lines(files.validation, ValidationLoss)[0]
    validation = next((line for line in validations if line.step == resumption.step), None)
    return ResumePoint(
        checkpoint=str(resumption.checkpoint),
        step=resumption.step,
        validate=due and validation is None,
        validation=validation,
        asked=config.checkpoint.resume,
        weights_only=resumption.weights_only,
    )


def next_free(path: Path) -> Path:
    """Returns the first free name next to `path`: RUN-2, RUN-3, ..."""
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _unless_repeated(files: RunFiles, request: str, *, is_restart: bool) -> str:
    """Returns the requested checkpoint, or `auto` if the previous launch had the same request and has saved a
    later step.

    A batch system starts a preempted job with its old command, which must not discard what the job did. A
    user who names a step wants to go back to that step, so such a request becomes `auto` only in a restart.
    """
    previous = load_if_valid(files.resume, ResumePoint)
    newest = CheckpointStore(files.checkpoints).latest()
    may_repeat = step_of(request) is None or is_restart or int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    if previous is not None and previous.asked == request and may_repeat and newest is not None:
        return "auto" if newest.step > previous.step else request
    return request


def _unless_diverged(files: RunFiles, request: str) -> str:
    """Returns the requested checkpoint. If that is `auto` and the run diverged, returns the last good
    checkpoint instead, because a later one would diverge again."""
    result = load_if_valid(files.result, RunResult)
    if request != "auto" or result is None or result.status != "diverged":
        return request
    return result.last_good or request


def finished_result(files: RunFiles, config: RunConfig) -> RunResult | None:
    """Returns the result of the run in a directory if all steps of `config` are done; otherwise None."""
    result = load_if_valid(files.result, RunResult)
    return result if result is not None and result.status == "done" and config.train.steps <= result.step else None


def _refuse_finished(files: RunFiles, config: RunConfig) -> None:
    result = finished_result(files, config)
    if result is None or step_of(config.checkpoint.resume) is not None:  # the user goes back to an earlier step
        return
    free_path = next_free(files.root)
    reason = f"the run in it has finished all {result.step:,} steps"
    fix = f"train.steps={2 * result.step} continues it; run.dir={free_path}, or no run.dir at all, starts another"
    raise ConfigError(Problem("run.dir", reason, fix, value=str(config.run.dir)))


def _from_checkpoint(config: RunConfig, layout: Layout, checkpoint: Path, *, of_this_run: bool) -> Resumption:
    """Returns a resumption with all of a checkpoint's state, or only its weights if it has no optimizer
    state.

    Raises:
        ConfigError: lists every setting with which the run cannot continue from the checkpoint.
    """
    manifest, saved = saved_run(checkpoint)
    if manifest.optimizer == NO_OPTIMIZER:
        return replace(_from_weights_of(config, checkpoint), of_this_run=of_this_run)
    progress = manifest.progress
    differences = changes(saved, config, step=progress.step)
    with as_checkpoint_errors(checkpoint):
        saved_layout = read_layout(checkpoint / "layout.json")
    layouts = [layout_words(each) for each in (saved_layout, layout)]
    problems = [*family_problems(saved.model, config.model, str(checkpoint)), *differences.problems]
    if progress.step > config.train.steps or (progress.step == config.train.steps and not of_this_run):
        reason = f"the checkpoint was saved at step {progress.step:,}, but the run ends at step {config.train.steps:,}"
        fix = f"train.steps={2 * progress.step}, or an earlier checkpoint: checkpoint.resume=NAME"
        problems.append(Problem("train.steps", reason, fix, value=config.train.steps))
    refuse(problems)
    warnings = [*differences.warnings]
    if progress.losses.excess > 0:
        reason = f"was saved while the loss was too high, from step {progress.losses.since:,} on: it may have diverged"
        warnings.append(f"{checkpoint.name} {reason}")
    return Resumption(
        # The final path: `set_aside` completes an interrupted replacement of a checkpoint, which renames its
        # folder.
        checkpoint=checkpoint.with_name(step_name(progress.step)) if of_this_run else checkpoint,
        progress=progress,
        created=manifest.created,
        of_this_run=of_this_run,
        saved=saved,
        batch_before=saved_layout.global_batch_size,
        data=saved_data(checkpoint, manifest),
        warnings=tuple(warnings),
        spread=", ".join([*([" -> ".join(layouts)] if layouts[0] != layouts[1] else []), *differences.spread]),
    )


def set_aside(files: RunFiles, resumption: Resumption | None) -> list[str]:
    """Moves the files of earlier launches into a new folder in `attempts`. The caller must hold the
    directory's lock.

    Args:
        resumption: the checkpoint of this directory that the launch resumes from. Checkpoints, metrics and
            events up to it stay; None moves all of them.

    Returns:
        Notes for the user, one per line.

    Raises:
        OSError: a file could not be moved; the files moved before it stay moved.
    """
    files.attempts.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in files.attempts.iterdir() if path.name.isdecimal()]
    folder = files.attempts / str(max(numbers, default=0) + 1)
    folder.mkdir()
    leftovers = (
        *(files.command, files.result, files.stop, files.resume, files.config, files.layout, files.plan),
        *(files.environment, files.routing, files.predicted, files.breakdown),
        *(files.timelines, files.profile, files.ranks, files.logs),
    )
    store = CheckpointStore(files.checkpoints)
    store.clear_partials()
    line_files = (files.metrics, files.validation, files.events)
    if resumption is None:
        had_steps = files.metrics.exists()
        for path in (*leftovers, *line_files, files.checkpoints):
            _move(path, folder)
        note = f"starts over: there was no checkpoint to continue from; the earlier files are in {folder}"
        return [note] if had_steps else []
    for path in leftovers:
        _move(path, folder)
    for path in line_files:
        _move_later_lines(path, folder, resumption)
    later_checkpoints = store.move_later(resumption.step, folder / "checkpoints")
    return [f"{', '.join(later_checkpoints)}: moved to {folder / 'checkpoints'}"] if later_checkpoints else []


def _move(path: Path, folder: Path) -> None:
    if os.path.lexists(path):
        os.rename(path, folder / path.name)


def _move_later_lines(path: Path, folder: Path, resumption: Resumption) -> None:
    """Moves the lines of a .jsonl file that come after the checkpoint, and incomplete lines, which a killed
    writer leaves."""
    try:
        text = read_plain(path, most=None).decode("utf-8", errors="replace")
    except Unreadable:
        return
    remaining: list[str] = []
    moved: list[str] = []
    for line in text.splitlines(keepends=True):
        value = json_object(line.encode())
        if value is not None and line.endswith("\n") and _precedes_checkpoint(value, resumption):
            remaining.append(line)
        else:
            moved.append(line)
    if moved:
        write_text_atomic(folder / path.name, "".join(moved))
        write_text_atomic(path, "".join(remaining))


def _precedes_checkpoint(line: Mapping[str, object], resumption: Resumption) -> bool:
    """Returns True if a line was written before the checkpoint was saved, judged by its step or, if it has
    none, by its time."""
    step, time = line.get("step"), line.get("time")
    if "step" in line:
        return isinstance(step, int) and step <= resumption.step
    return isinstance(time, int | float) and time <= resumption.created
