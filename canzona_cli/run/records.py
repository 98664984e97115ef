"""The records that the ranks and the launcher of a run leave, one type for their writers and their readers.

Files whose readers go on without them have defaults for what an older or an interrupted writer may have left
out.
"""

import logging
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal, get_args

from canzona_cli.config.schema import Layout
from canzona_cli.errors import Problem, gathered, refuse
from canzona_cli.run.codec import load, load_if_sound, plain, record_of, save
from canzona_cli.run.files import RunFiles
from canzona_cli.run.machine import clock_name
from canzona_cli.run.phases import StepTimeline
from canzona_cli.run.words import clean, size, step_time

Ending = Literal["done", "interrupted", "preempted"]
"""The end of a rank's work where nothing went wrong."""
Failure = Literal["failed", "diverged"]
"""The end where something did: the training itself diverged, or anything else failed."""
RunStatus = Literal[Ending, Failure]
FAILURES: Final[tuple[Failure, ...]] = get_args(Failure)
Level = Literal["info", "warning"]
RankStatus = Literal[RunStatus, "running", "missing"]
"""`missing` is in no file: the rank never wrote one."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error that ended a rank."""

    type: str = "Error"
    """Name of the exception's class."""
    message: str = ""
    traceback: str = ""
    """Empty for an error that was written for the user, which says what to do."""
    problems: tuple[Problem, ...] = ()
    """The content of such an error."""
    since: int | None = None
    """The first diverged step, where the run diverged."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """ranks/rank-NNNNN.json: how far a rank got and how it ended. Written when it starts and when it ends."""

    rank: int
    pid: int | None = None
    status: RankStatus
    exit_code: int | None = None
    step: int = 0
    loss: float | None = None
    """The loss of that step; None where it is not finite, and before the first."""
    checkpoint: str | None = None
    """Name of the checkpoint that the run ended with."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Lines of the run's files that it could not write, by file."""
    error: RankError | None = None
    time: float = 0.0
    """The time of writing, seconds since 1970."""


def read_rank(files: RunFiles, rank: int) -> RankResult:
    """A rank's file; status `missing` where there is none that can be read."""
    return load_if_sound(files.rank(rank), RankResult) or RankResult(rank=rank, status="missing")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """result.json: how a run ended, written by the launcher."""

    status: RunStatus
    exit_code: int
    step: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    message: str = ""
    rank: int | None = None
    """The rank that failed first."""
    log: Path | None = None
    """The output of that rank."""
    last_good: str | None = None
    """The newest checkpoint from before the run diverged."""
    restarts: int = 0
    """The number of restarts after a failure, in this launch."""
    go_on: str | None = None
    """The command that resumes the run; None where it is done, or its settings have to change first."""

    @property
    def failed(self) -> bool:
        """True where something went wrong."""
        return self.status in FAILURES


@dataclass(frozen=True, kw_only=True)
class TrackerState:
    """trackers/NAME.json: how far a tracker is, so that the next launch goes on with the same curve."""

    id: str | None = None
    """The tracker's name of the run; None before it has one."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """The last step it took, by what its names begin with: nothing for metrics.jsonl, else `validation_`."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """resume.json: where this launch goes on from, for the workers and for the next launch."""

    checkpoint: str
    """Path."""
    step: int
    validate: bool
    """True where validation comes before the first step."""
    validation: "ValidationLoss | None" = None
    """The validation of the checkpoint's step: made after the save, so the checkpoint does not have it."""
    asked: str
    """`checkpoint.resume` of the launch."""
    weights_only: bool = False
    """The launch takes the checkpoint's weights, and nothing else, and begins at its first step."""


def read_layout(path: Path) -> Layout:
    """layout.json of a run or a checkpoint.

    Raises:
        ConfigError: it is damaged.
        FileNotFoundError: there is none.
    """
    return load(path, Layout, key=path.name, fix="start the run again")


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    loss: float | None = None
    """Mean over the global batch, nats per token; None in the file where it is not finite."""
    lr: float | None = None
    grad_norm: float | None = None
    """The norm before clipping; None where it is not finite."""
    tokens_per_s: float | None = None
    """Throughput of the whole job."""
    step_s: float | None = None
    tokens: int | None = None
    """Trained on so far."""
    skipped: int = 0
    """Steps so far that changed nothing because their gradients were not finite."""
    fallbacks: int = 0
    """Matrix updates so far that were replaced by what their optimizer does when it fails."""
    captures: int = 0
    """CUDA graphs of updates that this launch has captured up to the step before, on all ranks."""
    time: float | None = None
    """The time of writing, seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """A line of validation.jsonl."""

    step: int
    loss: float | None = None
    """The loss, of a blend the mean of its sets by their training shares;
    None in the file where it is not finite."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """The loss of each set of a blend, by its name."""
    time: float | None = None


FIRST_STAGE: Final = "start workers"
"""The stage that every launch of a run begins with."""


@dataclass(frozen=True, kw_only=True)
class StageEvent:
    """A line of events.jsonl: the run, or one rank's part of it, enters a stage. The stage before ends."""

    time: float | None = None
    event: Literal["stage"] = "stage"
    stage: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """A line of events.jsonl: a checkpoint is on the disk."""

    time: float | None = None
    event: Literal["checkpoint"] = "checkpoint"
    step: int
    seconds: float
    """Seconds from the copy in memory to the whole checkpoint on the disk."""
    stall_s: float
    """Seconds of these that training waited."""
    bytes: int
    path: str = ""
    """Relative to the run directory."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A line of events.jsonl: something else happened."""

    time: float | None = None
    event: str
    detail: str = ""
    level: Level | None = None
    """Whoever watches the run sees the detail where there is a level."""
    facts: Mapping[str, float | str | None] = field(default_factory=dict)
    """Numbers and names, for programs; in the file they are fields of the line itself."""

    def line(self) -> dict[str, object]:
        """The line of the file."""
        fixed = plain(self)
        facts = {key: value for key, value in fixed.items() if key not in ("facts", "level")} | dict(self.facts)
        return facts | ({} if self.level is None else {"level": self.level})


Event = StageEvent | CheckpointEvent | Incident


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line about something that happened in a run."""

    text: str
    warning: bool = False
    """True where somebody should look at it; else it is shown quietly."""


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


Documents = Literal["held-out", "all"]
"""The documents of a corpus that are read: those that a run of these settings does not train on, or all."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """evaluation.json, written by rank 0."""

    VERSION: ClassVar = 1

    checkpoint: Path
    step: int
    data: Path
    """Prefix of the pair, or of a blend's first."""
    tokenizer: str
    documents: Documents
    layout: Layout
    batches: int
    """Global ones."""
    tokens: int
    """Predicted tokens; some of them several times where `epochs` is above 1."""
    epochs: float
    """The number of times the documents were read."""
    text_bytes: float | None
    """Bytes of the text that the tokens stand for; None where their tokenizer is not known."""
    bytes_counted: bool
    """True for bytes counted token by token; else they follow from the mean of the whole corpus."""
    loss: float | None
    """Mean, nats per token; None where it is not finite. Of a blend, as the bytes,
    by the shares of its sets."""
    sets: Mapping[str, float | None] = field(default_factory=dict)
    """The loss of each set of a blend, by its name."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where no number holds it."""
        return None if self.loss is None or self.loss > math.log(1e308) else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The bits of all tokens over the bytes of their text: the only number that compares tokenizers."""
        if self.loss is None or not self.text_bytes:
            return None
        return self.loss * self.tokens / self.text_bytes / math.log(2)

    def as_json(self) -> dict[str, object]:
        """The stable form of `canzona eval --json`."""
        places = {"checkpoint": str(self.checkpoint), "data": str(self.data)}
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"version": self.VERSION, **asdict(self), **places, **derived}


def evaluation_file(files: RunFiles) -> Path:
    return files.root / "evaluation.json"


def read_evaluation(files: RunFiles) -> Evaluation:
    """Reads what the ranks have measured.

    Raises:
        ConfigError: it is damaged.
        FileNotFoundError: they have not.
    """
    return load(evaluation_file(files), Evaluation, key="evaluation.json", fix="evaluate again")


PLAIN: Final = "plain"
"""The kernel of any product: cuBLAS, or oneDNN on CPUs."""
STRIPS: Final = "strips"
"""The kernel on CPUs that computes the lower triangle by strips of rows, and mirrors it."""


@dataclass(frozen=True, kw_only=True)
class KernelTrial:
    """One kernel, tried out on one shape of products when the run started."""

    kernel: str
    seconds: float | None = None
    """Seconds of a product on the slowest rank; None where the kernel could not be used."""
    refused: str = ""
    """The reason why it was not chosen; empty for the chosen kernel."""


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The kernel that multiplies (side, long) by (long, side)."""

    side: int
    long: int
    dtype: Literal["bf16", "fp16"] = "bf16"
    kernel: str
    trials: tuple[KernelTrial, ...] = ()
    """The trials, on GPUs alone: elsewhere the choice is known beforehand."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """kernels.json: the choice for every shape that the run's updates multiply one by one, smallest first."""

    VERSION: ClassVar[int] = 1

    choices: tuple[KernelChoice, ...] = ()
    no_graphs: str = ""
    """The reason why a rank does not replay its updates as CUDA graphs; empty where they can be replayed,
    or are not asked for."""


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
    """Writes the recorded steps, if there are any; logs a warning where the file cannot be written."""
    if not steps:
        return
    timeline = RankTimeline(rank=rank, host=socket.gethostname(), clock=clock_name(), steps=tuple(steps))
    try:
        files.timelines.mkdir(exist_ok=True)
        save(files.timeline(rank), timeline, indented=False)  # a step of a large model has thousands of entries
    except OSError as error:  # a full disk is no reason to lose the run at its very end
        logging.getLogger(__name__).warning("%s cannot be written: %s", files.timeline(rank), error.strerror)


def load_timelines(files: RunFiles) -> list[RankTimeline]:
    """Reads all ranks' timelines, by rank; empty where there are none.

    Raises:
        ConfigError: with every file that is damaged or of another version.
    """
    timelines: list[RankTimeline] = []
    problems: list[Problem] = []
    for path in sorted(files.timelines.glob("rank-*.json")):
        with gathered(problems):
            timelines.append(load(path, RankTimeline, key="timeline", fix="remove the file, or train again"))
    refuse(problems)
    return sorted(timelines, key=lambda timeline: timeline.rank)
