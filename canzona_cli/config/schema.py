"""The settings of a run's data, checkpoints and directory, and the complete configuration.

The classes are plain frozen dataclasses, so other modules can use them without depending on Hydra.
`canzona_cli.config.compose` fills them in and reports all mistakes at once. The sections that the core uses are in
`canzona_cli.core.setup`.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from canzona_cli.core.fields import (
    CURVE,
    NOTHING,
    PLAN,
    SPREAD,
    Affects,
    Count,
    CountOrZero,
    Example,
    Positive,
    Ranks,
    Share,
)
from canzona_cli.core.setup import (
    ClusterConfig,
    EngineConfig,
    Execution,
    HashedOnce,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    Setup,
    TrainConfig,
)

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""The supported trackers, by the names of their packages."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The settings of the training data and its tokenizer."""

    AFFECTS: ClassVar[Affects] = CURVE

    source: Annotated[
        Literal["stdlib", "prepared"],
        "stdlib: the source code of the Python standard library, tokenised "
        "once and cached. prepared: the files of `path` or `blend`.",
    ]
    path: Annotated[str | None, "For prepared: the prefix of the .bin/.idx pair, without extension."] = None
    blend: Annotated[
        dict[str, Positive] | None,
        "For prepared, instead of path: the prefixes of several pairs, "
        "each with a weight that gives its relative share of the samples.",
        Example("'{data/code:0.7,data/web:0.3}'"),
    ] = field(default=None, hash=False)
    validation: Annotated[
        str | None,
        "For prepared: the prefix of another pair, on which the run is validated in place of held-out documents; all "
        "documents of path or blend are then trained on.",
    ] = None
    tokenizer: Annotated[
        str,
        "For stdlib: byte; bpe, learned from the corpus, with as many entries as the model's vocabulary, at most 16384;"
        " or the path of a Hugging Face tokenizer.json or its folder.",
    ] = "byte"
    validation_fraction: Annotated[
        Share, "Share of documents that are held out for validation, unless `validation` names a set."
    ] = 0.02

    @property
    def validation_set(self) -> str | None:
        """The prefix of the set on which the run is validated; None if it is validated on held-out documents."""
        return self.validation if self.source == "prepared" else None

    @property
    def held_out_share(self) -> float:
        """The share of the documents to train on that is held out for validation."""
        return 0.0 if self.validation_set else self.validation_fraction


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The settings for saving checkpoints and resuming from them."""

    AFFECTS: ClassVar[Affects] = NOTHING

    every_steps: Annotated[Count | None, "Steps between checkpoints; null: save only by time."] = None
    every_minutes: Annotated[Positive | None, "Minutes between checkpoints; null: save only by steps."] = 30.0
    at_end: Annotated[bool, "Also save after the last step. Preempted and interrupted runs are always saved."] = True
    asynchronous: Annotated[bool, "Write checkpoints while training continues; false: training waits."] = True
    keep: Annotated[Count, "Number of the newest checkpoints to keep."] = 3
    keep_every: Annotated[
        Count | None, "Also keep checkpoints at multiples of this number of steps; null: only the newest."
    ] = None
    resume: Annotated[
        str,
        "Checkpoint from which the run resumes. auto: the newest one in the run directory, or a start at step"
        " 1. Or a checkpoint's name there (step-00000030), or the path of a checkpoint or run directory.",
    ] = "auto"
    weights_from: Annotated[
        str | None,
        "A run directory, a checkpoint or a Hugging Face folder with the initial weights. The run starts at"
        " step 1 with new optimizer state. Short form: init=DIR. null: random weights.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings for the run directory, trackers, hang detection, restarts and profiles."""

    AFFECTS: ClassVar[Affects] = NOTHING

    dir: Annotated[
        str | None, "The run directory; null: `<root>/<recipe>-<time>`, in Slurm `<root>/<recipe>-<job>`."
    ] = None
    root: Annotated[str, "Folder in which run directories are created if `dir` is null."] = "runs"
    trackers: Annotated[
        tuple[TrackerName, ...],
        "Trackers that also get the numbers in metrics.jsonl: tensorboard, wandb, mlflow. The trackers' own "
        "environment variables set the server and its key (WANDB_MODE, MLFLOW_TRACKING_URI, ...).",
        Example("[tensorboard,wandb,mlflow]"),
    ] = ()
    hang_timeout_s: Annotated[
        Positive | None,
        "Time that a rank may make no progress before the run ends and the stuck rank is reported; "
        "three times as long for start-up, loading, saving and the first step. null: no limit.",
    ] = 600.0
    restarts: Annotated[
        CountOrZero,
        "How many times one launch restarts a run whose workers crashed or hung. A run is not restarted if it"
        " failed twice in the same way at the same step, diverged, or failed because of a user's mistake.",
    ] = 0
    profile_steps: Annotated[
        tuple[Count, Count] | None,
        "First and last step to record with torch's profiler: on every rank if there are at most "
        "8, else on rank 0. The profiler slows these steps down, so the breakdown excludes them.",
        Example("[5,7]"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunConfig(HashedOnce):
    """The complete configuration of a run, as `canzona train` uses it."""

    name: Annotated[str, "The recipe's name.", NOTHING]
    gpus: Annotated[Ranks, "Total number of ranks: GPUs, or CPU processes with a CPU cluster profile.", SPREAD | PLAN]
    model: ModelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    engine: EngineConfig
    cluster: ClusterConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunSettings = field(default_factory=RunSettings)
    description: Annotated[str, "One line for `canzona recipes list`.", NOTHING] = ""

    __hash__ = HashedOnce.__hash__

    @cached_property
    def setup(self) -> Setup:
        """The sections of this configuration that the core uses."""
        return Setup(**{field.name: getattr(self, field.name) for field in fields(Setup)})

    @property
    def bpe_ids(self) -> int:
        """The number of ids of the byte-pair encoding that `data.tokenizer=bpe` learns from the built-in corpus."""
        return min(16384, self.model.vocab_size)

    @property
    def execution(self) -> Execution:
        """The way the run's updates are executed."""
        return self.setup.execution

    def with_setup(self, setup: Setup) -> Self:
        """Returns this configuration with the sections that the core uses replaced."""
        return replace(self, **{field.name: getattr(setup, field.name) for field in fields(setup)})
