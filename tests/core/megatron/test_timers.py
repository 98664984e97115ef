"""PhaseTimer on a clock that only moves when told: every second of a step belongs to exactly one phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.megatron.owner_bucket_group import PendingCollectives
from canzona_cli.core.megatron.timers import CudaWatcher, HostClock, PhaseTimer, StepTiming
from canzona_cli.core.phases import IN_STEP, Phase
from tests.cuda_stand_in import DEVICE, cuda_stand_in


@contextmanager
def step_of(timer: PhaseTimer) -> Iterator[None]:
    timer.begin_step()
    yield
    timer.end_step()


class HandClock(HostClock):
    """Shows the time it was set to."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> object:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


class HandTimer(PhaseTimer):
    """A timer that reads a `HandClock`."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.clock = self._clock = HandClock()

    def spend(self, seconds: float, *phases: Phase) -> None:
        """Let time pass inside nested `phases`."""
        if not phases:
            self.clock.wait(seconds)
            return
        with self.phase(phases[0]):
            self.spend(seconds, *phases[1:])

    def only(self) -> StepTiming:
        (timing,) = self.timings()
        return timing


def test_a_phase_ends_when_its_body_raises() -> None:
    timer = HandTimer()
    with pytest.raises(ZeroDivisionError), timer.phase("backward"):
        raise ZeroDivisionError
    assert timer.current == "other"


def test_transfers_that_overlap_count_once() -> None:
    """A total is the length of the union: two buckets in flight together share one link."""
    timer = HandTimer()
    with step_of(timer):
        for start, end in ((1.0, 4.0), (2.0, 3.0), (3.0, 6.0), (8.0, 9.0)):
            timer.span("grad_reduce_total", 100.0 + start, 100.0 + end)
        timer.spend(10.0, "backward")
    assert timer.only().phases["grad_reduce_total"] == pytest.approx(6.0)


def test_what_the_step_waits_for_a_transfer_is_part_of_its_total() -> None:
    """The transfer is in flight for 5 s under backward, then waited for 2 s more, of which the watcher saw 1."""
    timer = HandTimer()
    with step_of(timer):
        begin = timer.now()
        timer.spend(5.0, "backward")
        with timer.phase("grad_reduce"):
            timer.spend(1.0)
            timer.span("grad_reduce_total", begin, timer.now())
            timer.spend(1.0)
    phases = timer.only().phases
    assert (phases["grad_reduce"], phases["grad_reduce_total"]) == (2.0, 7.0)


def test_a_transfer_that_lands_after_its_step_counts_for_the_step_it_began_in() -> None:
    """Parameter gathering overlaps the next forward; a step is only read once the next one has ended."""
    timer = HandTimer()
    with step_of(timer):
        timer.spend(1.0)
        gather = timer.span("param_gather_total", timer.now())
        timer.spend(1.0)
    with step_of(timer):
        timer.spend(3.0, "forward")
        gather.end = timer.now()
    first, second = timer.timings()
    assert first.phases["param_gather_total"] == 4.0
    assert "param_gather_total" not in second.phases


def test_a_transfer_that_never_lands_is_left_out() -> None:
    timer = HandTimer()
    with step_of(timer):
        timer.span("exchange_total", timer.now())
    assert "exchange_total" not in timer.only().phases


def test_calls_outside_a_step_measure_nothing() -> None:
    """A validation runs the very same instrumented code between two steps."""
    timer = HandTimer()
    timer.spend(1.0, "forward")
    timer.span("grad_reduce_total", 100.0, 101.0)
    assert timer.timings() == []
    with step_of(timer):
        timer.spend(2.0, "forward")
    timer.spend(4.0, "forward")
    timer.span("grad_reduce_total", 102.0, 106.0)
    assert timer.timings() == [StepTiming(number=1, step_s=2.0, phases={"other": 0.0, "forward": 2.0})]


@given(
    parts=st.lists(
        st.tuples(st.lists(st.sampled_from(IN_STEP), max_size=3), st.integers(0, 50).map(float)), max_size=8
    ),
    transfers=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 100)), max_size=6),
)
def test_phases_add_up_to_the_step(parts: list[tuple[list[Phase], float]], transfers: list[tuple[int, int]]) -> None:
    """Whatever is nested in whatever: in-step phases add up, and a total is what a second-by-second count gives."""
    timer = HandTimer()
    with step_of(timer):
        covered: set[int] = set()
        for phases, seconds in parts:
            if phases and phases[-1] == "exchange":
                covered |= set(range(int(timer.clock.time), int(timer.clock.time + seconds)))
            timer.spend(seconds, *phases)
        for start, length in transfers:
            timer.span("exchange_total", float(start), float(start + length))
            covered |= set(range(start, start + length))
    timing = timer.only()
    assert timing.step_s == sum(seconds for _, seconds in parts)
    assert sum(timing.phases.get(name, 0.0) for name in IN_STEP) == timing.step_s
    assert timing.phases.get("exchange_total", 0.0) == len(covered)


def test_the_last_steps_can_be_told_moment_by_moment() -> None:
    """Exclusive phases without gaps from start to end, transfers beside them, on the host's clock."""
    timer = HandTimer()
    for number in range(1, 5):
        with step_of(timer):
            timer.spend(1.0, "forward")
            sent = timer.span("grad_reduce_total", timer.now())
            with timer.phase("norm_clip"):
                timer.spend(2.0)
                timer.spend(float(number), "matrix_update")
        sent.end = timer.now()
    assert [timeline.number for timeline in timer.timelines()] == [3, 4]
    last = timer.timelines()[-1]
    assert (last.start_s, last.end_s) == (100 + 4 + 5 + 6, 100 + 4 + 5 + 6 + 7)
    assert [(phase.name, phase.end_s - phase.start_s) for phase in last.phases] == [
        ("forward", 1.0),
        ("norm_clip", 2.0),
        ("matrix_update", 4.0),
    ]
    assert last.phases[0].start_s == last.start_s
    assert last.phases[-1].end_s == last.end_s
    (transfer,) = last.transfers
    assert (transfer.name, transfer.start_s, transfer.end_s) == ("grad_reduce", last.start_s + 1, last.end_s)


def test_a_resumed_run_numbers_its_steps_from_where_it_resumes() -> None:
    timer = HandTimer()
    timer.number_from(6)
    for _ in range(5):
        with step_of(timer):
            timer.spend(1.0, "forward")
    assert [timeline.number for timeline in timer.timelines()] == [9, 10]
    assert [timing.number for timing in timer.timings()] == [6, 7, 8, 9, 10]


def test_a_transfer_that_has_not_landed_is_not_drawn() -> None:
    timer = HandTimer()
    with step_of(timer):
        timer.span("exchange_total", timer.now())
        timer.spend(1.0, "forward")
    (timeline,) = timer.timelines()
    assert timeline.transfers == ()


def test_a_ranks_own_time_is_its_even_work_without_the_waits_in_it() -> None:
    timer = HandTimer()
    timer.waited(1.0)  # outside of steps nothing is measured
    for scale in (1.0, 2.0):
        with step_of(timer):
            timer.spend(scale * 1.0, "data")
            with timer.phase("forward"):
                timer.spend(scale * 2.0)
                timer.waited(scale * 0.5)
            timer.spend(scale * 4.0, "backward")
            with timer.phase("grad_reduce"):
                timer.spend(scale * 8.0)
                timer.waited(scale * 8.0)  # everybody waits here, for the one that is slow elsewhere
            timer.spend(scale * 16.0, "matrix_update")  # a plan may share these out unevenly
        if scale == 1.0:
            assert timer.newest is None, "its device may still be at it"
    assert timer.newest is not None
    assert (timer.newest.own_s, timer.newest.waited_s) == (6.5, 0.5)
    assert [timing.own_s for timing in timer.timings()] == [6.5, 13.0]


def test_what_is_fetched_early_is_not_waited_for_again() -> None:
    """The host waits on CUDA; only then is the host's clock a device's."""
    with cuda_stand_in() as record:
        timer = PhaseTimer(DEVICE)
        first, second = (torch.tensor([number, 2.0]) * 1.0 for number in (1.0, 3.0))
        with step_of(timer):
            early = timer.fetch(first)
            assert record.host_waits == []
            assert timer.read(second) == [3.0, 2.0]
            assert len(record.host_waits) == 1
            assert early() == [1.0, 2.0]
            assert len(record.host_waits) == 1
        assert record.host_reads == []
        before = time.perf_counter()
        (step,) = timer.timelines()
        assert (step.start_s, step.end_s) == pytest.approx((before, before), abs=60.0), "the host's clock"


def test_a_watched_transfer_of_nothing_takes_no_time() -> None:
    """One data-parallel rank sends nothing: the end must not come before its start, nor from another stream."""
    with cuda_stand_in() as record:
        timer = PhaseTimer(DEVICE)
        span = timer.span("grad_reduce_total", timer.now())
        CudaWatcher().watch(span, PendingCollectives([]))
        assert span.end is span.start
        assert record.waits == []


def test_who_listens_hears_every_change_of_phase() -> None:
    timer = HandTimer()
    heard: list[object] = []
    timer.on_change = heard.append
    with timer.phase("forward"), timer.phase("exchange"):
        pass
    assert heard == ["forward", "exchange", "forward", "other"]
