"""Runs the training loop: steps, validations, saves, records, and a clean stop between two steps."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from canzona_cli.checkpoint.contents import AVERAGE
from canzona_cli.checkpoint.manifest import BEGINNING, Progress
from canzona_cli.checkpoint.restore import publish_masters
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer, NonFiniteGradients
from canzona_cli.core.engine.masters import UpdatedMatrix
from canzona_cli.core.errors import Diverged, Problem
from canzona_cli.core.megatron.holdings import MasterRange, finish_gathering, megatron_masters
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import EMA, Ending, StepMetrics, ValidationLoss
from canzona_cli.records.words import plural
from canzona_cli.training.data import BatchStream, Datasets
from canzona_cli.training.guards import Divergence, DivergenceGuard
from canzona_cli.training.measure import StepProfiler, StragglerWatch
from canzona_cli.training.records import Journal, RankRecord
from canzona_cli.training.saving import Saver
from canzona_cli.training.step import StepResult, describe_bad_losses, step_rates, train_step, validate


class NonFiniteLoss(Diverged):
    """The error for a loss that is NaN or infinite. Another step would destroy the weights."""

    def __init__(self, step: int, loss: float, ranks: Sequence[int] = (), *, since: int | None = None) -> None:
        cause = describe_bad_losses(ranks)
        super().__init__(
            Problem(
                key=f"step {step}",
                value=loss,
                reason="the loss is no longer a finite number" + (f"; {cause}" if cause else ""),
                fix="a lower optimizer.lr or a longer schedule.warmup_steps; or look at the data of this step",
            ),
            since=step if since is None else since,
        )


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state from which this launch starts: the beginning of the run, or a checkpoint."""

    progress: Progress = BEGINNING
    validate: bool = True
    """True to validate the model before the first step."""
    validation: ValidationLoss | None = None
    """The validation that an earlier launch made after this step; None if it made none. The checkpoint does
    not contain it, because a checkpoint is saved before the validation of its step."""


@dataclass
class Training:
    """The training loop of one launch, with its progress."""

    config: RunConfig
    trainee: Trainee
    datasets: Datasets
    files: RunFiles
    journal: Journal
    record: RankRecord
    _: KW_ONLY
    start: Start = Start()
    saver: Saver | None = None
    """The writer of checkpoints; None if nothing is saved."""

    def __post_init__(self) -> None:
        self.progress = self.start.progress
        self._divergence = DivergenceGuard(self.trainee.setup.model.vocab_size, self.progress.losses)
        self._average = WeightAverage(self.trainee) if self.trainee.setup.train.ema else None
        self._ongoing: Divergence | None = None
        """The divergence that `check_recovered` checks; None if none was reported. A newly reported
        divergence replaces it only if the run has recovered from it, as it may with train.divergence=warn."""

    def run(self) -> Ending:
        """Runs the remaining steps, with validations and saves.

        Returns:
            The ending, the same on every rank: done after the last step, otherwise interrupted or preempted.

        Raises:
            NonFiniteLoss: on every rank together, if the loss is NaN or infinite.
            NonFiniteGradients: on every rank together, with train.non_finite=stop.
            Diverged: on every rank together, with train.divergence=stop.
            SaveFailed: on every rank together, if the run's final checkpoint could not be saved.
        """
        trainee, world, config = self.trainee, self.trainee.world, self.config
        first_step, last_step = self.progress.step + 1, config.train.steps
        self.journal.stage("train", plural(last_step - self.progress.step, "step"))
        if self.start.validate:
            self._validate()
        elif self.start.validation is not None:
            loss = self.start.validation.loss
            self._divergence.notice_validation(self.progress.step, math.nan if loss is None else loss, final=False)
            self._remember()  # not reported again: the launch that made the validation reported it
        batches = BatchStream(self.datasets.train, world, first_sample=self.progress.samples)
        trainee.timer.number_from(first_step)
        profiler = StepProfiler(self.files, world, trainee.timer, config.run.profile_steps)
        stragglers = StragglerWatch(world, trainee.timer, self.journal)
        with suspend_garbage_collection():
            for step in range(first_step, last_step + 1):
                self.record.watchdog.step()
                profiler.before_step(step)
                result, step_s = self._step(step, batches)
                finished = step == last_step
                profiler.after_step(step, final=finished or result.stop)
                stragglers.after_step(step)
                self.journal.step(step_metrics(trainee, self.progress, result, step_s))
                self._check(step, result)
                if result.stop and not finished:
                    # If a validation is due, it is skipped, because it may take as long as many steps.
                    return self._stop()
                self._save_and_validate(step, save=result.save, finished=finished)
                if step % STEPS_BETWEEN == 0:
                    gc.collect()
        # If the run does not save at its end, an earlier save may still be in progress.
        if self.saver is not None:
            self.record.watchdog.stage("save")
            self.saver.wait_until_written()
        return "done"

    def check_recovered(self) -> None:
        """Checks that a run with train.divergence=warn did not end in a divergence. Call it after the last
        step.

        Raises:
            Diverged: on every rank together, if the run has diverged and not recovered.
        """
        if self._ongoing is not None and self._divergence.persists(self._ongoing):
            raise self._ongoing.error(last_step=self.progress.step)

    def _step(self, step: int, batches: BatchStream) -> tuple[StepResult, float]:
        """Runs one step, updates the progress, and returns the step's result and its duration in seconds.

        Raises:
            NonFiniteGradients: with train.non_finite=stop, after the step's metrics have been written.
        """
        trainee = self.trainee
        started = time.perf_counter()
        try:
            result = train_step(
                trainee,
                batches,
                stop_requested=self._stop_requested,
                save_due=self._save_due,
            )
        except NonFiniteGradients as error:
            loss = math.nan if error.loss is None else error.loss
            lr, adamw_lr = step_rates(trainee)
            refused = StepResult(loss=loss, grad_norm=math.nan, lr=lr, adamw_lr=adamw_lr)
            progress = advance_progress(trainee, self.progress, refused)
            self.journal.step(step_metrics(trainee, progress, refused, time.perf_counter() - started))
            error.since = self._divergence.since or step
            raise
        if self._average is not None and not result.skipped:
            self._average.update()
        step_s = time.perf_counter() - started
        must_count = result.stop or result.save or step == trainee.setup.train.steps
        # Weights that are exchanged for their average must not need a repair.
        must_count |= self._average is not None and self._validation_due(step)
        if must_count and isinstance(trainee.optimizer, CanzonaOptimizer):
            # Fallbacks are normally counted in the next step. This launch may not have a next step, and a
            # checkpoint must include the fallbacks of its own step.
            result = replace(result, fallbacks=result.fallbacks + trainee.optimizer.repair_failed_updates())
        self.progress = advance_progress(trainee, self.progress, result)
        self.record.step, self.record.loss = step, result.loss
        return result, step_s

    def _stop_requested(self) -> bool:
        return self.record.preempted.is_set() or (self.trainee.world.rank == 0 and self.files.stop_requested())

    def _save_due(self) -> bool:
        return self.saver is not None and self.trainee.world.rank == 0 and self.saver.is_due(self.progress.step + 1)

    def _check(self, step: int, result: StepResult) -> None:
        """Checks the loss of a step, and reports a divergence.

        Raises:
            NonFiniteLoss: the loss is not finite.
            Diverged: the run has diverged, with train.divergence=stop.
        """
        # A skipped step changed nothing, so a loss that is not finite does no harm.
        if not result.skipped and not math.isfinite(result.loss):
            raise NonFiniteLoss(step, result.loss, result.bad_ranks, since=self._divergence.since)
        divergence = self._divergence.notice(step, None if result.skipped else result.loss)
        self._remember()
        if divergence is not None and self._report_divergence(divergence):
            raise divergence.error()

    def _report_divergence(self, divergence: Divergence) -> bool:
        """Reports a divergence. Returns True if the run must stop because of it, with
        train.divergence=stop."""
        facts = {"step": divergence.step, "since": divergence.since, "rule": divergence.rule}
        self.journal.incident("divergence", detail=divergence.words, level="warning", **facts)
        if self._ongoing is None or not self._divergence.persists(self._ongoing):
            self._ongoing = divergence
        return self.trainee.setup.train.divergence == "stop"

    def _remember(self) -> None:
        """Stores the losses that the guard remembers in the progress, which the next checkpoint saves."""
        self.progress = replace(self.progress, losses=self._divergence.memory)

    def _save_and_validate(self, step: int, *, save: bool, finished: bool) -> None:
        """Saves and validates, as far as these are due after a step. After the last step, waits until the checkpoint
        is complete."""
        config = self.config
        saver = self.saver if save or (finished and config.checkpoint.at_end) else None
        if saver is not None:
            self.record.watchdog.stage("save")  # it may have to wait for the previous save
            saver.save(self.progress)
            self.record.watchdog.stage("train")
        if finished or self._validation_due(step):
            self._validate()
        if saver is not None and finished:
            self.journal.stage("save", f"step {step}")
            self.record.checkpoint = saver.wait(self.progress)

    def _validation_due(self, step: int) -> bool:
        interval = self.config.train.eval_interval
        return interval > 0 and step % interval == 0

    def _stop(self) -> Ending:
        """Ends the run after a stop request: saves it, if it has a saver, and returns the ending.
        Collective."""
        if self.saver is not None:
            self.journal.stage("save", f"step {self.progress.step}")
            self.saver.save(self.progress)
            self.record.checkpoint = self.saver.wait(self.progress)
        is_preempted = float(self.record.preempted.is_set() or self.files.stop_reason() == "preempted")
        preempted = torch.full((1,), is_preempted, device=self.trainee.world.device)
        torch.distributed.all_reduce(preempted)
        return "preempted" if self.saver is not None and any(self.trainee.timer.read(preempted)) else "interrupted"

    def _validate(self) -> None:
        """Validates the model, if the run has validation data, and reports the loss. Collective.

        Raises:
            Diverged: the run has diverged, with train.divergence=stop.
        """
        step, settings = self.progress.step, self.trainee.setup.train
        if not self.datasets.validation:
            return
        self.journal.stage("validate", f"step {step}")
        loss, losses = self._validation_losses()
        if self._average is not None and self._average.begun:
            with self._average.in_place():
                losses[EMA], _ = self._validation_losses()
        self.journal.validation(step, loss, losses)
        divergence = self._divergence.notice_validation(step, loss, final=step == settings.steps)
        self._remember()
        if divergence is not None and self._report_divergence(divergence):
            raise divergence.error()
        self.journal.stage("train", f"step {step}")

    def _validation_losses(self) -> tuple[float, dict[str, float]]:
        """Returns the model's validation loss and, for a blend, the loss of each set by its name. Collective."""
        # Every validation uses the same samples, so that its loss depends only on the model.
        losses: dict[str, float] = {}
        for part in self.datasets.validation:
            batches = BatchStream(part.samples, self.trainee.world, count=part.count)
            losses[part.name] = validate(self.trainee, batches, samples=part.count)
        loss = sum(part.share * losses[part.name] for part in self.datasets.validation)
        return loss, losses if len(losses) > 1 else {}


def advance_progress(trainee: Trainee, progress: Progress, result: StepResult) -> Progress:
    """Returns the progress of the run after a step with this result."""
    train, step = trainee.setup.train, progress.step + 1
    batch = train.batch_at(trainee.world.layout.global_batch_size, step)
    return replace(
        progress,
        step=step,
        samples=progress.samples + batch,
        tokens=progress.tokens + batch * train.seq_length,
        skipped=progress.skipped + result.skipped,
        fallbacks=progress.fallbacks + result.fallbacks,
    )


def step_metrics(trainee: Trainee, progress: Progress, result: StepResult, step_s: float) -> StepMetrics:
    """Returns the metrics of a step.

    Args:
        progress: the progress after the step.
        step_s: the duration of the step, in seconds.
    """
    train = trainee.setup.train
    tokens = train.batch_at(trainee.world.layout.global_batch_size, progress.step) * train.seq_length
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        lr=result.lr,
        adamw_lr=result.adamw_lr,
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        tokens_per_s=tokens / step_s,
        step_s=step_s,
        tokens=progress.tokens,
        skipped=progress.skipped,
        fallbacks=progress.fallbacks,
        balancing_loss=None if result.routing is None else result.routing.balancing_loss,
        expert_load=None if result.routing is None else result.routing.load,
        captures=result.captures,
    )


STEPS_BETWEEN = 50
"""The number of steps between two garbage collections, which all ranks make after the same step. Reference
cycles are rare, and those in canzona's objects contain no tensors."""


@contextmanager
def suspend_garbage_collection() -> Iterator[None]:
    """Turns automatic garbage collection off inside the block. Even `gc.collect` then skips objects that were
    alive before the block."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class WeightAverage:
    """The exponential moving average of this rank's masters (`train.ema`). It begins as the weights after the first
    step that it sees. All ranks have to call all methods.

    The average of a master is a part of its optimizer's state, so it lies where the master does, is saved and loaded
    with the other state, and starts anew from the weight if that state is reset after an update that was not finite.
    """

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._items: list[MasterRange | UpdatedMatrix] = [*megatron_masters(trainee.optimizer, trainee.chunks)]
        if isinstance(trainee.optimizer, CanzonaOptimizer):
            matrices = trainee.optimizer.matrices
            self._items += [*matrices.whole, *matrices.fragments]
        self.begun = any(gather(any(AVERAGE in item.state for item in self._items), bool))
        """True once there is an average: after a step, or in a checkpoint."""
        if self.begun:
            self._begin()

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights to the average. Call this after each step that changed them."""
        known = [item for item in self._items if AVERAGE in item.state]
        if known:
            add = get_ema_multi_avg_fn(self._trainee.setup.train.ema)  # type: ignore[no-untyped-call]
            add([_average(item) for item in known], [item.master.detach() for item in known], 0)
        self._begin()
        self.begun = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the average in place of the weights inside the block."""
        finish_gathering(self._trainee.chunks)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _begin(self) -> None:
        """Begins the averages that are missing."""
        for item in self._items:
            if AVERAGE not in item.state:
                optimizer = item.inner if isinstance(item, MasterRange) else item.optimizer
                optimizer.state[item.master][AVERAGE] = item.master.detach().clone()

    @torch.no_grad()
    def _swap(self) -> None:
        for item in self._items:
            weight = item.master.clone()
            item.master.copy_(_average(item))
            _average(item).copy_(weight)
        publish_masters(self._trainee)


def _average(item: MasterRange | UpdatedMatrix) -> torch.Tensor:
    average = item.state[AVERAGE]
    assert isinstance(average, torch.Tensor)
    return average
