"""Builds the engine of one rank: from a plan, or, for strategy sc, with all matrices of the stage on every
rank."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from canzona_cli.core.costs.scratch import batch_slices
from canzona_cli.core.costs.sharing import SharedCosts
from canzona_cli.core.costs.update import algorithm_of, form_of, stack_of
from canzona_cli.core.engine.agreement import agree_on_optimizer
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.engine.hosted import Hosting, scratch_elements
from canzona_cli.core.engine.masters import Fallbacks, MasterOptimizer
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.engine.redundant import RedundantOptimizer, counts_dense, counts_update
from canzona_cli.core.engine.shared import Sharing
from canzona_cli.core.engine.wire import Fragments, MakeOptimizer, SideStream, Wiring, group_by_key
from canzona_cli.core.megatron.matrix_buffers import global_parameters, matrix_parameters, tag_matrices
from canzona_cli.core.megatron.optimizer import Overrides, adamw_settings, build_adamw
from canzona_cli.core.megatron.parallel import World, Wrapped
from canzona_cli.core.megatron.timers import PhaseTimer, watcher_for
from canzona_cli.core.model.matrices import Matrix, stage_matrices
from canzona_cli.core.model.matrices import matrices as matrices_of
from canzona_cli.core.optimizers import graphs
from canzona_cli.core.optimizers.facts import known_optimizers
from canzona_cli.core.optimizers.matrix_optimizer import OnFallback, Workspace
from canzona_cli.core.optimizers.registry import load_class, probe
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import CustomConfig, KroneckerConfig, MomentumConfig, OptimizerBase, Setup, ShampooConfig

_LOG = logging.getLogger(__name__)
_PACKAGE = __name__.partition(".")[0]
"""The name of canzona's package, whose classes `optimizer.allow` does not have to list."""

OptimizerClass = Callable[..., torch.optim.Optimizer]
Order = Callable[[Matrix], tuple[int, int]]
"""A function that returns the key by which matrices are sorted."""
_NO_ARGUMENTS = {field.name for field in fields(OptimizerBase)} | {
    *("name", "stack", "graph", "form", "stagger", "adamw_beta1", "adamw_beta2"),
}
"""The settings that `_settings` does not copy: they are passed in another way, or not at all."""


def try_graphs(setup: Setup, device: torch.device) -> None:
    """Tests whether updates can be replayed as CUDA graphs, if the run's are; if not, warns, and updates are launched
    one by one."""
    if device.type == "cuda" and algorithm_of(setup).graph and (reason := graphs.try_out(device)):
        _LOG.warning("updates are not replayed as CUDA graphs: %s", reason)


def build_engine(
    chunks: Wrapped,
    setup: Setup,
    world: World,
    plan: Plan | None,
    timer: PhaseTimer,
    *,
    adamw: MegatronOptimizerConfig | None = None,
    overrides: Overrides | None = None,
    reads_weights: bool = False,
) -> CanzonaOptimizer:
    """Builds the optimizer of a run in which canzona's optimizers update the matrices (`Execution.ours`).
    Collective.

    Args:
        chunks: the model's chunks, wrapped with the plan's buffers, or without sharding if there is no plan.
        plan: the plan of strategies canzona, paper and asc; None for sc, where every rank updates all
            matrices of its stage.
        adamw: Megatron's settings for AdamW (`optimizer="adam"`) and clipping; None to derive them from
            `setup`.
        overrides: see `build_adamw`.
        reads_weights: see `CanzonaOptimizer`.

    Raises:
        Unsupported: see `build_adamw`.
        OptimizerRefused: On all ranks together, if a user's own class cannot update 2-D parameters with
            `step()` alone.
    """
    try_graphs(setup, world.device)
    shared = plan.assignment.shared_costs if plan is not None else {}
    tp = world.layout.tp
    if plan is not None:
        part = _planned_part(chunks, plan, world)
    else:
        part = _redundant_part(chunks, setup, world)
        tag_matrices(chunks, part.parameters)
    masters = _masters(part.matrices, lambda m: m.fragment_shape(tp) if m.index in shared else m.shape, world.device)
    fallbacks = Fallbacks(part.counted, masters)
    source = setup.optimizer.source if isinstance(setup.optimizer, CustomConfig) else None
    wiring = Wiring(
        fragments=Fragments(setup.model, tp, world.tp_rank, part.parameters),
        rank=world.tp_rank,
        tp_group=world.groups.tp if tp > 1 else None,
        timer=timer,
        watcher=watcher_for(world.device),
        side_stream=SideStream(world.device),
        device=world.device,
        masters=masters,
        make_optimizer=agree_on_optimizer(lambda: optimizer_factory(setup, fallbacks), source, world),
    )
    adamw = adamw_settings(setup) if adamw is None else adamw
    updater: MasterOptimizer
    if plan is not None:
        groups = _micro_groups(plan, world)
        updater = PlannedOptimizer(
            adamw,
            chunks,
            _expert_hosting(setup, part.matrices, wiring),
            _group_hosting(setup, plan, groups, _buffer_order(part.parameters), wiring),
            _sharing(groups, shared, wiring),
            fallbacks,
        )
    else:
        updater = RedundantOptimizer(adamw, chunks, world, part.matrices, wiring, fallbacks)
    return CanzonaOptimizer(
        build_adamw(chunks, world, adamw, setup.optimizer, overrides),
        updater,
        chunks,
        # With a plan, every gradient element is reduced to one rank. Without a plan, data-parallel ranks have
        # equal gradients, which are counted once.
        stats_group=world.groups.mp if plan is None and world.layout.ep == 1 else world.groups.intra_dist_opt,
        counts_adamw=plan is not None or counts_dense(world),
        timer=timer,
        non_finite=setup.train.non_finite,
        reads_weights=reads_weights,
    )


@dataclass(frozen=True, kw_only=True)
class _RankPart:
    """The matrices of one rank."""

    matrices: Sequence[Matrix]
    """The matrices that this rank updates."""
    counted: Sequence[Matrix]
    """The matrices whose fallbacks this rank counts. If several ranks update the same matrix (a shared matrix
    or, without a plan, any matrix), all of them use the same fallback, and only one of them counts it."""
    parameters: Mapping[str, torch.nn.Parameter]
    """The parameters with matrices on this rank, by name, in the order of Megatron's buffers."""


def _planned_part(chunks: Wrapped, plan: Plan, world: World) -> _RankPart:
    """Returns the matrices that the plan gives this rank. The rank in a shared matrix's cell counts its
    fallbacks."""
    parameters = matrix_parameters(chunks, plan, world)
    shared, cells = plan.assignment.shared_costs, plan.assignment.cells
    owned = [m for m in plan.matrices if (m.stage, cells[m.index].owner) == (world.pp_rank, world.owner)]
    # Whole matrices that this rank hosts, and shared matrices, of which it keeps a fragment.
    updated = [m for m in owned if m.index in shared or cells[m.index].host == world.tp_rank]
    matrices = sorted(updated, key=_buffer_order(parameters))
    counted = [m for m in matrices if cells[m.index].host == world.tp_rank]
    return _RankPart(matrices=matrices, counted=counted, parameters=parameters)


def _redundant_part(chunks: Wrapped, setup: Setup, world: World) -> _RankPart:
    """Returns the matrices of this rank without a plan: all matrices of its stage, except experts that it
    does not store."""
    all_matrices = matrices_of(setup.model, world.layout, setup.engine.splitting)
    in_stage = stage_matrices(all_matrices, world.pp_rank)
    matrices = [matrix for matrix in in_stage if matrix.expert_rank in (None, world.expert_rank)]
    named = dict(global_parameters(chunks))
    return _RankPart(
        matrices=matrices,
        counted=[matrix for matrix in matrices if counts_update(matrix, world)],
        parameters={matrix.parameter: named[matrix.parameter] for matrix in matrices},
    )


def _buffer_order(parameters: Iterable[str]) -> Order:
    """Returns a key that sorts this rank's matrices in the order of Megatron's buffers, which is the same on
    all TP ranks. In this order, gradients and weights of matrices of one shape, such as experts, are more
    often evenly spaced (`optimizers.matrix_optimizer`).

    Args:
        parameters: the names of the parameters in the order of the buffers.
    """
    positions = {name: position for position, name in enumerate(parameters)}
    return lambda matrix: (positions[matrix.parameter], matrix.index)


def _masters(
    matrices: Sequence[Matrix], shape: Callable[[Matrix], tuple[int, int]], device: torch.device
) -> dict[int, torch.nn.Parameter]:
    """Allocates the fp32 weights of matrices, by matrix index. Weights of one shape are views of one tensor
    (count, rows, columns).

    Args:
        shape: a function that returns the shape of the weights that this rank keeps for a matrix.
    """
    masters: dict[int, torch.nn.Parameter] = {}
    for same_shape in group_by_key(matrices, shape):
        block = torch.empty(len(same_shape), *shape(same_shape[0]), dtype=torch.float32, device=device)
        masters |= {matrix.index: torch.nn.Parameter(view) for matrix, view in zip(same_shape, block, strict=True)}
    return masters


def _micro_groups(plan: Plan, world: World) -> list[tuple[Matrix, ...]]:
    """Returns the micro-groups of this rank's owner, in the order of their updates."""
    this_owner = (world.pp_rank, world.owner)
    groups = sorted((group for group in plan.groups if (group.stage, group.owner) == this_owner), key=lambda g: g.index)
    return [tuple(plan.matrices[index] for index in group.matrices) for group in groups]


def _expert_hosting(setup: Setup, matrices: Sequence[Matrix], wiring: Wiring) -> Hosting:
    """Allocates scratch and optimizers for those of this rank's matrices that are experts divided among ranks
    (`parallel.ep`), and copies the model's weights to their masters. The rank stores these experts whole, so
    nothing is sent."""
    experts = [matrix for matrix in matrices if matrix.expert_rank is not None]
    local = wiring.as_single_rank()
    batches = _split_by_scratch([experts], local)
    return Hosting(local, batches, dict.fromkeys((m.index for m in experts), 0), *_dtypes(setup))


def _group_hosting(
    setup: Setup, plan: Plan, groups: Sequence[Sequence[Matrix]], order: Order, wiring: Wiring
) -> Hosting:
    """Allocates message buffers, scratch and optimizers for the hosted matrices of this owner's micro-groups,
    and copies the model's weights to their masters. Matrices within a micro-group are sorted by `order`.
    Collective over the TP ranks."""
    hosts = {matrix.index: cell.host for matrix, cell in zip(plan.matrices, plan.assignment.cells, strict=True)}
    if wiring.fragments.tp == 1:  # nothing is sent, so groups are limited only by the scratch for gradients
        groups = _split_by_scratch(groups, wiring)
    shared = plan.assignment.shared_costs
    batches = [sorted((m for m in group if m.index not in shared), key=order) for group in groups]
    return Hosting(wiring, batches, hosts, *_dtypes(setup))


def _dtypes(setup: Setup) -> tuple[torch.dtype, torch.dtype]:
    """Returns the data types in which gradients and weights are sent."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return dtypes[setup.engine.exchange_dtype], dtypes[setup.train.precision]


def _split_by_scratch(groups: Sequence[Sequence[Matrix]], wiring: Wiring) -> list[Sequence[Matrix]]:
    """Divides each group into batches, so that the scratch for the gradients of a batch is bounded."""
    return [
        group[batch]
        for group in groups
        for batch in batch_slices([scratch_elements(wiring, (matrix,)) for matrix in group])
    ]


def _sharing(groups: Sequence[Sequence[Matrix]], shared: SharedCosts, wiring: Wiring) -> tuple[Sharing, ...]:
    """Creates the optimizer of this rank's fragments of shared matrices, and copies the model's weights to
    their masters. Returns an empty tuple if the owner does not have shared matrices."""
    matrices = [matrix for group in groups for matrix in group if matrix.index in shared]
    if not matrices:
        return ()
    sharing = Sharing(wiring, matrices, [len(shared[matrix.index].fragment) for matrix in matrices])
    for matrix in sharing.matrices:
        matrix.reload()
    return (sharing,)


def optimizer_factory(setup: Setup, on_fallback: OnFallback | None = None) -> MakeOptimizer:
    """Returns a function that creates the optimizer of some of this rank's matrices.

    Args:
        on_fallback: Called when an optimizer uses a fallback.

    Raises:
        UnusableOptimizer: A user's own class cannot update 2-D parameters with `step()` alone.
    """
    chosen = setup.optimizer
    algorithm = algorithm_of(setup)
    if isinstance(chosen, CustomConfig):
        return _custom_factory(chosen, torch.device(setup.cluster.device))
    optimizer_class, settings = _class_of(chosen), _settings(setup, on_fallback)

    def make(matrices: Sequence[Matrix], params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        by_shape: dict[str, object] = {}
        if isinstance(chosen, MomentumConfig):
            shapes = {matrix.shape for matrix in matrices}
            by_shape["stack"] = {shape: stack_of(algorithm, *shape, setup.cluster) for shape in shapes}
            by_shape["form"] = {shape: form_of(algorithm, *shape, setup.cluster) for shape in shapes}
        # The schedule replaces this learning rate before the first step.
        return optimizer_class(params, chosen.lr, weight_decay=chosen.weight_decay, **settings, **by_shape)

    return make


def _class_of(chosen: OptimizerBase) -> OptimizerClass:
    """Imports and returns the optimizer's class, which `Facts.update` names."""
    class_path = known_optimizers()[chosen.name].update
    assert class_path is not None, f"{chosen.name} does not update matrices"
    module, _, name = class_path.partition(":")
    optimizer_class: OptimizerClass = getattr(import_module(f"canzona_cli.core.optimizers.{module}"), name)
    return optimizer_class


def _settings(setup: Setup, on_fallback: OnFallback | None) -> dict[str, object]:
    """Returns the arguments of the optimizer's class that are the same for all matrices."""
    chosen = setup.optimizer
    algorithm = algorithm_of(setup)
    names = {field.name for field in fields(chosen)} - _NO_ARGUMENTS
    settings: dict[str, object] = {name: getattr(chosen, name) for name in names}
    if isinstance(chosen, MomentumConfig | KroneckerConfig):
        settings |= {"on_fallback": on_fallback, "workspace": Workspace()}
    if isinstance(chosen, MomentumConfig):
        settings |= {"precision": setup.train.precision, "graph": algorithm.graph, "fused": algorithm.fused}
    if isinstance(chosen, KroneckerConfig):
        settings |= {"betas": (chosen.beta1, chosen.beta2), "eps": chosen.eps, "spread": chosen.stagger}
        settings["precision"] = "tf32"
    if isinstance(chosen, ShampooConfig):
        settings["roots"] = algorithm.roots
    return settings


def _custom_factory(chosen: CustomConfig, device: torch.device) -> MakeOptimizer:
    """Implements `optimizer_factory` for a user's own class, after testing that class."""
    optimizer_class: OptimizerClass = load_class(chosen.source, (_PACKAGE,) if chosen.built_in else chosen.allow)

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_class(params, lr=chosen.lr, weight_decay=chosen.weight_decay, **chosen.options)

    probe(make, device)

    return lambda _, params: make(params)
