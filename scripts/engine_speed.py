"""The optimizer step of every strategy side by side in one session: from the global norm to gathered parameters.

    python scripts/engine_speed.py --out speed.json                          # every layout
    python scripts/engine_speed.py --case tp2-dp2 --rounds 20 optimizer.ns_steps=8

Each layout starts its ranks once. A rank builds the model once per strategy (layers of qwen3-mini's size) and fills the
gradient buffers as if reduced; then the strategies take turns: norm, clipping, updates, all parameters gathered. A turn
lasts from one barrier to the next, so the slowest rank counts; ratios are taken round by round. All strategies split
alike (q, k, v apart, fc1 fused: Megatron's own can do no more), with as many Newton-Schulz steps in bf16.

Beside wall time stands the processor time of all ranks together: ranks outnumber cores here, and what one rank waits
for another one computes. Memory is what tensors take, beside the plan's figure for the fullest rank.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state

from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.megatron import parallel
from canzona_cli.planner.measures import plan_memory
from canzona_cli.planner.obtain import executes_plan
from canzona_cli.planner.planner import make_plan
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.step import Trainee

CASES = {
    "tp2-dp2": (4, "parallel.tp=2"),
    "tp4-dp2": (8, "parallel.tp=4"),
    "tp4-dp1": (4, "parallel.tp=4"),
    "tp1-dp4": (4, "parallel.tp=1"),
    # As many ranks as cores: here what is hidden under an update does not take its processor away.
    "tp2-dp1": (2, "parallel.tp=2"),
}
STRATEGIES = ("canzona", "asc", "layerwise", "sc")
# Half of qwen3-mini, layers and vocabulary alike, so that four strategies fit in memory together.
MODEL = (
    "recipe=qwen3-mini",
    "model.num_layers=6",
    "model.vocab_size=8192",
    "data.tokenizer_vocab_size=8192",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "optimizer=muon",
    "engine.splitting=qkv",
    # Several buckets, as a large model has.
    "parallel.bucket_elements=4000000",
)
WARM_UP = 3
STATE = ("weights", "gradients", "padding", "masters", "matrix_state", "adamw_state")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One strategy on one layout."""

    wall_s: list[float]
    """By round."""
    processor_s: list[float]
    """By round, all ranks together."""
    phases_s: dict[str, tuple[float, float, float]]
    """Mean over rounds: least, mean and most over ranks."""
    tensor_bytes: list[int]
    """By rank: buffers, masters, optimizer state, messages and scratch."""
    planned_bytes: int | None
    """The same of the fullest rank, by the plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="one layout; may be repeated (default: all)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.rank:
        _rank(overrides, arguments.strategies, arguments.rounds, arguments.out)
        return
    found = {}
    for case in arguments.case or CASES:
        found[case] = _case(case, arguments.strategies, arguments.rounds, overrides)
        _report(case, found[case])
        if arguments.out is not None:
            arguments.out.write_text(
                json.dumps({case: {name: asdict(m) for name, m in of.items()} for case, of in found.items()}, indent=1)
                + "\n"
            )


def _case(case: str, strategies: Sequence[str], rounds: int, overrides: Sequence[str]) -> dict[str, Measured]:
    """Run one layout on ranks of its own."""
    ranks, tp = CASES[case]
    results = Path(f"engine-speed-{os.getpid()}.json")
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(
            __file__,
            "--rank",
            f"--rounds={rounds}",
            f"--out={results}",
            "--strategies",
            *strategies,
            "--",
        ),
        *(*MODEL, f"gpus={ranks}", tp, *overrides),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    try:
        subprocess.run(command, env=environment, check=True)
        read = json.loads(results.read_text())
    finally:
        results.unlink(missing_ok=True)
    return {strategy: Measured(**values) for strategy, values in read.items()}


def _rank(overrides: Sequence[str], strategies: Sequence[str], rounds: int, out: Path) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    overrides = [override for override in overrides if override != "--"]
    runs = {name: fit.resolve(compose_run([*overrides, f"engine.strategy={name}"]).config) for name in strategies}
    first, layout = next(iter(runs.values()))
    world = join(first, layout)
    trainees: dict[str, Trainee] = {}
    planned: dict[str, int | None] = {}
    for name, (config, _) in runs.items():
        plan = make_plan(config, layout) if executes_plan(config) else None
        trainees[name] = assemble(config, world, plan)
        planned[name] = None
        if plan is not None:
            memory = plan_memory(config, layout, plan)
            planned[name] = sum(memory.parts[part] for part in STATE) + memory.buffers.lasting
    wall: dict[str, list[float]] = {name: [] for name in strategies}
    processor: dict[str, list[float]] = {name: [] for name in strategies}
    for number in range(rounds + WARM_UP):
        # Who goes first changes from round to round.
        shift = number % len(strategies)
        for name in [*strategies[shift:], *strategies[:shift]]:
            seconds, worked = _turn(trainees[name])
            wall[name].append(seconds)
            processor[name].append(worked)
    found = {}
    for name, trainee in trainees.items():
        everyone = zip(*_gather(processor[name][WARM_UP:]), strict=True)
        measured = Measured(
            wall_s=wall[name][WARM_UP:],
            processor_s=[sum(ranks) for ranks in everyone],
            phases_s=_phases(trainee),
            tensor_bytes=_gather(tensor_bytes(trainee)),
            planned_bytes=planned[name],
        )
        found[name] = asdict(measured)
    if world.rank == 0:
        out.write_text(json.dumps(found))
    parallel.shutdown()


def _turn(trainee: Trainee) -> tuple[float, float]:
    """(seconds between barriers, processor seconds of this rank) of one optimizer step."""
    timer, model = trainee.timer, trainee.model
    # Clipping scales gradients where they lie.
    fill_gradients(trainee)
    torch.distributed.barrier()
    started, worked = time.perf_counter(), time.process_time()
    timer.begin_step()
    with timer.phase("norm_clip"):
        trainee.optimizer.step()
    if model.ddp_config.use_distributed_optimizer:
        for group in reversed(model.bucket_groups):
            if model.ddp_config.overlap_param_gather:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            group.param_gather_dispatched = False
    timer.end_step()
    worked = time.process_time() - worked
    torch.distributed.barrier()
    return time.perf_counter() - started, worked


@torch.no_grad()
def fill_gradients(trainee: Trainee) -> None:
    """The same in every strategy and on every data-parallel rank, large enough that clipping works."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for number, param in enumerate(trainee.model.module.parameters()):
        generator = torch.Generator().manual_seed(1000 * number + rank * (param.dim() > 1))
        param.main_grad.copy_(torch.randn(param.shape, generator=generator).mul_(1e-3))


def tensor_bytes(trainee: Trainee) -> int:
    """Of everything this rank keeps from step to step, each storage once."""
    optimizer = trainee.optimizer
    tensors = [tensor for buffer in trainee.model.buffers for tensor in (buffer.param_data, buffer.grad_data)]
    tensors += list(trainee.model.parameters())
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    while any(hasattr(leaf, "chained_optimizers") for leaf in leaves):
        leaves = [inner for leaf in leaves for inner in getattr(leaf, "chained_optimizers", [leaf])]
    extra = 0
    for leaf in leaves:
        if isinstance(optimizer, CanzonaOptimizer) and leaf is optimizer.matrices:
            tensors += [master.detach() for master in leaf.masters.values()]
            states = [group.optimizer.state for group in leaf.groups if group.optimizer is not None]
            extra += leaf.exchange_bytes
        else:
            tensors += leaf.get_parameters()
            states = [leaf.optimizer.state]
        tensors += [value for state in states for entry in state.values() for value in entry.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return extra + sum(storages.values())


def _phases(trainee: Trainee) -> dict[str, tuple[float, float, float]]:
    timings = trainee.timer.timings()[WARM_UP:]
    found = {}
    for name in dict.fromkeys(name for timing in timings for name in timing.phases):
        ranks = _gather(statistics.fmean(timing.phases.get(name, 0.0) for timing in timings))
        found[name] = (min(ranks), statistics.fmean(ranks), max(ranks))
    return found


def _gather[T](value: T) -> list[T]:
    values: list[T] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _report(case: str, found: dict[str, Measured]) -> None:
    ours = found["canzona"]
    print(f"\n{case}: {CASES[case][0]} ranks on {os.cpu_count()} cores, {len(ours.wall_s)} rounds; median (quartiles)")
    for name, measured in found.items():
        wall, ratio = _quartiles(measured.wall_s, 1e3), _quartiles(_ratios(measured.wall_s, ours.wall_s))
        processor = statistics.median(_ratios(measured.processor_s, ours.processor_s))
        print(
            f"  {name:10} {wall[1]:6.0f} ms ({wall[0]:.0f} to {wall[2]:.0f})   "
            f"{ratio[1]:5.2f}x canzona ({ratio[0]:.2f} to {ratio[2]:.2f})   processor time {processor:5.2f}x"
        )
    for name, measured in found.items():
        parts = ", ".join(f"{phase} {mean * 1e3:.0f}" for phase, (_, mean, _) in measured.phases_s.items())
        memory = f"{max(measured.tensor_bytes) / 2**20:.0f} MiB on the fullest rank"
        if measured.planned_bytes is not None:
            memory += f", planned {measured.planned_bytes / 2**20:.0f}"
        print(f"  {name:10} ms: {parts}; {memory}")


def _ratios(values: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [theirs / own for theirs, own in zip(values, ours, strict=True)]


def _quartiles(values: Sequence[float], unit: float = 1.0) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low * unit, middle * unit, high * unit


if __name__ == "__main__":
    main()
