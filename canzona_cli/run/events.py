"""What is said of the lines of events.jsonl that are no stages."""

from collections.abc import Mapping
from dataclasses import dataclass

from canzona_cli.run.words import clean, real, size, step_time


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line about something that happened in a run."""

    text: str
    warning: bool = False
    """Whether somebody should look at it; else it is said quietly."""


def describe(event: Mapping[str, object]) -> Note | None:
    """The line for an event; None for one that says nothing by itself.

    Events of any name may bring their own words in `detail`: they are shown when `level` is info or warning.
    """
    if event.get("event") == "checkpoint":
        return Note(text=_checkpoint(event))
    if event.get("level") in ("info", "warning") and event.get("detail"):
        return Note(text=clean(event["detail"]), warning=event["level"] == "warning")
    return None


def _checkpoint(event: Mapping[str, object]) -> str:
    facts = f"{size(event.get('bytes'))} in {step_time(event.get('seconds'))}"
    waited = f"training waited {step_time(event.get('stall_s'))}"
    return f"saved step {int(real(event.get('step')) or 0):,}: {facts}, {waited}"
