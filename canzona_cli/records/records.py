"""The records that the ranks and the launcher of a run write. Writers and readers of a record share its type.

In files that readers can do without, fields have defaults, because an interrupted writer may not have written
them.
"""

import logging
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal, get_args

from canzona_cli.core.errors import Problem, collect_problems, refuse
from canzona_cli.core.phases import StepTimeline
from canzona_cli.core.setup import Layout
from canzona_cli.records.codec import load, load_if_valid, record_of, save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.words import clean, size, step_time

Ending = Literal["done", "interrupted", "preempted"]
"""The status of a rank or a run that ended without an error."""
Failure = Literal["failed", "diverged"]
"""The status after an error: `diverged` if the training diverged, otherwise `failed`."""
RunStatus = Literal[Ending, Failure]
FAILURES: Final[tuple[Failure, ...]] = get_args(Failure)
Level = Literal["info", "warning"]
RankStatus = Literal[RunStatus, "running", "missing"]
"""The status of a rank. `missing` is never written: it stands for a rank that has no readable file."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error that ended a rank."""

    type: str = "Error"
    """The name of the exception's class."""
    message: str = ""
    traceback: str = ""
    """The traceback; empty for an error that was written for the user."""
    problems: tuple[Problem, ...] = ()
    """The problems of an error that was written for the user."""
    since: int | None = None
    """The first diverged step; None unless the run diverged."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The contents of ranks/rank-NNNNN.json: how far a rank got and how it ended. The rank writes it at its
    start and at its end."""

    rank: int
    pid: int | None = None
    status: RankStatus
    exit_code: int | None = None
    step: int = 0
    loss: float | None = None
    """The training loss of `step`; None if it is not finite, or before the first step."""
    checkpoint: str | None = None
    """The name of the checkpoint that was saved at the end of the run."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """The number of lines that the rank could not write, by file."""
    error: RankError | None = None
    time: float = 0.0
    """The time of writing, in seconds since 1970."""


def read_rank(files: RunFiles, rank: int) -> RankResult:
    """Reads a rank's file. The status is `missing` if the file does not exist or cannot be read."""
    return load_if_valid(files.rank(rank), RankResult) or RankResult(rank=rank, status="missing")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The contents of result.json: how a run ended. The launcher writes it."""

    status: RunStatus
    exit_code: int
    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    message: str = ""
    rank: int | None = None
    """The rank that failed first."""
    machine: str | None = None
    """The name of the machine of that rank, or of the launcher that failed."""
    log: Path | None = None
    """The log of that rank."""
    last_good: str | None = None
    """The newest checkpoint from before the run diverged."""
    restarts: int = 0
    """The number of restarts after a failure, in this launch."""
    go_on: str | None = None
    """The command that resumes the run; None if the run is done, or its settings have to change first."""

    @property
    def failed(self) -> bool:
        """True if the run failed or diverged."""
        return self.status in FAILURES


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The contents of sweep.json in the directory of a sweep."""

    runs: tuple[str, ...]
    """The names of all runs, which are those of their directories."""


@dataclass(frozen=True, kw_only=True)
class TrackerState:
    """The contents of trackers/NAME.json: a tracker's progress, so that the next launch continues the same
    curve."""

    id: str | None = None
    """The ID that the tracker gave the run; None until it has given one."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """The last step that was sent, by kind of record: the key is empty for metrics.jsonl, and `validation_` for
    validation.jsonl."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The contents of resume.json: the checkpoint that a launch starts from. The workers read the file, and
    the next launch compares its own `checkpoint.resume` with `asked`."""

    checkpoint: str
    """The path of the checkpoint."""
    step: int
    validate: bool
    """True if the model is validated before the first step."""
    validation: "ValidationLoss | None" = None
    """The validation of the checkpoint's step, if there was one. It ran after the save, so the checkpoint
    does not contain it."""
    asked: str
    """The value of `checkpoint.resume` in this launch."""
    weights_only: bool = False
    """True if the launch takes only the checkpoint's weights and starts at its first step."""


def read_layout(path: Path) -> Layout:
    """Reads the layout.json of a run or a checkpoint.

    Raises:
        ConfigError: the file is damaged.
        FileNotFoundError: there is no such file.
    """
    return load(path, Layout, key=path.name, fix="start the run again")


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    loss: float | None = None
    """The mean over the global batch, in nats per token; None if it was not finite."""
    lr: float | None = None
    adamw_lr: float | None = None
    """The learning rate of parameters that are not matrices; None if it is `lr`."""
    grad_norm: float | None = None
    """The norm before clipping; None if it was not finite."""
    tokens_per_s: float | None = None
    """The throughput of all ranks together."""
    step_s: float | None = None
    tokens: int | None = None
    """The number of tokens trained on so far."""
    skipped: int = 0
    """The number of steps so far that were skipped because their gradients were not finite."""
    fallbacks: int = 0
    """The number of matrix updates so far that were not finite or needed their optimizer's fallback."""
    balancing_loss: float | None = None
    """The mean balancing loss of the layers, before its weight; 1 if tokens are spread evenly over experts.
    None for a dense model."""
    expert_load: float | None = None
    """The tokens of the busiest expert over the mean of all experts, in the most uneven layer. None for a
    dense model."""
    captures: int = 0
    """The number of CUDA graphs of updates that all ranks have captured in this launch, up to the previous
    step."""
    time: float | None = None
    """The time of writing, in seconds since 1970."""


EMA: Final = "EMA"
"""The name of the average of the weights among the parts of a validation."""


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """A line of validation.jsonl."""

    step: int
    loss: float | None = None
    """The loss; for a blend, the mean of its sets weighted by their training shares. None if it was not
    finite."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """The loss of each set of a blend, by its name, and that of the average of the weights (`EMA`) on all of them."""
    time: float | None = None


FIRST_STAGE: Final = "start workers"
"""The first stage of every launch of a run."""


@dataclass(frozen=True, kw_only=True)
class StageEvent:
    """A line of events.jsonl: the run enters a stage, which ends the previous stage."""

    time: float | None = None
    event: Literal["stage"] = "stage"
    stage: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A line of events.jsonl: a checkpoint is complete on disk."""

    time: float | None = None
    event: Literal["checkpoint"] = "checkpoint"
    step: int
    seconds: float
    """The seconds from the copy in memory to the complete checkpoint on disk."""
    stall_s: float
    """The seconds that training waited for the save."""
    bytes: int
    path: str = ""
    """The path relative to the run directory."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A line of events.jsonl for an event that is neither a stage nor a checkpoint."""

    time: float | None = None
    event: str
    detail: str = ""
    level: Level | None = None
    """The level at which `detail` is shown to the user; None if it is not shown."""
    facts: Mapping[str, float | str | None] = field(default_factory=dict)
    """Further numbers and names, for programs. In the file, they are top-level keys of the line."""

    def line(self) -> dict[str, object]:
        """Returns the JSON object of the line in the file."""
        level = {} if self.level is None else {"level": self.level}
        return {"time": self.time, "event": self.event, "detail": self.detail, **self.facts, **level}


Event = StageEvent | CheckpointEvent | Incident


@dataclass(frozen=True, kw_only=True)
class Note:
    """A line of text about an event of a run."""

    text: str
    warning: bool = False
    """True if the user should look into the event."""


def event_of(line: Mapping[str, object]) -> Event | None:
    """Parses a line of events.jsonl; returns None if it is not a valid event."""
    kinds: dict[str, type[Event]] = {"stage": StageEvent, "checkpoint": CheckpointEvent}
    return record_of(kinds.get(str(line.get("event")), Incident), dict(line))


def describe(event: Event) -> Note | None:
    """Returns the note of a checkpoint or an incident; None for stages, which are shown separately.

    The text of an incident is its `detail`; incidents without a level or a detail are not shown.
    """
    if isinstance(event, CheckpointEvent):
        saved = f"{size(event.bytes)} in {step_time(event.seconds)}"
        return Note(text=f"saved step {event.step:,}: {saved}, training waited {step_time(event.stall_s)}")
    if isinstance(event, Incident) and event.level is not None and event.detail:
        return Note(text=clean(event.detail), warning=event.level == "warning")
    return None


Documents = Literal["held-out", "all"]
"""The documents of a corpus that an evaluation reads: all of them, or only those that the run holds out from
training."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The contents of evaluation.json, written by rank 0."""

    VERSION: ClassVar = 1

    checkpoint: Path
    step: int
    data: Path
    """The prefix of the data set, or of the first data set of a blend."""
    tokenizer: str
    documents: Documents
    layout: Layout
    sequences: int
    """The number of sequences, of all sets of a blend together."""
    tokens: int
    """The number of predicted tokens."""
    epochs: float
    """The part of the documents that was read; 1 is all of them."""
    text_bytes: float | None
    """The bytes of the text that the tokens encode; None if the tokenizer is unknown."""
    bytes_counted: bool
    """True if `text_bytes` was counted token by token; False if it is estimated from the mean of the
    corpus."""
    loss: float | None
    """The mean loss in nats per token; None if it is not finite. For a blend, the loss and `text_bytes` are
    weighted by the shares of the sets."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """The loss of each set of a blend, by its name."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None without a loss or if the result would overflow."""
        return None if self.loss is None or self.loss > math.log(1e308) else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The bits of all tokens over the bytes of their text. Unlike loss and perplexity, it can be compared
        between tokenizers."""
        if self.loss is None or not self.text_bytes:
            return None
        return self.loss * self.tokens / self.text_bytes / math.log(2)

    def as_json(self) -> dict[str, object]:
        """Returns the stable output of `canzona eval --json`."""
        places = {"checkpoint": str(self.checkpoint), "data": str(self.data)}
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"version": self.VERSION, **asdict(self), **places, **derived}


def evaluation_file(files: RunFiles) -> Path:
    return files.root / "evaluation.json"


def read_evaluation(files: RunFiles) -> Evaluation:
    """Reads the evaluation that the ranks have written.

    Raises:
        ConfigError: the file is damaged.
        FileNotFoundError: the ranks have not written it.
    """
    return load(evaluation_file(files), Evaluation, key="evaluation.json", fix="evaluate again")


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """The contents of timeline/rank-NNNNN.json."""

    VERSION: ClassVar[int] = 2

    rank: int
    host: str
    steps: tuple[StepTimeline, ...]


def write_timeline(files: RunFiles, rank: int, steps: Sequence[StepTimeline]) -> None:
    """Writes the timelines of the steps that a rank recorded; logs a warning if the file cannot be
    written."""
    if not steps:
        return
    timeline = RankTimeline(rank=rank, host=socket.gethostname(), steps=tuple(steps))
    try:
        files.timelines.mkdir(exist_ok=True)
        save(files.timeline(rank), timeline, indented=False)  # a step of a large model has thousands of entries
    except OSError as error:  # a full disk must not fail a run at its very end
        logging.getLogger(__name__).warning("%s cannot be written: %s", files.timeline(rank), error.strerror)


def load_timelines(files: RunFiles) -> list[RankTimeline]:
    """Reads the timelines of all ranks, in rank order; empty if there are none.

    Raises:
        ConfigError: lists every file that is damaged or of another version.
    """
    timelines: list[RankTimeline] = []
    problems: list[Problem] = []
    for path in sorted(files.timelines.glob("rank-*.json")):
        with collect_problems(problems):
            timelines.append(load(path, RankTimeline, key="timeline", fix="remove the file, or train again"))
    refuse(problems)
    return sorted(timelines, key=lambda timeline: timeline.rank)
