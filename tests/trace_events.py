"""Reads a Chrome trace as strictly as a viewer could: well-formed events, named tracks on which nothing overlaps."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict


class Event(TypedDict):
    """A complete event (`ph` X); microseconds."""

    name: str
    cat: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Processes by number, in their order, and the events of each track."""

    processes: Mapping[int, str]
    names: Mapping[tuple[int, int], str]
    events: Mapping[tuple[int, int], list[Event]]

    def tracks(self, process: str, track: str) -> list[list[Event]]:
        """Events of the tracks so named (`track`, `track 2`, ...) of the first process whose name begins so."""
        pid = next(pid for pid, name in self.processes.items() if name.split(" (")[0].startswith(process))
        return [
            self.events[key]
            for key, name in self.names.items()
            if key[0] == pid and (name == track or name.removeprefix(f"{track} ").isdecimal())
        ]


def read_trace(path: Path) -> Trace:
    """Check and read a trace."""
    content = json.loads(path.read_text(encoding="utf-8"))
    processes: dict[int, str] = {}
    order: dict[int, int] = {}
    names: dict[tuple[int, int], str] = {}
    events: dict[tuple[int, int], list[Event]] = {}
    for event in content["traceEvents"]:
        key = event["pid"], event["tid"]
        assert all(isinstance(number, int) for number in key)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "process_sort_index":
                order[event["pid"]] = event["args"]["sort_index"]
            elif event["name"] == "thread_name":
                assert key not in names
                names[key] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert set(event) == set(Event.__annotations__)
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["ts"], float)
        assert isinstance(event["dur"], float)
        assert event["dur"] >= 0
        events.setdefault(key, []).append(event)
    assert set(events) == set(names), "every track has a name and something on it"
    assert {pid for pid, _ in names} == set(processes) == set(order)
    assert len({tid for _, tid in names}) == len(names)
    for found in events.values():
        for one, other in itertools.pairwise(found):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, "a nanosecond is rounding"
    ordered = sorted(processes, key=lambda pid: order[pid])
    return Trace(processes={pid: processes[pid] for pid in ordered}, names=names, events=events)
