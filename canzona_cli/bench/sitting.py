"""The files that the launcher and the ranks of one sitting exchange,
and the samples that figures are computed from.

Both sides use this module, so it imports no torch.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.bench.results import Measured
from canzona_cli.run.codec import parse
from canzona_cli.run.files import RunFiles, write_json_atomic, write_text_atomic
from canzona_cli.run.statistics import OverRanks, by_phase, load_balance, mean_phases

_OWN: tuple[str, ...] = ("exchange", "matrix_update", "adamw_update")
"""Phases of the optimizer step in which a rank works alone or exchanges with its TP group."""
_TOGETHER: tuple[str, ...] = ("norm_clip", "param_gather")
"""Phases in which early ranks wait for late ones: until all have finished their backward pass, or have
reached the point of the next forward pass where the gathering needs them. The last rank waits for the
transfer only."""


@dataclass(frozen=True)
class BenchFiles:
    """A bench directory; the folder of each sitting in it is a run directory."""

    root: Path

    @property
    def result(self) -> Path:
        return self.root / "bench.json"

    def config(self, strategy: str) -> Path:
        return self.root / f"config-{strategy}.yaml"

    def plan(self, strategy: str) -> Path:
        """Only canzona, paper and asc execute one."""
        return self.root / f"plan-{strategy}.json"

    def sitting(self, number: int) -> Path:
        return self.root / f"sitting-{number}"

    @staticmethod
    def turn(sitting: RunFiles, round_: int, name: str) -> RunFiles:
        """The file that a turn in processes of its own leaves."""
        return RunFiles(sitting.root / f"round-{round_}-{name}")

    @staticmethod
    def failure(sitting: RunFiles, name: str) -> Path:
        """The file with the reason why its turn failed, by the first rank that knew."""
        return sitting.root / f"failed-{name}.txt"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of a sitting: which strategies, or layouts, take them, and how often."""

    names: tuple[str, ...]
    """The names in the order of the first round; each further round starts with the next one."""
    rounds: int
    """Warm-up included."""
    steps_per_turn: int
    warm_up_steps: int = 0
    """The first steps of a turn, which are not measured."""
    settling: int = 0
    """The most often that a turn in processes of its own repeats the last of them, as long as updates of the
    previous step were replaced (`Muon`'s Gram form by the standard form), which takes longer than the planned
    update."""
    apart: bool = False
    """Each turn is a process of its own: for layouts, of which Megatron has one for all of a process's life."""

    def order(self, round_: int) -> Sequence[str]:
        shift = round_ % len(self.names)
        return (*self.names[shift:], *self.names[:shift])

    def write(self, files: RunFiles) -> None:
        write_json_atomic(files.root / "sitting.json", asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Turns":
        return parse(cls, (files.root / "sitting.json").read_bytes())


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """One training step on one rank, seconds."""

    step_s: float
    processor_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One strategy in one sitting."""

    losses: tuple[float, ...]
    """The loss of each training step."""
    tensor_bytes: tuple[int, ...]
    """The bytes of each rank."""
    ranks: tuple[tuple[StepSample, ...], ...]
    """Every step of every turn, by rank."""


def write_samples(files: RunFiles, samples: Mapping[str, Samples]) -> None:
    """Writes the samples by strategy; rank 0 does it."""
    write_text_atomic(_samples(files), json.dumps({name: asdict(mine) for name, mine in samples.items()}) + "\n")


def read_samples(files: RunFiles) -> dict[str, Samples]:
    return parse(dict[str, Samples], _samples(files).read_bytes())


def measured(samples: Samples, *, warm_up_rounds: int, steps_per_turn: int, skipped: int = 1) -> Measured:
    """Summarise a strategy's steps, without the warm-up and without the first steps of each turn.

    The first step of a turn starts with parameters that are already gathered and caches that another strategy
    filled.

    Args:
        skipped: the number of steps of each turn that do not count.
    """
    steps = len(samples.losses)
    turns = [
        [[rank[step] for rank in samples.ranks] for step in range(first + skipped, first + steps_per_turn)]
        for first in range(warm_up_rounds * steps_per_turn, steps, steps_per_turn)
    ]
    ranks = range(len(samples.ranks))
    phases = by_phase([mean_phases([step[rank].phases for turn in turns for step in turn]) for rank in ranks])
    updates = phases.get("matrix_update", [0.0 for _ in ranks])
    return Measured(
        iteration_s=tuple(statistics.fmean(max(s.step_s for s in step) for step in turn) for turn in turns),
        optimizer_s=tuple(statistics.fmean(_optimizer_s(step) for step in turn) for turn in turns),
        processor_s=tuple(statistics.fmean(sum(s.processor_s for s in step) for step in turn) for turn in turns),
        phases={name: OverRanks.of(times) for name, times in phases.items()},
        load_balance=load_balance(updates),
        losses=samples.losses,
        tensor_bytes=samples.tensor_bytes,
        update_s=tuple(updates),
    )


def last_steps(samples: Samples, count: int) -> Measured:
    """Summarise a turn in processes of its own by its last `count` steps, however many it took to warm up."""
    taken = len(samples.losses)
    return measured(samples, warm_up_rounds=0, steps_per_turn=taken, skipped=taken - count)


def _optimizer_s(step: Sequence[StepSample]) -> float:
    """Sums seconds until the next forward: of the slowest rank in `_OWN` phases,
    of the last in `_TOGETHER`."""
    updating_s = max(sum(sample.phases.get(name, 0.0) for name in _OWN) for sample in step)
    return updating_s + sum(min(sample.phases.get(name, 0.0) for sample in step) for name in _TOGETHER)


def _samples(files: RunFiles) -> Path:
    return files.root / "samples.json"
