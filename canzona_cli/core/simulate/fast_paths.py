"""The fast paths that a run on GPUs leaves off because they have not been verified there, and the step that the run
would have with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from canzona_cli.core.costs.sharing import why_hosted
from canzona_cli.core.costs.update import algorithm_of, form_of, stack_of
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.model.matrices import matrix_shapes
from canzona_cli.core.model.shapes import ModelShapes
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Execution, FastPath, Layout, MomentumConfig, Setup
from canzona_cli.core.simulate.predict import simulate_run, with_cores


@dataclass(frozen=True, kw_only=True)
class OnceVerified:
    """The simulated step of a run whose GPUs have verified all fast paths."""

    paths: tuple[FastPath, ...]
    """The fast paths that the run would use in addition."""
    iteration_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True)
class FastPaths:
    """The fast paths that a run leaves off."""

    off: tuple[FastPath, ...]
    """The fast paths that the run could choose if they were verified; empty on CPUs."""
    once_verified: OnceVerified | None = None
    """The step with them; None if it was not simulated, or would not fit in memory."""


def fast_paths(setup: Setup, layout: Layout, shapes: ModelShapes | None = None, *, simulated: bool) -> FastPaths:
    """Lists the fast paths that a resolved run could choose if they were verified.

    Args:
        shapes: the user's own shapes if these are planned instead of `config.model`.
        simulated: True to plan and simulate the step with them, in the same layout. That takes as long as planning the
            run; otherwise the list takes no noticeable time.
    """
    off = tuple(_off(setup, layout))
    return FastPaths(off=off, once_verified=_once_verified(setup, layout, shapes, off) if off and simulated else None)


def _off(setup: Setup, layout: Layout) -> Iterator[FastPath]:
    optimizer, cluster = setup.optimizer, setup.cluster
    if not isinstance(optimizer, MomentumConfig) or not setup.execution.ours:
        return
    verified = _with_all(setup)
    algorithm = algorithm_of(verified)
    if algorithm.form == "auto" and not cluster.may_choose("gram"):
        yield "gram"
    if optimizer.graph == "auto" and not cluster.may_choose("graphs"):
        yield "graphs"
    if algorithm.form != "standard" and not cluster.may_choose("fused"):
        yield "fused"
    shares = setup.execution is Execution.PLANNED and why_hosted(verified, algorithm, layout) is None
    if setup.engine.mode == "auto" and shares and not cluster.may_choose("shared"):
        yield "shared"


def _once_verified(
    setup: Setup, layout: Layout, shapes: ModelShapes | None, off: Sequence[FastPath]
) -> OnceVerified | None:
    verified = _with_all(setup)
    try:
        plan = make_plan(verified, layout, shapes) if setup.execution is Execution.PLANNED else None
    except DoesNotFit:
        return None
    result = simulate_run(with_cores(verified), layout, plan)
    chosen = set(_chosen(verified, plan))
    return OnceVerified(
        paths=tuple(path for path in off if path in chosen),
        iteration_s=result.iteration_s,
        optimizer_s=result.optimizer_s,
    )


def _with_all(setup: Setup) -> Setup:
    """Returns the run on GPUs that have verified all fast paths."""
    return replace(setup, cluster=replace(setup.cluster, verified=get_args(FastPath)))


def _chosen(setup: Setup, plan: Plan | None) -> Iterator[FastPath]:
    """Yields the fast paths that a run uses."""
    algorithm = algorithm_of(setup)
    shapes = set(matrix_shapes(setup)) if plan is None else {matrix.shape for matrix in plan.matrices}
    in_gram_form = [shape for shape in shapes if form_of(algorithm, *shape, setup.cluster) == "gram"]
    if in_gram_form:
        yield "gram"
    if algorithm.graph:
        yield "graphs"
    if any(stack_of(algorithm, *shape, setup.cluster) == 1 for shape in in_gram_form):
        yield "fused"
    if plan is not None and plan.assignment.shared_costs:
        yield "shared"
