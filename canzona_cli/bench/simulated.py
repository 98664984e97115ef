"""`canzona bench --simulate`: predicted step times of every model size and strategy by number of GPUs. Does
not import torch.

For each size and number of GPUs, an iteration of every strategy is simulated in the layout that `canzona
train` would choose. AdamW and layerwise are also simulated in the layouts in which they are fastest. Nothing
is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError, DoesNotFit, Problem, refuse
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.planner.make import plannable
from canzona_cli.core.setup import Device
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.simulate.compare import Study, assumptions, study_run
from canzona_cli.core.simulate.predict import with_cores
from canzona_cli.core.simulate.search import LayoutResult, fastest_with

SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
SIZES_WITH_EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
YARDSTICKS: tuple[AnyStrategy, ...] = ("adamw", "layerwise")
"""The strategies that are also simulated in the layout in which they are fastest, as fair baselines for
canzona."""
MOST_GPUS = 65_536
"""The largest number of GPUs. A plan for more would take minutes, and no profile describes networks of this
size."""
VERSION = 3
"""The version of the `--json` output. New keys do not change it."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCell:
    """A model size on a number of GPUs: all strategies in one layout, or the reason why no layout is
    possible."""

    recipe: str
    gpus: int
    study: Study | None
    reason: str = ""
    """The reason why no layout is possible; empty if `study` is set."""
    yardsticks: Mapping[str, LayoutResult | None] = MappingProxyType({})
    """The strategies of `YARDSTICKS`, each in its fastest layout; None for a strategy that fits in memory
    in no layout."""

    def overhead(self, yardstick: str) -> float | None:
        """Returns how much longer canzona takes per sequence than a yardstick in its fastest layout (0.01 is
        1%).

        Returns None if there is no study, or if the yardstick fits in memory in no layout.
        """
        best = self.yardsticks.get(yardstick)
        if self.study is None or best is None:
            return None
        per_sequence_s = self.study.planned.result.iteration_s / self.study.layout.global_batch_size
        return per_sequence_s / best.per_sequence_s - 1

    def ratio(self, strategy: str) -> float | None:
        """Returns the ratio of a strategy's optimizer step to canzona's; None if there is no study, or if one
        of the two does not fit in memory."""
        return None if self.study is None else self.study.optimizer_speedup(strategy)

    def as_json(self) -> dict[str, object]:
        """Returns this cell's part of the `--json` output."""
        study, strategies, ratios = self.study, {}, {}
        if study is not None:
            balance = {name: compared.result.update_balance for name, compared in study.strategies.items()}
            strategies = {name: {**study.figures(name), "load_balance": balance[name]} for name in STRATEGIES}
            ratios = {name: self.ratio(name) for name in STRATEGIES if name != "canzona"}
        return {
            "recipe": self.recipe,
            "gpus": self.gpus,
            "layout": None if study is None else asdict(study.layout),
            "reason": self.reason or None,
            "strategies": strategies,
            "optimizer_over_canzona": ratios,
            "yardsticks": {
                name: best
                and {
                    "layout": asdict(best.layout),
                    "iteration_s": best.iteration_s,
                    "optimizer_s": best.optimizer_s,
                    "memory_bytes": best.memory_bytes,
                    "muon_tp_mode": best.tp_mode,
                    "canzona_over_it": self.overhead(name),
                }
                for name, best in self.yardsticks.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of `canzona bench --simulate`, with cells ordered by recipe and number of GPUs."""

    optimizer: str
    profile: str
    device: Device
    calibrated: bool
    overrides: tuple[str, ...]
    gpus: tuple[int, ...]
    cells: tuple[SimulatedCell, ...]
    assumptions: tuple[str, ...]

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.recipe for cell in self.cells))

    def cells_of(self, recipe: str) -> tuple[SimulatedCell, ...]:
        """Returns a recipe's cells, in ascending order of GPUs."""
        return tuple(cell for cell in self.cells if cell.recipe == recipe)

    def as_json(self) -> dict[str, object]:
        """Returns the output of `--json`."""
        return {
            "version": VERSION,
            "simulated": True,
            "optimizer": self.optimizer,
            "profile": self.profile,
            "calibrated": self.calibrated,
            "overrides": list(self.overrides),
            "gpus": list(self.gpus),
            "cells": [cell.as_json() for cell in self.cells],
            "assumptions": list(self.assumptions),
        }


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parses numbers of GPUs and returns them in ascending order.

    `8..1024` doubles from 8 to 1024, `8,64,256` is a list, and a list may contain ranges.

    Raises:
        ConfigError: the text is not valid; all problems are reported at once.
    """
    counts: set[int] = set()
    problems: list[Problem] = []
    for part in text.split(","):
        numbers = _numbers(part.strip())
        if isinstance(numbers, str):
            problems.append(
                Problem(key="--gpus", value=part.strip() or text, reason=numbers, fix="write 8..1024 or 8,64,256")
            )
        else:
            counts.update(numbers)
    refuse(problems)
    return tuple(sorted(counts))


def run_simulation(
    overrides: Sequence[str], gpus: Sequence[int], sizes: Sequence[str] = SIZES, recipes_dirs: Sequence[Path] = ()
) -> Simulation:
    """Simulates every size on every number of GPUs. Each simulation takes a second or two; with 1,024 GPUs,
    ten seconds.

    Args:
        overrides: settings for all runs; a `recipe=` among them selects a single size.
        gpus: the numbers of GPUs in ascending order.
        sizes: the recipes to simulate if `overrides` has no `recipe=`.

    Raises:
        ConfigError: the settings of a size are wrong for every number of GPUs, or `overrides` has `gpus=` or
            more than one `recipe=`.
    """
    named = [text.partition("=")[2].strip() for text in overrides if key_of(text) == "recipe"]
    _check_overrides(overrides, named)
    other_overrides = [text for text in overrides if key_of(text) != "recipe"]
    cells: list[SimulatedCell] = []
    configs: list[RunConfig] = []
    for recipe in named or sizes:
        refused: list[ConfigError] = []
        for count in gpus:
            try:
                config = _config(recipe, count, other_overrides, recipes_dirs)
                configs.append(config)
                cells.append(_cell(config, count))
            except ConfigError as error:
                refused.append(error)
                cells.append(_impossible(recipe, count, error))
        if len(refused) == len(gpus):  # then the settings are wrong for every number of GPUs
            raise ConfigError(*dict.fromkeys(problem for error in refused for problem in error.problems))
    return Simulation(
        optimizer=configs[0].optimizer.name,
        profile=configs[0].cluster.name,
        device=configs[0].cluster.device,
        calibrated=configs[0].cluster.calibrated,
        overrides=tuple(overrides),
        gpus=tuple(gpus),
        cells=tuple(cells),
        assumptions=assumptions(),
    )


def _numbers(text: str) -> Sequence[int] | str:
    """Parses a number or a range of `--gpus`; returns its numbers, or the reason why it is not valid."""
    first, dots, last = text.partition("..")
    ends = [first.strip(), last.strip()] if dots else [first.strip()]
    if not all(end.isascii() and end.isdigit() for end in ends):
        return "is neither a number of GPUs nor a range FROM..TO"
    low, high = int(ends[0]), int(ends[-1])
    if low < 1:
        return "must be at least 1"
    if high > MOST_GPUS:
        return f"is more than {MOST_GPUS:,}, the largest number of GPUs that can be planned"
    if high < low:
        return "ends below its first number"
    doubled = [low << power for power in range(high.bit_length()) if low << power <= high]
    if doubled[-1] != high:
        return f"doubling {low} gives {doubled[-1]} and {2 * doubled[-1]}, but not {high}"
    return doubled


def _check_overrides(overrides: Sequence[str], named: Sequence[str]) -> None:
    """Refuses gpus= overrides and more than one recipe= override."""
    gpus = [text.partition("=")[2].strip() for text in overrides if key_of(text) == "gpus"]
    problems = []
    if gpus:
        reason = "has no effect with --simulate, which has --gpus instead"
        problems.append(Problem(key="gpus", value=gpus[0], reason=reason, fix=f"use --gpus {gpus[0]}"))
    if len(named) > 1:
        fix = "to simulate all sizes, remove recipe="
        problems.append(Problem(key="recipe", value=named[-1], reason="is given twice", fix=fix))
    refuse(problems)


def _config(recipe: str, gpus: int, overrides: Sequence[str], recipes_dirs: Sequence[Path]) -> RunConfig:
    """Returns the resolved run on `gpus` GPUs with strategy canzona. If the profile does not have a number of
    cores, CPU ranks share the cores of this machine."""
    composed = compose_run([f"recipe={recipe}", f"gpus={gpus}", *overrides], recipes_dirs=recipes_dirs, training=False)
    setup, _ = plannable(composed.config.setup)
    setup = with_cores(replace(setup, engine=replace(setup.engine, strategy="canzona")))
    return composed.config.with_setup(setup)


def _cell(config: RunConfig, gpus: int) -> SimulatedCell:
    try:
        resolved, layout = resolve(config)
        study = study_run(resolved.setup, layout)
    except DoesNotFit as error:
        return _impossible(config.name, gpus, error)
    yardsticks: dict[str, LayoutResult | None] = {
        name: fastest_with(config.setup, name, study.layout) for name in YARDSTICKS
    }
    return SimulatedCell(recipe=config.name, gpus=gpus, study=study, yardsticks=yardsticks)


def _impossible(recipe: str, gpus: int, error: ConfigError | DoesNotFit) -> SimulatedCell:
    reason = "; ".join(f"{problem.key}: {problem.reason}" for problem in error.problems)
    return SimulatedCell(recipe=recipe, gpus=gpus, study=None, reason=reason)
