"""The checks before the engine is built: that all ranks have the same plan, that the plan is for this model
and these ranks, and that a user's own optimizer works."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import torch

from canzona_cli.core.errors import CanzonaError, ConfigError, Problem, refuse
from canzona_cli.core.megatron.matrix_buffers import PlanMismatch, check_model
from canzona_cli.core.megatron.parallel import World, gather
from canzona_cli.core.optimizers.registry import UnusableOptimizer
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.plan_file import first_difference


class PlanRefused(ConfigError):
    """The error for a plan that cannot be executed on these ranks."""

    headline = "The plan does not fit this run"


Chunks = Sequence[torch.nn.Module]
"""A rank's part of the model, in forward order."""
_NEW_RUN: Final = "start a new run: `canzona train` makes a plan for these ranks"


def agree_on_plan(plan: Plan | None, chunks: Chunks, world: World, *, fix: str = _NEW_RUN) -> Plan:
    """Returns this rank's plan, after checking that every rank has the same plan and that it fits.
    Collective.

    Args:
        fix: The fix to show if the plan does not fit.

    Raises:
        PlanRefused: on all ranks together, with the first problem of each rank that has one, or with the
            first difference between two ranks' plans.
    """
    agree_on_problem(_plan_problem(plan, chunks, world, fix), PlanRefused)
    assert plan is not None
    digests = gather(plan.hash, str)
    if len(set(digests)) > 1:
        raise PlanRefused(_disagreement(plan, digests))
    return plan


class OptimizerRefused(ConfigError):
    """The error for a user's own optimizer that cannot update whole matrices."""

    headline = "The optimizer cannot be used"


def agree_on_optimizer[T](make: Callable[[], T], source: str | None, world: World) -> T:
    """Returns the result of `make`, after checking that `make` worked on every rank. Collective if `source`
    is given.

    Args:
        source: `optimizer.source` of a user's class, whose file may be missing on some nodes; None for one of
            canzona's optimizers, which are not checked.

    Raises:
        OptimizerRefused: on all ranks together, with the problem of each rank on which `make` failed.
    """
    if source is None:
        return make()
    result: T | None = None
    problem: Problem | None = None
    try:
        result = make()
    except UnusableOptimizer as error:
        problem = Problem(
            key="optimizer.source",
            value=source,
            reason=str(error),
            fix="canzona calls the class with a list of 2-D parameters, lr=, weight_decay= and optimizer.options, then "
            "step() without arguments",
        )
    agree_on_problem(problem, OptimizerRefused)
    assert result is not None
    return result


def agree_on_problem(problem: Problem | None, kind: type[CanzonaError]) -> None:
    """Raises an error of type `kind` on all ranks if any rank has a problem. The error lists the problems of
    all ranks; a problem that several ranks have is listed once. Collective."""
    by_rank = gather([] if problem is None else [problem], list[Problem])
    refuse(dict.fromkeys(chain.from_iterable(by_rank)), kind)


def _plan_problem(plan: Plan | None, chunks: Chunks, world: World, fix: str) -> Problem | None:
    """Returns the first reason why this rank cannot execute the plan; None if the plan fits."""
    if plan is None:
        return Problem(key="plan", reason="there is no plan; strategies canzona, paper and asc need one", fix=fix)
    planned, actual = plan.subject.layout, world.layout.mesh
    for name in ("tp", "pp", "vpp", "cp", "dp", "ep"):
        actual_size, planned_size = getattr(actual, name), getattr(planned, name)
        if actual_size != planned_size:
            return Problem(
                key="plan",
                value=plan.name,
                reason=f"it was made for {name} = {planned_size}, but these ranks have {name} = {actual_size}",
                fix=fix,
            )
    try:
        check_model(chunks, plan, world)
    except PlanMismatch as mismatch:
        return Problem(key="plan", value=plan.name, reason=str(mismatch), fix=fix)
    return None


def _disagreement(plan: Plan, digests: Sequence[str]) -> Problem:
    """Describes the first difference between rank 0's plan and the first plan that differs from it.
    Collective."""
    other_rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    contents = gather(dict(plan.content()), dict[str, object])
    first_plan, other_plan = Plan.from_content(contents[0]), Plan.from_content(contents[other_rank])
    difference = first_difference(first_plan, other_plan)
    description = "their content" if difference is None else f"{difference[0]}: {difference[1]} and {difference[2]}"
    return Problem(
        key="plan",
        value=f"{first_plan.name} and {other_plan.name}",
        reason=f"ranks 0 and {other_rank} have different plans; the first difference is {description}",
        fix="use the same canzona version and the same run directory on every machine",
    )
