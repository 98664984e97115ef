"""Compares Muon's update of a Qwen3-32B layer, at reduced size, with other implementations, on one CPU thread.

    python scripts/measure_updates.py OUT.json [--divide 8] [--rounds 15] [--before CHECKOUT]

All sides of the matrices are divided by --divide. Each round updates every shape once with every implementation. Prints
for each implementation: its time for all matrices of a layer as a multiple of the first implementation's, with
quartiles; the distance of singular values from 1 for Gaussian gradients; and the FLOPs that torch counts. OUT.json has
all samples. On a processor without bf16 instructions, all products are computed in fp32 (`optimizers/cpu_matmuls.py`).
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon
from torch.utils.flop_counter import FlopCounterMode

from canzona_cli.optimizers import Muon, cpu_matmuls

LAYER = {(8192, 5120): 1, (1024, 5120): 2, (5120, 8192): 1, (25600, 5120): 2, (5120, 25600): 1}
"""The number of matrices of each shape in a layer of Qwen3-32B: q; k and v; proj; gate and up; down."""
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def contenders(before: Path | None) -> Mapping[str, Make]:
    """Returns the implementations to compare; the first is the baseline.

    The baseline is the Muon of another checkout, if one is given, otherwise this checkout's standard form.
    """
    baseline: dict[str, Make] = {}
    if before is not None:
        baseline["before"] = _muon_of(before)
    return {
        **baseline,
        "standard": lambda p: Muon(p, 0.02),
        "gram": lambda p: Muon(p, 0.02, form="gram"),
        "emerging": lambda p: EmergingMuon(
            p, 0.02, coefficient_type="quintic", fp32_matmul_prec="medium", extra_scale_factor=0.2, weight_decay=0.1
        ),
        "torch": lambda p: torch.optim.Muon(p, 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    }


def _muon_of(checkout: Path) -> Make:
    """Imports the Muon of another checkout as a module named `before`."""
    folder = checkout / "canzona_cli" / "optimizers"
    spec = importlib.util.spec_from_file_location(
        "before", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["before"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: Make = module.Muon
    return lambda p: kind(p, 0.02)  # type: ignore[call-arg]


def orthogonality(make: Make, shape: tuple[int, int]) -> float:
    """Returns the root mean square distance of an update's singular values from 1."""
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    make([p]).step()
    values = torch.linalg.svdvals(p.detach())
    return float((values / (0.02 * 0.2 * max(shape) ** 0.5) - 1).square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--divide", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu_matmuls.install()  # replaces torch's products for all implementations
    makes = contenders(args.before)
    shapes = {(rows // args.divide, cols // args.divide): count for (rows, cols), count in LAYER.items()}
    times: dict[str, dict[str, list[float]]] = {name: {str(shape): [] for shape in shapes} for name in makes}
    ready = {}
    flops = dict.fromkeys(makes, 0)
    for shape, count in shapes.items():
        for name, make in makes.items():
            p = torch.nn.Parameter(torch.randn(shape))
            p.grad = torch.randn(shape)
            ready[name, shape] = make([p])
            with FlopCounterMode(display=False) as counter:
                ready[name, shape].step()  # also warms up
            flops[name] += count * counter.get_total_flops()
    for _ in range(args.rounds):
        for shape in shapes:
            for name in makes:
                begin = time.perf_counter()
                ready[name, shape].step()
                times[name][str(shape)].append(time.perf_counter() - begin)
    errors = {name: {str(s): orthogonality(make, s) for s in shapes} for name, make in makes.items()}
    args.out.write_text(json.dumps({"divide": args.divide, "seconds": times, "orthogonality": errors, "flops": flops}))
    baseline = next(iter(makes))
    for name, by_shape in times.items():
        ratios = [
            sum(count * by_shape[str(s)][turn] for s, count in shapes.items())
            / sum(count * times[baseline][str(s)][turn] for s, count in shapes.items())
            for turn in range(args.rounds)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = statistics.mean(errors[name].values())
        spread = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        print(f"{name:9} {spread} of {baseline}'s time, singular values off 1 by {error:.4f}, {flops[name]:.3g} FLOPs")


if __name__ == "__main__":
    main()
