"""The parts of the check on two GPUs: every parallel axis compared with the CPU, grouped collectives, and the overlap
of communication with computation."""

from collections import Counter
from typing import get_args

from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.core.setup import Mode
from gpu_parts.one_gpu import DOUBTED, against_cpu, continued, profiled
from gpu_parts.outcome import Outcome, Setup, Status
from gpu_parts.runs import Run, StepTrace, compare_curves, on_device, read_steps, run, train

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
    return overlap_of(train(setup, {"overlap": overlap_overrides(setup)})["overlap"])


def overlap_overrides(setup: Setup) -> tuple[str, ...]:
    return profiled(setup, *on_device(setup, gpus=2), "parallel.tp=1", "parallel.pp=1")


def overlap_of(profiled_run: Run) -> Outcome:
    """Judges the profiled step of a run, with the number of buckets in its plan."""
    plan = read_plan(profiled_run.files.plan)
    return judge(read_steps(profiled_run.trace()), buckets=len(plan.buckets))


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
