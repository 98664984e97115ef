"""The training loop: steps, validations, records, a clean stop between two steps."""

import math
import time
from dataclasses import dataclass

from canzona_cli.errors import Problem, WorkerCrashed
from canzona_cli.launch.files import RunFiles
from canzona_cli.training.data import BatchStream, Datasets
from canzona_cli.training.profile import StepProfiler
from canzona_cli.training.records import Journal, RankRecord, StepMetrics
from canzona_cli.training.step import StepResult, Trainee, train_step, validate


class NonFiniteLoss(WorkerCrashed):
    """The loss is NaN or infinite; going on would only destroy the weights."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            Problem(
                key=f"step {step}",
                value=loss,
                reason="the loss is no longer a finite number",
                fix="lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of this step",
            )
        )


def train(trainee: Trainee, datasets: Datasets, files: RunFiles, journal: Journal, record: RankRecord) -> bool:
    """Run every step of the recipe.

    Returns:
        Whether all steps were done; False when somebody asked the run to stop.

    Raises:
        NonFiniteLoss: on every rank together.
    """
    settings, world = trainee.config.train, trainee.world
    journal.stage("train", f"{settings.steps} steps")
    _validate(trainee, datasets, journal, step=0)
    batches = BatchStream(datasets.train, world)
    if trainee.config.run.trace_steps is not None:
        trainee.timer.keep(*trainee.config.run.trace_steps)
    profiler = StepProfiler(files, world, trainee.timer, trainee.config.run.profile_steps)

    def stop_requested() -> bool:
        return world.rank == 0 and files.stop_requested()

    totals = Totals()
    for step in range(1, settings.steps + 1):
        profiler.before(step)
        started = time.perf_counter()
        result = train_step(trainee, batches, stop_requested=stop_requested)
        elapsed = time.perf_counter() - started
        totals.add(result)
        record.step, record.loss = step, result.loss
        finished = step == settings.steps
        profiler.after(step, final=finished or result.stop)
        # A skipped step changed nothing, whatever its loss was.
        if not math.isfinite(result.loss) and not result.skipped:
            journal.step(step_metrics(trainee, step, result, elapsed, totals))
            raise NonFiniteLoss(step, result.loss)
        if step % trainee.config.run.log_interval == 0 or finished or result.stop:
            journal.step(step_metrics(trainee, step, result, elapsed, totals))
        if result.stop and not finished:
            # At once: whoever asked is waiting, and a validation may take as long as many steps.
            return False
        if finished or (settings.eval_interval and step % settings.eval_interval == 0):
            _validate(trainee, datasets, journal, step=step)
    return True


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


@dataclass
class Totals:
    """Counts over the run so far."""

    skipped: int = 0
    fallbacks: int = 0

    def add(self, result: StepResult) -> None:
        self.skipped += result.skipped
        self.fallbacks += result.fallbacks


def step_metrics(trainee: Trainee, step: int, result: StepResult, elapsed: float, totals: Totals) -> StepMetrics:
    """The metrics line of a step that took `elapsed` seconds."""
    tokens = trainee.world.layout.global_batch_size * trainee.config.train.seq_length
    return StepMetrics(
        step=step,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        tokens_per_s=tokens / elapsed,
        step_s=elapsed,
        tokens=step * tokens,
        skipped=totals.skipped,
        fallbacks=totals.fallbacks,
    )
