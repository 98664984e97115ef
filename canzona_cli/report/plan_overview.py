"""What `canzona plan --dry-run` prints without a recipe: every built-in size on its recipe's number of GPUs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import RenderableType

from canzona_cli.bench.simulated import SIZES
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.errors import DoesNotFit
from canzona_cli.planner.memory import GIB
from canzona_cli.planner.planner import plannable
from canzona_cli.report.page import Page, Screen, headed, note, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.words import layout_code, number, overhead, step_time
from canzona_cli.simulate.study import Study, study_run

VERSION = 2
"""Of what `--json` prints; additions keep it."""


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """One recipe's plan; without a study where the model does not fit."""

    config: RunConfig
    study: Study | None

    def as_json(self) -> dict[str, object]:
        """The figures of its line."""
        found: dict[str, object] = {
            "recipe": self.config.name,
            "gpus": self.config.gpus,
            "cluster": self.config.cluster.name,
            "optimizer": self.config.optimizer.name,
            "fits": self.study is not None,
        }
        if self.study is None:
            return found
        study = self.study
        return {
            **found,
            "layout": asdict(study.layout),
            "memory_bytes": study.memory.total,
            "load_balance": study.balance.grid,
            "lower_bound": study.balance.lower_bound,
            "optimizer_s": study.planned.result.optimizer_s,
            "iteration_s": study.planned.result.iteration_s,
            "optimizer_vs_layerwise": study.optimizer_speedup("layerwise"),
            "optimizer_vs_sc": study.optimizer_speedup("sc"),
            "overhead_over_adamw": study.overhead(study.strategy),
        }


@dataclass(frozen=True, kw_only=True)
class Overview(Page):
    """A line per size, readable from 80 columns."""

    plans: tuple[SizePlan, ...]

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        optimizers = sorted({plan.config.optimizer.name for plan in self.plans})
        clusters = sorted({plan.config.cluster.name for plan in self.plans})
        about = f": {', '.join(optimizers)} on {', '.join(clusters)}, simulated"
        yield headed("Plans of the built-in sizes", about)
        table = Table()
        table.add_column("recipe", no_wrap=True)
        table.add_numbers("GPUs")
        table.add_column("layout", no_wrap=True)
        for title in ("GiB", "balance", "bound", "step", "/lw", "/sc", "AdamW"):
            table.add_numbers(title)
        for plan in self.plans:
            table.add_row(*_cells(plan), style="" if plan.study is not None else "yellow")
        yield table
        yield note(
            "GiB: of the fullest GPU; balance: updates of the slowest rank over the mean; bound: the least any plan "
            "can reach; step: of the optimizer; /lw, /sc: how many times longer it is with layerwise and sc; AdamW: "
            "overhead over its iteration in this layout; -: does not fit in it"
        )
        first = self.plans[0].config
        yield wrapped(f"Look at one: canzona plan recipe={first.name} gpus={first.gpus} --dry-run")

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {"version": VERSION, "plans": [plan.as_json() for plan in self.plans]}


def overview(overrides: Sequence[str], recipes_dirs: Iterable[Path]) -> Overview:
    """Plan every built-in size for GPUs.

    Args:
        overrides: settings for all of them, without a recipe.

    Raises:
        ConfigError: an override is impossible.
    """
    dirs = tuple(recipes_dirs)
    return Overview(plans=tuple(_planned([f"recipe={name}", *overrides], dirs) for name in SIZES))


def _planned(overrides: Sequence[str], dirs: Sequence[Path]) -> SizePlan:
    config, _ = plannable(compose_run(overrides, recipes_dirs=dirs, training=False).config)
    try:
        config, layout = resolve(config)
        return SizePlan(config=config, study=study_run(config, layout))
    except DoesNotFit:
        return SizePlan(config=config, study=None)


def _cells(plan: SizePlan) -> tuple[str, ...]:
    study = plan.study
    if study is None:
        return plan.config.name, str(plan.config.gpus), "does not fit", *[""] * 7
    return (
        plan.config.name,
        str(plan.config.gpus),
        layout_code(study.layout),
        f"{study.memory.total / GIB:.0f}",
        f"{study.balance.grid:.3f}",
        f"{study.balance.lower_bound:.3f}",
        step_time(study.planned.result.optimizer_s),
        number(study.optimizer_speedup("layerwise"), ".1f"),
        number(study.optimizer_speedup("sc"), ".1f"),
        overhead(study.overhead(study.strategy)),
    )
