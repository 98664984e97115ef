"""timeline/rank-NNNNN.json: a few steps of one rank, moment by moment. `canzona_cli.report.run_trace` draws them."""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from canzona_cli.errors import Problem, gathered, refuse
from canzona_cli.run.codec import load, save
from canzona_cli.run.files import RunFiles
from canzona_cli.run.machine import clock_name
from canzona_cli.run.phases import StepTimeline


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """The content of one rank's file."""

    VERSION: ClassVar[int] = 1

    rank: int
    host: str
    clock: str
    """Equal on ranks that share a clock."""
    steps: tuple[StepTimeline, ...]


def write_timeline(files: RunFiles, rank: int, steps: Sequence[StepTimeline]) -> None:
    """Nothing where no step was kept; a warning in the log where it cannot be written."""
    if not steps:
        return
    timeline = RankTimeline(rank=rank, host=socket.gethostname(), clock=clock_name(), steps=tuple(steps))
    try:
        files.timelines.mkdir(exist_ok=True)
        save(files.timeline(rank), timeline, indented=False)  # a step of a large model has thousands of entries
    except OSError as error:  # a full disk is no reason to lose the run at its very end
        logging.getLogger(__name__).warning("%s cannot be written: %s", files.timeline(rank), error.strerror)


def load_timelines(files: RunFiles) -> list[RankTimeline]:
    """By rank; empty where there are none.

    Raises:
        ConfigError: with every file that is damaged or of another version.
    """
    found: list[RankTimeline] = []
    problems: list[Problem] = []
    for path in sorted(files.timelines.glob("rank-*.json")):
        with gathered(problems):
            found.append(load(path, RankTimeline, key="timeline", fix="remove the file, or train again"))
    refuse(problems)
    return sorted(found, key=lambda timeline: timeline.rank)
