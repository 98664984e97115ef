"""The screens of `canzona plan` about several layouts: a table of plans, and the fastest layouts of a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.header import Outlook, layout_name, optimizer_words, outlook, rank_word
from canzona_cli.cli.views.page import Page, Screen, Table, note, paragraph, rows_table, section_head
from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.sweep import Combination, combinations
from canzona_cli.core.costs.memory import GIB, capacity, headroom
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.planner.make import make_plan, plannable
from canzona_cli.core.setup.execution import RELEASED_TP_MODES, AnyStrategy, with_flex
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.compare import Study, study_run
from canzona_cli.core.simulate.predict import LABELS
from canzona_cli.core.simulate.search import LayoutResult, LayoutSearch, search
from canzona_cli.records.words import count, layout_code, number, plural, predicted_overhead, step_time

SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
SIZES_WITH_EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
VERSION = 3
"""The version of the overview's JSON. New keys do not change it; any other change raises it."""


_BASELINES: tuple[AnyStrategy, ...] = ("layerwise", "adamw")
"""The strategies with which the overview compares a plan."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The plan of one run, a row of the overview."""

    config: RunConfig
    values: Mapping[str, str]
    """The run's values of the settings that have several."""
    study: Study | None
    """The simulated plan; None if the model does not fit."""

    def as_json(self) -> dict[str, object]:
        """Returns the figures of the row."""
        figures: dict[str, object] = {
            "recipe": self.config.name,
            "gpus": self.config.gpus,
            "cluster": self.config.cluster.name,
            "optimizer": self.config.optimizer.name,
            "values": dict(self.values),
            "fits": self.study is not None,
        }
        if self.study is None:
            return figures
        study = self.study
        return {
            **figures,
            "layout": asdict(study.layout),
            "memory_bytes": study.memory.total,
            "load_balance": study.balance.ranks,
            "lower_bound": study.balance.ranks_bound,
            "optimizer_s": study.planned.result.optimizer_s,
            "iteration_s": study.planned.result.iteration_s,
            "tokens_per_s": self.tokens_per_s,
            "optimizer_vs_layerwise": study.optimizer_speedup("layerwise"),
            "overhead_over_adamw": study.overhead(study.strategy),
        }

    @property
    def tokens_per_s(self) -> float:
        """The simulated throughput; 0 if the model does not fit."""
        if self.study is None:
            return 0.0
        return outlook(self.config, self.study.layout, self.study.planned.result.iteration_s).tokens_per_s


@dataclass(frozen=True, kw_only=True)
class Overview(Page):
    """The plans of the built-in sizes, or of a run with several values of a setting: a table with a row for each,
    which fits in 80 columns."""

    plans: tuple[PlanRow, ...]

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        optimizers = sorted({plan.config.optimizer.name for plan in self.plans})
        clusters = sorted({plan.config.cluster.name for plan in self.plans})
        scope = f": {', '.join(optimizers)} on {', '.join(clusters)}, simulated"
        yield section_head("Plans", scope)
        table = Table("recipe")
        table.add_numbers("GPUs")
        table.add_column("layout", no_wrap=True)
        table.add_numbers("GiB", "balance", "step", "vs lw", "vs AdamW", "tok/s")
        for plan in self.plans:
            table.add_row(*_cells(plan), style="" if plan.study is not None else "yellow")
        yield table
        yield note(
            "GiB: of the fullest GPU; balance: update time of the slowest rank over the mean; step: optimizer step; "
            "vs lw: layerwise's optimizer step divided by this one; vs AdamW: iteration overhead over AdamW in this "
            "layout; -: layerwise or AdamW does not fit; tok/s: of all GPUs"
        )
        paths = (path for plan in self.plans if plan.study for path in plan.study.fast_paths(simulated=False).off)
        if off := ", ".join(dict.fromkeys(paths)):
            yield note(f"as shipped: off until verified on these GPUs (canzona doctor --gpu-check): {off}")
        first = self.plans[0].config
        yield paragraph(f"To see one in detail: canzona plan recipe={first.name} gpus={first.gpus} --dry-run")

    def as_json(self) -> dict[str, object]:
        """Returns the JSON of `canzona plan --json`."""
        return {"version": VERSION, "plans": [plan.as_json() for plan in self.plans]}


def overview(overrides: Sequence[str], recipes_dirs: Sequence[Path]) -> Overview:
    """Plans a run for each combination of values; every built-in size if no recipe is named.

    Raises:
        ConfigError: an override is not valid.
    """
    if not any(key_of(override) == "recipe" for override in overrides):
        overrides = [f"recipe={','.join((*SIZES, *SIZES_WITH_EXPERTS))}", *overrides]
    return Overview(plans=tuple(_planned(run, recipes_dirs) for run in combinations(overrides)))


def _planned(run: Combination, dirs: Sequence[Path]) -> PlanRow:
    config = compose_run(run.overrides, recipes_dirs=dirs, training=False).config
    config = config.with_setup(plannable(config.setup)[0])
    study = None
    with suppress(DoesNotFit):
        config, layout = resolve(config)
        study = study_run(config.setup, layout, baselines=_BASELINES, tp_modes=RELEASED_TP_MODES, details=False)
    return PlanRow(config=config, values=run.values, study=study)


def _cells(plan: PlanRow) -> tuple[str, ...]:
    varied = {key.rpartition("."): value for key, value in plan.values.items() if key not in ("recipe", "gpus")}
    values = (f"{key}={value}" if group else value for (group, _, key), value in varied.items())
    study, name = plan.study, " ".join((plan.config.name.removeprefix("qwen3-"), *values))
    if study is None:
        return name, str(plan.config.gpus), "does not fit", *[""] * 6
    return (
        name,
        str(plan.config.gpus),
        layout_code(study.layout),
        f"{study.memory.total / GIB:.0f}",
        f"{study.balance.ranks:.3f}",
        step_time(study.planned.result.optimizer_s),
        number(study.optimizer_speedup("layerwise"), ".1f"),
        predicted_overhead(study.overhead(study.strategy)),
        count(plan.tokens_per_s).replace(" ", ""),
    )


LAYOUTS_VERSION = 1
SHOWN = 8
_WORTH_NAMING = 0.005
"""The smallest share of an iteration that is listed under `limited by`."""


@dataclass(frozen=True, kw_only=True)
class FastestLayouts(Page):
    """The fastest layouts of a run: a table whose first row, in bold, is the layout that the run uses by
    default."""

    config: RunConfig
    search: LayoutSearch
    flex: LayoutResult | None = None
    """The fastest layout with the dispatcher `flex`; None if it is not faster, or not possible."""
    verbose: bool = False
    """True to show the columns that do not fit in the terminal in a second table."""

    widest = 140

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        config, best = self.config, self.search.best
        optimizer = optimizer_words(config.optimizer.name, config.engine.strategy)
        unit = rank_word(config.cluster.device)
        place = f"{plural(config.gpus, unit)}, {config.cluster.name}"
        yield section_head(config.name, f" on {place}, {optimizer}")
        always_shown = ("batch", "recompute", "iteration", "slower", "MFU", "GiB")
        heads = (*always_shown, "limited by", f"tokens/s/{unit}")
        rows = ((layout_code(tried.layout), self._cells(tried)) for tried in best)
        yield rows_table(heads, rows, bold=0, needed=None if self.verbose else len(always_shown))
        yield note(
            "PP2x5: two stages of five model chunks each; batch: micro-batch x accumulation x DP; slower: time per "
            "sequence, relative to the first; GiB: on the fullest rank; a layout may use "
            f"{_usable_memory(config)}; limited by, shown with -v or in a wide terminal: the largest shares of time "
            "besides compute"
        )
        yield Text()
        yield paragraph(self._why())
        if self.flex is not None:
            rate, now = (count(self._outlook(tried).tokens_per_s) for tried in (self.flex, best[0]))
            yield paragraph(
                f"With parallel.dispatcher=flex, which needs DeepEP on every machine, it would be "
                f"{layout_name(self.flex.layout)}: {rate} tokens/s instead of {now}."
            )
        yield paragraph(
            f"{self.search.legal:,} layouts were compared; {self.search.simulated:,} were simulated, and the others "
            "do not fit or are estimated to be slower.",
            "dim",
        )

    def as_json(self) -> dict[str, object]:
        """Returns the JSON of `canzona plan --layouts --json`; new keys do not change `version`."""
        return {
            "version": LAYOUTS_VERSION,
            "recipe": self.config.name,
            "gpus": self.config.gpus,
            "cluster": self.config.cluster.name,
            "legal": self.search.legal,
            "simulated": self.search.simulated,
            "capacity_bytes": capacity(self.config.setup),
            "headroom_bytes": headroom(self.config.setup),
            "layouts": [
                {
                    "layout": asdict(tried.layout),
                    "iteration_s": tried.iteration_s,
                    "slower": self._slowdown(tried),
                    "memory_bytes": tried.memory_bytes,
                    "spent": asdict(tried.spent),
                    "limits": [{"name": name, "seconds": seconds} for name, seconds in tried.spent.overheads],
                    **asdict(self._outlook(tried)),
                }
                for tried in self.search.best
            ],
            "with_flex": None
            if self.flex is None
            else {"layout": asdict(self.flex.layout), "iteration_s": self.flex.iteration_s},
            "why": self._why(),
        }

    def _outlook(self, tried: LayoutResult) -> Outlook:
        return outlook(self.config, tried.layout, tried.iteration_s)

    def _slowdown(self, tried: LayoutResult) -> float:
        return tried.per_sequence_s / self.search.best[0].per_sequence_s - 1

    def _cells(self, tried: LayoutResult) -> tuple[str, ...]:
        layout, forecast = tried.layout, self._outlook(tried)
        return (
            f"{layout.micro_batch_size} x {layout.num_microbatches} x {layout.dp}",
            layout.recompute,
            step_time(tried.iteration_s),
            f"{self._slowdown(tried):.1%}" if tried is not self.search.best[0] else "",
            f"{forecast.mfu:.1%}",
            f"{tried.memory_bytes / GIB:.1f}",
            _limits(tried),
            count(forecast.tokens_per_s_per_gpu),
        )

    def _why(self) -> str:
        """Explains which parts of a step make the fastest layout faster than the second fastest."""
        first, *others = self.search.best
        if not others:
            return f"{layout_code(first.layout)} is the only layout that is legal and fits."
        second = others[0]
        scale = first.layout.global_batch_size / second.layout.global_batch_size
        savings = {
            LABELS[field.name]: scale * getattr(second.spent, field.name) - getattr(first.spent, field.name)
            for field in fields(first.spent)
        }
        largest = sorted(savings.items(), key=lambda pair: -abs(pair[1]))[:3]
        negligible_s = _WORTH_NAMING / 10 * first.iteration_s
        reasons = [
            f"{step_time(abs(saved))} {'less' if saved > 0 else 'more'} on {name}"
            for name, saved in largest
            if abs(saved) > negligible_s
        ]
        difference = f" For one batch, the first spends {', '.join(reasons)}." if reasons else ""
        return (
            f"{layout_name(first.layout)} has the shortest simulated time per sequence. Besides compute, it spends "
            f"time on: {_limits(first) or 'nothing'}. The next, {layout_name(second.layout)}, is "
            f"{self._slowdown(second):.2%} slower.{difference}"
        )


def fastest_layouts(config: RunConfig, *, verbose: bool) -> FastestLayouts:
    """Searches for the fastest layouts of a composed run.

    Args:
        verbose: True to show every column, even in a narrow terminal.

    Raises:
        ConfigError: the settings are impossible.
        DoesNotFit: no layout fits.
    """
    result = search(config.setup, SHOWN)
    if not result.best:
        make_plan(*fit.resolve(config.setup))  # raises an error that explains what does not fit
    with_other = with_flex(config.setup)
    fastest = () if with_other is None else search(with_other).best
    flex = fastest[0] if fastest and fastest[0].per_sequence_s < result.best[0].per_sequence_s else None
    return FastestLayouts(config=config, search=result, flex=flex, verbose=verbose)


def _usable_memory(config: RunConfig) -> str:
    """Formats the memory in GiB that a chosen layout may use on a GPU: `73.6, which keeps 3.0 free`."""
    free = headroom(config.setup)
    kept_free = f", which keeps {free / GIB:.1f} free" if free else ""
    return f"{(capacity(config.setup) - free) / GIB:.1f}{kept_free}"


def _limits(tried: LayoutResult) -> str:
    """Formats the two largest parts of an iteration other than compute: `updates 5%, pipeline idle 3%`."""
    shares = ((name, seconds / tried.iteration_s) for name, seconds in tried.spent.overheads[:2])
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= _WORTH_NAMING)
