"""The samples of a bench, and the files through which its ranks and the launcher communicate.

The launcher uses this module too, so it does not import torch.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.bench.results import Measured
from canzona_cli.core.reading import parse
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.files import RunFiles, write_json_atomic
from canzona_cli.records.statistics import OverRanks, by_phase, load_balance, mean_phases

_UPDATING: tuple[str, ...] = ("exchange", "matrix_update", "adamw_update")
"""The phases of the optimizer step in which a rank works alone or communicates with its TP group only."""
_WAITING: tuple[str, ...] = ("norm_clip", "param_gather")
"""The phases in which early ranks wait for late ranks: for the end of the last backward pass, or for the last
rank's gathering in the next forward pass. The last rank waits only for the communication."""


@dataclass(frozen=True)
class BenchFiles:
    """The paths in a bench directory. The folder of its ranks is a run directory."""

    root: Path

    @property
    def result(self) -> Path:
        return self.root / "bench.json"

    def config(self, strategy: str) -> Path:
        return self.root / f"config-{strategy}.yaml"

    def plan(self, strategy: str) -> Path:
        """Returns the path of a strategy's plan; only canzona, paper and asc have one."""
        return self.root / f"plan-{strategy}.json"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a bench: its strategies, their order and the number of steps."""

    names: tuple[str, ...]
    """The names in the order of the first round. Each round starts one name later than the previous round."""
    rounds: int
    """The number of rounds, including warm-up rounds."""
    steps_per_turn: int

    def order(self, round_: int) -> Sequence[str]:
        """Returns the names in the order of their turns in a round."""
        shift = round_ % len(self.names)
        return (*self.names[shift:], *self.names[:shift])

    def write(self, files: RunFiles) -> None:
        write_json_atomic(files.root / "sitting.json", asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Turns":
        return parse(cls, (files.root / "sitting.json").read_bytes())


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """The seconds of one training step on one rank."""

    step_s: float
    processor_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The raw measurements of one strategy."""

    losses: tuple[float, ...]
    """The loss of each training step."""
    tensor_bytes: tuple[int, ...]
    """The bytes of tensors that stay allocated between steps, by rank."""
    ranks: tuple[tuple[StepSample, ...], ...]
    """The samples of all steps of all turns, by rank."""


def write_samples(files: RunFiles, samples: Mapping[str, Samples]) -> None:
    """Writes the samples by strategy. Only rank 0 calls this."""
    write_text_atomic(_samples_path(files), json.dumps({name: asdict(each) for name, each in samples.items()}) + "\n")


def read_samples(files: RunFiles) -> dict[str, Samples]:
    return parse(dict[str, Samples], _samples_path(files).read_bytes())


def summarise(samples: Samples, *, warm_up_rounds: int, steps_per_turn: int) -> Measured:
    """Summarises a strategy's samples, excluding warm-up rounds and the first steps of each turn.

    In the first step of a turn, parameters are already gathered and the caches contain another strategy's
    data.
    """
    steps = list(zip(*samples.ranks, strict=True))  # the samples of all ranks, by step
    first_steps = range(warm_up_rounds * steps_per_turn, len(samples.losses), steps_per_turn)
    turns = [steps[first + 1 : first + steps_per_turn] for first in first_steps]
    ranks = range(len(samples.ranks))
    phases = by_phase([mean_phases([step[rank].phases for turn in turns for step in turn]) for rank in ranks])
    updates = phases.get("matrix_update", [0.0 for _ in ranks])

    def by_round(seconds: Callable[[Sequence[StepSample]], float]) -> tuple[float, ...]:
        """Returns the mean of `seconds` over the steps of each turn."""
        return tuple(statistics.fmean(map(seconds, turn)) for turn in turns)

    return Measured(
        iteration_s=by_round(lambda step: max(sample.step_s for sample in step)),
        optimizer_s=by_round(_optimizer_s),
        processor_s=by_round(lambda step: sum(sample.processor_s for sample in step)),
        phases={name: OverRanks.of(times) for name, times in phases.items()},
        load_balance=load_balance(updates),
        losses=samples.losses,
        tensor_bytes=samples.tensor_bytes,
        update_s=tuple(updates),
    )


def _optimizer_s(step: Sequence[StepSample]) -> float:
    """Returns the seconds of the optimizer step: the slowest rank's total over the `_UPDATING` phases, plus
    each `_WAITING` phase's minimum over ranks."""
    updating_s = max(sum(sample.phases.get(name, 0.0) for name in _UPDATING) for sample in step)
    return updating_s + sum(min(sample.phases.get(name, 0.0) for sample in step) for name in _WAITING)


def _samples_path(files: RunFiles) -> Path:
    return files.root / "samples.json"
