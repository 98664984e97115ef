"""Reads traces of torch's profiler: kernels, waits of the host, and hidden communication.

Only events from the first to the last phase of the breakdown count; phases are user annotations in the trace. The host
also waits for the GPU when the profiler starts and stops, which is not part of a step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Event = Mapping[str, object]
Span = tuple[float, float]

WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
"""The calls in which the host waits for the GPU; `item` and copies to pageable memory use the first."""
COLLECTIVES: Final = ("AllReduce", "ReduceScatter", "AllGather", "SendRecv", "Broadcast", "Reduce")
"""The collectives as they appear in the names of NCCL's kernels; the first one that a name contains counts."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The counts and times of a trace, added up over its steps."""

    kernels: int
    """The number of kernels on the GPU, including NCCL's."""
    waits: Mapping[str, int]
    """The number of the host's waits, by call."""
    collectives: Mapping[str, int]
    """The number of NCCL's kernels, by collective."""
    collective_s: float
    """The seconds in which an NCCL kernel runs."""
    hidden: float | None
    """The share of `collective_s` in which another kernel runs as well; None without NCCL kernels."""


def read_steps(events: Sequence[Event]) -> StepTrace:
    """Summarises the trace of one or more steps; all counts are 0 without a GPU."""
    phases = [_span(event) for event in events if event.get("cat") == "user_annotation"]
    start_us, end_us = min((begin for begin, _ in phases), default=0.0), max((end for _, end in phases), default=0.0)
    inside = [event for event in events if event.get("ph") == "X" and start_us <= _span(event)[0] <= end_us]
    kernels = [(str(event["name"]), _span(event)) for event in inside if event.get("cat") == "kernel"]
    nccl = [(name, span) for name, span in kernels if "nccl" in name.lower()]
    communicating_us = _length(span for _, span in nccl)
    computing_us = _length(span for name, span in kernels if "nccl" not in name.lower())
    hidden_us = communicating_us + computing_us - _length(span for _, span in kernels)
    return StepTrace(
        kernels=len(kernels),
        waits=Counter(str(event["name"]) for event in inside if event["name"] in WAITS),
        collectives=Counter(_kind(name) for name, _ in nccl),
        collective_s=communicating_us * 1e-6,
        hidden=hidden_us / communicating_us if nccl else None,
    )


def _kind(kernel: str) -> str:
    return next((kind for kind in COLLECTIVES if kind in kernel), "other")


def _span(event: Event) -> Span:
    """Returns the start and the end of an event, in microseconds."""
    begin, lasted = event.get("ts", 0.0), event.get("dur", 0.0)
    assert isinstance(begin, int | float)
    assert isinstance(lasted, int | float)
    return begin, begin + lasted


def _length(spans: Iterable[Span]) -> float:
    """Returns the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
