"""`canzona recipes layouts`: the layout of each size on each number of GPUs, and whether it fits."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import RenderableType

from canzona_cli.cluster import fit
from canzona_cli.cluster.search import Candidate, candidates
from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.memory import GIB, capacity
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.model.families import family_of, parameter_count
from canzona_cli.report.header import optimizer_words
from canzona_cli.report.page import Page, Screen, headed, wrapped
from canzona_cli.report.tables import Table
from canzona_cli.run.words import layout_code

GPU_COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of GPUs."""

    gpus: int
    candidate: Candidate | None
    """The layout chosen, or the one that needs least memory where none fits; None where there is none."""
    note: str
    """The note on what would make it fit, or why there is no layout."""

    @property
    def fits(self) -> bool:
        return self.candidate is not None and self.candidate.fits


@dataclass(frozen=True, kw_only=True)
class Layouts(Page):
    """All rows of one recipe, readable from 80 columns."""

    config: RunConfig
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """Its part of `canzona recipes layouts --json`."""
        rows = [
            {
                "gpus": row.gpus,
                "fits": row.fits,
                "layout": None if row.candidate is None else asdict(row.candidate.layout),
                "memory_bytes": None if row.candidate is None else row.candidate.memory.total,
                "note": row.note,
            }
            for row in self.rows
        ]
        return {"recipe": self.config.name, "capacity_bytes": capacity(self.config), "rows": rows}

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        model, cluster = self.config.model, self.config.cluster
        count = parameter_count(model)
        optimizer = optimizer_words(self.config.optimizer.name, self.config.engine.strategy)
        job = f" on {cluster.name}, {optimizer}, sequences of {self.config.train.seq_length} tokens"
        yield headed(self.config.name, job)
        parameters = f"{_billions(count.total)} parameters"
        published = family_of(model).published
        if model.name in published:
            total, body = published[model.name]
            parameters += f" (published {total}), {_billions(count.non_embedding)} without embeddings ({body})"
        yield wrapped(parameters, "dim")
        yield wrapped("batch: sequences a step = micro-batch x accumulation x DP", "dim")
        ranks = "GPUs" if cluster.device == "cuda" else "ranks"
        table = Table()
        table.add_numbers(ranks)
        table.add_column("layout", min_width=14, no_wrap=True)
        table.add_numbers("batch")
        table.add_column("recompute", no_wrap=True)
        # The title may fold on a narrow terminal, so that no number is cut.
        table.add_column(f"GiB of {capacity(self.config) / GIB:.1f}", justify="right")
        for row in self.rows:
            table.add_row(*_cells(row), style="" if row.fits else "yellow")
        yield table
        for row in self.rows:
            if row.note:
                yield wrapped(row.note, "yellow", first=f"{row.gpus:>{len(ranks)}}: ")


def layouts(config: RunConfig, gpu_counts: Sequence[int] = GPU_COUNTS) -> Layouts:
    """Fit `config` to each number of GPUs, whatever its own."""
    free = replace(config, cluster=replace(config.cluster, nodes=None))
    return Layouts(config=free, rows=tuple(_row(replace(free, gpus=gpus)) for gpus in gpu_counts))


def _row(config: RunConfig) -> Row:
    try:
        best = fit.choose(config)
    except ConfigError as error:
        return Row(gpus=config.gpus, candidate=None, note="; ".join(map(_why, error.problems)))
    if best is not None:
        return Row(gpus=config.gpus, candidate=best, note="")
    least = min(candidates(config), key=lambda candidate: candidate.memory.total)
    ways = [override for override, _ in fit.suggestions(config)]
    return Row(gpus=config.gpus, candidate=least, note=f"would fit with {' or '.join(ways)}" if ways else "")


def _cells(row: Row) -> tuple[str, ...]:
    if row.candidate is None:
        return f"{row.gpus}", "not possible", "", "", ""
    layout, memory = row.candidate.layout, row.candidate.memory
    needs = f"{memory.total / GIB:.1f}" if memory.total >= GIB else f"{memory.total / GIB:.2f}"
    if not row.fits:
        return f"{row.gpus}", "does not fit", "", "", needs
    return (
        f"{row.gpus}",
        layout_code(layout),
        f"{layout.global_batch_size} = {layout.micro_batch_size} x {layout.num_microbatches} x {layout.dp}",
        layout.recompute,
        needs,
    )


def _why(problem: Problem) -> str:
    return f"{problem.key}={problem.value} {problem.reason}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.3f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"
