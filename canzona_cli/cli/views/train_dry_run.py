"""The screens of `canzona train --dry-run` and `--prepare-only` (the resolved run or, for a sweep, a table of runs,
and the command that starts a run)."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from canzona_cli.cli.views.charts import MEMORY
from canzona_cli.cli.views.header import Outlook, fast_path_rows, header_rows, outlook_rows, rank_word
from canzona_cli.cli.views.page import Page, Screen, Table, labelled_rows, note, paragraph
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import redact, shown_value
from canzona_cli.core.costs.memory import GIB, Memory
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.planner.measures import balance
from canzona_cli.core.planner.plan_file import ObtainedPlan
from canzona_cli.core.reading import display_path
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.fast_paths import FastPaths
from canzona_cli.core.simulate.prediction import Prediction
from canzona_cli.launch.card import Card
from canzona_cli.launch.torchrun import (
    ENDPOINT_PLACEHOLDER,
    NODE_RANK_PLACEHOLDER,
    LaunchCommand,
    node_count,
    ranks_per_node,
)
from canzona_cli.records.breakdown import describes_machine
from canzona_cli.records.corpus import PreparedCorpus, supply
from canzona_cli.records.words import MISSING, duration, layout_code, plural, size

VERSION = 2


def resolved_json(config: RunConfig, layout: Layout, plan: ObtainedPlan | None) -> dict[str, object]:
    """Returns a resolved run as JSON values. New keys do not change `version`.

    Args:
        plan: the plan that the run executes; None for a run without a plan.
    """
    return {
        "version": VERSION,
        "recipe": config.name,
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "tokens_per_step": layout.global_batch_size * config.train.seq_length,
        "plan": None if plan is None else _plan(plan),
        "routing": asdict(routing(config.setup)),
        "settings": asdict(config),
    }


def refused_json(error: CanzonaError) -> dict[str, object]:
    """Returns the JSON of a refused run; secrets are redacted."""
    problems = [
        {
            "key": problem.key,
            "value": None if problem.value is None else redact(str(shown_value(problem.key, problem.value))),
            "reason": redact(problem.reason),
            "fix": redact(problem.fix),
        }
        for problem in error.problems
    ]
    return {"version": VERSION, "exit_code": int(error.exit_code), "problems": problems}


def _plan(obtained: ObtainedPlan) -> dict[str, object]:
    reached = balance(obtained.plan)
    return {
        "hash": obtained.plan.hash,
        "file": None if obtained.path is None else str(obtained.path),
        "load_balance": reached.grid,
        "lower_bound": reached.lower_bound,
        "slowest_update_s": reached.slowest_s,
    }


RUN_DIR_TIME = "YYYYmmdd-HHMMSS"
"""The placeholder for the start time in the name of a run directory that does not exist yet."""


@dataclass(frozen=True, kw_only=True)
class DryRun(Page):
    """The description of a resolved run. The configuration, environment and command are not wrapped, so that
    they can be copied."""

    config: RunConfig
    config_yaml: str | None
    """The configuration to show; None to omit it."""
    layout: Layout
    corpus: PreparedCorpus | None
    """The corpus of the run; None for the built-in corpus in a dry run, which does not prepare it."""
    plan: ObtainedPlan | None
    outlook: Outlook
    predicted: Prediction
    fast_paths: FastPaths
    """The fast paths that the run leaves off, and its step with them."""
    memory: Memory
    command: LaunchCommand
    card: Card | None = None
    """The recorded results of the run's recipe; None if there are none for these settings."""
    prepared: bool = False
    """True for `--prepare-only`, which writes the run directory but does not run the command."""
    samples: int | None = None
    """The number of samples of a resumed run; None for a run that starts at its first step."""

    def as_json(self) -> dict[str, object]:
        """Returns the JSON of `canzona train --dry-run`. New keys do not change `version`."""
        memory = self.memory
        return {
            **resolved_json(self.config, self.layout, self.plan),
            "memory": {
                "parts_bytes": dict(memory.parts),
                "total_bytes": memory.total,
                "capacity_bytes": memory.capacity,
                "worst_rank": memory.worst_rank,
            },
            "outlook": asdict(self.outlook),
            "fast_paths": asdict(self.fast_paths),
            "data": self._sets(),
            "validation": self._validation_set(),
            "nodes": node_count(self.config),
            "ranks_per_node": ranks_per_node(self.config),
            "environment": dict(self.command.environment),
            "command": list(self.command.argv),
        }

    def _sets(self) -> list[dict[str, object]]:
        """Returns the data sets that the run reads, with their epochs; empty if they are not prepared yet."""
        tokens, corpus = supply(self.config, self.layout, self.corpus, samples=self.samples), self.corpus
        if tokens is None or corpus is None:
            return []
        epochs = {name: part.epochs for name, part in tokens.sets.items()}
        return [
            {**asdict(part), "prefix": str(part.prefix), "epochs": epochs.get(part.name, tokens.epochs)}
            for part in corpus.sets
        ]

    def _validation_set(self) -> dict[str, object] | None:
        """Returns the set of `data.validation`; None if the run validates on documents of its data."""
        part = None if self.corpus is None else self.corpus.validation
        return None if part is None else {**asdict(part), "prefix": str(part.prefix)}

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        routed = self.config_yaml is not None
        rows = [
            *header_rows(
                self.config, self.layout, corpus=self.corpus, plan=self.plan, samples=self.samples, routed=routed
            ),
            *self._machines(),
            ("memory", self._memory()),
            *outlook_rows(self.config, self.outlook),
            *fast_path_rows(self.fast_paths, (self.predicted.iteration_s, self.predicted.optimizer_s)),
            *self._card(),
        ]
        yield from labelled_rows(rows, 13, indent=0)
        yield Text()
        if self.config_yaml is not None:
            yield from _verbatim("resolved configuration", self.config_yaml.rstrip().splitlines())
            yield Text()
        if self._command_shown:
            variables = self.command.environment.items()
            yield from _verbatim("environment", [f"export {name}={shlex.quote(value)}" for name, value in variables])
            yield Text()
            command = LaunchCommand(argv=self.command.argv, environment={}).shell()
            yield from _verbatim("command", command.splitlines())
        for text in self._notes():
            yield paragraph(text, "dim")

    def cells(self) -> dict[str, str]:
        """Returns the run's row in the table of a sweep, by the heads of the columns."""
        layout = self.layout
        return {
            "ranks": f"{layout.world_size:,}",
            "layout": layout_code(layout),
            "batch": f"{layout.global_batch_size:,}",
            "steps": f"{self.config.train.steps:,}",
            "GiB": f"{self.memory.total / GIB:.2f}",
            "training": MISSING if self.training_s is None else duration(self.training_s),
            "on disk": size(self.kept_bytes),
        }

    @property
    def kept_bytes(self) -> float:
        """The size of the checkpoints that are kept at the end."""
        return self.outlook.checkpoints_kept * self.outlook.checkpoint_bytes

    @property
    def training_s(self) -> float | None:
        """The planned seconds of all steps; None if the profile does not describe the machine."""
        cluster = self.config.cluster
        measured = describes_machine(cluster.device, calibrated=cluster.calibrated)
        return self.outlook.training_s if measured else None

    @property
    def _command_shown(self) -> bool:
        return self.config_yaml is not None or self.prepared

    def _card(self) -> Iterator[tuple[str, str]]:
        if self.card is not None:
            yield "reference", self.card.words
        elif self.config.cluster.device == "cuda":
            yield "reference", "none: no run with these settings was recorded"

    def _memory(self) -> str:
        memory, cluster = self.memory, self.config.cluster
        parts = (f"{MEMORY[name].name} {bytes_ / GIB:.2f}" for name, bytes_ in memory.parts.items() if bytes_)
        # On CPU ranks, the reserve is the memory of Python and torch, which `top` shows as used; on a GPU, it is not
        # part of the run's memory.
        remarks = f"; Python and torch take about {cluster.reserved_gib:g} GiB more" if cluster.device == "cpu" else ""
        free = memory.capacity - memory.total
        if free < memory.headroom:
            headroom = f"cluster.headroom_gib={cluster.headroom_gib:g}"
            remarks += f"; leaves {free / GIB:.2f} GiB free, less than {headroom}"
        total = f"{memory.total / GIB:.2f} of {memory.capacity / GIB:.2f} GiB"
        return f"{total} on the fullest {rank_word(cluster.device)} ({memory.worst_rank}): {', '.join(parts)}{remarks}"

    def _machines(self) -> Iterator[tuple[str, str]]:
        """Yields a row with the number of machines and of the ranks on each, if there are several machines."""
        if (nodes := node_count(self.config)) > 1:
            each = plural(ranks_per_node(self.config), rank_word(self.config.cluster.device))
            yield "machines", f"{nodes}, with {each} each"

    def _notes(self) -> Iterator[str]:
        if self._command_shown:
            yield from self._notes_on_command()
        if self.config_yaml is None:
            yield "--config adds every setting, the matrices, and the torchrun command."

    def _notes_on_command(self) -> Iterator[str]:
        environment, last_node = self.command.environment, node_count(self.config) - 1
        if last_node:
            if "OMP_NUM_THREADS" in environment:
                yield "OMP_NUM_THREADS suits this machine's cores; `canzona train` sets it on each machine."
            if NODE_RANK_PLACEHOLDER in self.command.argv:
                yield f"{NODE_RANK_PLACEHOLDER} is cluster.node_rank: 0 to {last_node}, different on each machine."
            if not environment.get("GLOO_SOCKET_IFNAME", "lo").startswith("lo"):
                yield "GLOO_SOCKET_IFNAME is this machine's network interface to machine 0; the others detect theirs."
            if ENDPOINT_PLACEHOLDER in self.command.argv:
                yield "GLOO_SOCKET_IFNAME, the network interface to machine 0, is detected on each machine."
                address = "an address of machine 0 that all others can reach"
                yield f"{ENDPOINT_PLACEHOLDER} is cluster.rdzv_endpoint: {address}."
        if self.config.run.dir is None:
            yield f"{RUN_DIR_TIME} is the start time; run.dir sets the full path instead."
        if self.prepared:
            directory = self.command.argv[-1]
            yield f"Prepared {directory}; nothing was started. With this environment, this command starts the training."
            yield f"To continue if the run stops early, prepare it again with run.dir={directory}."


@dataclass(frozen=True, kw_only=True)
class SweepDryRun(Page):
    """The runs of a sweep: a table with a row for each run."""

    root: Path
    """The parent directory of the runs' directories."""
    runs: Mapping[str, DryRun | None]
    """The runs by the names of their directories; None for a finished run."""

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        rows = {name: run.cells() for name, run in self.runs.items() if run is not None}
        by_head = {head: [*{cells[head] for cells in rows.values()}] for head in next(iter(rows.values()), {})}
        # A column of equal values would only take the room of the names.
        heads = [head for head, values in by_head.items() if len(values) > 1]
        table = Table("run")
        table.add_numbers(*heads)
        for name, run in self.runs.items():
            table.add_row(*([f"{name} (finished)"] if run is None else [name, *(rows[name][head] for head in heads)]))
        yield table
        equal = [f"{head} {value}" for head, (value, *others) in by_head.items() if not others and value != MISSING]
        if equal:
            yield note(f"all runs: {', '.join(equal)}")
        yield note("batch: sequences per step; GiB: of the fullest rank; on disk: the checkpoints kept at the end")
        yield from map(note, self._totals())
        yield paragraph(f"directory: {display_path(self.root)}; --config prints each run", "dim")

    def _totals(self) -> Iterator[str]:
        """Yields what the runs that are not finished need together: disk, memory and planned time."""
        runs = [run for run in self.runs.values() if run is not None]
        if not runs:
            return
        memory = max(run.memory.total for run in runs) / GIB
        needs = f"{size(sum(run.kept_bytes for run in runs))} on disk, at most {memory:.2f} GiB on a rank"
        known = [each for run in runs if (each := run.training_s) is not None]
        time = f"{duration(sum(known))} of steps (planned), without starts, validation and saves"
        if len(known) < len(runs):
            time = "the time is unknown; `canzona calibrate` measures this machine for an estimate"
        yield f"{plural(len(runs), 'run')}, one after another: {time}; {needs}"


def _verbatim(title: str, lines: list[str]) -> Iterator[Text]:
    yield Text(title, style="bold")
    for line in lines:
        yield Text(line, no_wrap=True, overflow="ignore")
