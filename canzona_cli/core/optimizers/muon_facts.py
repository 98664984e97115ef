"""A description of Muon and NorMuon that does not import torch: settings, costs and constants of the
update."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from canzona_cli.core.fields import CURVE, OPTIMIZER, PLAN, Positive, Range, Share

from .facts import Algorithm, Facts, Form, OptimizerBase, Rule, Work

CoefficientSet = Literal["simple", "quintic", "polar_express", "aol", "deepseekv4"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
MUON_AROUND = 14
"""The number of kernels per matrix that Muon launches outside Newton-Schulz. In a stack, evenly spaced
matrices share these kernels (`optimizers.matrix_optimizer`). Plans count them for every matrix nevertheless, because a
plan does not know which gradients are evenly spaced."""
SAMPLES = 32
"""The maximum number of evenly spaced rows from which the Gram form estimates a norm or a mean."""
BLOCK = 128 * 1024
"""The number of elements in a block of rows in elementwise passes on a CPU: few enough that weight, gradient,
momentum and scratch stay in a 2 MB cache between passes. All passes over 2560x768 take 3.5 ms on one core,
and 4.5 ms without blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """The weights with which momentum and gradient are combined into the direction to orthogonalise."""

    nesterov: bool
    """True for Nesterov's direction, False for the momentum itself."""
    momentum: float
    """The weight of the momentum in Nesterov's direction; the gradient has the remaining weight."""
    weight: float
    """The weight of the gradient in the new momentum."""
    norm: float
    """The Frobenius norm that the direction is scaled to; a direction of zeros stays zero."""


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(OptimizerBase):
    """The settings of Muon and NorMuon."""

    PLAUSIBLE_LR: ClassVar[float] = 0.5
    ns_steps: Annotated[int, Range(at_least=1, at_most=100), "Newton-Schulz iterations.", CURVE | PLAN] = 5
    coefficients: Annotated[CoefficientSet, "Polynomial of the Newton-Schulz iteration.", CURVE] = "quintic"
    scale_mode: Annotated[
        ScaleMode,
        "How the update is scaled by the shape of the matrix. spectral: by sqrt(max(rows, cols)); unit_rms_norm: by"
        " sqrt(rows / cols); shape_scaling: by the same, but at least 1.",
        CURVE,
    ] = "spectral"
    scale_factor: Annotated[
        Positive, "Multiplies the scaled update; 0.2 with spectral matches AdamW's update RMS (Moonshot 2025).", CURVE
    ] = 0.2

    momentum: Annotated[Share, "Decay of the momentum.", CURVE] = 0.95
    nesterov: Annotated[bool, "Use Nesterov's form of the momentum.", CURVE] = True
    form: Annotated[
        Literal["auto"] | Form,
        "How Newton-Schulz is computed. standard: every step multiplies the matrix. gram: steps multiply its Gram"
        " matrix, and only every other step the matrix, which is less work if one side is longer. auto: for each shape"
        " the form that the cost model predicts to be faster, but standard on GPUs unless cluster.verified has gram, in"
        " bf16 on CPUs with bf16 instructions (too imprecise for gram), and in Megatron's own Muon (sc, layerwise).",
        CURVE | PLAN,
    ] = "auto"
    stack: Annotated[
        Literal["auto"] | bool,
        "Update a host's matrices of the same shape together in batched matmuls, for many small matrices on a GPU."
        " auto: where the cost model says that it is faster; on CPUs, only where canzona calibrate measured both ways.",
        CURVE | PLAN,
    ] = "auto"
    graph: Annotated[
        Literal["auto"] | bool,
        "On GPUs, capture the updates of a micro-group as one CUDA graph and replay it; if that fails, updates run"
        " kernel by kernel, with a warning. auto: if cluster.verified has graphs. Results stay the same, only launch"
        " costs in plans change: cluster.graph_launch_us per operation, and launch_us per micro-group.",
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


def _muon(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    """Counts Muon's work: Newton-Schulz, and the elementwise passes of a GPU over fp32 masters.

    Bytes per element, where w is the width of the matmuls' dtype: momentum 12, Nesterov 12, norm 4, division
    4 + w, weight decay 8, weight 8 + w, the check for finite values 4, the copy of the weight for the model 4
    + w. In Gram form the last matmul writes fp32, so decay and weight take one pass of 12. In a stack, and
    without the fused kernel (`Algorithm.fused`), decay and weight remain two passes, and zeroing untrusted
    updates takes 2 w.
    """
    iteration, w = iteration_work(a, rows, cols), matmul_bytes(a)
    traffic = iteration.traffic + (40 + 2 * w + _move_bytes(a)) * rows * cols
    launches = iteration.launches + MUON_AROUND + (2 if a.form == "gram" and a.stack is not True else 0)
    return replace(iteration, traffic=traffic, launches=launches), ()


def _move_bytes(a: Algorithm) -> int:
    """Returns the bytes per element of Muon's passes for weight decay, weight and, unless they take one pass,
    untrusted updates in Gram form."""
    w = matmul_bytes(a)
    return 12 if _in_one_pass(a) else 16 + (3 if a.form == "gram" else 1) * w


def _in_one_pass(a: Algorithm) -> bool:
    """Returns True if weight decay and update take one pass, because the Gram form's last matmul writes fp32
    and the kernel for both may be used."""
    return a.form == "gram" and a.stack is not True and a.fused


def _normuon(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    """Counts NorMuon's work: Muon's, and two more passes for the norms and the scaling of the rows.

    Bytes per element, with w as in `_muon`: norms w and scaling w + 4, or 4 and 8 if Newton-Schulz returns
    fp32. The scaled update is fp32, so weight decay and weight take 20, or 12 if they take one pass.
    """
    muon, no_refresh = _muon(a, rows, cols)
    w = matmul_bytes(a)
    zeroing = 2 * w if a.form == "gram" and not _in_one_pass(a) else 0
    scaled = 12 if _in_one_pass(a) else 2 * w + 4
    traffic = muon.traffic + (scaled + (12 if _in_one_pass(a) else 20) + zeroing - _move_bytes(a)) * rows * cols
    return replace(muon, traffic=traffic, launches=muon.launches + 8), no_refresh


def matmul_bytes(a: Algorithm) -> int:
    """Returns the bytes per element of the matrices that Newton-Schulz multiplies."""
    return 2 if a.precision == "bf16" else 4


def iteration_work(a: Algorithm, rows: int, cols: int) -> Work:
    """Counts the work of Newton-Schulz alone. Its traffic includes the copies that `addmm` makes of the
    matrices to which it adds."""
    assert a.form != "auto"
    m, n = sorted((rows, cols))
    steps, width = a.ns_steps, matmul_bytes(a)
    if a.form == "gram":
        return _gram(steps, m, n, width)
    return Work(
        matmuls=((steps, m, m, n),),
        symmetric=((steps, m, n), (steps, m, m)),
        traffic=2 * width * steps * (m * n + m * m),
        launches=5 * steps,
    )


def _gram(steps: int, m: int, n: int, width: int) -> Work:
    """Counts the work of the Gram form: X X' and Q X once in each of its `segments`, and matmuls of squares
    (m, m) between them.

    Every step computes R R; all but a segment's first compute Q P, and all but its last P R P, where P is the
    step's polynomial and Q the product of the polynomials so far. All are polynomials of one symmetric
    matrix, so the results are symmetric. With u = 2 m^3 and r = n / m, 5 steps in segments of 2 and 3 take (4
    r + 14) u; the standard form takes 5 (2 r + 1) u.

    The traffic of squares, which have the matmuls' dtype, comes from writing zeros and the polynomials' other
    terms into the matrix that a matmul adds to (in bf16 on CPUs, X too). The error estimate takes norms of
    `SAMPLES` rows of R, of X, and of a copy of Q before and after a segment's last step, and launches kernels
    on single numbers.
    """
    parts = segments(steps)
    squares = 4 * steps - 3 * len(parts)
    passes = sum(8 * k - 5 for k in parts)
    longer_parts = sum(k > 1 for k in parts)
    sampled_rows = min(m, SAMPLES)
    probe = width * sampled_rows * ((3 * len(parts) + 4 * longer_parts) * m + len(parts) * n)
    return Work(
        matmuls=((len(parts), m, m, n),),
        symmetric=((len(parts), m, n), (squares, m, m)),
        traffic=width * passes * m * m + probe,
        launches=sum(13 * k + 10 for k in parts) + 10 * longer_parts - 4,
    )


def segments(steps: int) -> tuple[int, ...]:
    """Returns the number of steps that the Gram form runs on each Gram matrix: two, or three in the last
    segment if the number of steps is odd.

    Three steps must not be followed by others: a singular value that they leave outside the polynomials'
    range (above 1.4) would grow without bound, as happened with `deepseekv4` on a Gaussian 256 x 257 matrix.
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
        update="muon:NorMuon",
    ),
)


DISTRUSTED = "distrusted"
"""The key, in a matrix's state and in checkpoints, of the number of updates still to be made in standard
form."""
STANDARD_STEPS = 100
"""The number of updates in standard form after an untrusted update. After that many steps, a momentum of 0.95
retains 0.6% of its earlier value. Even if the Gram form is never trusted, trying it costs only 1% of the
updates' time."""
LOST = f"the rounding error of the Gram form was too large; using the standard form for {STANDARD_STEPS} steps"
"""The message that reports an untrusted update."""

State = MutableMapping[str, object]
"""Muon's state of one matrix, by key."""


def distrust(state: State) -> None:
    """Switches a matrix, given its state, to the standard form for its next `STANDARD_STEPS` updates."""
    state[DISTRUSTED] = STANDARD_STEPS


def steps_left(state: State) -> int:
    """Returns the number of further updates of a matrix that will be in standard form."""
    left = state.get(DISTRUSTED, 0)
    assert isinstance(left, int)
    return left


def count_down(state: State) -> None:
    """Counts one update in standard form. After the last of them, removes the counter from the state, which
    switches the matrix back to the Gram form."""
    if (remaining := steps_left(state) - 1) > 0:
        state[DISTRUSTED] = remaining
    else:
        del state[DISTRUSTED]
