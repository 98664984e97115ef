"""Lines of events.jsonl as records, and what they say to whoever watches the run."""

from collections.abc import Mapping
from dataclasses import dataclass

from canzona_cli.run.codec import record_of
from canzona_cli.run.records import CheckpointEvent, Incident, StageEvent
from canzona_cli.run.words import clean, size, step_time

Event = StageEvent | CheckpointEvent | Incident


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line about something that happened in a run."""

    text: str
    warning: bool = False
    """Whether somebody should look at it; else it is shown quietly."""


def event_of(line: Mapping[str, object]) -> Event | None:
    """A line of events.jsonl; None where it is no event."""
    kinds: dict[object, type[Event]] = {"stage": StageEvent, "checkpoint": CheckpointEvent}
    return record_of(kinds.get(line.get("event"), Incident), dict(line))


def describe(event: Event) -> Note | None:
    """The line for an event; None for one that is not shown: stages have lines of their own.

    Events of any name may bring their own words in `detail`: they are shown when they have a level.
    """
    if isinstance(event, CheckpointEvent):
        facts = f"{size(event.bytes)} in {step_time(event.seconds)}"
        return Note(text=f"saved step {event.step:,}: {facts}, training waited {step_time(event.stall_s)}")
    if isinstance(event, Incident) and event.level is not None and event.detail:
        return Note(text=clean(event.detail), warning=event.level == "warning")
    return None
