"""What `canzona plan --layouts` prints: the fastest layouts of a run, what limits each, and why the first one won."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.search import Found, Tried, search
from canzona_cli.config.schema import RunConfig
from canzona_cli.planner.memory import GIB, capacity
from canzona_cli.planner.planner import make_plan
from canzona_cli.report.header import layout_name, optimizer_words, rank_word
from canzona_cli.report.page import Page, Screen, headed, note, wrapped
from canzona_cli.report.tables import GroupedTable, columns
from canzona_cli.run.words import clean, count, layout_code, plural, step_time
from canzona_cli.simulate.outlook import Outlook, outlook
from canzona_cli.simulate.spent import LABELS

VERSION = 1
SHOWN = 8
_WORTH_NAMING = 0.005
"""Share of a step."""


@dataclass(frozen=True, kw_only=True)
class FastestLayouts(Page):
    """A table of the fastest, with the one that a run gets in bold."""

    config: RunConfig
    found: Found

    widest = 140

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        config, best = self.config, self.found.best
        optimizer = optimizer_words(config.optimizer.name, config.engine.strategy)
        unit = rank_word(config.cluster.device)
        yield headed(clean(config.name), f" on {plural(config.gpus, unit)}, {clean(config.cluster.name)}, {optimizer}")
        heads = ("batch", "recompute", "iteration", "slower", f"tokens/s/{unit}", "MFU", "GiB", "limited by")
        yield GroupedTable(
            labels=[layout_code(one.layout) for one in best],
            groups=columns(heads, map(self._cells, best)),
            styles=["bold", *[""] * (len(best) - 1)],
        )
        yield note(
            "batch: micro-batch x accumulation x DP; slower: per sequence, than the first; GiB: on the fullest "
            f"rank, of {capacity(config) / GIB:.1f}; limited by: share of the iteration"
        )
        yield Text()
        yield wrapped(self._why())
        yield wrapped(
            f"{self.found.legal:,} layouts are possible and fit; {self.found.simulated:,} were simulated, and the "
            + ("others take longer than these by a proven bound." if self.found.proven else "others seem slower."),
            "dim",
        )

    def as_json(self) -> dict[str, object]:
        """The stable form: additions keep `version`, anything else raises it."""
        return {
            "version": VERSION,
            "recipe": self.config.name,
            "gpus": self.config.gpus,
            "cluster": self.config.cluster.name,
            "legal": self.found.legal,
            "simulated": self.found.simulated,
            "capacity_bytes": capacity(self.config),
            "layouts": [
                {
                    "layout": asdict(one.layout),
                    "iteration_s": one.iteration_s,
                    "slower": self._slower(one),
                    "memory_bytes": one.memory_bytes,
                    "spent": asdict(one.spent),
                    "limits": [{"name": name, "seconds": seconds} for name, seconds in one.spent.limits],
                    **asdict(self._outlook(one)),
                }
                for one in self.found.best
            ],
            "why": self._why(),
        }

    def _outlook(self, one: Tried) -> Outlook:
        return outlook(self.config, one.layout, one.iteration_s)

    def _slower(self, one: Tried) -> float:
        return one.per_sequence_s / self.found.best[0].per_sequence_s - 1

    def _cells(self, one: Tried) -> tuple[str, ...]:
        layout, ahead = one.layout, self._outlook(one)
        limits = [f"{name} {share:.0%}" for name, share in _shares(one) if share >= _WORTH_NAMING]
        return (
            f"{layout.micro_batch_size} x {layout.num_microbatches} x {layout.dp}",
            layout.recompute,
            step_time(one.iteration_s),
            f"{self._slower(one):.1%}" if one is not self.found.best[0] else "",
            count(ahead.tokens_per_s_per_gpu),
            f"{ahead.mfu:.1%}",
            f"{one.memory_bytes / GIB:.1f}",
            ", ".join(limits[:2]),
        )

    def _why(self) -> str:
        """Where the first gains on the second, and where it loses."""
        first, *others = self.found.best
        if not others:
            return f"{layout_code(first.layout)} is the only layout that is possible and fits."
        second = others[0]
        scale = first.layout.global_batch_size / second.layout.global_batch_size
        apart = {
            LABELS[field.name]: scale * getattr(second.spent, field.name) - getattr(first.spent, field.name)
            for field in fields(first.spent)
        }
        named = sorted(apart.items(), key=lambda pair: -abs(pair[1]))
        least = _WORTH_NAMING / 10 * first.iteration_s
        told = [f"{step_time(abs(by))} {_sign(by)} {name}" for name, by in named[:3] if abs(by) > least]
        return (
            f"{layout_name(first.layout)} has the shortest simulated step per sequence. The next, "
            f"{layout_name(second.layout)}, is {self._slower(second):.2%} slower; against it, for a batch, the first "
            f"has {', '.join(told)}."
        )


def layouts_of(config: RunConfig) -> FastestLayouts:
    """Search the fastest layouts of a run as composed.

    Raises:
        ConfigError: what is set is impossible.
        DoesNotFit: no layout fits.
    """
    found = search(config, SHOWN)
    if not found.best:
        make_plan(*resolve(config))  # says what does not fit
    return FastestLayouts(config=config, found=found)


def _shares(one: Tried) -> list[tuple[str, float]]:
    return [(name, seconds / one.iteration_s) for name, seconds in one.spent.limits]


def _sign(by: float) -> str:
    return "less" if by > 0 else "more"
