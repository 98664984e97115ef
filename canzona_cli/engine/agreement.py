"""Checks before anything is built: all ranks have the same plan, for this model and these ranks;
optimizers work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from canzona_cli.errors import ConfigError, Problem
from canzona_cli.megatron.matrix_buffers import PlanMismatch, named_matrix_parameters
from canzona_cli.megatron.parallel import World, gather
from canzona_cli.optimizers.registry import UnusableOptimizer
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.plan_file import first_difference


class PlanRefused(ConfigError):
    """The plan cannot be executed here."""

    headline = "The plan does not fit this run"


def agree_on_plan(plan: Plan | None, chunks: Sequence[torch.nn.Module], world: World) -> Plan:
    """Returns this rank's plan, once every rank has the same and it fits. Collective.

    Raises:
        PlanRefused: on all ranks together, with the first difference that each refusing rank found.
    """
    everyone = gather(_Found(digest=None if plan is None else plan.hash, problem=_own_problem(plan, chunks, world)))
    problems = [answer.problem for answer in everyone if answer.problem is not None]
    if not problems and len({answer.digest for answer in everyone}) > 1:
        problems = _disagreement(plan, everyone)
    if problems:
        # Ranks that found the same say it once.
        raise PlanRefused(*dict.fromkeys(problems))
    assert plan is not None
    return plan


class OptimizerRefused(ConfigError):
    """A user's own optimizer cannot update whole matrices here."""

    headline = "The optimizer cannot be used"


def agree_on_optimizer[T](make: Callable[[], T], source: str | None, world: World) -> T:
    """Returns what `make` made, once every rank could make it. Collective.

    Args:
        source: the path of a user's class, which may be on some machines and not on others; None for ours.

    Raises:
        OptimizerRefused: on all ranks together, with what each refusing rank found.
    """
    if source is None:
        return make()
    made: T | None = None
    problem: Problem | None = None
    try:
        made = make()
    except UnusableOptimizer as error:
        problem = Problem(
            key="optimizer.source",
            value=source,
            reason=str(error),
            fix="canzona calls the class with a list of 2-D parameters, lr=, weight_decay= and optimizer.options, then "
            "step() without arguments",
        )
    problems = [answer.problem for answer in gather(_Found(problem=problem)) if answer.problem is not None]
    if problems:
        raise OptimizerRefused(*dict.fromkeys(problems))
    assert made is not None
    return made


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The digest of the plan and the problem of one rank, as it tells the others."""

    digest: str | None = None
    """The digest of its plan."""
    problem: Problem | None = None


@dataclass(frozen=True, kw_only=True)
class _Content:
    """One rank's plan."""

    plan: Mapping[str, object]


def _own_problem(plan: Plan | None, chunks: Sequence[torch.nn.Module], world: World) -> Problem | None:
    fix = "start the run anew: `canzona train` plans it for these ranks"
    if plan is None:
        return Problem(key="plan", reason="there is no plan, and strategies canzona, paper and asc need one", fix=fix)
    planned, actual = plan.subject.layout, world.layout.mesh
    for name in ("tp", "pp", "vpp", "cp", "dp"):
        here, there = getattr(actual, name), getattr(planned, name)
        if here != there:
            return Problem(
                key="plan",
                value=plan.name,
                reason=f"it was made for {name} = {there}, but these ranks have {name} = {here}",
                fix=fix,
            )
    try:
        named_matrix_parameters(chunks, plan, world.pp_rank)
    except PlanMismatch as mismatch:
        return Problem(key="plan", value=plan.name, reason=str(mismatch), fix=fix)
    return None


def _disagreement(plan: Plan | None, everyone: "list[_Found]") -> list[Problem]:
    """Describes what differs between rank 0's plan and the first other one."""
    other = next(rank for rank, answer in enumerate(everyone) if answer.digest != everyone[0].digest)
    assert plan is not None
    plans = gather(_Content(plan=plan.content()))
    first, second = Plan.from_content(plans[0].plan), Plan.from_content(plans[other].plan)
    difference = first_difference(first, second)
    answer = "their content" if difference is None else f"{difference[0]}: {difference[1]} and {difference[2]}"
    return [
        Problem(
            key="plan",
            value=f"{first.name} and {second.name}",
            reason=f"ranks 0 and {other} have different plans; the first difference is {answer}",
            fix="give every machine the same canzona version and the same run directory",
        )
    ]
