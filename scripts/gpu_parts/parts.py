"""The parts of the check, on one GPU and on two: training like CPU ranks, checkpoints for CPU ranks, memory,
calibration; shared matrices, and collectives that overlap with other work."""

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, get_args

import yaml

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.machine import install_fused_layers
from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.core.setup import Mode
from gpu_parts.outcome import Comparison, Outcome, Setup, Status
from gpu_parts.runs import (
    Distance,
    Run,
    StepTrace,
    compare_curves,
    finish,
    fp8_distance,
    on_device,
    read_steps,
    run,
    start,
    train,
)

PROFILED: Final = 7
HOST_WAITS: Final = 1
"""The number of times that the host may wait for the GPU in a step. The engine is designed to wait no more often."""
MEMORY_OVER: Final = 1.05
"""The largest accepted ratio of measured to planned memory."""
DOUBT_STEPS: Final = 100
DOUBTED: Final = 0.01
"""The largest accepted share of updates in Gram form that are doubted. A doubted update is discarded and redone in
standard form."""

MOE: Final = "qwen3-moe-tiny"
DECAY: Final = "schedule.decay_steps=120"
_PLAIN: Final = ("train.eval_interval=0", "checkpoint.every_minutes=null")


def continued(
    setup: Setup,
    *overrides: str,
    recipe: str = "qwen3-tiny",
    checkpoint: Path | None = None,
    steps: int | None = None,
) -> tuple[str, ...]:
    """Returns the overrides of a run without validation that continues from a checkpoint; from the demo's if
    `checkpoint` is None."""
    origin = setup.folder / "demo" if checkpoint is None else checkpoint
    end = setup.learnt + setup.compared if steps is None else steps
    resume = f"checkpoint.resume={origin}"
    return (*tiny(setup, recipe), DECAY, *_PLAIN, resume, f"train.steps={end}", *overrides)


def tiny(setup: Setup, recipe: str = "qwen3-tiny") -> tuple[str, ...]:
    """Returns the overrides of a small recipe. On a CPU, which is only a smoke test, the batch is smaller."""
    less = () if setup.device == "cuda" else ("train.batch_tokens=1024",)
    return (f"recipe={recipe}", *less)


def demo(setup: Setup) -> Outcome:
    """Trains a short version of `make demo` on four CPU ranks of this machine; the loss must fall by a fifth."""
    overrides = (*tiny(setup), DECAY, "gpus=4", "parallel.tp=2", f"train.steps={setup.learnt}")
    losses = train(setup, {"demo": overrides})["demo"].losses
    first, last = losses[1], losses[setup.learnt]
    summary = f"{setup.learnt} steps on 4 CPU ranks of this machine: loss {first:.2f} to {last:.2f}"
    return Outcome(status="pass" if last < 0.8 * first else "short", summary=summary, numbers={"losses": losses})


def train_part(setup: Setup) -> Outcome:
    """Compares the GPU, without Transformer Engine, with the CPU, from the same weights on the same batches."""
    run(setup, "demo")
    keep = f"checkpoint.every_steps={setup.handed_over}"
    train(
        setup,
        {
            "cpu": continued(setup, "gpus=1"),
            "cpu-fp32": continued(setup, "gpus=1", "train.precision=fp32"),
            "gpu": continued(setup, *on_device(setup), keep),
        },
    )
    return against_cpu(setup, run(setup, "gpu"))


def against_cpu(setup: Setup, checked: Run, on_cpu: str = "cpu") -> Outcome:
    """Compares a run's losses and first gradient norm with those of a run on a CPU.

    Args:
        on_cpu: the name of the CPU's run in bf16; the name of its run in fp32 ends in `-fp32`.
    """
    cpu, exact = run(setup, on_cpu), run(setup, f"{on_cpu}-fp32")
    checks = {
        "first loss": compare_curves(checked.losses, cpu.losses, exact.losses, steps=1),
        "losses": compare_curves(checked.losses, cpu.losses, exact.losses),
        "first grad norm": compare_curves(checked.grad_norms, cpu.grad_norms, exact.grad_norms, steps=1),
    }
    numbers = {"checked": checked.losses, "cpu": cpu.losses, "cpu_fp32": exact.losses, **as_dicts(checks)}
    return Outcome(status=verdict(checks), summary=in_words(checks), numbers=numbers)


def fused(setup: Setup) -> Outcome:
    """Compares the GPU with Transformer Engine, if it is installed, with the CPU."""
    if setup.device == "cpu":
        return Outcome(status="not run", summary="Transformer Engine needs a GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        return Outcome(status="not run", summary=f"Transformer Engine is not installed: {install_fused_layers()}")
    run(setup, "cpu")
    fused = on_device(setup, fused=True)
    [recipe, *_] = compose_run([f"cluster={setup.profile}", "recipe=qwen3-tiny"]).config.cluster.fp8_recipes or ["none"]
    trained = train(
        setup,
        {
            "te": continued(setup, *fused),
            **({} if recipe == "none" else {"te-fp8": continued(setup, *fused, f"train.fp8={recipe}")}),
        },
    )
    outcome = against_cpu(setup, trained["te"])
    if "te-fp8" not in trained:
        return outcome
    fp8 = fp8_distance(trained["te-fp8"].losses, trained["te"].losses)
    return replace(
        outcome,
        status=outcome.status if fp8.holds else "short",
        summary=f"{outcome.summary}; losses in FP8 ({recipe}) {fp8}",
        numbers={**outcome.numbers, "fp8": trained["te-fp8"].losses},
    )


def experts(setup: Setup) -> Outcome:
    """Compares a model with experts on the device with the CPU, from the same weights on the same batches. On two GPUs,
    each has half of the experts."""
    train(setup, {"moe": (*tiny(setup, MOE), DECAY, *_PLAIN, "gpus=4", f"train.steps={setup.learnt}")})
    trained = train(
        setup,
        {
            "moe-cpu": _moe_continued(setup, "gpus=1"),
            "moe-cpu-fp32": _moe_continued(setup, "gpus=1", "train.precision=fp32"),
            "experts": experts_overrides(setup),
        },
    )
    return against_cpu(setup, trained["experts"], "moe-cpu")


def experts_overrides(setup: Setup) -> tuple[str, ...]:
    ranks = min(2, setup.gpus)
    mesh = ("parallel.tp=1", "parallel.pp=1", f"parallel.ep={ranks}")
    return _moe_continued(setup, *on_device(setup, gpus=ranks), *mesh)


def _moe_continued(setup: Setup, *overrides: str) -> tuple[str, ...]:
    """Returns the overrides of a run that continues from the checkpoint of the run `moe`."""
    return continued(setup, *overrides, recipe=MOE, checkpoint=setup.folder / "moe")


def checkpoint(setup: Setup) -> Outcome:
    """Resumes from a checkpoint in the middle of the device's run, on the device to the end of the run, and on a CPU
    rank for two steps. Both resumed runs must have the losses of the uninterrupted run."""
    uninterrupted, step = run(setup, "gpu"), setup.handed_over
    saved = uninterrupted.files.checkpoints / f"step-{step:08d}"
    if not saved.is_dir():
        return Outcome(status="short", summary=f"the run on the GPU wrote no checkpoint {saved.name}")
    runs = train(
        setup,
        {
            "resumed-gpu": continued(setup, *on_device(setup), checkpoint=saved),
            "resumed": continued(setup, "gpus=1", checkpoint=saved, steps=step + 2),
        },
    )
    exact = run(setup, "cpu-fp32").losses
    checks = {name: compare_curves(resumed.losses, uninterrupted.losses, exact) for name, resumed in runs.items()}
    summary = f"from step {step}: device {checks['resumed-gpu']}, CPU rank {checks['resumed']}"
    return Outcome(status=verdict(checks), summary=summary, numbers=as_dicts(checks))


def doubts(setup: Setup) -> Outcome:
    """Counts the updates in Gram form that are doubted because of rounding, in the first steps of a real run, whose
    updates are replayed as CUDA graphs."""
    steps = DOUBT_STEPS if setup.device == "cuda" else 4
    size = ("recipe=qwen3-0.6b", "train.batch_tokens=16384") if setup.device == "cuda" else tiny(setup)
    form = () if setup.device == "cpu" else ("optimizer.form=gram", "optimizer.graph=true")
    overrides = (*size, *form, "data=stdlib-bytes", *_PLAIN, "checkpoint.at_end=false", f"train.steps={steps}")
    trained = train(setup, {"doubts": (*overrides, *on_device(setup))})["doubts"]
    matrices = len(read_plan(trained.files.plan).matrices)
    doubted = trained.fallbacks
    share = doubted / (steps * matrices)
    summary = f"{doubted:,} of {steps * matrices:,} updates in Gram form were doubted"
    last = trained.losses[steps]
    numbers = {"fallbacks": doubted, "matrices": matrices, "steps": steps, "last_loss": last}
    return Outcome(status="pass" if share <= DOUBTED and last == last else "short", summary=summary, numbers=numbers)


def step(setup: Setup) -> Outcome:
    """Profiles a step of a larger model: judges the host's waits, and compares its time and memory with the plan."""
    profiled_run, recipe = train(setup, {"step": step_overrides(setup)})["step"], profiled_recipe(setup)
    trace, breakdown = read_steps(profiled_run.trace()), profiled_run.breakdown
    peak, planned = breakdown.peak_memory_bytes, breakdown.planned
    assert peak is not None
    waits = sum(trace.waits.values())
    summary = f"{breakdown.step.mean_s * 1e3:.0f} ms a step, {trace.kernels} kernels, {waits} host waits"
    fine, comparisons = waits <= HOST_WAITS, []
    if planned is not None:
        comparisons.append(_milliseconds(f"step of {recipe}", planned.iteration_s, breakdown.step.mean_s))
        for name, phase in breakdown.phases.items():
            if phase is not None and planned.phases.get(name):
                comparisons.append(_milliseconds(f"  {name}", planned.phases[name], phase.mean_s))
    if planned is not None and breakdown.device == "cuda":  # a CPU process uses more memory than its tensors
        share = peak.max / planned.memory_bytes
        summary += f", peak memory {peak.max / 2**30:.1f} GiB, {share:.0%} of planned"
        fine = fine and share <= MEMORY_OVER
        memory = (planned.memory_bytes / 2**30, peak.max / 2**30)
        comparisons.append(Comparison(what="memory", unit="GiB", simulated=memory[0], measured=memory[1]))
    numbers = {
        "step_s": breakdown.step.mean_s, "mfu": breakdown.mfu, "kernels": trace.kernels, "waits": trace.waits,
        "memory_bytes": peak.max, "planned_memory_bytes": planned and planned.memory_bytes,
        "planned_s": planned and planned.iteration_s,
    }  # fmt: skip
    status: Status = "pass" if fine else "short"
    return Outcome(status=status, summary=summary, numbers=numbers, comparisons=tuple(comparisons))


def step_overrides(setup: Setup) -> tuple[str, ...]:
    return profiled(setup, *on_device(setup))


def profiled(setup: Setup, *overrides: str) -> tuple[str, ...]:
    """Returns the overrides of a run in which torch's profiler records one step."""
    recipe = profiled_recipe(setup)
    size = (f"recipe={recipe}", "train.batch_tokens=65536") if setup.device == "cuda" else tiny(setup, recipe)
    steps = (f"run.profile_steps=[{PROFILED},{PROFILED}]", f"train.steps={PROFILED + 1}", "checkpoint.at_end=false")
    return (*size, "data=stdlib-bytes", *_PLAIN, *steps, *overrides)


def profiled_recipe(setup: Setup) -> str:
    return "qwen3-0.6b" if setup.device == "cuda" else "qwen3-tiny"


def _milliseconds(what: str, simulated_s: float, measured_s: float) -> Comparison:
    return Comparison(what=what, unit="ms", simulated=1e3 * simulated_s, measured=1e3 * measured_s)


def calibrate(setup: Setup) -> Outcome:
    """Runs `canzona calibrate --quick` on one GPU (or two CPU ranks); the outcome's numbers contain the profile."""
    path = setup.folder / "measured.yaml"
    size = ("recipe=qwen3-0.6b", *on_device(setup))
    if setup.device == "cpu":  # only a smoke test, which measures all quantities of one layer
        size = ("recipe=qwen3-tiny", "gpus=2", "model.num_layers=1")
    finish(setup, "calibrate", start(setup, "calibrate", "calibrate", *size, "--quick", "--out", str(path)))
    profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    lacking = profile["measured_on"].get("not_measured")
    summary = f"products at {profile['bf16_tflops']:.3g} TFLOP/s, memory at {profile['memory_gb_per_s']:.4g} GB/s"
    summary += f"; not measured: {lacking}" if lacking else ""
    shipped = compose_run(["recipe=qwen3-0.6b", f"cluster={setup.profile}", "gpus=1"]).config.cluster
    units: dict[str, Literal["TFLOP/s", "GB/s", "us"]] = {
        "fp32_tflops": "TFLOP/s", "tf32_tflops": "TFLOP/s", "qr_tflops": "TFLOP/s", "eigh_tflops": "TFLOP/s",
        "memory_gb_per_s": "GB/s", "launch_us": "us", "graph_launch_us": "us",
    }  # fmt: skip
    comparisons = tuple(
        Comparison(what=name, unit=unit, simulated=float(getattr(shipped, name)), measured=float(profile[name]))
        for name, unit in units.items()
        if profile.get(name) is not None and getattr(shipped, name) is not None
    )
    status: Status = "short" if lacking else "pass"
    return Outcome(
        status=status,
        summary=summary,
        numbers={"profile": profile},
        comparisons=comparisons,
        verified=profile["verified"],
    )


def verdict(checks: dict[str, Distance]) -> Status:
    return "pass" if all(check.holds for check in checks.values()) else "short"


def in_words(checks: dict[str, Distance]) -> str:
    return ", ".join(f"{name} {check}" for name, check in checks.items())


def as_dicts(checks: dict[str, Distance]) -> dict[str, object]:
    return {name: vars(check) for name, check in checks.items()}


UNGROUPED = 1.5
"""The number of NCCL kernels per bucket and direction above which collectives are not grouped."""
HIDDEN = 0.5
"""The smallest accepted share of communication that overlaps with computation."""


def split(setup: Setup, axis: str) -> Outcome:
    """Compares two ranks along an axis (tp, dp, cp, pp) with a CPU rank, from the same weights on the same batches."""
    run(setup, "cpu")
    name = f"{axis}2"
    return against_cpu(setup, train(setup, {name: split_overrides(setup, axis)})[name])


def split_overrides(setup: Setup, axis: str) -> tuple[str, ...]:
    sizes = {"tp": 1, "pp": 1, "cp": 1} | ({} if axis == "dp" else {axis: 2})
    return continued(setup, *on_device(setup, gpus=2), *(f"parallel.{name}={ranks}" for name, ranks in sizes.items()))


def shared(setup: Setup) -> Outcome:
    """Compares two tensor-parallel ranks that share matrices with two that host them, both in Gram form, and with a CPU
    rank, from the same weights on the same batches."""
    exact = run(setup, "cpu-fp32")
    runs = train(setup, {f"{mode}2": shared_overrides(setup, mode) for mode in get_args(Mode)})
    checked, hosted = runs["shared2"], runs["hosted2"]
    modes = Counter(read_plan(checked.files.plan).modes)
    against_hosted = compare_curves(checked.losses, hosted.losses, exact.losses)
    outcome = against_cpu(setup, checked)
    # CPU ranks compute the Gram form in bf16, which is often doubted.
    doubted = setup.device == "cuda" and checked.fallbacks > DOUBTED * len(checked.losses) * modes["shared"]
    passed = outcome.status == "pass" and against_hosted.holds and modes["shared"] > 0 and not doubted
    summary = f"{modes['shared']} of {modes.total()} matrices shared, losses {against_hosted} from hosted ones"
    summary += f", {checked.fallbacks} updates doubted"
    numbers = {"hosted": hosted.losses, "fallbacks": checked.fallbacks, **outcome.numbers}
    return Outcome(status="pass" if passed else "short", summary=f"{summary}; {outcome.summary}", numbers=numbers)


def shared_overrides(setup: Setup, mode: Mode) -> tuple[str, ...]:
    return (*split_overrides(setup, "tp"), "optimizer.form=gram", f"engine.mode={mode}")


def overlap(setup: Setup) -> Outcome:
    """Profiles a step with DP 2, and judges whether a bucket's collectives are grouped and overlapped."""
    profiled_run = train(setup, {"overlap": overlap_overrides(setup)})["overlap"]
    return judge(read_steps(profiled_run.trace()), buckets=len(read_plan(profiled_run.files.plan).buckets))


def overlap_overrides(setup: Setup) -> tuple[str, ...]:
    return profiled(setup, *on_device(setup, gpus=2), "parallel.tp=1", "parallel.pp=1")


def judge(trace: StepTrace, *, buckets: int) -> Outcome:
    """Judges the grouping and the overlap of collectives in a step.

    Args:
        buckets: the number of buckets, each of which is reduced to owners and gathered again.
    """
    if trace.hidden is None:
        return Outcome(status="not run", summary="the trace has no NCCL kernels, as on a CPU")
    rooted = trace.collectives.get("Reduce", 0) + trace.collectives.get("Broadcast", 0)
    grouped = rooted <= 2 * UNGROUPED * buckets
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(trace.collectives.items()))
    summary = (
        f"{kinds} in {buckets} buckets: {'grouped' if grouped else 'one by one'}; "
        f"{trace.hidden:.0%} of {trace.collective_s * 1e3:.0f} ms hidden"
    )
    numbers = {"collectives": trace.collectives, "buckets": buckets, "hidden": trace.hidden}
    status: Status = "pass" if grouped and trace.hidden >= HIDDEN else "short"
    return Outcome(status=status, summary=summary, numbers=numbers)
