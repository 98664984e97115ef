"""The facts about each optimizer that other code needs without importing torch: settings, costs, state, and
the name of the optimizer's class.

Each optimizer has an entry in the tuple `FACTS` of a `*_facts.py` module (AdamW: here), a recipe, and, except for
AdamW, which Megatron implements, a module with its class. Settings, help, plans, memory estimates and the engine look
optimizers up with `known_optimizers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, get_args, get_type_hints

from canzona_cli.core.fields import (
    CURVE,
    NOTHING,
    OPTIMIZER,
    PLAN,
    Epsilon,
    Example,
    NotNegative,
    Positive,
    Precision,
    Range,
    Share,
)

"""The parameters whose gradients are clipped by the global norm."""
Form = Literal["standard", "gram"]
"""The form of the Newton-Schulz iteration: computed on the matrix itself, or on its Gram matrix."""
RootMethod = Literal["eigh", "newton"]
"""The algorithm for Shampoo's inverse roots: an eigendecomposition, or Newton's iteration, which needs only
matmuls."""
MOMENTUM: Final = "momentum_buffer"
"""The key of the momentum in Muon's state, here and in Megatron."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""The keys of Adam's moments in the state of every optimizer that has them."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The peak and the minimum of a learning rate, and the weight decay."""

    lr: float
    min_lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """The settings that all optimizers share. Matrix optimizers use the AdamW settings for all parameters
    that are not matrices, such as embeddings, the output layer and norms."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    PLAUSIBLE_LR: ClassVar[float] = 0.1

    lr: Annotated[
        Positive,
        "Peak learning rate of matrices, and of embeddings, output layer, norms, biases and routers, which AdamW always"
        " updates, unless adamw_lr sets theirs.",
        Example("0.0003"),
        CURVE,
    ]
    lrs: Annotated[
        dict[str, Positive],
        "Peak learning rates by optimizer, for recipes. They replace lr unless lr is given on the command line.",
        Example("'{soap:0.002}'"),
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    min_lr_ratio: Annotated[
        float, Range(at_least=0, at_most=1), "Learning rate at the end of the decay, as a fraction of lr.", CURVE
    ] = 0.1
    adamw_lr: Annotated[
        Positive | None,
        "Peak learning rate of parameters that are not matrices, also with optimizer=adamw; its schedule and its ratio"
        " of minimum to peak are those of lr. null: lr.",
        Example("0.001"),
        CURVE,
    ] = None
    adamw_lr_ratio: Annotated[
        Positive | None,
        "adamw_lr as a multiple of lr, so that it changes with lr; null: use adamw_lr.",
        Example("0.2"),
        NOTHING,
    ] = None
    weight_decay: Annotated[
        NotNegative, "Decoupled weight decay; 1-D parameters (norms, biases) are excluded.", CURVE
    ] = 0.1
    adamw_weight_decay: Annotated[
        NotNegative | None,
        "Weight decay of embeddings, output layer and routers; null: weight_decay.",
        Example("0.1"),
        CURVE,
    ] = None
    clip_grad: Annotated[NotNegative, "Maximum global gradient norm; 0 switches clipping off.", CURVE] = 1.0
    beta1: Annotated[Share, "Decay of the first moment of AdamW, and of SOAP's and Shampoo's.", CURVE] = 0.9
    beta2: Annotated[Share, "Decay of the second moment of AdamW, and of SOAP's and Shampoo's.", CURVE] = 0.95
    eps: Annotated[Epsilon, "Epsilon in the denominator of AdamW's update.", Example("1e-8"), CURVE] = 1e-8

    @property
    def min_lr(self) -> float:
        """The learning rate at the end of the decay. It is a product of decimals, so that 0.1 times 0.0003 is exactly
        the float 0.00003."""
        return float(Decimal(repr(self.min_lr_ratio)) * Decimal(repr(self.lr)))

    @property
    def adamw_rates(self) -> Rates:
        """The rates of the parameters that are not matrices; those of matrices unless they are set apart."""
        lr = self.lr if self.adamw_lr is None else self.adamw_lr
        decay = self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay
        # min_lr * 1 is exactly min_lr, so equal rates have equal schedules.
        return Rates(lr=lr, min_lr=self.min_lr * (lr / self.lr), weight_decay=decay)

    @property
    def adamw_betas(self) -> tuple[float, float]:
        """The decays of both moments of the parameters that are not matrices."""
        return self.beta1, self.beta2


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The settings that the cost of an update depends on."""

    name: str
    """The optimizer whose update is priced; for a user's own optimizer, the optimizer that it resembles."""
    custom: bool = False
    """True for a user's own optimizer, whose measurements are labelled separately."""
    ns_steps: int = 5
    form: Literal["auto"] | Form = "standard"
    """The form of Muon's Newton-Schulz iteration; with auto, `costs.update.form_of` decides for each
    shape."""
    refresh_period: int = 10
    """The number of steps between refreshes of roots or eigenbases."""
    spread: bool = False
    """True if each refresh is computed in parts, one in each step of the period."""
    max_preconditioner_dim: int = 8192
    """The longest side that has a Kronecker factor."""
    roots: RootMethod = "eigh"
    """The algorithm for Shampoo's inverse roots."""
    precision: Precision = "bf16"
    """The precision of the Newton-Schulz matmuls. Matmuls with Kronecker factors use TF32 on GPUs that have it;
    refreshes never do."""
    stack: Literal["auto"] | bool = False
    """True if Muon updates matrices of one shape in batched matmuls; with auto, `costs.update.stack_of`
    decides for each shape."""
    graph: bool = False
    """True if Muon's updates of each micro-group are replayed as one CUDA graph."""
    fused: bool = True
    """True if a matrix that was updated alone in Gram form decays and moves in one pass over its weights."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one update."""

    matmuls: tuple[tuple[int, int, int, int], ...] = ()
    """The dense matmuls, as (count, m, k, n): `count` matmuls of (m, k) by (k, n)."""
    symmetric: tuple[tuple[int, int, int], ...] = ()
    """The matmuls with a symmetric result, as (count, m, k): `count` matmuls of (m, k) by (k, m). A kernel
    that exploits the symmetry needs half the operations."""
    qr: tuple[tuple[int, int], ...] = ()
    """The shapes (m, n), m >= n, of the matrices whose QR decomposition with explicit Q is computed."""
    eigh: tuple[int, ...] = ()
    """The sides of the square matrices whose eigendecomposition is computed."""
    elementwise: float = 0.0
    """The FLOPs of elementwise kernels. They are counted for AdamW only; compared with matmuls they are
    negligible."""
    traffic: float = 0.0
    """The number of bytes that elementwise kernels and copies read and write."""
    launches: float = 0
    """The number of kernel launches."""

    @property
    def flops(self) -> float:
        """The total FLOPs. A QR with explicit Q takes 4 m n^2 - 4/3 n^3, an eigh with vectors 9 n^3 (Golub &
        Van Loan, 4th ed., 5.2 and 8.3)."""
        return self.elementwise + self.matmul_flops + self.qr_flops + sum(9.0 * n**3 for n in self.eigh)

    @property
    def qr_flops(self) -> float:
        """The FLOPs of the QR decompositions."""
        return sum(4.0 * m * n**2 - 4 / 3 * n**3 for m, n in self.qr)

    @property
    def matmul_flops(self) -> float:
        """The FLOPs of all matmuls if no kernel exploits the symmetry of a result."""
        return sum(2.0 * count * m * k * n for count, m, k, n in self.matmuls) + self.symmetric_flops

    @property
    def symmetric_flops(self) -> float:
        """The FLOPs of the matmuls whose results are symmetric, which are part of `matmul_flops`."""
        return sum(2.0 * count * m * k * m for count, m, k in self.symmetric)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule, as the planner sees it."""

    work: Callable[[Algorithm, int, int], tuple[Work, tuple[Work, ...]]]
    """A function that returns two things for a (rows, cols) matrix: the work of every update, and the
    additional work of a refresh, with one entry for each step over which the refresh is spread."""
    fragment_bytes: int
    """The memory traffic, in bytes per element, of the operations that can run on a fragment alone: weight
    decay and the change of the weight, in Muon and NorMuon also momentum and scaling, in AdamW all of the
    update. Writing the model's weight is not included."""
    moments: int
    """The number of fp32 state tensors of the weight's shape."""
    row_vectors: int = 0
    """The number of state vectors with one element per row."""
    orthogonal: bool = False
    """True if the update runs Newton-Schulz iterations, which need scratch."""
    shared: bool = False
    """True if ranks can update the fragments of a matrix together (`costs.sharing`)."""
    packed: int = 0
    """The number of symmetric squares in the state for each side with a factor; half of each is stored."""
    squares: int = 0
    """The number of squares stored in full for each side with a factor."""
    begun_packed: int = 0
    """The number of packed symmetric squares that store an unfinished refresh, for each side with a factor.
    """
    begun_squares: int = 0
    """The number of squares stored in full that store an unfinished refresh, for each side with a factor."""

    @property
    def preconditioned(self) -> bool:
        """True if the update uses Kronecker factors."""
        return self.packed > 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one optimizer: its settings, its update rule and its class."""

    settings: type[OptimizerBase]
    """The class of the optimizer's settings, whose `name` is a literal. Settings that are not in
    `OptimizerBase` are arguments of the optimizer's class, under the same names except `stagger`
    (`engine.build`)."""
    rule: Rule
    update: str | None = None
    """The optimizer's class, as `module:Class` within this package; None for AdamW, which Megatron
    implements."""

    @property
    def name(self) -> str:
        """The value of `optimizer.name`."""
        [name] = get_args(get_args(get_type_hints(self.settings, include_extras=True)["name"])[0])
        return str(name)


@cache
def known_optimizers() -> Mapping[str, Facts]:
    """Returns the facts about every optimizer by name, from the `*_facts` modules of this package in
    alphabetical order."""
    folders = import_module(__package__).__path__
    modules = sorted(path.stem for folder in folders for path in Path(folder).glob("*facts.py"))
    facts = [entry for module in modules for entry in import_module(f"{__package__}.{module}").FACTS]
    return {entry.name: entry for entry in facts}


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerBase):
    """AdamW on every parameter, by Megatron's DistributedOptimizer."""

    name: Annotated[Literal["adamw"], "The optimizer.", OPTIMIZER | PLAN]


def _adamw(a: Algorithm, rows: int, cols: int) -> tuple[Work, tuple[Work, ...]]:
    return Work(elementwise=15.0 * rows * cols), ()


FACTS = (Facts(settings=AdamWConfig, rule=Rule(work=_adamw, fragment_bytes=28, moments=2)),)
