"""The parts of the check that start no training run: fast paths of Muon's updates, the choice of kernels, and large
updates on a hot GPU."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final, get_args

import torch

from canzona_cli.bench.calibrate.compute import Group, Variant
from canzona_cli.bench.calibrate.fast_paths import Compared, compare
from canzona_cli.bench.calibrate.timing import Team
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.update import algorithm_of, flops, seconds
from canzona_cli.records.statistics import Quartiles
from gpu_parts.outcome import Comparison, Outcome, Setup

COMPARED: Final[tuple[Compared, ...]] = get_args(Compared)
"""The fast paths that a single GPU can verify."""
LARGE: Final = (5120, 25600)
"""The shape of the largest matrix of qwen3-32b."""
SMALL: Final = (256, 512)
"""The shape of the matrix that replaces `LARGE` on a CPU."""
HEATED_S: Final = 20.0
"""The seconds of matrix products before an update is timed. The power limit lowers the clocks after about a second."""
PRODUCT: Final = 8192


def fast_path(setup: Setup, path: Compared) -> Outcome:
    """Compares updates with a fast path with updates without it."""
    check = compare(path, torch.device(setup.device))
    return Outcome(status="pass" if check.agrees else "short", summary=check.summary)


def hot(setup: Setup) -> Outcome:
    """Heats the GPU with large products, then measures a large update in both forms, with and without a CUDA graph."""
    rows, cols = LARGE if setup.device == "cuda" else SMALL
    budget = 1.0 if setup.device == "cuda" else 0.01
    comparisons: list[Comparison] = []
    numbers: dict[str, object] = {}
    with lone_team(setup) as team:
        rate = _heat(team, HEATED_S if setup.device == "cuda" else 0.1)
        numbers["product_tflops"] = rate
        profile = _muon(setup, "gram", graph=True).cluster
        assumed = profile.sustained_tflops or max((rate for _, rate in profile.matmul_tflops), default=0.0)
        name = f"product of {PRODUCT} squared, hot" if setup.device == "cuda" else "product"
        comparisons.append(Comparison(what=name, unit="TFLOP/s", simulated=assumed, measured=rate))
        for form in ("gram", "standard"):
            for graph in (False, True):
                config = _muon(setup, form, graph=graph, extra=("model.num_layers=2",))
                group = Group(Variant(config=config, label=f"muon/{form}"), rows, cols, team.device)
                for _ in range(3):
                    group.update()
                times = Quartiles.of([sample / group.count for sample in team.samples(group.update, budget)])
                algorithm = algorithm_of(config.setup)
                what = f"Muon of {rows} x {cols}, {form}, {'replayed' if graph else 'eager'}"
                simulated = 1e3 * seconds(algorithm, rows, cols, config.cluster)
                comparisons.append(Comparison(what=what, unit="ms", simulated=simulated, measured=1e3 * times.median))
                numbers[what] = {"seconds": asdict(times), "tflops": flops(algorithm, rows, cols) / times.median / 1e12}
                summary = f"products at {rate:.3g} TFLOP/s; " + ", ".join(
                    f"{update.what.partition(', ')[2]} {update.measured:.1f} ms" for update in comparisons[1:]
                )
                outcome = Outcome(status="pass", summary=summary, numbers=numbers, comparisons=tuple(comparisons))
                setup.keep("hot", outcome)
                del group
    return outcome


def _heat(team: Team, seconds: float) -> float:
    """Runs large bf16 products for some seconds; returns the last rate in TFLOP/s."""
    side = PRODUCT if team.device.type == "cuda" else 256
    a, b, out = (torch.randn(side, side, device=team.device).bfloat16() for _ in range(3))
    end = time.perf_counter() + seconds
    rate = 0.0

    def multiply() -> None:
        torch.mm(a, b, out=out)

    while time.perf_counter() < end:
        times = Quartiles.of(team.samples(multiply, 1.0))
        rate = 2 * side**3 / times.median / 1e12
    return rate


def _muon(setup: Setup, form: str, *, graph: bool, extra: Sequence[str] = ()) -> RunConfig:
    settings = ["optimizer=muon", f"optimizer.form={form}", f"optimizer.graph={str(graph).lower()}"]
    return compose_run(["recipe=qwen3-32b", f"cluster={setup.profile}", "gpus=8", *settings, *extra]).config


@contextmanager
def lone_team(setup: Setup) -> Iterator[Team]:
    """Provides a team of one rank in a new process group. On a CPU, the rank has one thread: it is compared with
    simulations of one core, and on a busy machine threads wait for each other far longer than they compute."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = torch.get_num_threads()
    if setup.device == "cpu":
        torch.set_num_threads(1)
    try:
        yield Team(0, 1, torch.device(setup.device))
    finally:
        torch.set_num_threads(threads)
        torch.distributed.destroy_process_group()
