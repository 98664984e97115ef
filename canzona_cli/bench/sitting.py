"""What the launcher and the ranks of one sitting hand each other, and what a strategy's figures are computed from.

Both sides use this module, so it imports no torch.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from canzona_cli.bench.results import Measured
from canzona_cli.config.execution import AnyStrategy
from canzona_cli.run.codec import parse
from canzona_cli.run.files import RunFiles, write_json_atomic, write_text_atomic
from canzona_cli.run.statistics import OverRanks

_OWN: tuple[str, ...] = ("exchange", "matrix_update", "adamw_update")
"""Phases of the optimizer step that a rank spends by itself, or in exchanges with its TP group."""
_TOGETHER: tuple[str, ...] = ("norm_clip", "param_gather")
"""Phases in which early ranks wait for late ones: until all have finished their backward pass, or have come as far in
the next forward pass as the gathering needs them. The last of them waits for nothing but the transfer."""


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
        """Only canzona and asc execute one."""
        return self.root / f"plan-{strategy}.json"

    def sitting(self, number: int) -> Path:
        return self.root / f"sitting-{number}"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Which strategies take turns in a sitting, and how often."""

    strategies: tuple[AnyStrategy, ...]
    """In the order of the first round; each further round starts with the next strategy."""
    rounds: int
    """Warm-up included."""
    steps_per_turn: int

    def order(self, round_: int) -> Sequence[AnyStrategy]:
        shift = round_ % len(self.strategies)
        return (*self.strategies[shift:], *self.strategies[:shift])

    def write(self, files: RunFiles) -> None:
        write_json_atomic(_turns(files), asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Turns":
        return parse(cls, _turns(files).read_bytes())


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
    """By training step."""
    tensor_bytes: tuple[int, ...]
    """By rank."""
    ranks: tuple[tuple[StepSample, ...], ...]
    """By rank, every step of every turn."""


def write_samples(files: RunFiles, found: Mapping[str, Samples]) -> None:
    """By strategy; rank 0 does it."""
    write_text_atomic(_samples(files), json.dumps({name: asdict(samples) for name, samples in found.items()}) + "\n")


def read_samples(files: RunFiles) -> dict[str, Samples]:
    return parse(dict[str, Samples], _samples(files).read_bytes())


def measured(samples: Samples, *, warm_up_rounds: int, steps_per_turn: int) -> Measured:
    """Leave out the warm-up and each turn's first step, and take the rest together.

    The first step of a turn starts from parameters that are complete already and caches that another strategy filled.
    """
    steps = len(samples.losses)
    turns = [
        [[rank[step] for rank in samples.ranks] for step in range(first + 1, first + steps_per_turn)]
        for first in range(warm_up_rounds * steps_per_turn, steps, steps_per_turn)
    ]
    kept = [step for turn in turns for step in turn]
    names = dict.fromkeys(name for step in kept for sample in step for name in sample.phases)
    by_rank = {
        name: [statistics.fmean(step[rank].phases.get(name, 0.0) for step in kept) for rank in range(len(kept[0]))]
        for name in names
    }
    updates = by_rank.get("matrix_update", [0.0] * len(kept[0]))
    return Measured(
        iteration_s=tuple(_mean([max(s.step_s for s in step) for step in turn]) for turn in turns),
        optimizer_s=tuple(_mean([_optimizer_s(step) for step in turn]) for turn in turns),
        processor_s=tuple(_mean([sum(s.processor_s for s in step) for step in turn]) for turn in turns),
        phases={name: OverRanks.of(ranks) for name, ranks in by_rank.items()},
        load_balance=max(updates) / statistics.fmean(updates) if any(updates) else 1.0,
        losses=samples.losses,
        tensor_bytes=samples.tensor_bytes,
        update_s=tuple(updates),
    )


def _optimizer_s(step: Sequence[StepSample]) -> float:
    """From reduced gradients to the next forward: the rank that takes longest, and, of what ranks do together, the one
    that comes last."""
    own = max(sum(sample.phases.get(name, 0.0) for name in _OWN) for sample in step)
    return own + sum(min(sample.phases.get(name, 0.0) for sample in step) for name in _TOGETHER)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _turns(files: RunFiles) -> Path:
    return files.root / "sitting.json"


def _samples(files: RunFiles) -> Path:
    return files.root / "samples.json"
