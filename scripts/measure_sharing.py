#!/usr/bin/env python3
"""Steps of real ranks with matrices shared and hosted, in wall time, in turns: python scripts/measure_sharing.py

First one large matrix (5 sides long, bf16) on two ranks of a TP group: hosted in standard and in Gram form, and shared.
Then whole optimizer steps of qwen3-mini with engine.mode=hosted and auto, in three layouts. Each way takes its turn in
every round; printed are medians and quartiles of a step's milliseconds, and medians of the ratios within a round. It
starts real ranks, one thread each, so `tests` must be importable, and wants a machine with nothing else to do. About
ten minutes on two cores; `--quick` for a third of the rounds.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.engine.aside import Aside
from canzona_cli.engine.buffers import AllToAll, Messages
from canzona_cli.engine.fragments import Fragments
from canzona_cli.engine.hosted import HostedGroup, Wiring
from canzona_cli.engine.shared import SharedGroup
from canzona_cli.engine.sharing import Sharing
from canzona_cli.megatron.in_flight import watcher_for
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.megatron.trainee import Trainee
from canzona_cli.model.matrix import Matrix
from canzona_cli.optimizers.muon import Muon
from canzona_cli.optimizers.newton_schulz import Form
from canzona_cli.planner.exchange import from_hosts, to_hosts
from canzona_cli.planner.pipeline import order
from canzona_cli.planner.planner import make_plan
from canzona_cli.training.assemble import assemble, join
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import fill_gradients, finish_gathering, noise
from tests.sizes import model

CPU, TP, RATIO = torch.device("cpu"), 2, 5
LAYOUTS = {
    "TP2 x DP2": ("gpus=4", "parallel.tp=2"),
    "TP4": ("gpus=4", "parallel.tp=4"),
    "TP4 x DP2": ("gpus=8", "parallel.tp=4"),
}
Seconds = dict[str, list[float]]
"""By way, of every round."""


def in_turns(ways: Mapping[str, Callable[[], None]], rounds: int) -> Seconds:
    """What every way takes until all ranks are done with it; two rounds to warm up are left out."""
    found: Seconds = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, run in ways.items():
            torch.distributed.barrier()
            begin = time.perf_counter()
            run()
            torch.distributed.barrier()
            if number >= 2:
                found[name].append(time.perf_counter() - begin)
    return found


def one_matrix(side: int, rounds: int) -> Seconds:
    """On each of two ranks: a matrix (5 side, side) whose rows are cut, hosted by rank 0."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    matrix = Matrix(
        index=0, name="gate", kind="other", layer=0, stage=0, rows=RATIO * side, cols=side, shard_dim=0,
        parameter="gate", unit=0,
    )  # fmt: skip

    def way(form: Form, shared: bool) -> Callable[[], None]:
        parameter = torch.nn.Parameter(torch.randn(matrix.fragment_shape(TP), dtype=torch.bfloat16))
        parameter.main_grad = torch.randn(matrix.fragment_shape(TP))  # type: ignore[attr-defined]
        updates = shared or rank == 0
        master = torch.nn.Parameter(torch.randn(matrix.fragment_shape(TP) if shared else matrix.shape))
        wiring = Wiring(
            fragments=Fragments(model("tiny"), TP, rank, {"gate": parameter}),
            rank=rank,
            tp_group=torch.distributed.group.WORLD,
            timer=PhaseTimer(CPU),
            watcher=watcher_for(CPU),
            aside=Aside(CPU),
            device=CPU,
            masters={0: master} if updates else {},
            make_optimizer=lambda _, params: Muon(params, 0.01, form=form),
        )
        count = 2 if shared else 1
        exchanges = []
        for number in range(count):
            routes = [
                make([matrix], [0], rank=rank, tp=TP, shared={0} if shared else (), widths=(2, 4), number=number)
                for make in (to_hosts, from_hosts)
            ]
            there, back = (
                AllToAll(route, Messages.for_routes([route], dtype, CPU), 0, wiring.tp_group)
                for route, dtype in zip(routes, (torch.float32, torch.bfloat16), strict=True)
            )
            exchanges.append((there, back))
        hosted = (matrix,) if updates and not shared else ()
        scratch, finite = torch.empty(matrix.elements), torch.ones(len(hosted))
        group: HostedGroup
        if shared:
            sharing = Sharing(wiring, [[(matrix, 0)]], (), count, torch.bfloat16)
            group = SharedGroup(
                wiring, (), exchanges, scratch, finite,
                shared=[(matrix, 0)], optimizer=sharing.form, memory=sharing.memory, number=0,
            )  # fmt: skip
        else:
            group = HostedGroup(wiring, hosted, *exchanges[0], scratch, finite)

        @torch.no_grad()
        def step() -> None:
            for _, stage in order([count]):
                group.run(stage, 1.0)

        return step

    return in_turns(
        {
            "hosted, standard": way("standard", False),
            "hosted, Gram": way("gram", False),
            "shared": way("gram", True),
        },
        rounds,
    )


def _step(trainee: Trainee) -> None:
    trainee.optimizer.step()
    finish_gathering(trainee)


def whole_steps(overrides: tuple[str, ...], rounds: int) -> tuple[int, Seconds]:
    """Optimizer steps of qwen3-mini, gathering included; and how many of its matrices auto shares."""
    common = ("recipe=qwen3-mini", "parallel.pp=1", "optimizer=muon", *overrides)
    made = {
        mode: fit.resolve(compose_run([*common, f"engine.mode={mode}"]).config) for mode in ("hosted", "auto", "shared")
    }
    plans = {mode: make_plan(*found) for mode, found in made.items()}

    def rank() -> Seconds:
        logging.disable(logging.WARNING)
        world = join(*made["hosted"])
        ways: dict[str, Callable[[], None]] = {}
        for mode, (config, _) in made.items():
            trainee = assemble(config, world, plans[mode])
            fill_gradients(trainee, 0, noise)
            ways[mode] = partial(_step, trainee)
        return in_turns(ways, rounds)

    return len(plans["auto"].assignment.shares), run_ranks(made["hosted"][1].world_size, rank, timeout_s=600)[0]


def told(found: Seconds) -> None:
    """A line for each way; the first is what the others are compared with."""
    for name, taken in found.items():
        low, middle, high = statistics.quantiles([1e3 * seconds for seconds in taken], n=4)
        ratios = [
            f"{statistics.median(a / b for a, b in zip(others, taken, strict=True)):.2f} of {other}"
            for other, others in found.items()
            if other != name
        ]
        print(f"  {name:17} {middle:8.1f} ms [{low:.1f}, {high:.1f}]   times shorter: {', '.join(ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--side", type=int, default=768, help="short side of the one matrix")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    share = 3 if arguments.quick else 1
    print(f"one matrix of {RATIO * arguments.side} x {arguments.side}, bf16, two ranks")
    told(run_ranks(TP, lambda: one_matrix(arguments.side, 30 // share))[0])
    for where, overrides in LAYOUTS.items():
        shared, found = whole_steps(overrides, 12 // share)
        print(f"qwen3-mini, {where}: auto shares {shared} matrices")
        told(found)


if __name__ == "__main__":
    main()
