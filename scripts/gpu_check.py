#!/usr/bin/env python3
"""What one GPU does: trains qwen3-mini on it, calibrates it, and measures matrix updates against its own products.

    make gpu-check                                                       # all three, into gpu-check.json
    python scripts/gpu_check.py --only kernels --sizes qwen3-8b
    python scripts/gpu_check.py --device cpu --sizes qwen3-tiny          # the updates alone, on a CPU

Updates are timed as `canzona calibrate` times them: one warms up, then samples until a budget is spent; SOAP and
Shampoo as the mean over a period between refreshes. A rate is the FLOPs that plans count over the median time. Beside
it stands a product of two squares of the update's mean volume in its precision, measured here too: bf16 for Muon, TF32
for the others (on a CPU fp32). Without a GPU that torch can use the script ends with code 3.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.cluster.machine import gpu_inventory
from canzona_cli.config.compose import compose_run
from canzona_cli.errors import EnvironmentProblem, Problem, WorkerCrashed
from canzona_cli.planner.cost import algorithm, flops, work
from canzona_cli.report.errors import show_failure
from canzona_cli.run.statistics import Quartiles

if TYPE_CHECKING:  # torch and Megatron take seconds to import; that there is no GPU is told at once
    from canzona_cli.calibrate.team import Team
    from canzona_cli.calibrate.updates import Variant

SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
PARTS = ("train", "calibrate", "kernels")


@dataclass(frozen=True, kw_only=True)
class Update:
    """One algorithm's update of matrices of one shape."""

    algorithm: str
    rows: int
    cols: int
    size: str
    """The first of the models that has it."""
    seconds: Quartiles
    tflops: float
    precision: str
    """Of its products, and of the product of two (side, side) squares it is measured against."""
    side: int
    product_tflops: float
    share: float
    """Of the product's rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="RECIPE")
    parser.add_argument("--only", choices=PARTS, help="one of the three")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds for the samples of one number")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    given = parser.parse_args()
    try:
        check(given.device, given.sizes, [given.only] if given.only else PARTS, given.budget, given.out)
    except Exception as error:
        sys.exit(show_failure(error))


def check(device: str, sizes: Sequence[str], parts: Sequence[str], budget_s: float, out: Path) -> None:
    """Everything that was asked for, also behind a part that failed; each is written as soon as it is there."""
    name = require() if device == "cuda" else "cpu"
    found: dict[str, object] = {"device": name, "torch": metadata.version("torch")}
    failed = []
    for part in parts if device == "cuda" else ["kernels"]:
        if part == "kernels":
            found[part] = [asdict(update) for update in measure(device, sizes, budget_s)]
        else:
            code, found[part] = train(name) if part == "train" else calibrate(name, out)
            failed += [Problem(key=f"canzona {part}", value=code, reason="it failed; see above")] if code else []
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {out}")
    if failed:
        raise WorkerCrashed(*failed)


def require() -> str:
    """The GPU's name."""
    gpus = gpu_inventory()
    if gpus:
        import torch

        if torch.cuda.is_available():
            return gpus[0].name
    seen = f"torch cannot use the {gpus[0].name} that is here" if gpus else "no GPU is visible here"
    fix = "run it where `canzona doctor` finds a GPU; --device cpu measures the updates on this machine"
    raise EnvironmentProblem(Problem(key="gpu-check", reason=f"{seen}: nothing was checked", fix=fix))


def settings(gpu: str) -> tuple[str, ...]:
    """Overrides for one GPU of that name; a kind that there is no profile of is taken for an H100."""
    fused = str(importlib.util.find_spec("transformer_engine") is not None).lower()
    cluster = "h200" if "H200" in gpu else "h100-80g"
    return ("recipe=qwen3-mini", "gpus=1", f"cluster={cluster}", f"cluster.transformer_engine={fused}")


def train(gpu: str) -> tuple[int, dict[str, object]]:
    """Twenty steps of qwen3-mini on one GPU: the exit code, and the breakdown."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = (*settings(gpu), "parallel.tp=1", "parallel.pp=1", "train.steps=20")
        code = canzona("train", *overrides, f"run.dir={folder}/run")
        path = Path(folder, "run", "breakdown.json")
        breakdown = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return code, {"exit_code": code, "overrides": overrides, "breakdown": breakdown}


def calibrate(gpu: str, out: Path) -> tuple[int, dict[str, object]]:
    """The exit code, and the profile, which lies beside the result."""
    path = out.with_name(f"{out.stem}-profile.yaml")
    code = canzona("calibrate", *settings(gpu), "--force", "--out", str(path))
    return code, {"exit_code": code, "profile": path.read_text(encoding="utf-8") if path.is_file() else None}


def canzona(*arguments: str) -> int:
    print("canzona " + " ".join(arguments), flush=True)
    return subprocess.run([sys.executable, "-m", "canzona_cli.app", *arguments], check=False).returncode


def measure(device: str, sizes: Sequence[str], budget_s: float) -> Iterator[Update]:
    """Muon, one by one and stacked, SOAP and Shampoo with every shape of the sizes, each shape once."""
    import torch

    from canzona_cli.calibrate.team import Team
    from canzona_cli.calibrate.updates import Variant, shapes, update_samples, variants

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    team = Team(0, 1, torch.device(device))
    print(f"\n{'update':26} {'matrix':>13} {'of':>11} {'time':>12} {'spread':>7} {'TFLOP/s':>8}  share of a product")
    wanted: dict[tuple[str, int, int], tuple[Variant, str]] = {}
    for size in sizes:
        config = compose_run([f"recipe={size}"]).config
        for variant in (found for found in variants(config) if found.kind == "ours"):
            for shape in shapes(config):
                wanted.setdefault((variant.label, *shape), (variant, size))
    for (label, rows, cols), (variant, size) in wanted.items():
        side, precision = alike(variant, rows, cols, device)
        against = product_tflops(team, side, precision, budget_s)
        times = Quartiles.of(update_samples(team, variant, rows, cols, budget_s))
        tflops = flops(algorithm(variant.config), rows, cols) / times.median / 1e12
        found = Update(
            algorithm=label, rows=rows, cols=cols, size=size, seconds=times, tflops=tflops,
            precision=precision, side=side, product_tflops=against, share=tflops / against,
        )  # fmt: skip
        show(found)
        yield found
    torch.distributed.destroy_process_group()


def alike(variant: "Variant", rows: int, cols: int, device: str) -> tuple[int, str]:
    """Side and precision of the product of two squares that is like the mean one of an update."""
    how = algorithm(variant.config)
    parts = work(how, rows, cols)[0].products
    volume = sum(n * m * k * p for n, m, k, p in parts) / sum(n for n, *_ in parts)
    precision = how.precision if how.name == "muon" else "tf32" if how.tf32 and device == "cuda" else "fp32"
    return max(64, 64 * round(volume ** (1 / 3) / 64)), precision


@cache
def product_tflops(team: "Team", side: int, precision: str, budget_s: float) -> float:
    """Of random numbers: the power that constants take, and so the clock they leave, is another."""
    import torch

    from canzona_cli.optimizers.matrix_optimizer import products

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b, out = (torch.randn(side, side, device=team.device).to(dtype) for _ in range(3))

    def multiply() -> None:
        torch.mm(a, b, out=out)

    with products("tf32" if precision == "tf32" else "fp32"):
        return 2 * side**3 / Quartiles.of(team.samples(multiply, budget_s)).median / 1e12


def show(found: Update) -> None:
    print(
        f"{found.algorithm:26} {f'{found.rows} x {found.cols}':>13} {found.size:>11} "
        f"{found.seconds.median * 1e3:9.3f} ms {found.seconds.relative:7.1%} {found.tflops:8.3g}  "
        f"{found.share:4.0%} of {found.side} squared's {found.product_tflops:.3g} in {found.precision}"
    )


if __name__ == "__main__":
    main()
