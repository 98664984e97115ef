"""The files of a bench directory. The launcher and the workers use this module, so it imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from canzona_cli.config.execution import AnyStrategy
from canzona_cli.config.schema import Strategy
from canzona_cli.run.files import RunFiles, write_json_atomic


@dataclass(frozen=True)
class BenchFiles:
    """Where everything of one bench lies; a sitting's folder in it is a run directory."""

    root: Path

    @property
    def result(self) -> Path:
        return self.root / "bench.json"

    def config(self, strategy: str) -> Path:
        return self.root / f"config-{strategy}.yaml"

    def plan(self, strategy: str) -> Path:
        """What canzona and asc execute; the others have none."""
        return self.root / f"plan-{strategy}.json"

    def sitting(self, number: int) -> Path:
        return self.root / f"sitting-{number}"


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """Strategies that take turns in one process group, and how."""

    strategies: tuple[AnyStrategy, ...]
    """In the order of the first round; in every further one, the next goes first."""
    rounds: int
    """Warm-up included."""
    steps_per_turn: int

    def order(self, round_: int) -> Sequence[AnyStrategy]:
        shift = round_ % len(self.strategies)
        return (*self.strategies[shift:], *self.strategies[:shift])

    def write(self, files: RunFiles) -> None:
        write_json_atomic(_sitting(files), asdict(self))

    @classmethod
    def read(cls, files: RunFiles) -> "Sitting":
        content = json.loads(_sitting(files).read_text(encoding="utf-8"))
        known = {name: name for name in (*get_args(Strategy), "adamw")}
        return cls(**{**content, "strategies": tuple(known[name] for name in content["strategies"])})


def samples_of(files: RunFiles) -> Path:
    """What rank 0 of a sitting leaves."""
    return files.root / "samples.json"


def _sitting(files: RunFiles) -> Path:
    return files.root / "sitting.json"
