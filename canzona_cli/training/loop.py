"""The training loop: steps, validations, records, a clean stop between two steps."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.engine.canzona_optimizer import NonFiniteGradients
from canzona_cli.errors import Problem, WorkerCrashed
from canzona_cli.megatron.trainee import Trainee
from canzona_cli.run.files import RunFiles
from canzona_cli.run.records import Ending, StepMetrics
from canzona_cli.training.data import BatchStream, Datasets
from canzona_cli.training.guards import LossSpike, SpikeGuard
from canzona_cli.training.profile import StepProfiler
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.requests import StopRequests
from canzona_cli.training.saving import Saver
from canzona_cli.training.step import StepResult, bad_losses, train_step, validate
from canzona_cli.training.stragglers import StragglerWatch


class NonFiniteLoss(WorkerCrashed):
    """The loss is NaN or infinite; going on would only destroy the weights."""

    def __init__(self, step: int, loss: float, ranks: Sequence[int] = ()) -> None:
        where = bad_losses(ranks)
        super().__init__(
            Problem(
                key=f"step {step}",
                value=loss,
                reason="the loss is no longer a finite number" + (f"; {where}" if where else ""),
                fix="lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of this step",
            )
        )


_BEGINNING = Progress(step=0, samples=0, tokens=0)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where this launch begins: before the first step, or behind a checkpoint's."""

    progress: Progress = _BEGINNING
    validate: bool = True
    """Whether the model is validated before anything else."""


def train(
    trainee: Trainee,
    datasets: Datasets,
    files: RunFiles,
    journal: Journal,
    record: RankRecord,
    *,
    start: Start | None = None,
    saver: Saver | None = None,
    requests: StopRequests | None = None,
) -> Ending:
    """Run the steps of the recipe that are left.

    Args:
        start: None for the first step.
        saver: None where nothing is saved.
        requests: what this rank is asked by signals.

    Returns:
        How it ended, the same on every rank; done when all steps were made.

    Raises:
        NonFiniteLoss: on every rank together.
        LossSpike: likewise, with train.loss_spike=stop.
        SaveFailed: on every rank together, when what the run ends with could not be saved.
    """
    start = start or Start()
    settings, world, progress = trainee.config.train, trainee.world, start.progress
    journal.stage("train", f"{settings.steps - progress.step} steps")
    if start.validate:
        _validate(trainee, datasets, journal, step=progress.step)
    batches = BatchStream(datasets.train, world, first_sample=progress.samples)
    if trainee.config.run.trace_steps is not None:
        trainee.timer.keep(*trainee.config.run.trace_steps)
    profiler = StepProfiler(files, world, trainee.timer, trainee.config.run.profile_steps)

    def stop_requested() -> bool:
        return (requests is not None and requests.preempted) or (world.rank == 0 and files.stop_requested())

    spikes = SpikeGuard(settings)
    stragglers = StragglerWatch(world, trainee.timer, journal)
    for step in range(progress.step + 1, settings.steps + 1):
        record.heart.step(step)
        profiler.before(step)
        started = time.perf_counter()
        try:
            result = train_step(
                trainee,
                batches,
                stop_requested=stop_requested,
                save_due=lambda step=step: saver is not None and world.rank == 0 and saver.due(step),  # type: ignore[misc]
            )
        except NonFiniteGradients as error:
            refused = StepResult(
                loss=math.nan if error.loss is None else error.loss,
                grad_norm=math.nan,
                lr=float(trainee.optimizer.param_groups[0]["lr"]),
                stop=False,
            )
            journal.step(
                step_metrics(trainee, advanced(trainee, progress, refused), refused, time.perf_counter() - started)
            )
            raise
        elapsed = time.perf_counter() - started
        progress = advanced(trainee, progress, result)
        record.step, record.loss = step, result.loss
        finished = step == settings.steps
        profiler.after(step, final=finished or result.stop)
        stragglers.after_step(step)
        # A skipped step changed nothing, whatever its loss was.
        if not math.isfinite(result.loss) and not result.skipped:
            journal.step(step_metrics(trainee, progress, result, elapsed))
            raise NonFiniteLoss(step, result.loss, result.bad_ranks)
        spike = None if result.skipped else spikes.notice(step, result.loss)
        if spike is not None:
            facts = {"step": step, "loss": spike.loss, "mean": spike.mean, "limit": spike.limit}
            journal.incident("loss_spike", detail=spike.words, level="warning", **facts)
            if settings.loss_spike == "stop":
                journal.step(step_metrics(trainee, progress, result, elapsed))
                raise LossSpike(spike, files.checkpoints)
        if step % trainee.config.run.log_interval == 0 or finished or result.stop:
            journal.step(step_metrics(trainee, progress, result, elapsed))
        if result.stop and not finished:
            # At once: whoever asked is waiting, and a validation may take as long as many steps.
            return _stop(trainee, files, journal, record, progress, saver, requests)
        saving = saver is not None and (result.save or (finished and trainee.config.checkpoint.at_end))
        if saver is not None and saving:
            record.heart.stage("save")  # it may wait for the one before
            saver.save(progress)
            record.heart.stage("train")
        if finished or (settings.eval_interval and step % settings.eval_interval == 0):
            _validate(trainee, datasets, journal, step=step)
        if saver is not None and saving and finished:
            journal.stage("save", f"step {step}")
            record.checkpoint = saver.wait(progress)
    if saver is not None:  # without a save at the end, one begun before it may still be on its way to the disk
        record.heart.stage("save")
        saver.settle()
    return "done"


def _stop(
    trainee: Trainee,
    files: RunFiles,
    journal: Journal,
    record: RankRecord,
    progress: Progress,
    saver: Saver | None,
    requests: StopRequests | None,
) -> Ending:
    """End between two steps, as somebody asked; saved where the run is saved at all."""
    if saver is not None:
        journal.stage("save", f"step {progress.step}")
        record.checkpoint = saver.save_now(progress)
    asked = requests is not None and requests.preempted
    preempted = torch.tensor([float(asked or files.stop_reason() == "preempted")], device=trainee.world.device)
    torch.distributed.all_reduce(preempted)
    return "preempted" if saver is not None and preempted.item() else "interrupted"


def _validate(trainee: Trainee, datasets: Datasets, journal: Journal, *, step: int) -> None:
    settings = trainee.config.train
    if datasets.validation is None:
        return
    journal.stage("validate", f"step {step}")
    # Always the same batches, so that two validations differ by the model alone.
    batches = BatchStream(datasets.validation, trainee.world)
    loss = validate(trainee, batches, global_batches=settings.eval_batches)
    journal.validation(step, loss)
    journal.stage("train", f"step {step}")


def advanced(trainee: Trainee, progress: Progress, result: StepResult) -> Progress:
    """How far a run has come one step later."""
    batch = trainee.world.layout.global_batch_size
    return Progress(
        step=progress.step + 1,
        samples=progress.samples + batch,
        tokens=progress.tokens + batch * trainee.config.train.seq_length,
        skipped=progress.skipped + result.skipped,
        fallbacks=progress.fallbacks + result.fallbacks,
    )


def step_metrics(trainee: Trainee, progress: Progress, result: StepResult, elapsed: float) -> StepMetrics:
    """The metrics line of the step that led to `progress` and took `elapsed` seconds."""
    tokens = trainee.world.layout.global_batch_size * trainee.config.train.seq_length
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        tokens_per_s=tokens / elapsed,
        step_s=elapsed,
        tokens=progress.tokens,
        skipped=progress.skipped,
        fallbacks=progress.fallbacks,
    )
