"""The description of a run: model, optimizer, layout, plan, batch, data, run directory; and its outlook: simulated
speed, duration and checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import checkpoint_bytes
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.model.matrices import Routed, routing
from canzona_cli.core.planner.measures import balance
from canzona_cli.core.planner.plan_file import ObtainedPlan
from canzona_cli.core.setup import CustomConfig, Device, Layout, TrainConfig
from canzona_cli.core.simulate.fast_paths import FastPaths
from canzona_cli.records.words import count, duration, layout_code, layout_words, plural, size, step_time

if TYPE_CHECKING:
    # These modules import the records of runs; the tables of plans need none of them.
    from canzona_cli.launch.view import EarlierSteps
    from canzona_cli.records.corpus import PreparedCorpus


_PARTS: Final = {"gated": "GELU", "layernorm": "LayerNorm", "biases": "biases", "positions": "{:,} learned positions"}
"""The parts of GPT-2 by the settings that choose them."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected throughput, duration and checkpoint sizes of a run that is never interrupted."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """The model FLOP utilisation, relative to the profile's bf16 peak, as runs measure it."""
    training_s: float
    """The seconds of all steps, excluding start-up, saves and validation. Steps of a ramp-up count by their sequences,
    as if a small batch took as long for each as the full one."""
    gpu_hours: float
    """The hours of training, added up over all GPUs."""
    checkpoint_bytes: int
    """The bytes of one checkpoint."""
    checkpoints_kept: int
    """The largest possible number of checkpoints on disk at the end of the run."""
    host_bytes: int
    """The mean host memory per node, in bytes, that holds the ranks' copies of state for saves, from the first
    save on."""
    save_s: float | None
    """The seconds in which every machine writes its part of a checkpoint, if the file system serves all machines at
    once; None if the profile does not have the measured rate."""


def outlook(config: RunConfig, layout: Layout, iteration_s: float) -> Outlook:
    """Computes the outlook of a resolved run whose steps take `iteration_s` each."""
    setup, train, checkpoint = config.setup, config.train, config.checkpoint
    tokens_per_s = layout.global_batch_size * train.seq_length / iteration_s
    per_gpu = tokens_per_s / layout.world_size
    training_s = train.sequences(layout.global_batch_size, 1, train.steps) / layout.global_batch_size * iteration_s
    saved_bytes = checkpoint_bytes(setup)
    rate = setup.cluster.checkpoint_gb_per_s
    machine_bytes = saved_bytes / (setup.cluster.nodes or -(-layout.world_size // setup.cluster.gpus_per_node))
    return Outlook(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops_per_token(setup.model, train.seq_length) / (setup.cluster.bf16_tflops * 1e12),
        training_s=training_s,
        gpu_hours=layout.world_size * training_s / 3600,
        checkpoint_bytes=saved_bytes,
        checkpoints_kept=checkpoint.keep + (train.steps // checkpoint.keep_every if checkpoint.keep_every else 0),
        host_bytes=round(machine_bytes),
        save_s=None if rate is None else machine_bytes / rate / 1e9,
    )


def rank_word(device: Device | None) -> str:
    """Returns the word for a rank on this device: `GPU`, `CPU rank`, or `rank` if the device is unknown."""
    return {"cuda": "GPU", "cpu": "CPU rank", None: "rank"}[device]


def describe_layout(layout: Layout, device: Device | None) -> str:
    """Returns a layout as `8 GPUs: TP 2 × PP 2 × DP 2`."""
    return f"{plural(layout.world_size, rank_word(device))}: {layout_words(layout, times='×')}"


def layout_name(layout: Layout) -> str:
    """Returns a layout as `TP2 DP4 (micro-batch 4, full recomputation)`."""
    recompute = "" if layout.recompute == "none" else f", {layout.recompute} recomputation"
    return f"{layout_code(layout)} (micro-batch {layout.micro_batch_size}{recompute})"


def describe_batch(layout: Layout, train: TrainConfig) -> str:
    """Returns `32 sequences × 256 = 8,192 tokens a step (micro-batch 4 × accumulation 4 × DP 2)`, and the smaller
    batches before it: `after 100 steps of 8 and 100 of 16`."""
    stages = [
        f"{steps:,}{'' if index else ' steps'} of {size:,}" for index, (size, steps) in enumerate(train.batch_rampup)
    ]
    return (
        f"{layout.global_batch_size:,} sequences × {train.seq_length:,} = "
        f"{layout.global_batch_size * train.seq_length:,} tokens a step ({batch_factors(layout)})"
        + (f", after {', '.join(stages)}" if stages else "")
    )


def batch_factors(layout: Layout) -> str:
    """Returns the factors of the global batch: `micro-batch 4 × accumulation 4 × DP 2`."""
    return f"micro-batch {layout.micro_batch_size} × accumulation {layout.num_microbatches} × DP {layout.dp}"


def optimizer_words(name: str, strategy: str) -> str:
    """Returns `muon (canzona)`; only the optimizer's name for AdamW, or if the strategy has the same name."""
    return name if name in ("adamw", strategy) else f"{name} ({strategy})"


def describe_optimizer(config: RunConfig) -> str:
    """Returns `muon (canzona), lr 0.003 cosine, bf16`; with AdamW's rate (`lr 0.003, AdamW 0.001, cosine`) if it is
    another. The name of a custom optimizer includes its source."""
    name: str = config.optimizer.name
    if isinstance(config.optimizer, CustomConfig):
        name += f" {config.optimizer.source}"
    words = optimizer_words(name, config.engine.strategy)
    lr, adamw_lr = config.optimizer.lr, config.optimizer.adamw_rates.lr
    rates = f"{lr:g}" if adamw_lr == lr else f"{lr:g}, AdamW {adamw_lr:g},"
    return f"{words}, lr {rates} {config.schedule.decay}, {describe_precision(config)}"


def describe_precision(config: RunConfig) -> str:
    """Returns `bf16`, or `bf16 with FP8 matmuls (delayed)`."""
    train = config.train
    return train.precision if train.fp8 == "none" else f"{train.precision} with FP8 matmuls ({train.fp8})"


def describe_data(config: RunConfig, corpus: "PreparedCorpus | None") -> str:
    """Describes the data: `Python standard library, byte tokenizer, 12.3 M tokens, 1,204 documents`. Without
    a corpus, the counts are missing, and so is the tokenizer unless the data is the built-in corpus. A validation set
    of its own comes last."""
    source = "Python standard library" if config.data.source == "stdlib" else (config.data.path or "prepared")
    if corpus is not None and len(corpus.sets) > 1:
        source = " + ".join(f"{part.share:.1%} {part.name} ({count(part.tokens)} tokens)" for part in corpus.sets)
    elif config.data.blend:
        source = " + ".join(f"{weight:g} {path}" for path, weight in config.data.blend.items())
    own_set = f"; validated on {config.data.validation_set}" if config.data.validation_set else ""
    if corpus is not None:
        amount = f"{count(corpus.tokens)} tokens, {plural(corpus.documents, 'document')}"
        if corpus.validation is not None:
            own_set += f", {count(corpus.validation.tokens)} tokens"
        return f"{source}, {corpus.tokenizer} tokenizer, {amount}{own_set}"
    if config.data.source == "stdlib":
        return f"{source}, {config.data.tokenizer} tokenizer; prepared when a run first needs it"
    return source + own_set  # the tokenizer is a fact of the prepared data, not of the configuration


def outlook_rows(config: RunConfig, outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Yields (label, value) rows: the simulated speed and training time, and the size of checkpoints."""
    steps, unit = f"{config.train.steps:,} steps", rank_word(config.cluster.device)
    if _describes_machine(config):
        rates = f"{count(outlook.tokens_per_s)} tokens/s, {count(outlook.tokens_per_s_per_gpu)} per {unit}"
        yield "speed", f"{rates}, MFU {100 * outlook.mfu:.1f}% (simulated)"
        training = f"{duration(outlook.training_s)} for {steps}, without saves"
        yield "training", training + _cost(config, outlook)
    else:
        yield "training", f"{steps}; run `canzona calibrate` to get a time estimate for this machine"
    copies, bytes_ = outlook.checkpoints_kept, outlook.checkpoint_bytes
    disk = f"{size(bytes_)} each, {copies} kept: {size(copies * bytes_)} on disk"
    rate = config.cluster.checkpoint_gb_per_s
    seconds = "how fast: canzona calibrate"
    if outlook.save_s is not None:
        seconds = f"in {duration(outlook.save_s)} at {rate:g} GB/s, measured on one machine alone"
    written = f"each machine writes about {size(outlook.host_bytes)}, from a copy in host memory"
    yield "checkpoints", f"{disk}; {written} ({seconds})"


def fast_path_rows(paths: FastPaths, result_s: tuple[float, float] | None) -> Iterator[tuple[str, str]]:
    """Yields a row about the fast paths that a run leaves off; nothing if there are none.

    Args:
        result_s: the simulated seconds of the run's step, and of the optimizer in it, to compare with the step with
            the fast paths; None for a short row that refers to -v.
    """
    if not paths.off:
        return
    off = ", ".join(paths.off)
    if result_s is None:
        yield "fast paths", f"off until verified here: {off} (see -v)"
        return
    words = f"off until verified on these GPUs (canzona doctor --gpu-check): {off}"
    if (once := paths.once_verified) is not None and once.paths:
        (step, optimizer), (step_now, optimizer_now) = (
            map(step_time, times) for times in ((once.iteration_s, once.optimizer_s), result_s)
        )
        whole = f"{step} a step as now" if step == step_now else f"{step} a step, not {step_now}"
        gain = f"{whole}; optimizer {optimizer}, not {optimizer_now}"
        words += f"; once verified ({', '.join(once.paths)}): {gain} (simulated)"
    yield "fast paths", words


def _cost(config: RunConfig, outlook: Outlook) -> str:
    """Returns the GPU hours of a run; empty for CPU ranks."""
    return f": {outlook.gpu_hours:,.0f} GPU hours" if config.cluster.device == "cuda" else ""


def _describes_machine(config: RunConfig) -> bool:
    """Returns True if times simulated with the run's profile describe the run's machine."""
    from canzona_cli.records.breakdown import describes_machine

    return describes_machine(config.cluster.device, calibrated=config.cluster.calibrated)


def describe_plan(obtained: ObtainedPlan, config: RunConfig) -> str:
    """Returns a plan's name, load balance, update time on the busiest rank, and file.

    The update time is omitted if the run's profile does not describe its machine.
    """
    loads = balance(obtained.plan)
    words = f"{obtained.plan.name}: load balance {loads.grid:.2f} (lower bound {loads.lower_bound:.2f})"
    if _describes_machine(config):
        words += f", {step_time(loads.slowest_s)} of updates on the busiest rank predicted"
    return words if obtained.path is None else f"{words}; from {obtained.path}"


def routing_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Returns two rows: the parameters that are updated as matrices, and those that AdamW updates. A row
    without parameters is omitted."""
    routes = routing(config.setup)
    rows = {"matrices": routes.matrices, "adamw": routes.adamw}
    return [(label, _parameters_text(parameters)) for label, parameters in rows.items() if parameters]


def _parameters_text(parameters: tuple[Routed, ...]) -> str:
    """Returns parameters as `28 with 2.95 M elements: 4 layers.*.q (262 k), ...`."""
    names = []
    for routed in parameters:
        name = routed.pattern.removeprefix("decoder.").removesuffix(".weight")
        names.append(f"{routed.count:,} {name} ({count(routed.elements)})")
    elements = count(sum(routed.elements for routed in parameters))
    return f"{sum(routed.count for routed in parameters):,} with {elements} elements: {', '.join(names)}"


def header_rows(
    config: RunConfig,
    layout: Layout,
    *,
    run_dir: Path | None = None,
    corpus: "PreparedCorpus | None" = None,
    plan: ObtainedPlan | None = None,
    earlier: "EarlierSteps | None" = None,
    samples: int | None = None,
    routed: bool = True,
) -> list[tuple[str, str]]:
    """Returns the description of a run as (label, value) rows. If `run_dir`, `plan` or `earlier` is None, its
    row is omitted.

    Args:
        samples: the number of samples of the whole run, if its earlier steps had another batch; `earlier` has it
            too.
        routed: True to list which parameters are updated as matrices, and which by AdamW.
    """
    from canzona_cli.core.model.families import parameter_count
    from canzona_cli.records.corpus import supply

    samples = earlier.samples if earlier is not None else samples
    parameters = parameter_count(config.model).total
    model = "" if config.model.name == config.name else f"{config.model.name}, "
    parts = "".join(f", {_PARTS[name].format(value)}" for name, value in config.model.parts_of_gpt2.items())
    return [
        ("recipe", f"{config.name}: {model}{count(parameters)} parameters{parts}, {config.train.steps:,} steps"),
        ("optimizer", describe_optimizer(config)),
        *(routing_rows(config) if routed else []),
        ("layout", f"{describe_layout(layout, config.cluster.device)} on {config.cluster.name}"),
        *([("plan", describe_plan(plan, config))] if plan is not None else []),
        ("batch", describe_batch(layout, config.train)),
        ("data", describe_data(config, corpus)),
        *([] if (tokens := supply(config, layout, corpus, samples=samples)) is None else [("epochs", tokens.words)]),
        *([("run", str(run_dir))] if run_dir is not None else []),
        *([("resumes", f"from step {earlier.step:,} ({earlier.origin})")] if earlier is not None else []),
    ]
