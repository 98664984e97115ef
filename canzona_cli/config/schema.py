"""The typed schema of a run: what a recipe, its groups and the overrides come to.

Plain frozen dataclasses, so that every other module can use them without knowing how they were filled.
`canzona_cli.config.compose` fills them from Hydra and reports all mistakes at once. A field whose type admits
`None` is chosen by `canzona_cli.cluster.fit` unless the user sets it; every other field has its value after
composition.
"""

from dataclasses import dataclass, field
from typing import Literal

Strategy = Literal["canzona", "asc", "layerwise", "sc"]
OptimizerName = Literal["adamw", "muon", "shampoo", "soap", "custom"]
Precision = Literal["bf16", "fp32"]
Recompute = Literal["none", "selective", "full"]
Device = Literal["cpu", "cuda"]
BufferLayout = Literal["contiguous", "owner", "aligned"]
Splitting = Literal["fused", "qkv", "split", "per_head"]
Grouping = Literal["registration", "balanced", "greedy", "auto"]
Reduction = Literal["reduce", "all_to_all", "even"]
"""How a bucket's gradients get to their owners: one reduction per owner; all-to-all and a local fp32 sum; Megatron's
reduce-scatter of equal shards."""
Collective = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]
NonFinite = Literal["stop", "skip"]
LossSpike = Literal["ignore", "warn", "stop"]
DecayStyle = Literal["cosine", "wsd", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Qwen3 family (RMSNorm, QK-norm, SwiGLU, GQA, RoPE, no bias)."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (GQA groups)."""
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    """Whether the output layer shares the embedding's weight."""
    rope_base: float = 1_000_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    init_std: float = 0.02
    """Standard deviation of the initial weights; residual projections use `init_std / sqrt(2 * num_layers)`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model is spread over ranks. dp is what is left: `gpus / (tp * pp * cp)`."""

    tp: int | None = None
    """Tensor-parallel ranks; auto when null."""
    pp: int | None = None
    """Pipeline stages; auto when null."""
    cp: int = 1
    """Context-parallel ranks."""
    sequence_parallel: bool | None = None
    """Shard activations of norms over TP ranks; needs Transformer Engine. Auto when null: on with it and tp > 1."""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    bucket_elements: int | None = None
    """Elements in one gradient bucket; auto when null: Megatron's max(40M, 1M * dp)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The job: how long, on how much data a step, in which precision."""

    steps: int
    seq_length: int
    batch_tokens: int
    """Tokens of one optimizer step to aim for when `global_batch_size` is null."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step over all ranks; auto when null: the multiple of dp nearest to `batch_tokens`."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass on one data-parallel rank; auto when null."""
    recompute: Recompute | None = None
    """Activation recomputation: none, selective (core attention), full (whole layers); auto when null."""
    precision: Precision = "bf16"
    """bf16: bf16 weights with fp32 masters. fp32: everything in fp32."""
    grad_reduce_dtype: Precision = "fp32"
    """What data-parallel gradient reduction adds up in."""
    non_finite: NonFinite = "stop"
    """What NaN or infinite gradients do: stop all ranks before any weight changes, or skip that step (and count it)."""
    loss_spike: LossSpike = "warn"
    """What a sudden rise of the loss does: nothing, a warning, or a stop that leaves the last checkpoint as it is."""
    loss_spike_sigmas: float = 8.0
    """A rise counts when the loss is that many standard deviations above its recent mean."""
    seed: int = 1234
    eval_interval: int = 100
    """Steps between validations; 0 for none. Validation also runs before step 1 and after the last step."""
    eval_batches: int = 8
    """Global batches a validation reads."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, then a decay."""

    decay: DecayStyle = "cosine"
    warmup_steps: int | None = None
    """null: a twentieth of `decay_steps`, 2000 at most."""
    decay_steps: int | None = None
    """Step at which the rate has reached its minimum; null: `train.steps`."""
    wsd_decay_steps: int | None = None
    """For wsd, the length of the final decay; null: a tenth of what follows the warm-up."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """What every optimizer shares. The AdamW values also govern embeddings, output layer, norms and biases."""

    lr: float
    min_lr: float = 0.0
    weight_decay: float = 0.1
    """Decoupled; 1-D parameters (norms, biases) are excluded."""
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0 switches clipping off."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerBase):
    """AdamW on every parameter, by Megatron's DistributedOptimizer."""

    name: Literal["adamw"]


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerBase):
    """Muon on matrices, AdamW on the rest (Jordan et al. 2024)."""

    name: Literal["muon"]
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    coefficients: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """How the update's size depends on the matrix shape: spectral is sqrt(max(rows, cols))."""
    scale_factor: float = 0.2
    """Multiplies the scaled update; 0.2 with spectral matches AdamW's update RMS (Moonshot 2025)."""
    stack: bool = False
    """Update a host's matrices of one shape together, in batched products: for many small matrices on a GPU."""


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(OptimizerBase):
    """Shampoo on matrices, AdamW on the rest (Gupta et al. 2018)."""

    name: Literal["shampoo"]
    shampoo_beta: float = 0.95
    """Decay of the Kronecker factors."""
    precondition_frequency: int = 10
    """Steps between refreshes of the inverse roots."""
    max_preconditioner_dim: int = 8192
    """A side longer than this is not preconditioned."""
    grafting: Literal["none", "sgd", "adam"] = "adam"
    """Whose update's norm a Shampoo update is given."""
    shampoo_eps: float = 1e-12
    """Added to the factors' eigenvalues, relative to the largest; none counts below sqrt(n) * 2^-23 of that."""
    stagger: bool = True
    """Spread refreshes of different matrices over the period, so that no step has all of them."""
    tf32: bool = True
    """On GPUs, multiply in TF32; false: in full fp32, several times slower. Decompositions are fp32 always."""


@dataclass(frozen=True, kw_only=True)
class SoapConfig(OptimizerBase):
    """SOAP on matrices, AdamW on the rest (Vyas et al. 2024)."""

    name: Literal["soap"]
    shampoo_beta: float = 0.95
    """Decay of the Kronecker factors."""
    precondition_frequency: int = 10
    """Steps between refreshes of the eigenbases."""
    max_preconditioner_dim: int = 8192
    """A side longer than this is not preconditioned."""
    stagger: bool = True
    """Spread refreshes of different matrices over the period, so that no step has all of them."""
    tf32: bool = True
    """On GPUs, multiply in TF32; false: in full fp32, several times slower. Decompositions are fp32 always."""


@dataclass(frozen=True, kw_only=True)
class CustomConfig(OptimizerBase):
    """A user's own torch optimizer on whole matrices, AdamW on the rest."""

    name: Literal["custom"]
    source: str
    """FILE.py:Class, or module:Class of an installed package that `allow` names. Called with the matrices, lr,
    weight_decay and `options`."""
    allow: tuple[str, ...] = ()
    """Packages a class may be taken from; files need no entry."""
    options: dict[str, bool | int | float | str | tuple[bool | int | float | str, ...]] = field(
        default_factory=dict, hash=False
    )
    """Further keyword arguments of the class: plain values and lists of them."""
    cost_like: Literal["adamw", "muon", "shampoo", "soap"] = "muon"
    """Whose update costs and state sizes plans assume for it; `cluster.measured_updates` (custom) is taken before."""


OptimizerConfig = AdamWConfig | MuonConfig | ShampooConfig | SoapConfig | CustomConfig
"""Which one is told by `name`."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Who updates the matrices."""

    strategy: Strategy
    """asc and canzona execute a Plan; layerwise is Megatron's own; sc (every rank updates everything) is too with Muon,
    and done by canzona's engine with other optimizers. AdamW alone needs none of them."""
    layout: BufferLayout = "owner"
    """Order of a bucket's parameters: contiguous (natural order, the paper's), owner (by owner, uneven shards, no
    padding), aligned (equal padded shards, Megatron's own collectives)."""
    splitting: Splitting = "split"
    """What counts as one matrix. fused: weights as Megatron stores them; qkv: q, k and v apart (as far as sc and
    layerwise go); split: gate and up apart too; per_head: q, k and v by head, gate and up apart."""
    alpha: float = 1.0
    """Balance over data-parallel ranks: 0 evens out communication, 1 compute, in between both."""
    grouping: Grouping = "auto"
    """How micro-groups are cut: registration order, balanced, greedy with rollback (the paper's), auto (searched)."""
    c_max_mib: float | None = None
    """Largest fused exchange of one rank, MiB; auto when null."""
    reduction: Reduction | None = None
    """How gradients get to their owners; null: chosen for each bucket by its shares."""
    plan: str | None = None
    """A plan file to execute, as `canzona plan` wrote it; null: the newest in ./plans for this very run, else a new
    plan. The same run is always planned the same."""
    exchange_dtype: Precision = "fp32"
    """What gradients travel in between TP ranks; bf16 halves the exchange and rounds them."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A hardware profile, and how many machines of it a job takes."""

    name: str
    device: Device
    gpus_per_node: int
    """Ranks one machine carries (GPUs, or CPU processes)."""
    memory_gib: float
    """Memory of one GPU (or of one CPU rank), GiB."""
    reserved_gib: float
    """Of that, what the driver, the communication library and the allocator's fragmentation take, GiB."""
    bf16_tflops: float
    """Dense bf16 matrix-multiply peak of one GPU, TFLOP/s; what model FLOP utilisation is measured against."""
    memory_gb_per_s: float
    """Memory bandwidth of one GPU, GB/s (1e9 bytes)."""
    intra_node_gb_per_s: float
    """One GPU to its peers inside a machine, one direction, GB/s."""
    inter_node_gb_per_s: float
    """One GPU to another machine, one direction, GB/s."""
    transformer_engine: bool = False
    """Build layers from Transformer Engine (fused norms, sequence parallelism, flash attention)."""
    intra_node_latency_us: float = 10.0
    """One step of a collective inside a machine, microseconds: what a message of no size takes."""
    inter_node_latency_us: float = 20.0
    """The same between machines."""
    matmul_tflops: tuple[tuple[int, float], ...] = ()
    """Rates bf16 products of n by n matrices reach: pairs of n, ascending, and TFLOP/s; empty: guessed."""
    fp32_tflops: float | None = None
    """Rate that large fp32 products reach, TFLOP/s; null: a sixteenth of the bf16 peak."""
    tf32_tflops: float | None = None
    """The same where TF32 is allowed (Shampoo and SOAP allow it); null: there is no such unit, as fp32."""
    qr_tflops: float | None = None
    """Rate that the QR factorisation of a large fp32 matrix reaches, TFLOP/s; null: a twentieth of fp32_tflops."""
    eigh_tflops: float | None = None
    """Rate that its symmetric eigendecomposition reaches; null: a hundredth of fp32_tflops."""
    launch_us: float = 5.0
    """What one operation takes beyond its work (its launch), microseconds."""
    measured_updates: tuple[tuple[str, int, int, float], ...] = ()
    """Measured updates, taken before the cost model: algorithm (soap, muon/standard/5), rows, columns, seconds. A name
    that begins with megatron/ is Megatron's own implementation, what sc and layerwise execute."""
    adamw_ns: float | None = None
    """Measured nanoseconds of AdamW per element; null: from memory traffic."""
    collectives: tuple[tuple[str, int, float, float, float], ...] = ()
    """Measured collectives inside a machine, taken before bandwidth and latency: kind (`Collective`), ranks, bytes,
    seconds, and the processor cores they kept busy meanwhile (0 on GPUs). Bytes are of the whole buffer for all_reduce,
    all_gather and reduce_scatter, of the message for reduce, broadcast and send, and of what the busiest rank sends to
    all others for all_to_all."""
    cores: int | None = None
    """Processor cores that the ranks of one machine share; null: every rank has a device of its own, or, where a run is
    started on CPU ranks, what that machine has. It changes predicted times, never a plan."""
    crowding: float = 1.0
    """Measured time of steps whose ranks outnumber the cores, over what even shares of the cores would take: ranks that
    take turns on a core find its caches full of each other's data."""
    forward_factor: float = 1.0
    """Measured time of forward passes over what the model of them says."""
    backward_factor: float = 1.0
    """The same of backward passes."""
    step_factors: dict[str, float] = field(default_factory=dict, hash=False)
    """Measured time of a phase in whole steps over what its parts come to, by phase (norm_clip, exchange,
    matrix_update, adamw_update, grad_reduce, param_gather); megatron/PHASE for Megatron's own strategies."""
    measured_on: dict[str, str | int | float] = field(default_factory=dict, hash=False)
    """What `canzona calibrate` measured on (processor, cores, torch, ...) and when; empty for a profile by hand."""
    not_measured: tuple[str, ...] = ()
    """Parts of an interrupted calibration that are missing, and come from the profile it started from."""
    nodes: int | None = None
    """Machines; auto when null: gpus / gpus_per_node, rounded up."""
    node_rank: int | None = None
    """This machine's number when several are started by hand."""
    rdzv_endpoint: str | None = None
    """host:port every machine can reach; needed when nodes > 1."""
    rdzv_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    source: Literal["stdlib", "prepared"]
    """stdlib: the Python standard library's own sources, tokenised once and cached. prepared: files at `path`."""
    path: str | None = None
    """For prepared: the prefix of the .bin/.idx pair, without extension."""
    tokenizer: str = "byte"
    """For stdlib: byte, bpe, or the path of a Hugging Face tokenizer.json."""
    tokenizer_vocab_size: int = 16384
    """Entries of a bpe trained on the spot."""
    validation_fraction: float = 0.02
    """Share of the documents held out, from the end."""
    cache_dir: str | None = None
    """Prepared corpora and sample indices; null: $CANZONA_CACHE, else ~/.cache/canzona."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, what is kept of it, and what a run goes on from."""

    every_steps: int | None = None
    """Steps between two checkpoints; null: by time alone."""
    every_minutes: float | None = 30.0
    """Minutes between two checkpoints; null: by steps alone."""
    at_end: bool = True
    """Also after the last step. A preempted or interrupted run is always saved."""
    asynchronous: bool = True
    """Write while training goes on; false: wait for the disk."""
    keep: int = 3
    """Newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep checkpoints at multiples of this many steps for ever; null: only the newest."""
    resume: str = "auto"
    """auto: the newest checkpoint of the run directory, else from the start. A checkpoint's name in it
    (step-00000030), or the path of a checkpoint or of another run's directory."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a run leaves its files, and what it says on the way."""

    dir: str | None = None
    """The run directory; null: `<root>/<recipe>-<time>`."""
    root: str = "runs"
    log_interval: int = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    hang_timeout_s: float | None = 600.0
    """Seconds without progress on any rank after which the run is ended and the rank that is stuck is named; three
    times as long for start-up, loading, saving and the first step. null: never."""
    trace_steps: tuple[int, int] | None = None
    """First and last step whose timelines go into trace.json; null: no trace.json, and those of the last two steps are
    kept for `canzona report --trace`."""
    profile_steps: tuple[int, int] | None = None
    """First and last step to record with torch's profiler, on every rank of up to 8, else on rank 0; they slow those
    steps, which the breakdown leaves out."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything `canzona train` needs to know."""

    name: str
    """The recipe's name."""
    gpus: int
    """Ranks in all (GPUs, or CPU processes on a CPU cluster profile)."""
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
    description: str = ""
    """One line for `canzona recipes list`."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A resolved spread of one job over its ranks; all numbers concrete, `gpus == tp * pp * cp * dp`."""

    tp: int
    pp: int
    cp: int
    dp: int
    micro_batch_size: int
    """Sequences."""
    num_microbatches: int
    """Micro-batches of one step on one data-parallel rank (gradient accumulation)."""
    global_batch_size: int
    """Sequences; `dp * micro_batch_size * num_microbatches`."""
    recompute: Recompute
    sequence_parallel: bool

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The ranks of each axis as a layout is written: (("TP", 2), ("DP", 4)). Only DP is named with one rank."""
        axes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("DP", self.dp))
        return tuple((name, ranks) for name, ranks in axes if ranks > 1 or name == "DP")
