"""The screens of `canzona plan`: a summary that fits in 25 lines, or everything about a plan; and the
cost of a Megatron-LM run's optimizer compared with canzona's."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import MEMORY, Bar, Bars, Lanes, LoadMaps, planned_lanes
from canzona_cli.cli.views.header import (
    Outlook,
    describe_batch,
    describe_layout,
    fast_path_rows,
    outlook,
    outlook_rows,
    rank_word,
)
from canzona_cli.cli.views.page import (
    GroupedTable,
    Page,
    Paragraph,
    Screen,
    column,
    items,
    joined,
    labelled_rows,
    note,
    paragraph,
    rows_table,
    section_head,
)
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import GIB
from canzona_cli.core.costs.update import RULES
from canzona_cli.core.phases import LABELS
from canzona_cli.core.planner.measures import UpdateKind, kinds
from canzona_cli.core.setup import Gathering, Reduction
from canzona_cli.core.simulate.compare import STRATEGIES, SUMMARY, Study, mode_key
from canzona_cli.records.breakdown import describes_machine
from canzona_cli.records.corpus import PreparedCorpus, supply
from canzona_cli.records.words import MISSING, count, milliseconds, plural, predicted_overhead, size, step_time, traffic

if TYPE_CHECKING:
    from canzona_cli.bench.beside_megatron import Cost, MegatronComparison

_NO_GAP = 1e-6
"""The relative gap to the lower bound below which a plan is called optimal, because the gap may be due to
rounding."""


@dataclass(frozen=True, kw_only=True)
class PlanView(Page):
    """The description of a plan, with simulated times."""

    config: RunConfig
    study: Study
    written: Path | None = None
    """The plan file; None if nothing was written."""
    verbose: bool = False
    """True to show everything about the plan."""
    assumptions: bool = False
    """True to list the assumptions of the simulation instead of only counting them."""
    corpus: PreparedCorpus | None = None
    """The user's prepared corpus; None if it does not exist, or if the run uses the built-in corpus."""

    widest = 120

    @property
    def outlook(self) -> Outlook:
        """The outlook of the run if every iteration takes as long as under the plan."""
        return outlook(self.config, self.study.layout, self.study.planned.result.iteration_s)

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        study = self.study
        yield self._title()
        sections: Sequence[Callable[[Study, Screen], Iterator[RenderableType]]] = [strategies]
        if self.verbose:
            yield from labelled_rows(self._rows())
            sections = [strategies_section, phases, *([load_map] * screen.page), memory, *([streams] * screen.page)]
        else:
            yield from labelled_rows(self._main_rows())
        for section in sections:
            yield Text()
            yield from section(study, screen)
        if self.assumptions:
            yield from items("Assumptions", study.assumptions, "dim")
        if self.verbose or self.assumptions:
            yield Text()  # the summary has no line to spare
        name = study.plan.hash if self.verbose else study.plan.name
        if self.written is not None:
            yield paragraph(f"Plan {name} was written to {self.written}.")
        elif self.verbose:
            yield paragraph(f"Plan {name}")
        if not screen.page:
            yield note(self._hint())

    @property
    def _unit(self) -> str:
        return rank_word(self.study.setup.cluster.device)

    def _title(self) -> Paragraph:
        study, config = self.study, self.study.setup
        layout = f"{describe_layout(study.layout, config.cluster.device)} on {config.cluster.name}"
        title = joined((f"Plan {study.plan.name}", "bold"), f"  {config.name}, {self._optimizer()}, {layout}")
        return paragraph(title, rest="  ")

    def _optimizer(self) -> str:
        algorithm = self.study.plan.subject.optimizer
        if algorithm.custom:
            return f"custom (cost model of {algorithm.name})"
        if RULES[algorithm.name].preconditioned:
            return f"{algorithm.name} (refreshed every {algorithm.refresh_period} steps)"
        if RULES[algorithm.name].orthogonal:
            return f"{algorithm.name} ({algorithm.ns_steps} Newton-Schulz steps)"
        return algorithm.name

    def _main_rows(self) -> Iterator[tuple[str, Text | str]]:
        """Yields the rows of the summary."""
        study, balance, account = self.study, self.study.balance, self.study.memory
        yield "batch", describe_batch(study.layout, study.setup.train)
        yield from [row for row in outlook_rows(self.config, self.outlook) if row[0] != "checkpoints"]
        yield from self._dispatcher_rows()
        free = max(account.capacity - account.total, 0)
        yield "memory", f"{size(account.total)} on the fullest {self._unit}, {size(free)} free"
        yield "matrices", self._matrices()
        busiest = f"{step_time(balance.slowest_s)} of updates on rank {balance.slowest.rank}"
        reached = f"{balance.grid:.3f} (bound {balance.lower_bound:.3f})"
        yield "load balance", f"{reached}: {busiest}, mean {step_time(balance.mean_s)}"
        yield from fast_path_rows(study.fast_paths(simulated=False), None)

    def _rows(self) -> Iterator[tuple[str, Text | str]]:
        """Yields the rows of the verbose view."""
        study, communication = self.study, self.study.communication
        plan, mesh, settings = study.plan, study.plan.subject.layout, study.plan.subject.settings
        yield "batch", describe_batch(study.layout, study.setup.train)
        corpus_supply = supply(self.config, study.layout, self.corpus)
        if corpus_supply is not None:
            yield "epochs", corpus_supply.words
        yield from outlook_rows(self.config, self.outlook)
        yield from self._dispatcher_rows()
        yield "matrices", self._matrices()
        if updates := self._updates():
            yield "updates", updates
        orders: dict[str, str] = {"asc": "in order", "paper": f"in order, alpha {settings.alpha:g}"}
        order = orders.get(settings.strategy, "by owner")
        grid = f"{plural(mesh.owners, 'owner')} × {plural(mesh.tp, 'host')}"
        shared_count = len(plan.assignment.shared_costs)
        shared = f"; {shared_count:,} matrices shared by TP groups" if shared_count else ""
        if mesh.ep > 1:
            grid += f", each expert on {plural(mesh.expert_owners, 'rank')}"
        yield "assignment", f"{settings.strategy}: {order}; grid of {grid}{shared}"
        yield from self._update_rows()
        group_elements = (sum(plan.matrices[index].elements for index in group.matrices) for group in plan.groups)
        groups = f"{plural(len(plan.groups), 'micro-group')}"
        padding = f"{len(plan.buckets)}, {100 * communication.padding_fraction:.1f}% padding"
        yield "buckets", f"{padding}; {groups}, up to {count(max(group_elements, default=0))} elements each"
        reduced = f"{traffic(communication.dp_reduce_bytes)} of gradients reduced"
        gathered = f"{traffic(communication.dp_gather_bytes)} of weights gathered"
        exchanged = f"{traffic(communication.tp_exchange_bytes)} exchanged over TP"
        yield "traffic", f"per {self._unit} and step: {reduced}, {gathered}, {exchanged}"
        if communication.reduced_by:
            gradients = f"{communication.dp_reductions:,} ({_bucket_counts(communication.reduced_by)})"
            weights = f"{communication.dp_gathers:,} ({_bucket_counts(communication.gathered_by)})"
            yield "collectives", f"gradients: {gradients}, weights: {weights}"
        result = study.planned.result
        yield from fast_path_rows(study.fast_paths(simulated=True), (result.iteration_s, result.optimizer_s))

    def _dispatcher_rows(self) -> Iterator[tuple[str, Text | str]]:
        """Yields the row that names the faster dispatcher, which is not chosen because it needs DeepEP."""
        speedup = self.study.flex_speedup
        if speedup is not None and speedup > 1.005:
            yield "dispatcher", f"alltoall; flex (needs DeepEP): about {speedup - 1:+.0%} tokens/s (estimated)"

    def _update_rows(self) -> Iterator[tuple[str, Text | str]]:
        """Yields the rows about the time of updates."""
        study, balance, mesh = self.study, self.study.balance, self.study.plan.subject.layout
        yield (
            "load balance",
            Text.assemble(
                (f"{balance.grid:.3f}", "bold"),
                f" over the grid (max / mean; DP {balance.dp:.3f}, TP {balance.tp:.3f}); lower bound ",
                (f"{balance.lower_bound:.3f}", "bold"),
                f"; this plan is {_gap_text(balance.gap)}",
                f"; {balance.ranks:.3f} over all ranks, lower bound {balance.ranks_bound:.3f}" if mesh.pp > 1 else "",
            ),
        )
        slowest, mean = step_time(balance.slowest_s), step_time(balance.mean_s)
        yield "busiest rank", f"{balance.slowest.describe(mesh)}: {slowest} (mean {mean})"
        if study.refreshes is not None:
            refreshes, mean_s = study.refreshes, study.planned.result.iteration_s
            spreading = "spread" if study.plan.subject.optimizer.spread else "not spread"
            step_count, most_s = plural(len(refreshes.steps_s), "step"), step_time(max(refreshes.steps_s))
            updates = f"up to {most_s} of updates in a step, mean {step_time(refreshes.mean_s)}"
            longest = f"{step_time(mean_s + refreshes.excess_s)}, {refreshes.excess_s / mean_s:+.1%} over the mean"
            yield "refreshes", f"{spreading} over {step_count}: {updates}; longest step {longest}"

    def _matrices(self) -> str:
        plan = self.study.plan
        mesh, matrices = plan.subject.layout, plan.matrices
        elements = count(sum(matrix.elements for matrix in matrices))
        text = f"{len(matrices):,} with {elements} elements (engine.splitting={plan.subject.settings.splitting})"
        ranks = mesh.pp * mesh.cells
        busy = sum(load > 0 for stage in range(mesh.pp) for load in plan.loads(stage))
        if len(matrices) >= ranks or busy == ranks:
            return text
        idle = f"fewer than ranks: {ranks - busy:,} of {ranks:,} ranks update none"
        return f"{text}; {idle}" if self.verbose else f"{len(matrices):,}, {idle}"

    def _updates(self) -> str:
        """Describes how each shape is orthogonalised, such as `192 of 25,600 × 5,120: gram, 14.8 ms each;
        ...; expected RMS error of the singular values: 0.017`; empty for optimizers
        without orthogonalisation."""
        shapes_updated = kinds(self.study.setup, self.study.plan)
        if shapes_updated[0].form is None:
            return ""
        shapes = "; ".join(
            f"{kind.matrices:,} of {kind.rows:,} × {kind.cols:,}: {kind.form}, {step_time(kind.seconds)} each"
            f"{f', in stacks of {kind.together}' if kind.together > 1 else ''}{_shared(kind)}"
            for kind in shapes_updated
        )
        error = shapes_updated[0].error
        expected = "" if error is None else f"; expected RMS error of the singular values: {error:g}"
        return f"{shapes}{expected}"

    def _hint(self) -> str:
        """Returns a hint about the options that show more."""
        counted = f"Simulated under {len(self.study.assumptions)} assumptions; --assumptions lists them. "
        more = "--html FILE draws timelines and the load of every rank." if self.verbose else "-v adds all details."
        return counted * (not self.assumptions) + more


def _shared(kind: UpdateKind) -> str:
    """Describes the matrices that TP groups share: ` (120 shared: 2.8 ms per rank)`; empty if there are
    none."""
    return f" ({kind.shared:,} shared: {step_time(kind.fragment_s)} per rank)" if kind.shared else ""


def _bucket_counts(buckets: Mapping[Reduction, int] | Mapping[Gathering, int]) -> str:
    """Formats the number of buckets by kind of collective: `60 buckets by ring, 5 buckets by reduce`. With
    only one kind, returns its name."""
    if len(buckets) == 1:
        return f"{next(iter(buckets))}"
    return ", ".join(f"{plural(number, 'bucket')} by {kind}" for kind, number in buckets.items())


def _gap_text(gap: float) -> str:
    """Describes a plan's relative distance from its lower bound, such as `1.5% above it`."""
    if gap < _NO_GAP:
        return "optimal"
    return f"{100 * gap:.1f}% above it" if gap >= 0.0005 else "less than 0.1% above it"


def strategies(study: Study, screen: Screen, *, whole: bool = False) -> Iterator[RenderableType]:
    """Yields a table of strategies: times, overhead, memory, and times relative to the planned strategy.

    Args:
        whole: True to show also the paper's strategies, those that do not fit, and layerwise and sc in the slower of
            the modes that the supported Megatron can run.
    """
    brief = dict.fromkeys((*SUMMARY, study.strategy, mode_key("layerwise", "layer_sharded")))
    misfits = [name for name in brief if name in study.strategies and not study.strategies[name].fits]
    names = [name for name in study.shown_strategies if whole or (name in brief and name not in misfits)]
    heads = ("iteration", "optimizer", "vs AdamW", "GiB", "opt. ratio", "iter. ratio")
    rows = ((_strategy_label(name), _strategy_cells(study, name)) for name in names)
    yield rows_table(heads, rows, bold=names.index(study.strategy))
    cluster = study.setup.cluster
    measured = describes_machine(cluster.device, calibrated=cluster.calibrated)
    hardware = "" if measured else " on an uncalibrated CPU"
    ratio, room = f"ratio: time divided by {study.strategy}'s", f"{study.memory.capacity / GIB:.1f} GiB"
    if whole and not all(strategy.fits for strategy in study.strategies.values()):
        ratio += f"; !: does not fit in {room}, simulated as if it did"
    elif misfits and not whole:
        ratio += f"; too large for {room}: {', '.join(name for name in misfits if '/' not in name)} (see -v)"
    if study.setup.bucket_size_open:
        ratio += "; adamw, sc, layerwise: Megatron's bucket size"  # canzona chooses its own
    yield note(f"simulated in this layout{hardware}; optimizer: exposed time; {ratio}")
    modes = {name: study.strategies[name].tp_mode for name in ("layerwise", "sc") if name in names}
    if any(modes.values()):
        first, *others = modes.values()
        faster = f"{', '.join(modes)}: TP mode {first}"
        if any(mode != first for mode in others):
            faster = f"layerwise: TP mode {first}, sc: {others[0]}"
        yield note(f"{faster}; layer_sharded: Megatron's main branch")
    if (optimizer := study.setup.optimizer.name) != "muon":
        yield note(f"layerwise: Megatron has it only for muon; simulated with {optimizer}")


def strategies_section(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Yields the table of strategies, with a title."""
    yield section_head("Strategies", ", simulated on the same layout and batch")
    yield from strategies(study, screen, whole=True)


def _strategy_label(name: str) -> str:
    """Returns the label of a strategy's row; another mode is indented below its strategy."""
    _, slash, mode = name.partition("/")
    return f"  {mode}" if slash else name


def _strategy_cells(study: Study, name: str) -> tuple[str, ...]:
    simulated = study.strategies[name]
    compared = name not in ("adamw", study.strategy)
    return (
        step_time(simulated.result.iteration_s),
        step_time(simulated.result.optimizer_s),
        MISSING if name == "adamw" else predicted_overhead(study.overhead(name)),
        f"{simulated.memory_bytes / GIB:.1f}{' ' if simulated.fits else '!'}",
        _times_as_long(study.optimizer_speedup(name)) if compared else "",
        _times_as_long(study.iteration_speedup(name)) if compared else "",
    )


def _times_as_long(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}x"


def phases(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Yields a table of each phase's milliseconds for every strategy, on the rank that finishes last."""
    results = [study.strategies[name].result for name in STRATEGIES]
    shown = [phase for phase in LABELS if any(result.phases.get(phase) for result in results)]
    waits = "exchange includes waits for other hosts; " if "exchange" in shown else ""
    lead = f" on the rank that finishes last; {waits}all rows but the totals add up to the iteration"
    yield section_head("Phases", lead)
    groups = []
    for name, result in zip(STRATEGIES, results, strict=True):
        phase_times = (result.phases.get(phase) or None for phase in shown)  # `-` for a phase without time
        groups.append(column(name, list(map(milliseconds, (*phase_times, result.iteration_s)))))
    yield GroupedTable(
        head="phase, ms",
        labels=[*(LABELS[phase] for phase in shown), "iteration"],
        groups=groups,
        sections=(len(shown),),
        styles=[*("dim" if phase.endswith("_total") else "" for phase in shown), "bold"],
    )


def load_map(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Yields a map of the ranks' update times for each of `Study.drawn_strategies`; with several pipeline
    stages, only of the stage with the slowest rank."""
    mesh = study.plan.subject.layout
    shown = ((name, study.strategies[name].loads) for name in study.drawn_strategies)
    maps = {name: loads for name, loads in shown if loads is not None}
    stage = f", pipeline stage {study.balance.slowest.stage}" if mesh.pp > 1 else ""
    yield section_head("Update time of every rank", f"; colour: time relative to the mean of the strategy{stage}")
    yield LoadMaps(maps=maps, hosts=mesh.tp)


def memory(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Yields one bar with the parts of the fullest rank's memory, and its free memory."""
    account, mesh = study.memory, study.plan.subject.layout
    unit = rank_word(study.setup.cluster.device)
    free = max(account.capacity - account.total, 0)
    yield section_head(
        "Memory",
        f" of the fullest {unit}, {account.worst.describe(mesh)}: {account.total / GIB:.1f} of "
        f"{account.capacity / GIB:.1f} GiB, {free / GIB:.1f} free",
    )
    parts = [(name, float(account.parts[name])) for name in MEMORY if account.parts.get(name)]
    row = Bar(label="fullest", parts=parts, value=size(account.total), limit=account.capacity)
    scale = max(account.capacity, account.total)
    yield Bars(rows=[row], scale=scale, inks=MEMORY, show=size, amounts=True)


def streams(study: Study, screen: Screen) -> Iterator[RenderableType]:
    """Yields the timeline of the rank that finishes last, and that of all recorded ranks from gradient norm and
    clipping on, enlarged."""
    result = study.planned.result
    slowest, end_s = result.slowest_rank, max(event.end_s for event in result.events)
    enlarged_start_s = min((event.start_s for event in result.events if event.phase == "norm_clip"), default=0.0)
    yield section_head("Timeline", f" of {study.strategy} on rank {slowest}, which finishes last")
    slowest_lanes = planned_lanes([event for event in result.events if event.rank == slowest])
    yield Lanes(rows=slowest_lanes, end_s=end_s)
    late_events = [event for event in result.events if event.end_s > enlarged_start_s]
    yield Lanes(rows=planned_lanes(late_events), start_s=enlarged_start_s, end_s=end_s)


_SHOWN = 4
"""The most arguments that a list shows without `-v`."""
_MODES = {
    "blockwise": "each TP rank orthogonalises its own fragment, so updates depend on TP; canzona's do not",
    "duplicated": "each TP rank gathers and updates whole matrices",
    "distributed": "each TP rank updates its fragment, and squares are all-reduced",
}


@dataclass(frozen=True, kw_only=True)
class BesideMegatronView(Page):
    """The optimizers' costs on one screen, and the command that trains the model in canzona's own loop."""

    beside: "MegatronComparison"
    verbose: bool = False
    """True to list every argument, not only the first few."""

    widest = 120

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        beside, run, config = self.beside, self.beside.run, self.beside.setup
        optimizer = "AdamW" if run.optimizer == "adamw" else "Muon"
        layout = describe_layout(beside.layout, config.cluster.device)
        model = f"  {config.model.name}, {optimizer}, {layout} on {config.cluster.name}"
        yield paragraph(joined((run.path.name, "bold"), model))
        batch = f"{beside.layout.global_batch_size:,} sequences × {config.train.seq_length:,}"
        yield note(f"{batch}, micro-batch {beside.layout.micro_batch_size}")
        yield self._table()
        all_fit = all(cost.fits for cost in (beside.adamw, beside.muon, beside.canzona))
        yield note("simulated, all in Megatron's own loop, so that only the optimizers differ")
        misfits = "" if all_fit else "; !: does not fit"
        yield note(f"optimizer: exposed time; balance: max / mean update time of ranks{misfits}")
        yield Text()
        yield from labelled_rows(self._rows(), 16)
        yield Text()
        if run.plans_only:
            yield paragraph("canzona's own loop cannot train this model:", "bold")
            yield from map(note, self._first_few(run.plans_only))
            return
        lacking = f", without {' and '.join(beside.overlaps)}" if beside.overlaps else ""
        data = "" if "data.path" in run.overrides else "; add data.path=PREFIX"
        yield paragraph(f"In canzona's own loop{lacking}{data}:", "bold")
        yield replace(paragraph(shlex.join(("canzona", "train", *beside.command))), unbroken=True)

    def _table(self) -> RenderableType:
        beside = self.beside
        muon = "layer-wise Muon" if beside.muon.strategy == "layerwise" else "redundant Muon"
        costs = {"Megatron AdamW": beside.adamw, f"  {muon}": beside.muon, "canzona Muon": beside.canzona}
        heads = ("iteration", "optimizer", "vs AdamW", "balance", "padding", "GiB")
        return rows_table(heads, ((name, self._cells(cost)) for name, cost in costs.items()), bold=2)

    def _cells(self, cost: "Cost") -> tuple[str, ...]:
        return (
            step_time(cost.result.iteration_s),
            step_time(cost.result.optimizer_s),
            MISSING if cost.strategy == "adamw" else predicted_overhead(self.beside.overhead(cost)),
            MISSING if cost.balance is None else f"{cost.balance:.2f}",
            MISSING if cost.padding is None else f"{100 * cost.padding:.1f}%",
            f"{cost.memory_bytes / GIB:.1f}{' ' if cost.fits else '!'}",
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        beside, run = self.beside, self.beside.run
        yield "canzona", "runs in Megatron's loop through use_in_megatron_lm(), see canzona_cli/LIBRARY.md"
        if run.optimizer == "adamw" and not run.distributed:
            yield "AdamW", "is simulated with --use-distributed-optimizer, although the run does not set it"
        if run.optimizer == "muon" and beside.muon.strategy == "sc":
            yield "redundant", "without --use-distributed-optimizer, every rank updates every matrix"
        if run.optimizer == "muon" and beside.layout.tp > 1:
            yield "muon-tp-mode", f"{run.tp_mode}: {_MODES[run.tp_mode]}"
        for label, arguments in (
            ("not understood", run.not_understood),
            ("not in the log", run.assumed),
            ("not simulated", run.left_out),
        ):
            if arguments:
                yield label, ", ".join(self._first_few(arguments))
        if run.no_effect:
            shown = f": {', '.join(run.no_effect)}" if self.verbose else " (-v lists them)"
            yield "no effect", f"{plural(len(run.no_effect), 'other argument')}{shown}"

    def _first_few(self, arguments: Sequence[str]) -> Sequence[str]:
        """Returns all arguments if they are few or the view is verbose; otherwise the first few and the
        number of the others."""
        if self.verbose or len(arguments) <= _SHOWN:
            return arguments
        return *arguments[:_SHOWN], f"and {len(arguments) - _SHOWN} more (-v)"
