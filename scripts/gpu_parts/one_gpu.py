"""What one GPU has to do: train beside CPU ranks, agree with them, hand its checkpoint over, stay within its memory."""

import importlib.util
from pathlib import Path
from typing import Final

import yaml

from gpu_parts.losses import Apart, apart
from gpu_parts.outcome import Outcome, Setup, Status
from gpu_parts.runs import Run, finish, on_device, run, start, train
from gpu_parts.traces import read_steps

PROFILED: Final = 7
HOST_WAITS: Final = 1
"""That the design allows a step."""
MEMORY_OVER: Final = 1.05
"""Of what was planned; beyond it a plan that fits may not."""

DECAY: Final = "schedule.decay_steps=120"
_PLAIN: Final = ("train.eval_interval=0", "checkpoint.every_minutes=null")


def go_on(setup: Setup, *overrides: str, checkpoint: Path | None = None, steps: int | None = None) -> tuple[str, ...]:
    """Overrides of a run that goes on from a checkpoint, the demo's if none is given, without validation."""
    origin = setup.folder / "demo" if checkpoint is None else checkpoint
    end = setup.learnt + setup.compared if steps is None else steps
    return (*tiny(setup), DECAY, *_PLAIN, f"checkpoint.resume={origin}", f"train.steps={end}", *overrides)


def tiny(setup: Setup) -> tuple[str, ...]:
    """The demo's recipe; on a CPU with a quarter of its batch, as nothing is found out there but that parts work."""
    less = () if setup.device == "cuda" else ("train.batch_tokens=1024",)
    return ("recipe=qwen3-tiny", *less)


def demo(setup: Setup) -> Outcome:
    """`make demo`, shorter: four CPU ranks on a machine with a GPU."""
    overrides = (*tiny(setup), DECAY, "gpus=4", "parallel.tp=2", f"train.steps={setup.learnt}")
    found = train(setup, {"demo": overrides})["demo"]
    losses = found.losses
    first, last = losses[1], losses[setup.learnt]
    said = f"{setup.learnt} steps on 4 CPU ranks beside it: loss {first:.2f} to {last:.2f}"
    return Outcome(status="pass" if last < 0.8 * first else "short", said=said, numbers={"losses": losses})


def train_part(setup: Setup) -> Outcome:
    """The GPU without Transformer Engine, against the CPU from the same weights on the same batches."""
    run(setup, "demo")
    keep = f"checkpoint.every_steps={setup.handed_over}"
    train(
        setup,
        {
            "cpu": go_on(setup, "gpus=1"),
            "cpu-fp32": go_on(setup, "gpus=1", "train.precision=fp32"),
            "gpu": go_on(setup, *on_device(setup), keep),
        },
    )
    return against_cpu(setup, run(setup, "gpu"))


def against_cpu(setup: Setup, found: Run) -> Outcome:
    """Losses and the norm of gradients, the first step and all of them."""
    cpu, exact = run(setup, "cpu"), run(setup, "cpu-fp32")
    checks = {
        "first loss": apart(found.losses, cpu.losses, exact.losses, steps=1),
        "losses": apart(found.losses, cpu.losses, exact.losses),
        "first grad norm": apart(found.grad_norms, cpu.grad_norms, exact.grad_norms, steps=1),
    }
    numbers = {"found": found.losses, "cpu": cpu.losses, "cpu_fp32": exact.losses, **plain(checks)}
    return Outcome(status=verdict(checks), said=in_words(checks), numbers=numbers)


def fused(setup: Setup) -> Outcome:
    """With Transformer Engine, where there is one."""
    if setup.device == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        return Outcome(status="not run", said="Transformer Engine is not installed: pip install 'canzona[te]'")
    run(setup, "cpu")
    return against_cpu(setup, train(setup, {"te": go_on(setup, *on_device(setup, fused=True))})["te"])


def checkpoint(setup: Setup) -> Outcome:
    """A CPU rank goes on from the checkpoint that the GPU left in the middle of its run."""
    gpu = run(setup, "gpu")
    saved = gpu.files.checkpoints / f"step-{setup.handed_over:08d}"
    if not saved.is_dir():
        return Outcome(status="short", said=f"the run on the GPU left no {saved.name}")
    overrides = go_on(setup, "gpus=1", checkpoint=saved, steps=setup.handed_over + 2)
    resumed = train(setup, {"resumed": overrides})["resumed"]
    check = apart(resumed.losses, gpu.losses, run(setup, "cpu-fp32").losses)
    said = f"steps {setup.handed_over + 1} and {setup.handed_over + 2} on a CPU rank, losses {check}"
    return Outcome(status=verdict({"losses": check}), said=said, numbers=plain({"losses": check}))


def step(setup: Setup) -> Outcome:
    """A larger model: kernels and host waits of one step, memory beside the plan's."""
    return profile_of(train(setup, {"step": step_overrides(setup)})["step"])


def step_overrides(setup: Setup) -> tuple[str, ...]:
    return profiled(setup, *on_device(setup))


def profiled(setup: Setup, *overrides: str) -> tuple[str, ...]:
    """A run of which torch's profiler records one step."""
    size = ("recipe=qwen3-0.6b", "train.batch_tokens=65536") if setup.device == "cuda" else tiny(setup)
    one = (f"run.profile_steps=[{PROFILED},{PROFILED}]", f"train.steps={PROFILED + 1}", "checkpoint.at_end=false")
    return (*size, "data=stdlib-bytes", *_PLAIN, *one, *overrides)


def profile_of(found: Run) -> Outcome:
    """One profiled step beside what the plan said of the run."""
    seen, breakdown = read_steps(found.trace()), found.breakdown
    peak = breakdown.peak_memory_bytes
    assert peak is not None
    planned = breakdown.planned
    waits = sum(seen.waits.values())
    said = f"{breakdown.step.mean_s * 1e3:.0f} ms a step, {seen.kernels} kernels, {waits} host waits"
    fine = waits <= HOST_WAITS
    if planned is not None and breakdown.device == "cuda":  # a process on the CPU takes more than its tensors do
        share = peak.max / planned.memory_bytes
        said += f", {peak.max / 2**30:.1f} GiB at most, {share:.0%} of planned"
        fine = fine and share <= MEMORY_OVER
    numbers = {
        "step_s": breakdown.step.mean_s, "mfu": breakdown.mfu, "kernels": seen.kernels, "waits": seen.waits,
        "memory_bytes": peak.max, "planned_memory_bytes": planned and planned.memory_bytes,
        "planned_s": planned and planned.iteration_s,
    }  # fmt: skip
    return Outcome(status="pass" if fine else "short", said=said, numbers=numbers)


def calibrate(setup: Setup) -> Outcome:
    """`canzona calibrate --quick` on one GPU (two CPU ranks): the profile is in the numbers."""
    path = setup.folder / "measured.yaml"
    size = ("recipe=qwen3-0.6b", *on_device(setup)) if setup.device == "cuda" else ("recipe=qwen3-tiny", "gpus=2")
    finish(setup, "calibrate", start(setup, "calibrate", "calibrate", *size, "--quick", "--out", str(path)))
    profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    lacking = profile["not_measured"]
    said = f"products at {profile['bf16_tflops']:.3g} TFLOP/s, memory at {profile['memory_gb_per_s']:.4g} GB/s"
    said += f"; not measured: {', '.join(lacking)}" if lacking else ""
    return Outcome(status="short" if lacking else "pass", said=said, numbers={"profile": profile})


def verdict(checks: dict[str, Apart]) -> Status:
    return "pass" if all(check.holds for check in checks.values()) else "short"


def in_words(checks: dict[str, Apart]) -> str:
    return ", ".join(f"{name} {check}" for name, check in checks.items())


def plain(checks: dict[str, Apart]) -> dict[str, object]:
    return {name: vars(check) for name, check in checks.items()}
