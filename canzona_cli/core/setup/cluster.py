"""The settings of the hardware: a profile with its rates, written by hand or by `canzona calibrate`, and the
nodes of a job."""

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from canzona_cli.core.fields import (
    NOTHING,
    PLAN,
    SPREAD,
    Affects,
    Bytes,
    Count,
    CountOrZero,
    Example,
    Factor,
    Finite,
    Fp8Recipe,
    NotNegative,
    Positive,
    Range,
    Ranks,
    Seconds,
    Side,
)

Device = Literal["cpu", "cuda"]
Collective = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]
FastPath = Literal["gram", "graphs", "fused", "shared"]
"""A faster way to run Muon's updates: the Gram form of the iteration, in fp16; CUDA graphs; weight decay and update
in one kernel after the Gram form; matrices that a TP group updates together."""


class HashedOnce:
    """A base class for frozen dataclasses that are cache keys. It computes their hash only once, because that
    is slow. Subclasses must set `__hash__ = HashedOnce.__hash__`; otherwise `dataclass` generates a different
    hash."""

    def __hash__(self) -> int:
        value: int | None = self.__dict__.get("_hash")
        if value is None:
            hashed = [field.name for field in fields(self) if field.hash is not False]  # type: ignore[arg-type]
            value = self.__dict__["_hash"] = hash(tuple(getattr(self, name) for name in hashed))
        return value


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(HashedOnce):
    """A hardware profile, and the nodes of a job.

    A plan file lists the values that the plan depends on, in the order of these fields.
    """

    AFFECTS: ClassVar[Affects] = PLAN

    # The upper limits are several times the figures of today's fastest devices: a larger value has a wrong unit.
    name: Annotated[str, "Name of the profile."]
    device: Annotated[Device, "The device on which a rank computes."]
    gpus_per_node: Annotated[Ranks, "Ranks on one node (GPUs, or CPU processes)."]
    memory_gib: Annotated[
        float, Range(at_least=1e-9, at_most=65_536), "Memory of one GPU, or of one CPU rank.", Example("80")
    ]
    reserved_gib: Annotated[NotNegative, "Part of memory_gib that the driver and the communication library take."]
    bf16_tflops: Annotated[
        float,
        Range(at_least=1e-9, at_most=20_000),
        "Peak rate of dense bf16 matmuls on one GPU; model FLOP utilisation is relative to it.",
        Example("989"),
    ]
    memory_gb_per_s: Annotated[
        float, Range(at_least=1e-9, at_most=100_000), "Memory bandwidth of one GPU.", Example("3350")
    ]
    intra_node_gb_per_s: Annotated[
        Positive, "Bandwidth from one GPU to its peers in the same node, in one direction.", Example("450")
    ]
    inter_node_gb_per_s: Annotated[Positive, "Bandwidth from one GPU to another node, in one direction.", Example("50")]
    headroom_gib: Annotated[
        NotNegative,
        "Memory that automatically chosen layouts and plans leave free if possible, in addition to reserved_gib,"
        " because no run has confirmed the planned memory on these GPUs. Layouts that you set may use it.",
    ] = 0.0
    transformer_engine: Annotated[
        bool | None,
        "Build layers with Transformer Engine (fused norms, sequence parallelism, flash attention). null: on a machine"
        " with GPUs, true if Transformer Engine is installed; on other machines, plans for GPUs assume true.",
    ] = None
    intra_node_latency_us: Annotated[
        NotNegative, "Time of one step of an intra-node collective with an empty message."
    ] = 10.0
    inter_node_latency_us: Annotated[
        NotNegative, "Time of one step of an inter-node collective with an empty message."
    ] = 20.0
    matmul_tflops: Annotated[
        tuple[tuple[Side, Positive], ...],
        "Measured rates of n by n bf16 matmuls, as pairs [n, rate] in ascending order of n; empty: estimated.",
        Example("[[2048,540],[8192,800]]"),
    ] = ()
    sustained_tflops: Annotated[
        Positive | None,
        "Highest rate of bf16 matmuls that the GPU sustains at its power limit; null: no limit on matmul_tflops.",
        Example("700"),
    ] = None
    fp8_recipes: Annotated[
        tuple[Fp8Recipe, ...],
        "Values of train.fp8 that Transformer Engine supports on these GPUs.",
        Example("[tensorwise,delayed]"),
        NOTHING,
    ] = ()
    bf16_in_fp32: Annotated[
        bool,
        "CPU ranks only: the processor has no bf16 instructions, so bf16 matmuls are computed in fp32. "
        "fp16 matmuls take as long, so optimizer.form=auto may then choose the Gram form, which needs fp16.",
    ] = False
    tp_overlap: Annotated[
        bool,
        "Simulate tensor-parallel collectives as overlapped with their matmuls, as Transformer Engine's user"
        " buffers do. canzona's own runs do not overlap them.",
    ] = False
    dispatch_overlap: Annotated[
        bool,
        "Simulate transfers of tokens to experts and back as overlapped with another micro-batch, as Megatron's"
        " overlap_moe_expert_parallel_comm does. canzona's own runs do not overlap them.",
    ] = False
    collective_units: Annotated[
        float,
        Range(at_least=0, at_most=0.5),
        "Share of a GPU's compute units that a collective takes from concurrent kernels if "
        "it uses all links of a node; proportionally less if it uses fewer network ports.",
    ] = 0.0
    speed_spread: Annotated[
        float,
        Range(at_least=0, at_most=0.1),
        "Relative standard deviation of the speed of GPUs; every step waits for the slowest.",
    ] = 0.0
    fp32_tflops: Annotated[
        Positive | None, "Rate of large fp32 matmuls; null: a sixteenth of the bf16 peak.", Example("50")
    ] = None
    tf32_tflops: Annotated[
        Positive | None,
        "Rate of large fp32 matmuls in TF32, which Shampoo and SOAP allow; null: fp32_tflops.",
        Example("400"),
    ] = None
    qr_tflops: Annotated[
        Positive | None,
        "Rate of the QR factorisation of a large fp32 matrix, without the latency of its columns on GPUs; null: a"
        " quarter of fp32_tflops.",
        Example("12"),
    ] = None
    eigh_tflops: Annotated[
        Positive | None,
        "Rate of the eigendecomposition of a large symmetric fp32 matrix, without the latency of its columns on GPUs;"
        " null: a twenty-fifth of fp32_tflops.",
        Example("2"),
    ] = None
    launch_us: Annotated[
        NotNegative, "Time in which the host launches one operation. A GPU runs earlier operations meanwhile."
    ] = 5.0
    graph_launch_us: Annotated[
        NotNegative, "Time of a kernel on a GPU besides its work, which is what a CUDA graph leaves of a launch."
    ] = 1.0
    verified: Annotated[
        tuple[FastPath, ...],
        "GPUs only: the fast paths that ran on these GPUs and agreed with their references. Plans choose no others on"
        " their own. `canzona doctor --gpu-check` and `canzona calibrate` find them out.",
        Example("[gram,graphs]"),
    ] = ()
    grouped_collectives: Annotated[
        bool,
        "Launch all reductions to the owners of a bucket (or broadcasts from them) as one NCCL group; false:"
        " one after another, each with its own latency. Workers on GPUs check this when they start.",
    ] = True
    measured_updates: Annotated[
        tuple[tuple[str, Side, Side, Seconds], ...],
        "Measured updates, used instead of the cost model: algorithm (soap, muon/standard/5), rows, columns, "
        "seconds. Names that start with megatron/ are Megatron's own implementation, which sc and layerwise run.",
        Example("[[muon/standard/5,4096,4096,0.004]]"),
    ] = ()
    adamw_ns: Annotated[
        Positive | None, "Measured time of AdamW per element; null: estimated from memory traffic.", Example("0.01")
    ] = None
    collectives: Annotated[
        tuple[tuple[str, Ranks, Bytes, Seconds, NotNegative], ...],
        "Measured intra-node collectives, used instead of bandwidth and latency: kind, ranks, bytes, seconds, and the "
        "processor cores that they kept busy (0 on GPUs). On CPU ranks, the seconds are the time that the collective "
        "adds to a loop of computation. Bytes count the entire buffer for all_reduce, all_gather and reduce_scatter, "
        "the message for reduce, broadcast and send (on GPUs, for reduce and broadcast, a bucket with one range per "
        "rank), and everything that the busiest rank sends for all_to_all.",
        Example("[[all_reduce,2,1048576,0.002,1.5]]"),
    ] = ()
    cores: Annotated[
        Count | None,
        "Processor cores that the ranks of one node share. null: no limit for GPU ranks; CPU ranks "
        "share the cores of the machine that starts the run. Changes predicted times, never a plan.",
        NOTHING,
    ] = None
    pass_factors: Annotated[
        tuple[Factor, Factor], "Measured time of forward and of backward passes, relative to the modelled time."
    ] = (1.0, 1.0)
    module_us: Annotated[
        tuple[NotNegative, NotNegative],
        "Measured fixed time of a module (the work around one weight) in the forward and in the backward pass.",
    ] = (0.0, 0.0)
    step_factors: Annotated[
        dict[str, Factor],
        "Measured time of each phase (norm_clip, exchange, matrix_update, adamw_update, grad_reduce, param_gather) in "
        "complete steps, relative to the sum of the phase's parts; megatron/PHASE for Megatron's own strategies.",
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    checkpoint_gb_per_s: Annotated[
        Positive | None,
        "Measured rate at which the ranks of one machine together write a checkpoint while no other machine does; null:"
        " not measured, so that dry runs do not say how long a save takes.",
        Example("1.5"),
        NOTHING,
    ] = None
    measured_on: Annotated[
        dict[str, str | int | Finite],
        "The machine that `canzona calibrate` measured, and the date; empty for a profile written by hand. not_measured"
        " names the parts that an interrupted calibration copied from the base profile.",
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    nodes: Annotated[Ranks | None, "Number of nodes; null: gpus / gpus_per_node, rounded up.", SPREAD] = None
    node_rank: Annotated[CountOrZero | None, "Rank of this node, from 0, if nodes are started by hand.", NOTHING] = None
    rdzv_endpoint: Annotated[
        str | None,
        "host:port that every node can reach; needed if nodes > 1, except in Slurm.",
        Example("node0:29500"),
        NOTHING,
    ] = None
    setup: Annotated[
        tuple[str, ...],
        "Shell lines that a Slurm job runs on its first node before the run; "
        "all nodes inherit the environment. A line that fails ends the job.",
        Example('["module load cuda","export NCCL_IB_HCA=mlx5"]'),
        NOTHING,
    ] = ()
    sbatch: Annotated[
        tuple[str, ...],
        "Options of sbatch for every job on this cluster; options of `canzona slurm` replace them.",
        Example('["--account=physics","--partition=large","--gres=gpu:h100:8"]'),
        NOTHING,
    ] = ()
    srun_args: Annotated[
        tuple[str, ...],
        "Additional srun options in a Slurm job, such as a container plugin's.",
        Example('["--container-image=/images/canzona.sqsh"]'),
        NOTHING,
    ] = ()
    command: Annotated[
        tuple[str, ...],
        "Command that starts canzona in a Slurm job; empty: the command that submitted the job.",
        Example('["apptainer","exec","--nv","canzona.sif","canzona"]'),
        NOTHING,
    ] = ()

    __hash__ = HashedOnce.__hash__

    @property
    def fused_layers(self) -> bool:
        """True if layers are built with Transformer Engine, which is assumed for GPUs if the setting is
        null."""
        return self.device == "cuda" if self.transformer_engine is None else self.transformer_engine

    def may_choose(self, path: FastPath) -> bool:
        """Returns True if plans and runs may choose a fast path that the user did not ask for by name: on GPUs, one
        that has been verified there; on CPUs, any."""
        return self.device == "cpu" or path in self.verified

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The parts that an interrupted calibration copied from its base profile."""
        return tuple(str(self.measured_on.get("not_measured", "")).split())

    @property
    def calibrated(self) -> bool:
        """True if `canzona calibrate` wrote this profile."""
        return bool(self.measured_on)
