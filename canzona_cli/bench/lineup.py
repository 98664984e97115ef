"""The lineup of a bench: which strategies run, and which of them share a process group. No torch.

All have the same layout, batch and schedule; each has a resolved configuration and, where it executes one, a
plan. Strategies take turns in one process group, a sitting. As many share one as fit into memory together;
where that takes several sittings, the reference takes part in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import psutil

from canzona_cli.bench.results import Predicted
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.checks import config_problems
from canzona_cli.config.compose import Composed
from canzona_cli.config.execution import AnyStrategy, Execution, execution_of, strategy_of, with_strategy
from canzona_cli.config.schema import ClusterConfig, Layout, MomentumConfig, RunConfig
from canzona_cli.costs.buffers import matrix_shapes
from canzona_cli.costs.memory import GIB, MemoryEstimate, capacity, estimate
from canzona_cli.errors import ConfigError, DoesNotFit, Problem, refuse
from canzona_cli.planner.memory import plan_memory
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.plan_file import obtain_plan
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.words import plural
from canzona_cli.simulate.predict import predict

PLANNED_STATE = ("weights", "gradients", "padding", "masters", "matrix_state", "adamw_state")
"""Parts of a plan's memory that stay from step to step."""
SHARE = 0.9
"""The share of the machine's free memory that CPU ranks may take."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A strategy, or for `canzona tune` a layout, that is ready to take turns."""

    name: str
    config: RunConfig
    """Resolved."""
    layout: Layout
    plan: Plan | None
    """The plan that canzona, paper and asc execute."""
    state_bytes: int
    """Bytes that the fullest rank keeps from step to step: every model of a sitting takes this much."""
    transient_bytes: int
    """Bytes that a step needs on top: only one strategy of a sitting steps at a time."""

    @property
    def strategy(self) -> AnyStrategy:
        return strategy_of(self.config)

    @property
    def tensor_bytes(self) -> int | None:
        """The plan's figure for `Measured.tensor_bytes`; None where there is no plan."""
        return None if self.plan is None else self.state_bytes

    @property
    def arithmetic(self) -> str:
        """Equal for strategies that give the same matrices the same updates."""
        if self.strategy == "adamw":
            return "adamw"
        return "+".join(f"{rows}x{cols}" for rows, cols in matrix_shapes(self.config))

    @cached_property
    def predicted(self) -> Predicted:
        """The simulator's prediction on this machine."""
        prediction = predict(self.config, self.layout, self.plan)
        return Predicted(
            iteration_s=prediction.iteration_s,
            optimizer_s=prediction.optimizer_s,
            phases=dict(prediction.phases),
            load_balance=prediction.load_balance,
            tensor_bytes=self.tensor_bytes,
            memory_bytes=prediction.memory_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """All strategies of a bench; the first is the reference."""

    strategies: tuple[Entrant, ...]
    arithmetic: str
    """The compared forms of the update, as in `BenchResult.arithmetic`."""
    notes: tuple[str, ...]

    @property
    def reference(self) -> Entrant:
        return self.strategies[0]

    @property
    def layout(self) -> Layout:
        return self.reference.layout


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """The strategies that take turns in one process group."""

    strategies: tuple[Entrant, ...]
    alone: bool = False
    """Its only strategy does not fit into memory together with the reference."""


def line_up(composed: Composed, strategies: Sequence[AnyStrategy] | None, *, steps: int) -> LineUp:
    """Resolve one configuration per strategy.

    Args:
        strategies: those that the user named, each of which must be possible; None for all that are possible.
        steps: the number of training steps each strategy will do.

    Raises:
        ConfigError: the run, or a strategy the user named, is impossible; every problem at once.
        DoesNotFit: the reference, or a strategy the user named, does not fit into memory.
    """
    base = composed.config
    if execution_of(base) is Execution.ADAMW:
        reason = "a bench compares ways of updating matrices, and AdamW updates element by element"
        fix = "use optimizer=muon, shampoo or soap; AdamW is measured with each of them"
        raise ConfigError(Problem(key="optimizer", value="adamw", reason=reason, fix=fix))
    notes: list[str] = []
    names = _possible(base, strategies, notes)
    if "engine.splitting" not in composed.explicit and "engine" not in composed.explicit:
        base = _split_alike(base, names, notes)
    base, arithmetic = _form_alike(base, names, chosen="optimizer.form" in composed.explicit)
    base = replace(
        base,
        # The rates of the recipe's own first steps, however short the bench is.
        schedule=base.schedule.complete(base.train.steps),
        train=replace(base.train, steps=steps, eval_interval=0),
    )
    first, layout = resolve(with_strategy(base, names[0]))
    if not {"train", "train.global_batch_size", "train.batch_tokens"} & composed.explicit:
        first, layout = resolve(_small_batch(base, composed.explicit, first, layout))
        notes.append(
            f"{plural(layout.global_batch_size, 'sequence')} a step, to keep steps short: the optimizer takes a larger "
            "share of a step than in training; set train.global_batch_size to change this"
        )
    prepared: list[Entrant] = []
    for name in names:
        try:
            prepared.append(entrant(with_strategy(first, name), layout, name))
        except DoesNotFit as error:
            if strategies is not None or not prepared:
                raise
            notes.append(f"without {name}: {error.problems[0].reason}")
    return LineUp(strategies=tuple(prepared), arithmetic=arithmetic, notes=tuple(notes))


def into_sittings(line_up: LineUp, available_bytes: int | None) -> tuple[Sitting, ...]:
    """Put each strategy into the first sitting that has room for it;
    the first sitting begins with the reference.

    Args:
        available_bytes: free memory of the machine that CPU ranks share; None where ranks have their own.
    """
    reference, *others = line_up.strategies
    ranks = line_up.layout.world_size

    def fits(members: Sequence[Entrant]) -> bool:
        needed = sum(member.state_bytes for member in members) + max(member.transient_bytes for member in members)
        if needed > capacity(reference.config):
            return False
        # A CPU rank has Python, torch and megatron-core in memory before its first tensor.
        each = needed + int(reference.config.cluster.reserved_gib * GIB)
        return available_bytes is None or ranks * each <= SHARE * available_bytes

    shared: list[list[Entrant]] = [[reference]]
    alone = []
    for strategy in others:
        if not fits([reference, strategy]):
            alone.append(Sitting(strategies=(strategy,), alone=True))
            continue
        members = next((members for members in shared if fits([*members, strategy])), None)
        if members is None:
            shared.append([reference, strategy])
        else:
            members.append(strategy)
    return (*(Sitting(strategies=tuple(members)) for members in shared), *alone)


def available_bytes(cluster: ClusterConfig) -> int | None:
    """Free memory of this machine, where ranks share it."""
    return int(psutil.virtual_memory().available) if cluster.device == "cpu" else None


def _possible(config: RunConfig, strategies: Sequence[AnyStrategy] | None, notes: list[str]) -> list[AnyStrategy]:
    """The strategies to run, in the order of `STRATEGIES`."""
    names = [name for name in STRATEGIES if strategies is None or name in strategies]
    possible: list[AnyStrategy] = []
    problems: list[Problem] = []
    for name in names:
        wrong = config_problems(with_strategy(config, name))
        if not wrong:
            possible.append(name)
        elif strategies is not None:
            problems += [_of_option(problem, name) for problem in wrong]
        else:
            notes.append(f"without {name}: {wrong[0].reason}")
    refuse(dict.fromkeys(problems))
    return possible


def _of_option(problem: Problem, strategy: AnyStrategy) -> Problem:
    """A problem that comes from a strategy the user named, worded for that option."""
    if problem.key == "engine.strategy":
        return Problem(key="--strategies", value=strategy, reason=problem.reason, fix=f"leave {strategy} out")
    return replace(problem, fix=f"leave {strategy} out of --strategies; or {problem.fix}")


def _split_alike(config: RunConfig, names: Sequence[AnyStrategy], notes: list[str]) -> RunConfig:
    """Split q, k and v but nothing else if one of the strategies splits no further:
    it would update other matrices."""
    shapes = {matrix_shapes(with_strategy(config, name)) for name in names if name != "adamw"}
    if len(shapes) < 2:
        return config
    limited = [name for name in names if name in ("layerwise", "sc")]
    verb = "splits" if len(limited) == 1 else "split"
    notes.append(f"engine.splitting=qkv for all: {' and '.join(limited)} {verb} no further")
    return replace(config, engine=replace(config.engine, splitting="qkv"))


def _form_alike(config: RunConfig, names: Sequence[AnyStrategy], *, chosen: bool) -> tuple[RunConfig, str]:
    """The standard form for all if Megatron's own Muon is among them, unless the user chose another; and what
    to say of it (`BenchResult.arithmetic`)."""
    optimizer = config.optimizer
    theirs = [name for name in names if name != "adamw" and not execution_of(with_strategy(config, name)).ours]
    if not isinstance(optimizer, MomentumConfig) or optimizer.form == "standard" or not theirs:
        return config, ""
    whose = f"Megatron's own ({' and '.join(theirs)})"
    if chosen:
        return config, f"optimizer.form={optimizer.form} in canzona's own strategies, standard in {whose}"
    remark = (
        f"the standard form in all strategies, for {whose} have no other; optimizer.form=auto compares canzona's own"
    )
    return replace(config, optimizer=replace(optimizer, form="standard")), remark


def _small_batch(base: RunConfig, explicit: frozenset[str], first: RunConfig, layout: Layout) -> RunConfig:
    """One micro-batch on every data-parallel rank, or as many as there are pipeline stages; on CPU ranks a
    micro-batch is one sequence unless the user set another size. The mesh stays as it was chosen."""
    train = base.train
    micro = 1 if base.cluster.device == "cpu" else layout.micro_batch_size
    if "train.micro_batch_size" in explicit and train.micro_batch_size is not None:
        micro = train.micro_batch_size
    batch = layout.dp * micro * layout.pp
    changed = replace(first.train, recompute=train.recompute, micro_batch_size=micro, global_batch_size=batch)
    return replace(first, train=changed)


def entrant(config: RunConfig, layout: Layout, name: str) -> Entrant:
    """Prepares a resolved run to take turns, with its plan where it executes one.

    Raises:
        DoesNotFit: it needs more memory than the profile has.
    """
    obtained = obtain_plan(config, layout)
    if obtained is None:
        estimated = estimate(config, layout)
        if not estimated.fits:
            raise DoesNotFit(_too_large(config, name, estimated))
        plan, state, total = None, estimated.state, estimated.total
    else:
        plan, memory = obtained.plan, plan_memory(config, layout, obtained.plan)
        state, total = sum(memory.parts[part] for part in PLANNED_STATE) + memory.buffers.lasting, memory.total
    transient = max(0, total - state)
    return Entrant(name=name, config=config, layout=layout, plan=plan, state_bytes=state, transient_bytes=transient)


def _too_large(config: RunConfig, name: str, memory: MemoryEstimate) -> Problem:
    reason = (
        f"needs {memory.total / GIB:.2f} GiB on {memory.worst_rank} of this layout, and {config.cluster.name} has "
        f"{memory.capacity / GIB:.2f} GiB to use"
    )
    fix = f"leave {name} out, or use more GPUs or tensor-parallel ranks"
    return Problem(key="--strategies", value=name, reason=reason, fix=fix)
