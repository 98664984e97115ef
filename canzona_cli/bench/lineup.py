"""Which strategies a bench runs, each with its resolved configuration and plan: the same layout, batch and schedule for
all of them. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from canzona_cli.cluster.fit import resolve
from canzona_cli.config.checks import config_problems
from canzona_cli.config.compose import Composed
from canzona_cli.config.execution import AnyStrategy, with_strategy
from canzona_cli.config.schedule import complete
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit, Problem
from canzona_cli.planner.measures import plan_memory
from canzona_cli.planner.memory import GIB, MemoryEstimate, estimate, matrix_shapes
from canzona_cli.planner.obtain import obtain_plan
from canzona_cli.planner.plan import Plan
from canzona_cli.run.phases import STRATEGIES
from canzona_cli.run.words import plural

PLANNED_STATE = ("weights", "gradients", "padding", "masters", "matrix_state", "adamw_state")
"""Parts of a plan's memory that stay from step to step."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One strategy, ready to be run."""

    strategy: AnyStrategy
    config: RunConfig
    """Resolved."""
    plan: Plan | None
    """What canzona and asc execute."""
    state_bytes: int
    """Of the fullest rank, from step to step: what every model of a sitting takes."""
    transient_bytes: int
    """On top of it while a step runs: only one strategy of a sitting steps at a time."""

    @property
    def tensor_bytes(self) -> int | None:
        """What the plan says of `Measured.tensor_bytes`; None where there is no plan."""
        return None if self.plan is None else self.state_bytes

    @property
    def arithmetic(self) -> str:
        """The same word where the same matrices get the same updates."""
        if self.strategy == "adamw":
            return "adamw"
        return "+".join(f"{rows}x{cols}" for rows, cols in matrix_shapes(self.config))


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """All contenders of a bench; the first is the reference."""

    layout: Layout
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...]

    @property
    def reference(self) -> Contender:
        return self.contenders[0]


def line_up(composed: Composed, strategies: Sequence[AnyStrategy] | None, *, steps: int) -> LineUp:
    """Resolve one configuration per strategy.

    Args:
        strategies: what the user named, each of which must be possible; None for all that are.
        steps: training steps each will do.

    Raises:
        ConfigError: the run, or a strategy the user named, is impossible; every problem at once.
        DoesNotFit: the reference, or a strategy the user named, does not fit into memory.
    """
    base = composed.config
    if base.optimizer.name == "adamw":
        raise ConfigError(
            Problem(
                key="optimizer",
                value="adamw",
                reason="a bench compares ways of updating matrices, and AdamW updates element by element",
                fix="use optimizer=muon, shampoo or soap; AdamW is measured beside each",
            )
        )
    notes: list[str] = []
    names = _possible(base, strategies, notes)
    if "engine.splitting" not in composed.explicit and "engine" not in composed.explicit:
        base = _split_alike(base, names, notes)
    base = replace(
        base,
        # The rates of the recipe's own first steps, however short the bench is.
        schedule=complete(base.schedule, base.train.steps),
        train=replace(base.train, steps=steps, eval_interval=0),
    )
    first, layout = resolve(with_strategy(base, names[0]))
    if not {"train", "train.global_batch_size", "train.batch_tokens"} & composed.explicit:
        first, layout = resolve(_small_batch(base, composed.explicit, first, layout))
        notes.append(
            f"{plural(layout.global_batch_size, 'sequence')} a step, to keep steps short: the optimizer's share of one "
            "is larger than in training; set train.global_batch_size for another"
        )
    contenders = []
    for name in names:
        try:
            contenders.append(_contender(with_strategy(first, name), layout, name))
        except DoesNotFit as error:
            if strategies is not None or not contenders:
                raise
            notes.append(f"without {name}: {error.problems[0].reason}")
    return LineUp(layout=layout, contenders=tuple(contenders), notes=tuple(notes))


def _possible(config: RunConfig, strategies: Sequence[AnyStrategy] | None, notes: list[str]) -> list[AnyStrategy]:
    """Those to run, in the order of `STRATEGIES`."""
    wanted = [name for name in STRATEGIES if strategies is None or name in strategies]
    found: list[AnyStrategy] = []
    problems: list[Problem] = []
    for name in wanted:
        wrong = config_problems(with_strategy(config, name))
        if not wrong:
            found.append(name)
        elif strategies is not None:
            problems += [_of_option(problem, name) for problem in wrong]
        else:
            notes.append(f"without {name}: {wrong[0].reason}")
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return found


def _of_option(problem: Problem, strategy: AnyStrategy) -> Problem:
    """A problem that only a strategy the user named has."""
    if problem.key == "engine.strategy":
        return Problem(key="--strategies", value=strategy, reason=problem.reason, fix=f"leave {strategy} out")
    return replace(problem, fix=f"leave {strategy} out of --strategies; or {problem.fix}")


def _split_alike(config: RunConfig, names: Sequence[AnyStrategy], notes: list[str]) -> RunConfig:
    """q, k and v apart and nothing further, if a strategy goes no further: it would update other matrices."""
    shapes = {matrix_shapes(with_strategy(config, name)) for name in names if name != "adamw"}
    if len(shapes) < 2:
        return config
    limited = [name for name in names if name in ("layerwise", "sc")]
    goes = "goes" if len(limited) == 1 else "go"
    notes.append(f"engine.splitting=qkv for all: {' and '.join(limited)} {goes} no further")
    return replace(config, engine=replace(config.engine, splitting="qkv"))


def _small_batch(base: RunConfig, explicit: frozenset[str], first: RunConfig, layout: Layout) -> RunConfig:
    """One micro-batch on every data-parallel rank, with pipeline stages as many as fill them; of one sequence on CPU
    ranks unless the user set another size. The mesh stays as it was chosen."""
    train = base.train
    micro = 1 if base.cluster.device == "cpu" else layout.micro_batch_size
    if "train.micro_batch_size" in explicit and train.micro_batch_size is not None:
        micro = train.micro_batch_size
    return replace(
        first,
        train=replace(
            first.train,
            recompute=train.recompute,
            micro_batch_size=micro,
            global_batch_size=layout.dp * micro * layout.pp,
        ),
    )


def _contender(config: RunConfig, layout: Layout, strategy: AnyStrategy) -> Contender:
    obtained = obtain_plan(config, layout)
    if obtained is not None:
        memory = plan_memory(config, layout, obtained.plan)
        state = sum(memory.parts[part] for part in PLANNED_STATE) + memory.buffers.lasting
        return Contender(
            strategy=strategy,
            config=config,
            plan=obtained.plan,
            state_bytes=state,
            transient_bytes=max(0, memory.total - state),
        )
    estimated = estimate(config, layout)
    if not estimated.fits:
        raise DoesNotFit(_too_large(config, strategy, estimated))
    return Contender(
        strategy=strategy,
        config=config,
        plan=None,
        state_bytes=estimated.state,
        transient_bytes=estimated.total - estimated.state,
    )


def _too_large(config: RunConfig, strategy: AnyStrategy, memory: MemoryEstimate) -> Problem:
    return Problem(
        key="--strategies",
        value=strategy,
        reason=(
            f"needs {memory.total / GIB:.2f} GiB on {memory.worst_rank} of this layout, and {config.cluster.name} has "
            f"{memory.capacity / GIB:.2f} GiB to use"
        ),
        fix=f"leave {strategy} out, or use more GPUs or tensor-parallel ranks",
    )
