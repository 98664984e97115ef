"""A whole run: who updates the matrices, what is saved, where its files go, and all sections together."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from canzona_cli.config.schema.cluster import ClusterConfig
from canzona_cli.config.schema.optimizer import OptimizerConfig
from canzona_cli.config.schema.training import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recompute,
    ScheduleConfig,
    TrainConfig,
)
from canzona_cli.fields import (
    CURVE,
    NOTHING,
    PLAN,
    SPREAD,
    Count,
    CountOrZero,
    Example,
    Positive,
    Precision,
    Range,
    Ranks,
    Unit,
)

Strategy = Literal["canzona", "paper", "asc", "layerwise", "sc"]
BufferLayout = Literal["contiguous", "owner"]
Splitting = Literal["fused", "qkv", "split", "per_head"]
Grouping = Literal["greedy", "auto"]
Mode = Literal["hosted", "shared"]
"""The ways to update a matrix: whole by its host, or by the owner's TP group together."""
Reduction = Literal["reduce", "ring"]
"""The ways in which a bucket's gradients get to their owners: one reduction per owner, or a reduce-scatter of
the bucket in equal parts, which are then handed on to their owners."""
Gathering = Literal["broadcast", "ring"]
"""The ways in which a bucket's weights return: one broadcast per owner, or handed back and all-gathered."""

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""The trackers, by package."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of who updates the matrices."""

    strategy: Annotated[
        Strategy,
        "canzona, paper (the engine of arXiv 2602.06079) and asc execute a Plan; layerwise is Megatron's own; sc (each "
        "rank updates everything) is too with Muon, and is done by canzona's engine with other optimizers. AdamW alone "
        "needs none of them.",
        SPREAD | PLAN,
    ]
    layout: Annotated[
        BufferLayout,
        "Order of a bucket's parameters: contiguous (natural order, the paper's) or owner (by owner, uneven "
        "shards, no padding).",
        SPREAD | PLAN,
    ] = "owner"
    splitting: Annotated[
        Splitting,
        "What counts as one matrix. fused: weights as Megatron stores them; qkv: q, k and v apart (as far as sc "
        "and layerwise go); split: gate and up apart too; per_head: q, k and v by head, gate and up apart.",
        SPREAD | PLAN,
    ] = "split"
    alpha: Annotated[
        float,
        Range(at_least=0, at_most=1),
        "Balance over data-parallel ranks: 0 evens out communication, 1 compute, in between both.",
        SPREAD | PLAN,
    ] = 1.0
    grouping: Annotated[
        Grouping,
        "How micro-groups are cut: greedy with rollback (the paper's), auto (searched).",
        SPREAD | PLAN,
    ] = "auto"
    mode: Annotated[
        Literal["auto"] | Mode,
        "Who updates a matrix: hosted (its host, whole), shared (the owner's TP group together, wherever the optimizer "
        "and the matrix allow it), auto (by matrix, searched). paper, asc: hosted.",
        SPREAD | PLAN,
    ] = "auto"
    c_max_mib: Annotated[
        Positive | None, "Largest fused exchange of one rank; null: chosen.", Unit("MiB"), Example("64"), SPREAD | PLAN
    ] = None
    reduction: Annotated[
        Reduction | None,
        "How gradients get to their owners, and weights back: reduce (and broadcast) by owner, or one "
        "native collective of equal parts that are handed on to owners (ring). null: the faster for each bucket.",
        SPREAD | PLAN,
    ] = None
    plan: Annotated[
        str | None,
        "A plan file to execute, as `canzona plan` wrote it; null: the newest in ./plans for this very run, else a"
        " new plan. The same run is always planned the same.",
        NOTHING,
    ] = None
    exchange_dtype: Annotated[
        Precision,
        "Precision of gradients on their way between TP ranks; bf16 halves the exchange and rounds them.",
        CURVE | PLAN,
    ] = "fp32"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The settings of when a run is saved, what is kept of it, and what a run continues from."""

    every_steps: Annotated[Count | None, "Steps between two checkpoints; null: by time alone.", NOTHING] = None
    every_minutes: Annotated[Positive | None, "Minutes between two checkpoints; null: by steps alone.", NOTHING] = 30.0
    at_end: Annotated[bool, "Also after the last step. A preempted or interrupted run is always saved.", NOTHING] = True
    asynchronous: Annotated[bool, "Write while training continues; false: wait for the disk.", NOTHING] = True
    keep: Annotated[Count, "Newest checkpoints to keep.", NOTHING] = 3
    keep_every: Annotated[
        Count | None, "Keep checkpoints at multiples of this many steps for ever; null: only the newest.", NOTHING
    ] = None
    resume: Annotated[
        str,
        "auto: the newest checkpoint of the run directory, else from the start. Or the name of a checkpoint in it "
        "(step-00000030), or the path of a checkpoint or of another run's directory.",
        NOTHING,
    ] = "auto"
    weights_from: Annotated[
        str | None,
        "A run's directory, a checkpoint's path or a Hugging Face folder: the run begins at its first step with those "
        "weights, and with a new optimizer (another one, annealing); once it has saved, it continues from that. "
        "init=DIR is short for it. null: random weights.",
        NOTHING,
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of where a run leaves its files, and what it reports on the way."""

    dir: Annotated[str | None, "The run directory; null: `<root>/<recipe>-<time>`.", NOTHING] = None
    root: Annotated[str, "Folder in which runs without a directory of their own get one.", NOTHING] = "runs"
    trackers: Annotated[
        tuple[TrackerName, ...],
        "What takes the numbers of metrics.jsonl as well, of tensorboard, wandb and mlflow. Where they send them, and "
        "with which key, their own environment variables say (WANDB_MODE, MLFLOW_TRACKING_URI, ...).",
        Example("[tensorboard,wandb,mlflow]"),
        NOTHING,
    ] = ()
    hang_timeout_s: Annotated[
        Positive | None,
        "Time without progress on any rank after which the run is ended and the stuck rank is named; three times "
        "as long for start-up, loading, saving and the first step. null: never.",
        Unit("seconds"),
        NOTHING,
    ] = 600.0
    restarts: Annotated[
        CountOrZero,
        "How often one launch starts a run again whose workers crashed or hung, after 10 s, and 20 s, 40 s, ... while "
        "it gets no further; 0: never. Not what fails twice alike at one step, what diverged, nor a mistake.",
        NOTHING,
    ] = 0
    trace_steps: Annotated[
        tuple[Count, Count] | None,
        "First and last step whose timelines go into trace.json; null: no trace.json, and those of the last two "
        "steps are kept for `canzona report --trace`.",
        Example("[5,7]"),
        NOTHING,
    ] = None
    profile_steps: Annotated[
        tuple[Count, Count] | None,
        "First and last step to record with torch's profiler, on every rank of up to 8, else on rank 0; it slows "
        "those steps, which the breakdown leaves out.",
        Example("[5,7]"),
        NOTHING,
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything `canzona train` needs to know."""

    name: Annotated[str, "The recipe's name.", NOTHING]
    gpus: Annotated[Ranks, "Ranks in all (GPUs, or CPU processes on a CPU cluster profile).", SPREAD | PLAN]
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


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one job, which a plan is for; `gpus == tp * pp * cp * dp`."""

    tp: Ranks
    pp: Ranks
    vpp: Count = 1
    """Model chunks of each pipeline stage; chunk c of stage s has the layers of part `c * pp + s` of `pp * vpp`."""
    cp: Ranks
    dp: Ranks

    @property
    def owners(self) -> int:
        """Ranks that share out the matrices of a stage, for gradients are reduced over them: data and context
        parallel."""
        return self.dp * self.cp

    @property
    def cells(self) -> int:
        """Ranks of one stage."""
        return self.owners * self.tp

    @property
    def world_size(self) -> int:
        return self.cells * self.pp

    def rank(self, stage: int, cell: int) -> int:
        """Global rank of cell `owner * tp + host`, by Megatron's order: tp innermost, then cp, dp, pp."""
        return stage * self.cells + cell


@dataclass(frozen=True, kw_only=True)
class Layout(Mesh):
    """A resolved spread of one job over its ranks; all numbers concrete."""

    micro_batch_size: Count
    """Sequences."""
    num_microbatches: Count
    """Micro-batches of one step on one data-parallel rank (gradient accumulation)."""
    global_batch_size: Count
    """Sequences; `dp * micro_batch_size * num_microbatches`."""
    recompute: Recompute
    sequence_parallel: bool

    @property
    def mesh(self) -> Mesh:
        """The ranks alone."""
        return Mesh(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp)

    @cached_property
    def bare(self) -> "Layout":
        """Tensor, pipeline and data-parallel ranks, model chunks, and nothing else: what depends on these
        alone is the same for all layouts that have the same here, and computed once. Context-parallel ranks
        count as data-parallel ones."""
        return replace(
            self,
            cp=1,
            dp=self.owners,
            micro_batch_size=1,
            num_microbatches=1,
            global_batch_size=self.owners,
            recompute="none",
            sequence_parallel=False,
        )

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The ranks of each axis as a layout is written: (("TP", 2), ("DP", 4)).
        Only DP is named with one rank."""
        axes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("DP", self.dp))
        return tuple((name, ranks) for name, ranks in axes if ranks > 1 or name == "DP")
