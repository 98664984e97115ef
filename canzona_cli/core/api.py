"""canzona's engine for other training loops on Megatron-core."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from canzona_cli.core.engine.agreement import agree_on_plan, agree_on_problem
from canzona_cli.core.engine.build import build_engine
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.errors import EnvironmentProblem, Problem, Unsupported, refuse
from canzona_cli.core.megatron import contract, owner_bucket_group
from canzona_cli.core.megatron.model import unwrap
from canzona_cli.core.megatron.optimizer import Overrides, adamw_part, wrap_planned
from canzona_cli.core.megatron.parallel import World, Wrapped, kind_of, world_of
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Device, Layout, Setup

_LOG = logging.getLogger(__name__)


Describe = Callable[["Caller"], tuple[Setup, Layout, Sequence[str]]]
"""A function that describes a training loop: its setup, its layout and warnings about its settings."""


class Engine:
    """The engine in a training loop that is not canzona's. `canzona_cli.Engine` is this engine, and describes the loop
    by settings as on the command line.

    Args:
        optimizer_config: Megatron's configuration, with `optimizer="muon"`.
        describe: Returns the setup and layout of the loop's objects, and warnings.
        groups: The loop's process groups; None for the groups of `megatron.core.parallel_state`.
    """

    def __init__(
        self,
        optimizer_config: MegatronOptimizerConfig,
        describe: Describe,
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        refuse(contract.PROBLEMS, EnvironmentProblem)
        self._megatron, self._describe, self._groups = optimizer_config, describe, groups
        self._built: tuple[Setup, World, Plan, Wrapped] | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the engine executes, the same on every rank. `wrap` makes it."""
        _, _, plan, _ = self._parts
        return plan

    def wrap(
        self, chunks: Sequence[torch.nn.Module], ddp_config: DistributedDataParallelConfig
    ) -> list[DistributedDataParallel]:
        """Plans the updates of a model, and wraps its chunks with the plan's gradient buffers. Collective.

        Args:
            chunks: this rank's model chunks in forward order, already on their device and in their final
                precision.
            ddp_config: the configuration for Megatron's `DistributedDataParallel`, with
                `use_distributed_optimizer=True`.

        Raises:
            CanzonaError: the engine cannot train this model here. Raised on all ranks together.
        """
        agree_on_problem(_unwrapped_problem(chunks), Unsupported)
        groups = self._groups or ProcessGroupCollection.use_mpu_process_groups()
        device = next(chunks[0].parameters()).device
        caller = Caller(
            optimizer=self._megatron,
            ddp=ddp_config,
            models=tuple(map(unwrap, chunks)),
            groups=groups,
            device=kind_of(device),
        )
        setup, layout, warnings = self._describe(caller)
        if torch.distributed.get_rank() == 0:
            for warning in warnings:
                _LOG.warning(warning)
        world = world_of(groups, layout, device)
        agree_on_problem(next(_parameter_problems(caller.models), None), Unsupported)
        fix = "train a decoder whose matrices the engine supports; the plan covers all of its layers"
        plan = agree_on_plan(make_plan(setup, layout), chunks, world, fix=fix)
        wrapped = wrap_planned(chunks, setup, world, plan, ddp_config)
        self._built = setup, world, plan, wrapped
        return wrapped

    def optimizer(self, chunks: Wrapped, overrides: Overrides | None = None) -> CanzonaOptimizer:
        """Builds the optimizer for the chunks that `wrap` returned: canzona updates the matrices, Megatron's
        AdamW all other parameters. Collective.

        Args:
            overrides: Megatron's `config_overrides` for the parameters that AdamW updates; None for
                Megatron's standard overrides.

        Raises:
            CanzonaError: no model is wrapped, `chunks` are not the chunks that the last `wrap` returned, or the
                overrides or a user's own optimizer cannot be used. Raised on all ranks together.
        """
        setup, world, plan, wrapped = self._parts
        agree_on_problem(_wrapped_problem(chunks, wrapped), Unsupported)
        assumed = setup.cluster.grouped_collectives
        if (contradiction := owner_bucket_group.find_contradiction(chunks, world, assumed=assumed)) is not None:
            _LOG.warning(contradiction)
        return build_engine(
            chunks,
            setup,
            world,
            plan,
            PhaseTimer(world.device),
            adamw=adamw_part(self._megatron, setup.optimizer),
            overrides=overrides,
            reads_weights=True,
        )

    @property
    def _parts(self) -> tuple[Setup, World, Plan, Wrapped]:
        if self._built is None:
            fix = "call wrap(chunks, ddp_config) first, in place of DistributedDataParallel"
            raise Unsupported(Problem(key="Engine", reason="it has not wrapped a model", fix=fix))
        return self._built


def _unwrapped_problem(chunks: Sequence[torch.nn.Module]) -> Problem | None:
    """Returns the reason why `Engine.wrap` cannot wrap these chunks; None if it can."""
    if not chunks:
        fix = "give this rank's model chunks, one for each virtual pipeline stage"
        return Problem(key="Engine.wrap", reason="there is nothing to train", fix=fix)
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, DistributedDataParallel):
            fix = "give the model itself: the engine plans its gradient buffers, so it has to wrap it"
            return Problem(key="Engine.wrap", reason=f"chunk {index} is already wrapped", fix=fix)
    return None


def _wrapped_problem(chunks: Wrapped, wrapped: Wrapped) -> Problem | None:
    """Returns the reason why the plan does not belong to these chunks, which only holds for the very chunks that
    `Engine.wrap` returned: other buffers are reduced to other ranks, and would be trained wrongly; None if it does."""
    if [id(chunk) for chunk in chunks] == [id(chunk) for chunk in wrapped]:
        return None
    kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "no chunk"
    reason = f"got {kinds}, but only the {len(wrapped)} that the engine's last wrap(...) returned follow its plan"
    fix = "call optimizer(chunks) with the result of wrap(chunks, ddp_config), and one Engine for each model"
    return Problem(key="Engine.optimizer", reason=reason, fix=fix)


def _parameter_problems(models: Sequence[torch.nn.Module]) -> Iterator[Problem]:
    """Yields a problem for each parameter of this rank that is not stored as a plain bf16 or fp32 tensor."""
    for name, param in (item for model in models for item in model.named_parameters()):
        if param.dtype not in (torch.bfloat16, torch.float32) or type(param.data) is not torch.Tensor:
            reason = f"{name} is stored as {type(param.data).__name__} of {param.dtype}"
            yield Problem(key="model", reason=reason, fix="store weights in bf16 or fp32")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The objects of a training loop that determine a plan."""

    optimizer: MegatronOptimizerConfig
    ddp: DistributedDataParallelConfig
    models: tuple[GPTModel, ...]
    """The model chunks without wrappers."""
    groups: ProcessGroupCollection
    device: Device

    @property
    def model(self) -> TransformerConfig:
        return self.models[0].config
