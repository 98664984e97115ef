"""Prepares the strategies of a bench. Does not import torch.

All strategies have the same layout, batch and schedule. Each has a resolved configuration; canzona, paper and
asc also have a plan. They take turns in one process group, so they have to fit in memory together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import psutil

from canzona_cli.bench.results import Predicted
from canzona_cli.config.checks import config_problems
from canzona_cli.config.compose import Composed
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import GIB, MemoryEstimate, capacity, estimate
from canzona_cli.core.errors import ConfigError, DoesNotFit, Problem, refuse
from canzona_cli.core.model.matrices import matrix_shapes
from canzona_cli.core.phases import STRATEGIES
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.plan_file import obtain_plan
from canzona_cli.core.setup import ClusterConfig, Execution, Layout, MomentumConfig
from canzona_cli.core.setup.execution import AnyStrategy, strategy_of, with_strategy
from canzona_cli.core.simulate.predict import predict
from canzona_cli.records.words import plural

PLANNED_STATE = ("weights", "gradients", "padding", "masters", "matrix_state", "adamw_state")
"""The parts of a plan's memory that stay allocated between steps."""
MEMORY_SHARE = 0.9
"""The share of the machine's free memory that all CPU ranks together may use."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A strategy that is ready to run."""

    name: str
    config: RunConfig
    """The resolved configuration."""
    layout: Layout
    plan: Plan | None
    """The plan that canzona, paper and asc execute; None for other strategies."""
    state_bytes: int
    """The bytes that stay allocated between steps, on the rank that needs the most. The states of all strategies
    are in memory at the same time."""
    transient_bytes: int
    """The bytes that are allocated only during a step. Only one strategy runs a step at a time."""

    @property
    def strategy(self) -> AnyStrategy:
        return strategy_of(self.config.setup)

    @property
    def tensor_bytes(self) -> int | None:
        """The planned maximum of `Measured.tensor_bytes`; None if the strategy has no plan."""
        return None if self.plan is None else self.state_bytes

    @property
    def arithmetic(self) -> str:
        """A key that is equal for strategies that compute the same updates of the same matrices."""
        if self.strategy == "adamw":
            return "adamw"
        return "+".join(f"{rows}x{cols}" for rows, cols in matrix_shapes(self.config.setup))

    @cached_property
    def predicted(self) -> Predicted:
        """The simulator's prediction. If the profile does not have a number of cores, CPU ranks share the
        cores of this machine."""
        prediction = predict(self.config.setup, self.layout, self.plan)
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
    """The strategies of a bench."""

    strategies: tuple[Entrant, ...]
    """The strategies, with the reference first."""
    arithmetic: str
    """The value of `BenchResult.arithmetic`."""
    notes: tuple[str, ...]

    @property
    def reference(self) -> Entrant:
        return self.strategies[0]

    @property
    def layout(self) -> Layout:
        return self.reference.layout


def line_up(composed: Composed, strategies: Sequence[AnyStrategy] | None, *, steps: int) -> LineUp:
    """Prepares the strategies of a bench: resolves a configuration for each, and makes the plans.

    Args:
        strategies: the strategies that the user named, all of which must be possible; None for every possible
            strategy.

    Raises:
        ConfigError: the run, or a strategy that the user named, is not possible. The error lists the problems
            of all these strategies.
        DoesNotFit: the reference, or a strategy that the user named, does not fit in memory.
    """
    base = composed.config
    if base.execution is Execution.ADAMW:
        reason = "a bench compares ways of updating matrices, and AdamW updates element by element"
        fix = "use optimizer=muon, shampoo or soap; AdamW is measured with each of them"
        raise ConfigError(Problem(key="optimizer", value="adamw", reason=reason, fix=fix))
    notes: list[str] = []
    names = _possible_strategies(base, strategies, notes)
    if "engine.splitting" not in composed.explicit and "engine" not in composed.explicit:
        base = _with_common_splitting(base, names, notes)
    base, arithmetic = _with_common_form(base, names, form_set="optimizer.form" in composed.explicit)
    base = replace(
        base,
        # The bench runs the first steps of the recipe's full schedule, so learning rates do not depend on its
        # length.
        schedule=base.schedule.complete(base.train.steps),
        train=replace(base.train, steps=steps, eval_interval=0),
    )
    resolved, layout = resolve(_following(base, names[0]))
    if not {"train", "train.global_batch_size", "train.batch_tokens"} & composed.explicit:
        resolved, layout = resolve(_small_batch(base, composed.explicit, resolved, layout))
        notes.append(
            f"{plural(layout.global_batch_size, 'sequence')} per step, to keep steps short: the optimizer takes a "
            "larger share of the step than in training; to change this, set train.global_batch_size"
        )
    prepared: list[Entrant] = []
    for name in names:
        try:
            prepared.append(entrant(_following(resolved, name), layout, name))
        except DoesNotFit as error:
            if strategies is not None or not prepared:
                raise
            notes.append(f"without {name}: {error.problems[0].reason}")
    members = _fitting_together(prepared, _available_bytes(resolved.cluster), notes, named=strategies is not None)
    return LineUp(strategies=members, arithmetic=arithmetic, notes=tuple(notes))


def _fitting_together(
    entrants: Sequence[Entrant], available_bytes: int | None, notes: list[str], *, named: bool
) -> tuple[Entrant, ...]:
    """Returns the strategies that fit in memory together, the reference first; adds a note for each of the others.

    Args:
        available_bytes: the machine's free memory, which CPU ranks share; None for GPU ranks.
        named: True if the user named the strategies.

    Raises:
        DoesNotFit: the user named the strategies, and one of them does not fit.
    """
    setup, ranks = entrants[0].config.setup, entrants[0].layout.world_size
    members = [entrants[0]]
    for entrant in entrants[1:]:
        needed = sum(member.state_bytes for member in (*members, entrant))
        needed += max(member.transient_bytes for member in (*members, entrant))
        # The reserved memory of a CPU rank holds Python, torch and megatron-core.
        on_machine = ranks * (needed + int(setup.cluster.reserved_gib * GIB))
        if needed <= capacity(setup) and (available_bytes is None or on_machine <= MEMORY_SHARE * available_bytes):
            members.append(entrant)
            continue
        reason = f"does not fit in memory beside {', '.join(member.name for member in members)}"
        if named:
            fix = "name fewer strategies, or use a smaller model or batch, or more ranks"
            raise DoesNotFit(Problem("--strategies", reason, fix, entrant.name))
        pair = f"{members[0].name},{entrant.name}"
        notes.append(f"without {entrant.name}: {reason}; for a bench of fewer: --strategies {pair}")
    return tuple(members)


def _available_bytes(cluster: ClusterConfig) -> int | None:
    """Returns this machine's free memory for CPU ranks, which share it; None for GPU ranks."""
    return int(psutil.virtual_memory().available) if cluster.device == "cpu" else None


def _following(config: RunConfig, strategy: AnyStrategy) -> RunConfig:
    """Returns the configuration with another strategy."""
    return config.with_setup(with_strategy(config.setup, strategy))


def _possible_strategies(
    config: RunConfig, strategies: Sequence[AnyStrategy] | None, notes: list[str]
) -> list[AnyStrategy]:
    """Returns the strategies that can run, in the order of `STRATEGIES`; adds a note for each strategy that
    cannot.

    Raises:
        ConfigError: a strategy that the user named cannot run.
    """
    names = [name for name in STRATEGIES if strategies is None or name in strategies]
    possible: list[AnyStrategy] = []
    problems: list[Problem] = []
    for name in names:
        obstacles = config_problems(_following(config, name))
        if not obstacles:
            possible.append(name)
        elif strategies is not None:
            problems += [_with_option_fix(problem, name) for problem in obstacles]
        else:
            notes.append(f"without {name}: {obstacles[0].reason}")
    refuse(dict.fromkeys(problems))
    return possible


def _with_option_fix(problem: Problem, strategy: AnyStrategy) -> Problem:
    """Returns the problem with a fix that suggests a change to `--strategies`, for a strategy that the user
    named."""
    if problem.key == "engine.strategy":
        return Problem(key="--strategies", value=strategy, reason=problem.reason, fix=f"leave {strategy} out")
    return replace(problem, fix=f"leave {strategy} out of --strategies; or {problem.fix}")


def _with_common_splitting(config: RunConfig, names: Sequence[AnyStrategy], notes: list[str]) -> RunConfig:
    """Sets engine.splitting=qkv if the strategies would otherwise split weights differently.

    layerwise and sc split only q, k and v. Other strategies may split more weights, and would then update
    different matrices.
    """
    shapes = {matrix_shapes(with_strategy(config.setup, name)) for name in names if name != "adamw"}
    if len(shapes) < 2:
        return config
    limited = [name for name in names if name in ("layerwise", "sc")]
    verb = "splits" if len(limited) == 1 else "split"
    notes.append(f"engine.splitting=qkv for all strategies: {' and '.join(limited)} {verb} only q, k and v")
    return replace(config, engine=replace(config.engine, splitting="qkv"))


def _with_common_form(config: RunConfig, names: Sequence[AnyStrategy], *, form_set: bool) -> tuple[RunConfig, str]:
    """Sets the standard form for all strategies if one of them runs Megatron's code, which has only this
    form.

    Args:
        form_set: True if the user set `optimizer.form`, which is then not changed.

    Returns:
        The configuration and the sentence for `BenchResult.arithmetic`, which is empty if nothing had to be
        changed or explained.
    """
    optimizer = config.optimizer
    megatron = [name for name in names if name != "adamw" and not with_strategy(config.setup, name).execution.ours]
    if not isinstance(optimizer, MomentumConfig) or optimizer.form == "standard" or not megatron:
        return config, ""
    listed = " and ".join(megatron)
    if form_set:
        return config, f"optimizer.form={optimizer.form} in canzona's strategies, standard in Megatron's ({listed})"
    remark = (
        f"the standard form in all strategies, because Megatron's code ({listed}) has no other form; "
        "with optimizer.form=auto, canzona's strategies choose the faster form"
    )
    return replace(config, optimizer=replace(optimizer, form="standard")), remark


def _small_batch(base: RunConfig, explicit: frozenset[str], resolved: RunConfig, layout: Layout) -> RunConfig:
    """Returns the run with a small batch, to keep steps short: for every data-parallel rank, one micro-batch
    per pipeline stage.

    On CPU ranks a micro-batch is one sequence unless the user set its size. The mesh does not change.
    """
    train = base.train
    micro_batch = 1 if base.cluster.device == "cpu" else layout.micro_batch_size
    if "train.micro_batch_size" in explicit and train.micro_batch_size is not None:
        micro_batch = train.micro_batch_size
    batch = layout.dp * micro_batch * layout.pp
    changed = replace(resolved.train, recompute=train.recompute, micro_batch_size=micro_batch, global_batch_size=batch)
    return replace(resolved, train=changed)


def entrant(config: RunConfig, layout: Layout, name: str) -> Entrant:
    """Makes the plan of a resolved run, if the strategy executes one, and estimates its memory.

    Raises:
        DoesNotFit: the run needs more memory than the hardware profile provides.
    """
    obtained = obtain_plan(config.setup, layout)
    if obtained is None:
        estimated = estimate(config.setup, layout)
        if not estimated.fits:
            raise DoesNotFit(_too_large(config, name, estimated))
        plan = None
        state, total = estimated.state, estimated.total
    else:
        plan = obtained.plan
        memory = plan_memory(config.setup, layout, plan)
        state = sum(memory.parts[part] for part in PLANNED_STATE) + memory.buffers.lasting
        total = memory.total
    transient = max(0, total - state)
    return Entrant(name=name, config=config, layout=layout, plan=plan, state_bytes=state, transient_bytes=transient)


def _too_large(config: RunConfig, name: str, memory: MemoryEstimate) -> Problem:
    """Describes a strategy that does not fit in memory."""
    reason = (
        f"needs {memory.total / GIB:.2f} GiB on {memory.worst_rank} of this layout, but {config.cluster.name} has "
        f"only {memory.capacity / GIB:.2f} GiB"
    )
    fix = f"leave {name} out, or use more GPUs or tensor-parallel ranks"
    return Problem(key="--strategies", value=name, reason=reason, fix=fix)
