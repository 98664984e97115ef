"""From a run's settings to the ordinary torch optimizers that hosts step."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module

import torch

from canzona_cli.config.schema import (
    CustomConfig,
    KroneckerConfig,
    MomentumConfig,
    NewtonSchulzConfig,
    OptimizerBase,
    RunConfig,
)
from canzona_cli.engine.wire import MakeOptimizer
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.facts import known
from canzona_cli.optimizers.matrix_optimizer import OnFallback
from canzona_cli.optimizers.registry import load_class, probe
from canzona_cli.optimizers.workspace import Workspace
from canzona_cli.planner.cost import algorithm, form_of, stack_of
from canzona_cli.planner.refresh import refreshes

_OURS = __name__.partition(".")[0]
"""This package: its optimizers need no consent."""

Kind = Callable[..., torch.optim.Optimizer]
_NO_ARGUMENTS = {field.name for field in fields(OptimizerBase)} | {"name", "stack", "graph", "form", "stagger", "tf32"}
"""Settings that the classes do not take under their own names."""

_log = logging.getLogger(__name__)


class Fallbacks:
    """What optimizers could not do for a matrix and did instead: logged with the matrix's name, and counted.

    Args:
        hosted: matrices that this rank speaks for.
        masters: by matrix index; what the optimizers call their parameters.
    """

    def __init__(self, hosted: Iterable[Matrix], masters: Mapping[int, torch.nn.Parameter]) -> None:
        self._names = {id(masters[matrix.index]): matrix.name for matrix in hosted}
        self._count = 0

    def __call__(self, parameter: torch.Tensor, reason: str) -> None:
        if (name := self._names.get(id(parameter))) is not None:
            self._count += 1
            _log.warning("%s: %s", name, reason)

    def take(self) -> int:
        """How many since the last call."""
        count, self._count = self._count, 0
        return count


def optimizer_factory(
    config: RunConfig, ranks: Sequence[Sequence[Matrix]], on_fallback: OnFallback | None = None
) -> MakeOptimizer:
    """How a rank makes an optimizer of some of the matrices it hosts.

    Args:
        ranks: what this rank and all that wait for it update: refreshes of factors take turns (`planner.refresh`).

    Raises:
        UnusableOptimizer: a user's own class cannot update 2-D parameters by `step()` alone.
    """
    chosen = config.optimizer
    if isinstance(chosen, CustomConfig):
        return _custom(chosen, torch.device(config.cluster.device))
    kind = _class_of(chosen)
    if isinstance(chosen, MomentumConfig):
        return _orthogonal(config, chosen, kind, on_fallback)
    if isinstance(chosen, KroneckerConfig):
        return _preconditioned(config, chosen, kind, refreshes(config, chosen, ranks).turns, on_fallback)

    def plain(_: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind(params, chosen.lr, weight_decay=chosen.weight_decay, **_own(chosen))

    return plain


def _class_of(chosen: OptimizerBase) -> Kind:
    """Imports the class that the optimizer's facts name."""
    update = known()[chosen.name].update
    assert update is not None, f"{chosen.name} updates no matrices"
    module, _, name = update.partition(":")
    kind: Kind = getattr(import_module(f"canzona_cli.optimizers.{module}"), name)
    return kind


def _own(chosen: OptimizerBase) -> dict[str, object]:
    """Settings that only this optimizer or its kin have; its class takes them by the same names."""
    names = {field.name for field in fields(chosen)} - _NO_ARGUMENTS
    return {name: getattr(chosen, name) for name in names}


def _orthogonal(config: RunConfig, chosen: MomentumConfig, kind: Kind, on_fallback: OnFallback | None) -> MakeOptimizer:
    workspace, how = Workspace(), algorithm(config)

    def make(matrices: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        shapes = {(matrix.rows, matrix.cols) for matrix in matrices}
        return kind(
            params,
            chosen.lr,  # the schedule sets its own before the first step
            weight_decay=chosen.weight_decay,
            precision=config.train.precision,
            graph=how.graph,
            stack={shape: stack_of(how, *shape, config.cluster) for shape in shapes},
            form={shape: form_of(how, *shape, config.cluster) for shape in shapes},
            on_fallback=on_fallback,
            workspace=workspace,
            **_own(chosen),
        )

    return make


def _preconditioned(
    config: RunConfig, chosen: KroneckerConfig, kind: Kind, turns: Mapping[int, int], on_fallback: OnFallback | None
) -> MakeOptimizer:
    workspace, own = Workspace(), _own(chosen)
    if "roots" in own:
        own["roots"] = algorithm(config).roots
    if isinstance(chosen, NewtonSchulzConfig):
        own["iterated_in"] = config.train.precision

    def make(matrices: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind(
            params,
            chosen.lr,  # the schedule sets its own before the first step
            weight_decay=chosen.weight_decay,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            refresh_offsets=[turns[matrix.index] for matrix in matrices],
            on_fallback=on_fallback,
            precision="tf32" if chosen.tf32 else "fp32",
            workspace=workspace,
            **own,
        )

    return make


def _custom(chosen: CustomConfig, device: torch.device) -> MakeOptimizer:
    kind: Callable[..., torch.optim.Optimizer] = load_class(
        chosen.source, (_OURS,) if chosen.built_in else chosen.allow
    )

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return kind(params, lr=chosen.lr, weight_decay=chosen.weight_decay, **chosen.options)

    probe(make, device)

    def custom(_: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return make(params)

    return custom
