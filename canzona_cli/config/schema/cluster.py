"""The hardware: a profile of its rates, by hand or by `canzona calibrate`,
and how many machines a job takes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from canzona_cli.fields import (
    NOTHING,
    PLAN,
    SPREAD,
    Bytes,
    Count,
    CountOrZero,
    Example,
    Factor,
    Finite,
    NotNegative,
    Positive,
    Range,
    Ranks,
    Seconds,
    Side,
    Unit,
)

Device = Literal["cpu", "cuda"]
Collective = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A hardware profile, and how many machines of it a job takes.

    The order of these fields is the order in which a plan lists what it was computed from.
    """

    name: Annotated[str, "Name of the profile.", PLAN]
    device: Annotated[Device, "What a rank computes on.", PLAN]
    gpus_per_node: Annotated[Ranks, "Ranks on one machine (GPUs, or CPU processes).", PLAN]
    memory_gib: Annotated[Positive, "Memory of one GPU, or of one CPU rank.", Unit("GiB"), Example("80"), PLAN]
    reserved_gib: Annotated[
        NotNegative,
        "The part of that memory that the driver, the communication library and the allocator's fragmentation take.",
        Unit("GiB"),
        PLAN,
    ]
    bf16_tflops: Annotated[
        Positive,
        "Dense bf16 matrix-multiply peak of one GPU, against which model FLOP utilisation is measured.",
        Unit("TFLOP/s"),
        Example("989"),
        PLAN,
    ]
    memory_gb_per_s: Annotated[
        Positive, "Memory bandwidth of one GPU.", Unit("GB/s (1e9 bytes)"), Example("3350"), PLAN
    ]
    intra_node_gb_per_s: Annotated[
        Positive, "One GPU to its peers inside a machine, one direction.", Unit("GB/s"), Example("450"), PLAN
    ]
    inter_node_gb_per_s: Annotated[
        Positive, "One GPU to another machine, one direction.", Unit("GB/s"), Example("50"), PLAN
    ]
    transformer_engine: Annotated[
        bool | None,
        "Build layers from Transformer Engine (fused norms, sequence parallelism, flash attention); null: where this"
        " machine has GPUs, whether it is installed here, and on any other machine a plan for GPUs assumes it.",
        PLAN,
    ] = None
    intra_node_latency_us: Annotated[
        NotNegative,
        "One step of a collective inside a machine: the time of a message without content.",
        Unit("microseconds"),
        PLAN,
    ] = 10.0
    inter_node_latency_us: Annotated[NotNegative, "The same between machines.", Unit("microseconds"), PLAN] = 20.0
    intra_node_channels: Annotated[
        Count,
        "Channels that NCCL runs in a group inside a machine. Each has a chunk of 512 KiB on its way in every hop of a"
        " reduction or broadcast, and filling that chain of ranks takes a chunk's time a hop besides the latency. On"
        " CPU ranks it means nothing.",
        PLAN,
    ] = 24
    # "24 coll channels" for eight H100, and 24 for the links of eight A100: NVIDIA/nccl issues 1259 and 652.
    inter_node_channels: Annotated[
        Count, "The same between machines, for each network port: one ring a port, and two channels a ring.", PLAN
    ] = 2
    # NVIDIA/nccl issue 1041; logs of two machines with eight H100 each say "16 coll channels".
    matmul_tflops: Annotated[
        tuple[tuple[Side, Positive], ...],
        "Rates that bf16 products of n by n matrices reach: pairs of n, ascending, and a rate; empty: guessed.",
        Unit("TFLOP/s"),
        Example("[[2048,540],[8192,800]]"),
        PLAN,
    ] = ()
    sustained_tflops: Annotated[
        Positive | None,
        "The most that bf16 products reach for longer than a second, when the GPU is at its power limit; null: "
        "matmul_tflops without a limit.",
        Unit("TFLOP/s"),
        Example("700"),
        PLAN,
    ] = None
    symmetric_factor: Annotated[
        float,
        Range(at_least=0.25, at_most=1),
        "Time of a bf16 product whose result is known to be symmetric over that of any other of its size, with the"
        " symmetric kernels that canzona finds on this machine; 1: there are none, 0.5: they are perfect.",
        Example("0.6"),
        PLAN,
    ] = 1.0
    bf16_in_fp32: Annotated[
        bool,
        "Of CPU ranks: the processor has no instructions for bf16, so that its products are made in fp32. fp16 takes as"
        " long there, and Newton-Schulz' Gram form, which optimizer.form=auto then may choose, has fp16 for bf16.",
        PLAN,
    ] = False
    tp_overlap: Annotated[
        bool,
        "Tensor-parallel collectives travel under the products they belong to, as Transformer Engine's user buffers do"
        " and published recipes of NVIDIA's ask for. canzona's own runs do not.",
        NOTHING,
    ] = False
    collective_units: Annotated[
        float,
        Range(at_least=0, at_most=0.5),
        "Share of a GPU's computing units that a collective takes away from what computes at the same time, where it"
        " goes through all links of a machine; through fewer network ports, proportionally less.",
        Example("0.12"),
        NOTHING,
    ] = 0.0
    speed_spread: Annotated[
        float,
        Range(at_least=0, at_most=0.1),
        "Standard deviation of the speed of GPUs of this kind, as a share of it: every step waits for the slowest.",
        Example("0.01"),
        NOTHING,
    ] = 0.0
    fp32_tflops: Annotated[
        Positive | None,
        "Rate that large fp32 products reach; null: a sixteenth of the bf16 peak.",
        Unit("TFLOP/s"),
        Example("50"),
        PLAN,
    ] = None
    tf32_tflops: Annotated[
        Positive | None,
        "The same where TF32 is allowed, as Shampoo and SOAP do; null: no TF32 units, so fp32_tflops.",
        Unit("TFLOP/s"),
        Example("400"),
        PLAN,
    ] = None
    qr_tflops: Annotated[
        Positive | None,
        "Rate that the QR factorisation of a large fp32 matrix reaches; null: a twentieth of fp32_tflops.",
        Unit("TFLOP/s"),
        Example("5"),
        PLAN,
    ] = None
    eigh_tflops: Annotated[
        Positive | None,
        "Rate that its symmetric eigendecomposition reaches; null: a hundredth of fp32_tflops.",
        Unit("TFLOP/s"),
        Example("2"),
        PLAN,
    ] = None
    launch_us: Annotated[NotNegative, "What launching one operation adds to its work.", Unit("microseconds"), PLAN] = (
        5.0
    )
    graph_launch_us: Annotated[
        NotNegative, "The same of an operation that is replayed in a CUDA graph.", Unit("microseconds"), PLAN
    ] = 1.0
    grouped_collectives: Annotated[
        bool,
        "Whether all reductions to (broadcasts from) the owners of a bucket go out as one launch, as those of an NCCL "
        "group do; false: one after another, each with its own latency. Workers on GPUs check it when they start.",
        PLAN,
    ] = True
    measured_updates: Annotated[
        tuple[tuple[str, Side, Side, Seconds], ...],
        "Measured updates, used instead of the cost model: algorithm (soap, muon/standard/5), rows, columns, "
        "seconds. A name that begins with megatron/ is Megatron's own implementation, which sc and layerwise run.",
        Example("[[muon/standard/5,4096,4096,0.004]]"),
        PLAN,
    ] = ()
    adamw_ns: Annotated[
        Positive | None,
        "Measured time of AdamW per element; null: from memory traffic.",
        Unit("nanoseconds"),
        Example("0.01"),
        PLAN,
    ] = None
    collectives: Annotated[
        tuple[tuple[str, Ranks, Bytes, Seconds, NotNegative], ...],
        "Measured collectives inside a machine, used instead of bandwidth and latency: kind, ranks, bytes, "
        "seconds, and the processor cores they kept busy meanwhile (0 on GPUs); on CPU ranks, what they add to ranks "
        "that compute between them. Bytes are those of the whole buffer for all_reduce, all_gather and "
        "reduce_scatter, of the message for reduce, broadcast and send (on GPUs, of a bucket of ranges, one to or from "
        "each rank, for reduce and broadcast), and of what the busiest rank sends to all others for all_to_all.",
        Example("[[all_reduce,2,1048576,0.002,1.5]]"),
        PLAN,
    ] = ()
    cores: Annotated[
        Count | None,
        "Processor cores that the ranks of one machine share; null: every rank has a device of its own or, where a"
        " run is started on CPU ranks, the cores of that machine. It changes predicted times, never a plan.",
        NOTHING,
    ] = None
    crowding: Annotated[
        Factor,
        "Time of steps whose ranks outnumber the cores, over the time that even shares of the cores would give: ranks"
        " that take turns on a core find its caches full of each other's data. Calibration measures such ranks as they"
        " are, and leaves this at 1.",
        NOTHING,
    ] = 1.0
    forward_factor: Annotated[Factor, "Measured time of forward passes over their modelled time.", NOTHING] = 1.0
    backward_factor: Annotated[Factor, "Measured time of backward passes over their modelled time.", NOTHING] = 1.0
    forward_module_us: Annotated[
        NotNegative,
        "Measured time of the forward pass of one weight's module that does not depend on how much it computes: what"
        " starting its operations takes.",
        Unit("microseconds"),
        NOTHING,
    ] = 0.0
    backward_module_us: Annotated[NotNegative, "The same of the backward pass.", Unit("microseconds"), NOTHING] = 0.0
    pass_us: Annotated[
        NotNegative,
        "What a micro-batch's pass through a model chunk, forward or backward, takes however few layers the chunk has:"
        " the schedule's own work on the host, and issuing a send and a receive.",
        Unit("microseconds"),
        NOTHING,
    ] = 150.0
    # Measured with Megatron-core 0.19 and gloo: 130 to 180 of the host's processor time (16 layers of width
    # 32 on 2 ranks, 8 chunks each against 2, 4 micro-batches, the least of 40 steps). The same code runs with
    # NCCL; how much of it a device that has work left hides was not measured, so all of it counts.
    step_factors: Annotated[
        dict[str, Factor],
        "Measured time of a phase in whole steps over the sum of its parts, by phase (norm_clip, exchange, "
        "matrix_update, adamw_update, grad_reduce, param_gather); megatron/PHASE for Megatron's own strategies.",
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    measured_on: Annotated[
        dict[str, str | int | Finite],
        "The machine `canzona calibrate` measured (processor, cores, torch, ...), and when; empty for a profile "
        "written by hand.",
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    not_measured: Annotated[
        tuple[str, ...],
        "Parts that an interrupted calibration did not reach and took from the profile it started from.",
        NOTHING,
    ] = ()
    nodes: Annotated[Ranks | None, "Machines; null: gpus / gpus_per_node, rounded up.", SPREAD] = None
    node_rank: Annotated[CountOrZero | None, "This machine's number when several are started by hand.", NOTHING] = None
    rdzv_endpoint: Annotated[
        str | None, "host:port that every machine can reach; needed when nodes > 1.", Example("node0:29500"), NOTHING
    ] = None
    rdzv_id: Annotated[str | None, "Name of the rendezvous, the same on all machines of a run.", NOTHING] = None

    @property
    def fused_layers(self) -> bool:
        """True if layers come from Transformer Engine; while that is still open, GPUs are assumed to have it."""
        return self.device == "cuda" if self.transformer_engine is None else self.transformer_engine

    @property
    def calibrated(self) -> bool:
        """True if its numbers were measured on a machine."""
        return bool(self.measured_on)
