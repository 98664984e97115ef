"""The screen of `canzona plan --from-megatron`: the cost of a Megatron-LM run's optimizer compared with
canzona's."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.bench.beside_megatron import Cost, MegatronComparison
from canzona_cli.cli.views.header import describe_layout
from canzona_cli.cli.views.page import Page, Screen, joined, labelled_rows, note, paragraph
from canzona_cli.cli.views.tables import rows_table
from canzona_cli.core.costs.memory import GIB
from canzona_cli.records.words import MISSING, plural, predicted_overhead, step_time

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

    beside: MegatronComparison
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
            only_in_megatron = "canzona's own loop cannot train this model:"
            only_planned = "canzona plans this model, but cannot train it:"
            yield paragraph(only_in_megatron if self._in_megatrons_loop else only_planned, "bold")
            yield from map(note, self._first_few(run.plans_only))
            return
        lacking = f", without {' and '.join(beside.overlaps)}" if beside.overlaps else ""
        data = "" if "data.path" in run.overrides else "; add data.path=PREFIX"
        yield paragraph(f"In canzona's own loop{lacking}{data}:", "bold")
        yield replace(paragraph(shlex.join(("canzona", "train", *beside.command))), unbroken=True)

    @property
    def _in_megatrons_loop(self) -> bool:
        """True if canzona's engine can train the model in Megatron's loop."""
        model = self.beside.setup.model
        return model.gated and not model.num_experts

    def _table(self) -> RenderableType:
        beside = self.beside
        muon = "layer-wise Muon" if beside.muon.strategy == "layerwise" else "redundant Muon"
        costs = {"Megatron AdamW": beside.adamw, f"  {muon}": beside.muon, "canzona Muon": beside.canzona}
        heads = ("iteration", "optimizer", "vs AdamW", "balance", "padding", "GiB")
        return rows_table(heads, ((name, self._cells(cost)) for name, cost in costs.items()), bold=2)

    def _cells(self, cost: Cost) -> tuple[str, ...]:
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
        if beside.setup.model.num_experts:
            yield "canzona", "does not train experts in Megatron's loop yet"
        elif self._in_megatrons_loop:
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
