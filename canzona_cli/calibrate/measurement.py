"""The orders of a calibration's launcher to its ranks, and their reports:
a line of JSON per number. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from canzona_cli.config.schema.cluster import Device
from canzona_cli.run.codec import JsonLines, parse
from canzona_cli.run.files import RunFiles, append_json_line, write_json_atomic
from canzona_cli.run.statistics import Quartiles

Part = Literal["arithmetic", "memory", "adamw", "collectives", "model", "updates"]
"""The parts in the order of measurement. A missing part comes from the profile that the calibration started from."""
Quantity = Literal[
    "matmul_tflops",
    "fp32_tflops",
    "tf32_tflops",
    "qr_tflops",
    "eigh_tflops",
    "launch_us",
    "memory_gb_per_s",
    "adamw_ns",
    "updates",
    "collectives",
    "grouped_collectives",
    "forward",
    "backward",
]
"""Profile fields in their own units (grouped_collectives: 1 or 0); updates, collectives, forward and backward
in seconds."""

WHAT: dict[Part, str] = {
    "arithmetic": "matrix products, decompositions, launches",
    "memory": "memory bandwidth",
    "adamw": "AdamW",
    "collectives": "collectives",
    "model": "forward and backward",
    "updates": "matrix updates",
}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Budgets in seconds: a measurement is repeated until its budget is spent."""

    item_s: float = 0.3
    """Seconds for each product, decomposition, size of a collective and shape of an update."""
    largest_item_s: float = 40.0
    """An update that would take longer than this to measure is left to the cost model."""
    end_s: float = 70.0
    """Seconds since the start after which only quick items are measured."""
    sizes: tuple[int, ...] = (8, 64 << 10, 1 << 20, 8 << 20)
    """The sizes of collectives, in bytes."""
    large: int | None = 32 << 20
    """One more size, where it is quick enough."""

    def on(self, device: Device) -> "Effort":
        """The same with sizes of what travels on it: on GPUs up to buckets and gatherings of the largest models."""
        return self if device == "cpu" else replace(self, sizes=GPU_SIZES, large=None)


GPU_SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30)
FULL = Effort()
QUICK = Effort(item_s=0.08, largest_item_s=1.5, end_s=30.0, sizes=(8, 64 << 10, 1 << 20), large=None)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders that ranks read in addition to configuration and layout."""

    effort: Effort
    workers: int
    """Ranks that compute at the same time."""

    def write(self, files: RunFiles) -> None:
        write_json_atomic(_orders(files), asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Orders":
        return parse(cls, _orders(files).read_bytes())


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number, measured more than once."""

    quantity: Quantity
    key: tuple[str | int, ...] = ()
    """matmul_tflops: (n,); updates: (label, rows, columns); collectives: (kind, ranks, bytes);
    forward and backward:
    (sequences,)."""
    spread: Quartiles
    repetitions: int
    """The repetitions over all ranks that took part."""
    busy: float = 0.0
    """The processor cores that a collective kept busy."""

    @classmethod
    def of(cls, quantity: Quantity, values: Sequence[float], *key: str | int, busy: float = 0.0) -> "Measurement":
        return cls(quantity=quantity, key=key, spread=Quartiles.of(values), repetitions=len(values), busy=busy)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the run that only its ranks know."""

    torch: str
    backend: str
    threads: int
    """The threads of one rank."""
    workers: int
    """Ranks that computed at the same time."""
    bf16_in_fp32: bool
    """A field of the profile."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything the ranks of a calibration have reported so far."""

    measurements: tuple[Measurement, ...] = ()
    done: tuple[Part, ...] = ()
    """Parts that are complete."""
    skipped: tuple[str, ...] = ()
    """Updates left to the cost model, and why."""
    facts: Facts | None = None


class Recorder:
    """Writes for rank 0: every number is on disk before the next one is measured.
    Other ranks write nothing."""

    def __init__(self, files: RunFiles, *, writes: bool) -> None:
        self._path, self._writes = _measured(files), writes

    def add(self, measurement: Measurement) -> None:
        self._line({"measurement": asdict(measurement)})

    def done(self, part: Part) -> None:
        self._line({"done": part})

    def skipped(self, what: str) -> None:
        self._line({"skipped": what})

    def facts(self, facts: Facts) -> None:
        self._line({"facts": asdict(facts)})

    def _line(self, content: dict[str, object]) -> None:
        if self._writes:
            append_json_line(self._path, content)


def read_record(files: RunFiles) -> Record:
    """The record so far; incomplete lines are left out."""
    measurements: list[Measurement] = []
    done: list[Part] = []
    skipped: list[str] = []
    facts: Facts | None = None
    for line in JsonLines(_measured(files)).read():
        match line:
            case {"measurement": dict(found)}:
                measurements.append(parse(Measurement, found))
            case {"done": str(part)}:
                done += [known for known in get_args(Part) if known == part]
            case {"skipped": str(what)}:
                skipped.append(what)
            case {"facts": dict(found)}:
                facts = parse(Facts, found)
    return Record(measurements=tuple(measurements), done=tuple(done), skipped=tuple(skipped), facts=facts)


def parts(ranks: int) -> Iterator[Part]:
    """The parts of a calibration on that many ranks; a single rank has no collectives."""
    yield from (part for part in get_args(Part) if part != "collectives" or ranks > 1)


def _orders(files: RunFiles) -> Path:
    return files.root / "orders.json"


def _measured(files: RunFiles) -> Path:
    return files.root / "measured.jsonl"
