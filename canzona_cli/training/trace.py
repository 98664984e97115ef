"""What a rank writes about a few of its steps, moment by moment. `canzona_cli.report.chrome_trace` draws it."""

import json
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from canzona_cli.run.files import RunFiles, write_text_atomic
from canzona_cli.run.phases import Interval, StepTimeline

VERSION = 1


def write_timeline(files: RunFiles, rank: int, steps: Sequence[StepTimeline]) -> None:
    """timeline/rank-NNNNN.json. Nothing where no step was kept; a warning in the log where it cannot be written."""
    if not steps:
        return
    content = {
        "version": VERSION,
        "rank": rank,
        "host": socket.gethostname(),
        "clock": clock_name(),
        "steps": [
            {
                "number": step.number,
                "start_s": step.start_s,
                "end_s": step.end_s,
                "phases": _rows(step.phases),
                "transfers": _rows(step.transfers),
            }
            for step in steps
        ],
    }
    # Not indented: a step of a large model has thousands of entries.
    text = json.dumps(content) + "\n"
    try:
        files.timelines.mkdir(exist_ok=True)
        write_text_atomic(files.timeline(rank), text)
    except OSError as error:  # a full disk is no reason to lose the run at its very end
        logging.getLogger(__name__).warning("%s cannot be written: %s", files.timeline(rank), error.strerror)


def clock_name() -> str:
    """Equal on ranks whose monotonic clocks are the same one: those of a machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _rows(intervals: Sequence[Interval]) -> list[list[object]]:
    return [[interval.name, interval.start_s, interval.end_s] for interval in intervals]
