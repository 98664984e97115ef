"""The event simulator against schedules worked out by hand, and the laws every schedule obeys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.planner.timeline import Timeline


def ends(timeline: Timeline) -> list[float]:
    return [ran.end for ran in timeline.run()]


def test_a_stream_runs_one_task_after_another() -> None:
    timeline = Timeline()
    for seconds in (1.0, 2.0, 3.0):
        timeline.add("work", "a", seconds=seconds)
    assert ends(timeline) == [1.0, 3.0, 6.0]


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


def test_tasks_in_a_circle_are_refused() -> None:
    timeline = Timeline()
    timeline.add("work", "a", after=[1])
    timeline.add("work", "a")
    with pytest.raises(ValueError, match="circle"):
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
