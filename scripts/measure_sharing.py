#!/usr/bin/env python3
"""Steps of real ranks with matrices shared and hosted, in wall time, in turns: python scripts/measure_sharing.py

    canzona calibrate recipe=qwen3-mini gpus=4 train.precision=fp32 --out here.yaml
    python scripts/measure_sharing.py --precision fp32 --profile ./here.yaml

First one large matrix (5 sides long) on two ranks of a TP group: hosted in standard and in Gram form, and shared.
Then whole optimizer steps of qwen3-mini with engine.mode=hosted, auto, shared and rows, in three layouts. Each way
takes its turn in every round; printed are medians and quartiles of a step's milliseconds, and medians of the ratios
within a round. With a profile, plans are made for it, and beside each measured update phase (updates and exposed
exchanges, mean of all ranks) stands what the simulator says of that very run; beside the bytes that a rank sent inside
its TP group, the plan's. Exits 1 where these are not the same.

It starts real ranks, one thread each, so `tests` must be importable, and wants a machine with nothing else to do. About
ten minutes on two cores; `--quick` for a third of the rounds. In bf16 processors share only what they are told to.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import pytest
import torch

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Precision
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
from canzona_cli.optimizers.newton_schulz import Form
from canzona_cli.optimizers.shared_muon import SharedMuon
from canzona_cli.planner.exchange import from_hosts, to_hosts
from canzona_cli.planner.measures import exchange_sent
from canzona_cli.planner.pipeline import order
from canzona_cli.planner.planner import make_plan
from canzona_cli.simulate.predict import predict
from canzona_cli.training.assemble import assemble, join
from tests.dist.engine_support import engine_of
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import fill_gradients, finish_gathering, noise
from tests.sizes import model

CPU, TP, RATIO = torch.device("cpu"), 2, 5
DTYPES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
WITHIN = 0.20
"""An error of a prediction up to this much is a good one, as in `scripts/prediction_error.py`."""
LAYOUTS = {
    "TP2 x DP2": ("gpus=4", "parallel.tp=2"),
    "TP4": ("gpus=4", "parallel.tp=4"),
    "TP4 x DP2": ("gpus=8", "parallel.tp=4"),
}
Seconds = dict[str, list[float]]
"""By way, of every round."""


WARM_UP = 2
"""Rounds that are left out."""


def in_turns(ways: Mapping[str, Callable[[], None]], rounds: int) -> Seconds:
    """What every way takes until all ranks are done with it."""
    found: Seconds = {name: [] for name in ways}
    for number in range(rounds + WARM_UP):
        for name, run in ways.items():
            torch.distributed.barrier()
            begin = time.perf_counter()
            run()
            torch.distributed.barrier()
            if number >= WARM_UP:
                found[name].append(time.perf_counter() - begin)
    return found


def one_matrix(side: int, rounds: int, precision: Precision) -> Seconds:
    """On each of two ranks: a matrix (5 side, side) whose rows are cut, hosted by rank 0."""
    dtype = DTYPES[precision]
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    matrix = Matrix(
        index=0, name="gate", kind="other", layer=0, stage=0, rows=RATIO * side, cols=side, shard_dim=0,
        parameter="gate", unit=0,
    )  # fmt: skip

    def way(form: Form, shared: bool) -> Callable[[], None]:
        parameter = torch.nn.Parameter(torch.randn(matrix.fragment_shape(TP), dtype=dtype))
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
            make_optimizer=lambda _, params: SharedMuon(params, 0.01, form=form, precision=precision),
        )
        count, widths = 2 if shared else 1, (dtype.itemsize, 4)
        exchanges = []
        for number in range(count):
            routes = [
                make([matrix], [0], rank=rank, tp=TP, shared={0} if shared else (), widths=widths, number=number)
                for make in (to_hosts, from_hosts)
            ]
            there, back = (
                AllToAll(route, Messages.for_routes([route], sent, CPU), 0, wiring.tp_group)
                for route, sent in zip(routes, (torch.float32, dtype), strict=True)
            )
            exchanges.append((there, back))
        hosted = (matrix,) if updates and not shared else ()
        scratch, finite = torch.empty(matrix.elements), torch.ones(len(hosted))
        group: HostedGroup
        if shared:
            sharing = Sharing(wiring, [[(matrix, 0)]], (), count, dtype)
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """Whole steps of one mode, measured and planned."""

    step_s: list[float]
    """By round."""
    updating_s: list[float]
    """By round: updates and exposed exchanges, mean of all ranks."""
    sent: list[int]
    """By rank: bytes that one step sent to other ranks of its TP group."""
    predicted_s: float
    planned: list[int]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / statistics.median(self.updating_s) - 1


@contextmanager
def sent_bytes(group: torch.distributed.ProcessGroup | None) -> Iterator[list[int]]:
    """One for each message of squares and fragments to another rank of `group`; not the few numbers of all-reduces."""
    found: list[int] = []
    swap: Callable[..., object] = torch.distributed.all_to_all_single
    gather: Callable[..., object] = torch.distributed.all_gather_into_tensor

    def swapped(
        output: torch.Tensor, given: torch.Tensor, receive: list[int] | None = None, send: list[int] | None = None,
        **how: object,
    ) -> object:  # fmt: skip
        if how.get("group") is group:
            # What it keeps is not sent; routes have none of it, but even parts have.
            own = 0 if send else given.nbytes // torch.distributed.get_world_size(group)
            found.append(given.nbytes - own)
        return swap(output, given, receive, send, **how)

    def gathered(output: torch.Tensor, given: torch.Tensor, **how: object) -> object:
        if how.get("group") is group:
            found.append(output.nbytes - given.nbytes)
        return gather(output, given, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "all_to_all_single", swapped)
        patched.setattr(torch.distributed, "all_gather_into_tensor", gathered)
        yield found


def _step(trainee: Trainee) -> None:
    trainee.timer.begin_step()
    trainee.optimizer.step()
    finish_gathering(trainee)
    trainee.timer.end_step()


Mode = Literal["hosted", "auto", "shared", "rows"]


def whole_steps(overrides: tuple[str, ...], rounds: int) -> tuple[int, dict[str, Way]]:
    """Optimizer steps of qwen3-mini, gathering included; and how many of its matrices auto shares."""
    common = ("recipe=qwen3-mini", "parallel.pp=1", "optimizer=muon", *overrides)
    made = {mode: fit.resolve(compose_run([*common, f"engine.mode={mode}"]).config) for mode in get_args(Mode)}
    plans = {mode: make_plan(*found) for mode, found in made.items()}

    def rank() -> tuple[Seconds, Seconds, dict[str, int]]:
        logging.disable(logging.WARNING)
        world = join(*made["hosted"])
        trainees: dict[str, Trainee] = {}
        sent: dict[str, int] = {}
        for mode, (config, _) in made.items():
            trainees[mode] = trainee = assemble(config, world, plans[mode])
            fill_gradients(trainee, 0, noise)
            with sent_bytes(engine_of(trainee).matrices._wiring.tp_group) as messages:
                _step(trainee)
            sent[mode] = sum(messages)
        taken = in_turns({mode: partial(_step, trainee) for mode, trainee in trainees.items()}, rounds)
        updating = {
            mode: [step.phases["matrix_update"] + step.phases.get("exchange", 0.0) for step in steps[-rounds:]]
            for mode, trainee in trainees.items()
            for steps in (trainee.timer.timings(),)
        }
        return taken, updating, sent

    ranks = run_ranks(made["hosted"][1].world_size, rank, timeout_s=900)
    found: dict[str, Way] = {}
    for mode, (config, layout) in made.items():
        phases = predict(config, layout, plans[mode]).phases
        found[mode] = Way(
            step_s=ranks[0][0][mode],
            updating_s=[statistics.mean(of_round) for of_round in zip(*(own[1][mode] for own in ranks), strict=True)],
            sent=[own[2][mode] for own in ranks],
            predicted_s=phases["matrix_update"] + phases["exchange"],
            planned=exchange_sent(config, plans[mode]),
        )
    return len(plans["auto"].assignment.shares), found


def judged(found: Mapping[str, Way]) -> bool:
    """A line for each way, prediction beside measurement; and whether what travelled is what was planned."""
    for name, way in found.items():
        measured = statistics.median(way.updating_s)
        good = "" if abs(way.error) <= WITHIN else f", more than {WITHIN:.0%}"
        same = "as planned" if way.sent == way.planned else f"PLANNED {max(way.planned):,}"
        print(
            f"  {name:17} update phase {1e3 * measured:8.1f} ms, predicted {1e3 * way.predicted_s:8.1f} ms: "
            f"{way.error:+.0%}{good};   busiest rank sent {max(way.sent):,} bytes, {same}",
            flush=True,
        )
    return all(way.sent == way.planned for way in found.values())


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
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    parser.add_argument("--profile", help="a cluster profile of this machine, from canzona calibrate")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    share = 3 if arguments.quick else 1
    print(f"one matrix of {RATIO * arguments.side} x {arguments.side}, {arguments.precision}, two ranks")
    told(run_ranks(TP, lambda: one_matrix(arguments.side, 30 // share, arguments.precision))[0])
    asked = (f"train.precision={arguments.precision}", *([f"cluster={arguments.profile}"] if arguments.profile else ()))
    right = True
    for where, overrides in LAYOUTS.items():
        shared, found = whole_steps((*overrides, *asked), 12 // share)
        print(f"qwen3-mini, {where}: auto shares {shared} matrices")
        told({name: way.step_s for name, way in found.items()})
        right &= judged(found)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
