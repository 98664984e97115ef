"""The event simulator against schedules worked out by hand, and the laws every schedule obeys."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.costs.timeline import Timeline


def ends(timeline: Timeline) -> list[float]:
    return [ran.end for ran in timeline.run()]


def test_a_task_takes_longer_by_the_share_of_its_units_that_transfers_take() -> None:
    timeline = Timeline()
    timeline.add("work", "compute", seconds=10.0)
    timeline.add("move", "data", seconds=1.0, link="wire", link_s=3.0)
    timeline.add("move", "other", seconds=2.0)
    ran = timeline.run_slowed({"compute": ["data", "other"]}, 0.5)
    assert [task.end for task in ran] == [10.0 + 0.5 * (4.0 + 2.0), 4.0, 2.0]


def test_two_transfers_at_a_time_get_half_the_link_each() -> None:
    timeline = Timeline()
    timeline.add("move", "a", link="wire", link_s=2.0)
    timeline.add("move", "b", seconds=1.0, link="wire", link_s=1.0)
    timeline.add("move", "c", link="other wire", link_s=2.0)
    # Until 1 the first is alone; then both need one more second of the link.
    assert ends(timeline) == [3.0, 3.0, 2.0]


def test_a_transfer_speeds_up_when_another_has_ended() -> None:
    timeline = Timeline()
    timeline.add("move", "a", link="wire", link_s=3.0)
    timeline.add("move", "b", link="wire", link_s=1.0)
    assert ends(timeline) == [4.0, 2.0]


def test_latency_does_not_use_the_link() -> None:
    timeline = Timeline()
    timeline.add("move", "a", seconds=5.0, link="wire", link_s=1.0)
    timeline.add("move", "b", link="wire", link_s=4.0)
    assert ends(timeline) == [6.0, 4.0]


def test_a_wait_is_blamed_on_what_came_last() -> None:
    timeline = Timeline()
    first = timeline.add("soon", "a", seconds=1.0)
    second = timeline.add("late", "b", seconds=3.0)
    timeline.add("work", "c", seconds=2.0)
    waited = timeline.add("work", "c", seconds=1.0, after=[first, second])
    ran = timeline.run()[waited]
    assert (ran.ready, ran.start, ran.end, ran.held_by) == (2.0, 3.0, 4.0, second)


def test_tasks_in_a_cycle_are_refused() -> None:
    timeline = Timeline()
    timeline.add("work", "a", after=[1])
    timeline.add("work", "a")
    with pytest.raises(ValueError, match="wait for each other in a cycle"):
        timeline.run()


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    timeline = Timeline()
    durations = st.integers(0, 8).map(lambda n: n / 4)
    for number in range(draw(st.integers(1, 25))):
        timeline.add(
            "x",
            draw(st.integers(0, 3)),
            seconds=draw(durations),
            link=draw(st.sampled_from((None, "one", "two"))),
            link_s=draw(durations),
            after=draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else [],
        )
    return timeline


@given(timeline=timelines())
def test_every_schedule_keeps_order_and_conserves_the_links(timeline: Timeline) -> None:
    ran = timeline.run()
    assert ran == timeline.run()
    busy_until: dict[object, float] = {}
    for task, when in zip(timeline.tasks, ran, strict=True):
        assert when.start >= busy_until.get(task.stream, 0.0)
        assert all(when.start >= ran[other].end for other in task.after)
        alone = task.seconds + (0.0 if task.link is None else task.link_s)
        assert when.end - when.start >= alone - 1e-9
        busy_until[task.stream] = when.end
    for link in ("one", "two"):
        used = [(t, w) for t, w in zip(timeline.tasks, ran, strict=True) if t.link == link and t.link_s]
        # A link gives at most a second a second, and never idles while somebody wants it.
        wanted = sorted((when.start + task.seconds, when.end) for task, when in used)
        reach, covered = float("-inf"), 0.0
        for start, end in wanted:
            covered += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        assert covered == pytest.approx(sum(task.link_s for task, _ in used))


def test_tasks_that_want_more_cores_than_there_are_slow_down_alike() -> None:
    timeline = Timeline(cores=2)
    for name, seconds in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 2.0)):
        timeline.add("work", name, seconds=seconds, cores=1.0)
    # Four on two cores: half speed until three are done at 2; the last one has a core of its own from then on.
    assert ends(timeline) == [2.0, 2.0, 2.0, 3.0]


def test_a_transfer_that_keeps_cores_busy_takes_them_from_who_computes() -> None:
    timeline = Timeline(cores=2)
    timeline.add("work", "a", seconds=2.0, cores=2.0)
    timeline.add("move", "b", seconds=1.0, link="wire", link_s=1.0, cores=1.0)
    timeline.add("move", "c", link="wire", link_s=1.0)
    # Three cores wanted of two; what keeps none busy has the link to itself.
    assert ends(timeline) == [3.0, 3.0, 1.0]


@given(
    cores=st.integers(1, 4),
    works=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=20),
)
def test_cores_are_neither_exceeded_nor_left_idle(cores: int, works: list[tuple[int, int, int]]) -> None:
    timeline = Timeline(cores=cores)
    for stream, quarters, wanted in works:
        timeline.add("work", stream, seconds=quarters / 4, cores=float(wanted))
    ran = timeline.run()
    demand = sum(quarters / 4 * wanted for _, quarters, wanted in works)
    longest = max(sum(q / 4 for stream, q, _ in works if stream == own) for own in range(4))
    end = max(when.end for when in ran)
    assert end >= max(demand / cores, longest) - 1e-9
    for (_, quarters, _), when in zip(works, ran, strict=True):
        assert when.end - when.start >= quarters / 4 - 1e-9
    # Whenever somebody runs, the cores do as much as is wanted of them, at most what they can.
    moments = sorted({when.start for when in ran} | {when.end for when in ran})
    done = 0.0
    for begin, until in itertools.pairwise(moments):
        now = sum(w for (_, _, w), when in zip(works, ran, strict=True) if when.start <= begin and when.end >= until)
        done += min(now, cores) * (until - begin)
    assert done == pytest.approx(demand)
