"""The inputs of the core: what it may know of a run, and how the run's updates are executed."""

from dataclasses import dataclass
from enum import Enum

from canzona_cli.core.setup.cluster import ClusterConfig, HashedOnce
from canzona_cli.core.setup.sections import (
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)


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
class Setup(HashedOnce):
    """What the engine, its plans and the simulator may know of a run: sections of its settings, as they are in recipes.

    `RunConfig.setup` composes it. Nothing in it says where a run's data, checkpoints and records are.
    """

    name: str
    """The recipe's name."""
    gpus: int
    model: ModelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    engine: EngineConfig
    cluster: ClusterConfig
    parallel: ParallelConfig
    schedule: ScheduleConfig

    __hash__ = HashedOnce.__hash__

    @property
    def bucket_size_open(self) -> bool:
        """True if the size of buckets may be chosen: on GPUs, unless the user set `parallel.bucket_elements`."""
        return self.parallel.bucket_elements is None and self.cluster.device == "cuda"

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
