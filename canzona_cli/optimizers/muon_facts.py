"""Muon and NorMuon without torch: settings, and what an update does."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from canzona_cli.fields import CURVE, OPTIMIZER, PLAN, Positive, Range, Share

from .facts import Algorithm, Facts, Form, OptimizerBase, Rule, Work

CoefficientSet = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
STANDARD_ONLY: frozenset[CoefficientSet] = frozenset({"cans"})
"""Coefficients that the Gram form is not for (why: `gram_form`)."""
MUON_AROUND = 14
"""Kernels of Muon around its iteration, for each matrix whether it is stacked or not."""
SAMPLES = 32
"""Rows at most, evenly spread, that stand for all where the Gram form estimates a norm or a mean."""
BLOCK = 128 * 1024
"""Elements of a block of rows that elementwise passes take together on a CPU: a weight, its gradient, its
momentum and scratch stay in a 2 MB cache between passes. All passes of 2560x768 on one core: 3.5 ms, without
blocks 4.5 ms."""


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzConfig(OptimizerBase):
    """Settings of optimizers that orthogonalise their update."""

    PLAUSIBLE_LR: ClassVar[float] = 0.5
    ns_steps: Annotated[int, Range(at_least=1, at_most=100), "Newton-Schulz iterations.", CURVE | PLAN] = 5
    coefficients: Annotated[
        CoefficientSet,
        "Polynomial of the Newton-Schulz iteration.",
        CURVE | PLAN,
    ] = "quintic"
    scale_mode: Annotated[
        ScaleMode,
        "How the update is scaled by the shape of the matrix; spectral: by sqrt(max(rows, cols)).",
        CURVE,
    ] = "spectral"
    scale_factor: Annotated[
        Positive, "Multiplies the scaled update; 0.2 with spectral matches AdamW's update RMS (Moonshot 2025).", CURVE
    ] = 0.2


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(NewtonSchulzConfig):
    """Settings of Muon and NorMuon."""

    momentum: Annotated[Share, "Decay of the momentum.", CURVE] = 0.95
    nesterov: Annotated[bool, "Use Nesterov's form of the momentum.", CURVE] = True
    form: Annotated[
        Literal["auto"] | Form,
        "How Newton-Schulz is computed. standard: products with the matrix in every step. gram: products with its Gram"
        " matrix, and with the matrix only every other step, which is less work if one side is longer. auto: the"
        " cheaper one by the cost model for each shape, but standard on CPUs in bf16 (too imprecise for gram), with the"
        " coefficients cans, and in Megatron's own Muon (sc, layerwise).",
        CURVE | PLAN,
    ] = "auto"
    stack: Annotated[
        Literal["auto"] | bool,
        "Update a host's matrices of the same shape together in batched products, for many small matrices on a GPU."
        " auto: where the cost model says that it is faster; on CPUs, only where canzona calibrate measured both ways.",
        CURVE | PLAN,
    ] = "auto"
    graph: Annotated[
        Literal["auto"] | bool,
        "On GPUs, capture the updates of a micro-group as one CUDA graph and replay it; if that fails, updates run"
        " kernel by kernel, with a warning. auto: on GPUs. Results stay the same, only launch costs in plans change:"
        " cluster.graph_launch_us per operation, and launch_us per micro-group.",
        PLAN,
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class MuonConfig(MomentumConfig):
    """Muon on matrices, AdamW on the rest (Jordan et al. 2024)."""

    name: Annotated[Literal["muon"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(MomentumConfig):
    """NorMuon on matrices, AdamW on the rest (Li et al. 2025)."""

    name: Annotated[Literal["normuon"], "The optimizer.", OPTIMIZER | PLAN]
    row_beta: Annotated[Share, "Decay of the rows' mean squares.", CURVE] = 0.95


def _muon(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Newton-Schulz, and around it what a GPU does with each element on fp32 masters.

    Bytes per element: momentum 12, Nesterov 12, norm 4 and division 4 + w, decay 8, weight 8 + w, whether it
    is finite 4, the copy of the weight for the model 4 + w. In Gram form decay and weight in one pass 12, as
    the last product is in fp32; those of a stack as they were, and leaving out what is not trusted 2 w.
    """
    iteration, w = iteration_work(a, rows, cols), product_bytes(a)
    traffic = iteration.traffic + (40 + 2 * w + _moved(a)) * rows * cols
    launches = iteration.launches + MUON_AROUND + (2 if _in_one_pass(a) else 0)
    return replace(iteration, traffic=traffic, launches=launches), Work()


def _moved(a: Algorithm) -> int:
    """Counts the bytes per element of Muon's decay and weight."""
    w = product_bytes(a)
    return 12 if _in_one_pass(a) else 16 + (3 if a.form == "gram" else 1) * w


def _in_one_pass(a: Algorithm) -> bool:
    """Tells whether decay and update are one pass, over what the Gram form leaves in fp32."""
    return a.form == "gram" and a.stack is not True


def _normuon(a: Algorithm, rows: int, cols: int) -> tuple[Work, Work]:
    """Muon's, and per element the norms of rows w bytes and their scaling w + 4, of what is in fp32 already 4
    and 8; then decay and weight 20, in one pass 12."""
    muon, none = _muon(a, rows, cols)
    w = product_bytes(a)
    left_out = 2 * w if a.form == "gram" and a.stack is True else 0
    scaled = 12 if _in_one_pass(a) else 2 * w + 4
    traffic = muon.traffic + (scaled + (12 if a.form == "gram" else 20) + left_out - _moved(a)) * rows * cols
    return replace(muon, traffic=traffic, launches=muon.launches + 8), none


def product_bytes(a: Algorithm) -> int:
    """Bytes of an element in Newton-Schulz."""
    return 2 if a.precision == "bf16" else 4


def iteration_work(a: Algorithm, rows: int, cols: int) -> Work:
    """Counts Newton-Schulz alone. `addmm` first copies what it adds to."""
    assert a.form != "auto"
    m, n = sorted((rows, cols))
    steps, width = a.ns_steps, product_bytes(a)
    if a.form == "gram":
        return _gram(steps, m, n, width)
    return Work(
        products=((steps, m, m, n),),
        symmetric=((steps, m, n), (steps, m, m)),
        traffic=2 * width * steps * (m * n + m * m),
        launches=5 * steps,
    )


def _gram(steps: int, m: int, n: int, width: int) -> Work:
    """Counts the Gram form: X X' and Q X once in each of its `segments`, in between polynomials of the Gram
    matrix R alone.

    Every step takes R R; all but a segment's first take Q P, all but its last P R P, for P the step's
    polynomial and Q the product of those so far. All are polynomials of one symmetric matrix, so they are
    symmetric themselves. With u = 2 m^3 and r = n / m, 5 steps in segments of 2 and 3 take (4 r + 14) u; the
    standard form 5 (2 r + 1) u.

    Squares are passed over as the products' type: zeros and the polynomials' other terms are written into
    what a product is added to (in bf16, on processors, X too). The probe takes norms of `SAMPLES` rows, of Q,
    copied, around a segment's last step, of R and of X; what it makes of them takes launches of a single
    number each.
    """
    parts = segments(steps)
    squares = 4 * steps - 3 * len(parts)
    passes = sum(8 * k - 5 for k in parts)
    several = sum(k > 1 for k in parts)
    rows = min(m, SAMPLES)
    probe = width * rows * ((3 * len(parts) + 4 * several) * m + len(parts) * n)
    return Work(
        products=((len(parts), m, m, n),),
        symmetric=((len(parts), m, n), (squares, m, m)),
        traffic=width * passes * m * m + probe,
        launches=sum(13 * k + 10 for k in parts) + 10 * several - 4,
    )


def segments(steps: int) -> tuple[int, ...]:
    """Counts the steps that the Gram form makes on each Gram matrix: two,
    and three at the end of an odd number.

    Where three steps are followed by others, what they leave beyond the polynomials' range (above 1.4) grows
    without bound: `deepseekv4` did so on Gaussian 256 x 257.
    """
    return (2,) * (steps // 2 - 1) + (2 + steps % 2,) if steps > 1 else (1,)


FACTS = (
    Facts(
        settings=MuonConfig,
        rule=Rule(work=_muon, fragment_bytes=64, moments=1, orthogonal=True, shared=True),
        update="shared_muon:SharedMuon",
    ),
    Facts(
        settings=NorMuonConfig,
        rule=Rule(work=_normuon, fragment_bytes=76, moments=1, row_vectors=1, orthogonal=True),
        update="normuon:NorMuon",
    ),
)


DISTRUSTED = "distrusted"
"""The key, in a matrix's state and so in checkpoints, of how many of its next updates are in standard form.
Older checkpoints have True."""
STANDARD_STEPS = 100
"""Updates in standard form after a doubt. A momentum of 0.95 then has 0.6% left of what was doubted; and
where the Gram form is doubted again and again, to have tried it costs 1% of what updates take."""
LOST = f"the Gram form lost too much in rounding; it is updated in standard form for {STANDARD_STEPS} steps"

State = MutableMapping[str, object]
"""The state of one matrix."""


def distrust(state: State) -> None:
    """Marks the state of a matrix whose update was not to be trusted."""
    state[DISTRUSTED] = STANDARD_STEPS


def steps_left(state: State) -> int:
    """Tells how many of the next updates are in standard form."""
    left = state.get(DISTRUSTED, 0)
    assert isinstance(left, int)
    return STANDARD_STEPS if left is True else left


def count_down(state: State) -> None:
    """Counts one of those updates as made."""
    if (after := steps_left(state) - 1) > 0:
        state[DISTRUSTED] = after
    else:
        del state[DISTRUSTED]
