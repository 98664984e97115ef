"""The settings of the engine, checkpoints and run directory; the complete configuration; and the mesh and
layout of a run."""

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, ClassVar, Literal

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
    Precision,
    Range,
    Ranks,
)
from canzona_cli.core.setup.cluster import ClusterConfig, HashedOnce
from canzona_cli.core.setup.optimizer import OptimizerConfig
from canzona_cli.core.setup.training import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recompute,
    ScheduleConfig,
    TrainConfig,
)

Strategy = Literal["canzona", "paper", "asc", "layerwise", "sc"]
Splitting = Literal["fused", "qkv", "split", "per_head"]
Mode = Literal["hosted", "shared"]
"""The ways to update a matrix: as a whole on its host, or jointly by the TP group of its owner."""
Reduction = Literal["reduce", "ring"]
"""The ways to reduce a bucket's gradients to their owners: one reduction per owner, or a reduce-scatter in
equal parts, which are then sent on to their owners."""
Gathering = Literal["broadcast", "ring"]
"""The ways to gather a bucket's weights: one broadcast per owner, or an all-gather of equal parts, to which
the owners have sent their ranges."""

MuonTpMode = Literal["duplicated", "distributed", "layer_sharded"]
"""The ways in which Megatron's Muon divides exact updates over TP ranks: every rank gathers and updates the whole
matrix; every rank keeps its fragment, and a square is all-reduced in every Newton-Schulz step; or one TP rank
updates the whole matrix for all. Megatron-core 0.19 has the first two, Megatron-LM's main branch all three."""

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""The supported trackers, by the names of their packages."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings that decide which ranks update which matrices, and how."""

    AFFECTS: ClassVar[Affects] = SPREAD | PLAN

    strategy: Annotated[
        Strategy,
        "canzona, paper (the engine of arXiv 2602.06079) and asc execute a plan. layerwise is "
        "Megatron's layer-wise optimizer. sc: every rank updates every matrix, with Megatron's "
        "own Muon or, for other optimizers, canzona's engine. Has no effect with optimizer=adamw.",
    ]
    splitting: Annotated[
        Splitting,
        "Splitting of weights into matrices. fused: none; qkv: q, k and v (the finest for layerwise, and"
        " for sc with Muon); split: gate and up too; per_head: also each head of q, k and v.",
    ] = "split"
    alpha: Annotated[
        float,
        Range(at_least=0, at_most=1),
        "Quantity that paper balances over data-parallel ranks: 0: communication, 1: compute, in between: both.",
    ] = 1.0
    mode: Annotated[
        Literal["auto"] | Mode,
        "Ranks that update a matrix: hosted (only its host), shared (all TP ranks of its owner, if optimizer"
        " and matrix allow it), or auto (chosen for each matrix; on GPUs hosted unless cluster.verified has shared)."
        " paper and asc always use hosted.",
    ] = "auto"
    c_max_mib: Annotated[
        Positive | None, "Size limit of one rank's fused exchange; null: chosen automatically.", Example("64")
    ] = None
    reduction: Annotated[
        Reduction | None,
        "How gradients reach their owners, and weights return: reduce (a reduction and a broadcast per owner)"
        " or ring (a reduce-scatter and an all-gather of equal parts, exchanged with the owners). null: the"
        " faster one for each bucket.",
    ] = None
    plan: Annotated[
        str | None,
        "The plan file to execute; null: the newest file in ./plans that fits this run, or else a new plan.",
        NOTHING,
    ] = None
    exchange_dtype: Annotated[
        Precision,
        "Precision of gradients in messages between TP ranks; bf16 rounds them and halves the messages.",
        CURVE | PLAN,
    ] = "fp32"
    muon_tp_mode: Annotated[
        MuonTpMode,
        "How TP ranks divide the updates of Megatron's own Muon (layerwise, sc). duplicated: every rank updates the"
        " whole matrix; distributed: every rank its fragment, with an all-reduce in every Newton-Schulz step;"
        " layer_sharded: one rank for all. layer_sharded can only be simulated, because it is in Megatron-LM's main"
        " branch.",
        SPREAD,
    ] = "duplicated"

    @property
    def gradient_bytes(self) -> int:
        """The number of bytes per gradient element in a message between TP ranks."""
        return 2 if self.exchange_dtype == "bf16" else 4


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


class Execution(Enum):
    """The way a run's updates are executed: which ranks update each weight, and with which code."""

    PLANNED = "planned"
    """Strategies canzona, paper and asc: a plan gives each matrix an owner and a host, and canzona's engine
    executes the plan."""
    REDUNDANT = "redundant"
    """Strategy sc with canzona's engine, for optimizers other than Muon: every rank updates every matrix."""
    MEGATRON_SC = "megatron_sc"
    """Strategy sc with Megatron's own Muon: every rank updates every matrix."""
    LAYERWISE = "layerwise"
    """Megatron's `LayerWiseDistributedOptimizer`: each matrix has an owner among the data-parallel ranks, and
    every TP rank of the owner repeats its update."""
    ADAMW = "adamw"
    """Megatron's `DistributedOptimizer` updates every parameter element by element."""

    @property
    def ours(self) -> bool:
        """True if canzona's engine updates the matrices; False if Megatron's optimizer runs the entire
        step."""
        return self in (Execution.PLANNED, Execution.REDUNDANT)

    @property
    def has_owners(self) -> bool:
        """True if one data-parallel rank, the owner, updates each matrix."""
        return self in (Execution.PLANNED, Execution.LAYERWISE)

    @property
    def everywhere(self) -> bool:
        """True if every rank updates every parameter: optimizer state is not sharded, and parameters are not
        gathered."""
        return self in (Execution.REDUNDANT, Execution.MEGATRON_SC)


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

    @property
    def exchange_bytes(self) -> int:
        """The number of bytes per element in the larger of a micro-group's two messages, which C_max limits."""
        return max(self.train.weight_bytes, self.engine.gradient_bytes)

    @property
    def execution(self) -> Execution:
        """The way the run's updates are executed. With AdamW, `engine.strategy` has no effect."""
        if self.optimizer.name == "adamw":
            return Execution.ADAMW
        match self.engine.strategy:
            case "canzona" | "paper" | "asc":
                return Execution.PLANNED
            case "layerwise":
                return Execution.LAYERWISE
            case "sc":
                return Execution.MEGATRON_SC if self.optimizer.name == "muon" else Execution.REDUNDANT


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a job along each parallel axis: `gpus == tp * pp * cp * dp`. A plan is made for a mesh.

    Each rank of a stage is a cell: cell `owner * tp + host` is the owner-th data- and context-parallel rank
    and the host-th tensor-parallel rank.
    """

    tp: Ranks
    pp: Ranks
    vpp: Count = 1
    """The number of model chunks of each pipeline stage. Chunk c of stage s is part `c * pp + s` of the
    model, which has `pp * vpp` parts."""
    cp: Ranks
    dp: Ranks
    ep: Ranks = 1
    """The number of a pipeline stage's ranks among which a layer's experts are divided. Expert parallelism is
    not a separate axis: the rank in cell c has the experts of expert-parallel rank `c % ep`."""

    @property
    def owners(self) -> int:
        """The number of data- and context-parallel ranks. Gradients are reduced over these ranks, and a
        stage's matrices are divided among them."""
        return self.dp * self.cp

    @property
    def cells(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.owners * self.tp

    @property
    def expert_owners(self) -> int:
        """The number of ranks of a stage that have the same experts and reduce their gradients: the cells
        with the same `expert_rank`. `expert_owner` is the index of a cell among them."""
        return self.cells // self.ep

    def reducers(self, expert_rank: int | None) -> int:
        """Returns the number of ranks that reduce a matrix's gradients, one of which owns the matrix.

        Args:
            expert_rank: the matrix's `Matrix.expert_rank`.
        """
        return self.owners if expert_rank is None else self.expert_owners

    @property
    def expert_tp(self) -> int:
        """The number of parts into which TP cuts an expert's matrices; 1 if experts are divided among
        ranks."""
        return self.tp if self.ep == 1 else 1

    def expert_rank(self, cell: int) -> int:
        """Returns the expert-parallel rank of a cell, in Megatron's numbering."""
        return cell % self.ep

    def expert_cells(self, rank: int) -> range:
        """Returns the cells of a stage with an expert-parallel rank, in the order of `expert_owner`.

        Args:
            rank: the expert-parallel rank.
        """
        return range(rank, self.cells, self.ep)

    def expert_owner(self, cell: int) -> int:
        """Returns the index of a cell among the cells with the same experts."""
        return cell // self.ep

    @property
    def world_size(self) -> int:
        return self.cells * self.pp

    def rank(self, stage: int, cell: int) -> int:
        """Returns the global rank of a stage's cell in Megatron's order: tp innermost, then cp, dp, pp."""
        return stage * self.cells + cell


@dataclass(frozen=True, kw_only=True)
class Layout(Mesh):
    """A resolved layout of a job: the mesh, batch sizes and recomputation, without nulls."""

    micro_batch_size: Count
    """The number of sequences in a micro-batch."""
    num_microbatches: Count
    """The number of micro-batches in a step on one data-parallel rank (gradient accumulation)."""
    global_batch_size: Count
    """The number of sequences in a step: `dp * micro_batch_size * num_microbatches`."""
    recompute: Recompute
    sequence_parallel: bool

    @classmethod
    def plain(
        cls, *, pp: int = 1, vpp: int = 1, dp: int = 1, micro_batch_size: int = 1, num_microbatches: int = 1
    ) -> "Layout":
        """Returns a layout without tensor and context parallelism and without recomputation."""
        return cls(
            tp=1,
            pp=pp,
            vpp=vpp,
            cp=1,
            dp=dp,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            global_batch_size=dp * micro_batch_size * num_microbatches,
            recompute="none",
            sequence_parallel=False,
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh of this layout."""
        return Mesh(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp, ep=self.ep)

    @cached_property
    def bare(self) -> "Layout":
        """The layout reduced to its tensor-, pipeline-, data- and expert-parallel ranks and its model chunks.
        It is a cache key for results that depend only on these. Context-parallel ranks are counted as
        data-parallel ranks."""
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
        """The number of ranks along each axis, for display: (("TP", 2), ("DP", 4)). Axes with one rank are
        omitted, except DP."""
        axes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("DP", self.dp), ("EP", self.ep))
        return tuple((name, ranks) for name, ranks in axes if ranks > 1 or name == "DP")
