"""What two GPUs have to do: agree with one on every axis, group a bucket's reductions, hide communication."""

from canzona_cli.planner.plan_file import read_plan
from gpu_parts.one_gpu import against_cpu, go_on, profiled
from gpu_parts.outcome import Outcome, Setup
from gpu_parts.runs import Run, on_device, run, train
from gpu_parts.traces import StepTrace, read_steps

UNGROUPED = 1.5
"""Kernels a bucket beyond which its reductions run one by one."""
HIDDEN = 0.5
"""Share of communication under computation that is the least to expect of a step that overlaps both ways."""


def split(setup: Setup, axis: str) -> Outcome:
    """Two ranks along one axis: tp, dp, cp or pp. From the same weights on the same batches as one."""
    run(setup, "cpu")
    name = f"{axis}2"
    return against_cpu(setup, train(setup, {name: split_overrides(setup, axis)})[name])


def split_overrides(setup: Setup, axis: str) -> tuple[str, ...]:
    sizes = {"tp": 1, "pp": 1, "cp": 1} | ({} if axis == "dp" else {axis: 2})
    return go_on(setup, *on_device(setup, gpus=2), *(f"parallel.{name}={ranks}" for name, ranks in sizes.items()))


def overlap(setup: Setup) -> Outcome:
    """DP 2: launches of a bucket's collectives, and how much of them runs under other kernels."""
    return overlap_of(train(setup, {"overlap": overlap_overrides(setup)})["overlap"])


def overlap_overrides(setup: Setup) -> tuple[str, ...]:
    return profiled(setup, *on_device(setup, gpus=2), "parallel.tp=1", "parallel.pp=1")


def overlap_of(found: Run) -> Outcome:
    """Of one profiled step, beside the plan's buckets."""
    plan = read_plan(found.files.plan)
    return judge(read_steps(found.trace()), buckets=len(plan.buckets))


def judge(seen: StepTrace, *, buckets: int) -> Outcome:
    """Grouping and overlap of one step, `buckets` of which are reduced to owners and gathered again."""
    if seen.hidden is None:
        return Outcome(status="not run", said="the trace has no kernels of NCCL, as on a CPU")
    rooted = seen.collectives.get("Reduce", 0) + seen.collectives.get("Broadcast", 0)
    grouped = rooted <= 2 * UNGROUPED * buckets
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.collectives.items()))
    said = (
        f"{kinds} in {buckets} buckets: {'grouped' if grouped else 'one by one'}; "
        f"{seen.hidden:.0%} of {seen.collective_s * 1e3:.0f} ms hidden"
    )
    numbers = {"collectives": seen.collectives, "buckets": buckets, "hidden": seen.hidden}
    return Outcome(status="pass" if grouped and seen.hidden >= HIDDEN else "short", said=said, numbers=numbers)
