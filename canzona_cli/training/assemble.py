"""Builds the objects that a worker needs before its first step: process groups, model, optimizer, schedule
and timer."""

import os
import random
from collections.abc import Callable

import numpy as np
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.agreement import agree_on_plan
from canzona_cli.core.engine.build import build_engine
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.errors import EnvironmentProblem, refuse
from canzona_cli.core.megatron import contract, instrument, model, optimizer, parallel
from canzona_cli.core.megatron.experts import RoutingMeter
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.optimizers import cpu_matmuls
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Execution, Layout
from canzona_cli.records.protection import HANG_PATIENCE, HANG_VARIABLE


def join(config: RunConfig, layout: Layout, *, alive: Callable[[], None] = lambda: None) -> World:
    """Seeds this process, joins the other ranks in process groups, and returns this rank's `World`.
    Collective.

    Args:
        alive: Called repeatedly while the rank waits for the others.
    """
    torch.manual_seed(config.train.seed)
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)  # the state that libraries draw from
    timeout_s = 600.0
    if HANG_VARIABLE in os.environ and config.run.hang_timeout_s is not None:
        # The timeout of collectives must be longer than the watchdog's, whose stacks show what each rank
        # waits for.
        timeout_s = max(timeout_s, 1.2 * HANG_PATIENCE * config.run.hang_timeout_s)
    device, seed = config.cluster.device, config.train.seed
    if device == "cpu":
        cpu_matmuls.install()
    return parallel.initialize(layout, device, seed=seed, timeout_minutes=timeout_s / 60, alive=alive)


def assemble(config: RunConfig, world: World, plan: Plan | None, *, timed: bool = True) -> Trainee:
    """Builds this rank's model, optimizer, schedule and timer. Collective.

    Args:
        plan: The plan to execute, for strategies canzona, paper and asc; None for other strategies.
        timed: True to time the phases of the breakdown in each step.

    Raises:
        EnvironmentProblem: The installed megatron-core or torch lacks a property that canzona relies on.
        PlanRefused: On all ranks together, if the plan is for another model or layout, or differs between
            ranks.
        OptimizerRefused: See `build_engine`.
    """
    refuse(contract.PROBLEMS, EnvironmentProblem)
    timer = PhaseTimer(world.device)
    chunks = model.build_model(config.setup, world)
    execution = config.execution
    plan = agree_on_plan(plan, chunks, world) if execution is Execution.PLANNED else None
    wrapped = optimizer.wrap_data_parallel(chunks, config.setup, world, plan)
    updater: MegatronOptimizer
    if execution.ours:
        updater = build_engine(wrapped, config.setup, world, plan, timer)
    else:
        updater = optimizer.build_optimizer(wrapped, config.setup, world)
    if timed:
        # canzona's optimizers report their phases to the timer themselves.
        instrument.attach(wrapped, None if isinstance(updater, CanzonaOptimizer) else updater, timer, world)
    schedule = optimizer.build_schedule(updater, config.setup)
    return Trainee(
        setup=config.setup,
        world=world,
        chunks=wrapped,
        optimizer=updater,
        schedule=schedule,
        timer=timer,
        routing=RoutingMeter(wrapped, config.model, world.device) if config.model.num_experts else None,
    )
