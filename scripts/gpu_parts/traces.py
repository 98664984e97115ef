"""What a trace of torch's profiler says of a step: kernels, waits of the host, and how much communication is hidden.

Read between the first and the last phase of the breakdown, which the trace has as ranges of the user's: starting and
stopping the profiler synchronises too, and is no part of a step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Event = Mapping[str, object]
Span = tuple[float, float]

WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""Calls in which the host waits for the GPU; `item` and copies to pageable memory end in the first."""
COLLECTIVES: Final = ("AllReduce", "ReduceScatter", "AllGather", "SendRecv", "Broadcast", "Reduce")
"""Words in NCCL's names of kernels. The first that is found counts."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Of all steps in the trace together."""

    kernels: int
    """All that ran on the GPU, NCCL's as well."""
    waits: Mapping[str, int]
    collectives: Mapping[str, int]
    """NCCL's kernels by what they do."""
    collective_s: float
    """With an NCCL kernel on the GPU, whatever else is."""
    hidden: float | None
    """Share of that time in which another kernel runs as well; None without any."""


def read_steps(events: Sequence[Event]) -> StepTrace:
    """What the trace of a few steps holds; nothing where no GPU took part."""
    phases = [_span(event) for event in events if event.get("cat") == "user_annotation"]
    first, last = min((begin for begin, _ in phases), default=0.0), max((end for _, end in phases), default=0.0)
    inside = [event for event in events if event.get("ph") == "X" and first <= _span(event)[0] <= last]
    kernels = [(str(event["name"]), _span(event)) for event in inside if event.get("cat") == "kernel"]
    nccl = [(name, span) for name, span in kernels if "nccl" in name.lower()]
    communicating = _length(span for _, span in nccl)
    computing = _length(span for name, span in kernels if "nccl" not in name.lower())
    hidden = communicating + computing - _length(span for _, span in kernels)
    return StepTrace(
        kernels=len(kernels),
        waits=Counter(str(event["name"]) for event in inside if event["name"] in WAITS),
        collectives=Counter(_kind(name) for name, _ in nccl),
        collective_s=communicating * 1e-6,
        hidden=hidden / communicating if nccl else None,
    )


def _kind(kernel: str) -> str:
    return next((kind for kind in COLLECTIVES if kind in kernel), "other")


def _span(event: Event) -> Span:
    """Microseconds."""
    begin, lasted = event.get("ts", 0.0), event.get("dur", 0.0)
    assert isinstance(begin, int | float)
    assert isinstance(lasted, int | float)
    return begin, begin + lasted


def _length(spans: Iterable[Span]) -> float:
    """Of all of them together, counting once where several are."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
