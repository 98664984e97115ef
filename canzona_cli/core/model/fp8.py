"""The rules for FP8 matmuls: the machines that have them, and the sides that they need."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from canzona_cli.core.errors import Problem
from canzona_cli.core.fields import Fp8Recipe
from canzona_cli.core.model.families import family_of, layer_kinds
from canzona_cli.core.setup import Setup
from canzona_cli.core.setup.layout_rules import may_have_whole_experts

FP8_UNITS: Mapping[Fp8Recipe, int] = MappingProxyType({"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32})
"""The number that must divide all sides of an FP8 matmul: the alignment of cuBLAS's FP8 kernels, or the length of the
blocks that share a scale (Transformer Engine 2, `Float8BlockQuantizer` and `MXFP8Quantizer`)."""


def fp8_sides(setup: Setup, tp: int, cp: int, micro_batch: int = 1) -> Mapping[int, str]:
    """Returns the lengths of the sides of the layers' matmuls on a rank, each with a name. Experts' tokens are not
    included, because Transformer Engine pads them."""
    sides = {setup.train.seq_length * micro_batch // cp: "tokens of a micro-batch on a rank"}
    for weight in (work.weight for kind in layer_kinds(setup.model) for work in family_of(kind).modules(kind)):
        stored = weight.stored(1 if weight.expert is not None and may_have_whole_experts(setup) else tp)
        name = f"of {weight.name.rpartition('.')[0]} on a rank"
        sides = {stored.rows: f"rows {name}", stored.cols: f"columns {name}"} | sides
    return sides


def divides_fp8(setup: Setup, tp: int, cp: int) -> bool:
    """Returns True if these parallel sizes leave matmuls whose sides FP8 can have, or if `train.fp8` is none."""
    recipe = setup.train.fp8
    if recipe == "none":
        return True
    return all(
        length % FP8_UNITS[recipe] == 0 for length in fp8_sides(setup, tp, cp, setup.train.micro_batch_size or 1)
    )


def fp8_problems(setup: Setup) -> Iterator[Problem]:
    """Yields the problems with `train.fp8`."""
    recipe, cluster = setup.train.fp8, setup.cluster
    if recipe == "none":
        return
    others = f"use train.fp8={' or '.join(['none', *cluster.fp8_recipes])}"
    if cluster.device == "cpu":
        yield Problem("train.fp8", "FP8 matmuls need a GPU", "use train.fp8=none", value=recipe)
    elif recipe not in cluster.fp8_recipes:
        reason = f"is not a recipe that {cluster.name} supports (cluster.fp8_recipes)"
        yield Problem("train.fp8", reason, others, value=recipe)
    elif not cluster.fused_layers:
        reason = "needs layers of Transformer Engine, and cluster.transformer_engine is false"
        yield Problem("train.fp8", reason, "leave cluster.transformer_engine null, or use train.fp8=none", value=recipe)
    elif setup.train.precision != "bf16":
        reason = f"casts bf16 to FP8, and train.precision is {setup.train.precision}"
        yield Problem("train.fp8", reason, "use train.precision=bf16", value=recipe)
    else:
        tp, cp, unit = setup.parallel.tp or 1, setup.parallel.cp or 1, FP8_UNITS[recipe]
        sides = fp8_sides(setup, tp, cp, setup.train.micro_batch_size or 1)
        uneven = [f"{length} {name}" for length, name in sides.items() if length % unit]
        if uneven:
            reason = f"needs multiples of {unit}, not {', '.join(uneven)}"
            yield Problem("train.fp8", reason, "use smaller parallel sizes, another recipe, or none", value=recipe)
