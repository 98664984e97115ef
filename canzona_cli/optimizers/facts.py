"""Facts about optimizers that can be used without torch: settings, costs, state, and the name of the class.

An optimizer consists of a module of facts, `NAME_facts.py` with a tuple `FACTS`, the module of its class, and
a recipe. Settings, help, plans, memory estimates and the engine look it up in `known`; no other code names
it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, get_args, get_type_hints

from canzona_cli.fields import CURVE, NOTHING, Epsilon, Example, NotNegative, Positive, Precision, Share

Clip = Literal["all", "adamw", "none"]
"""The parameters whose gradients are clipped by the global norm."""
Form = Literal["standard", "gram"]
"""The form of the Newton-Schulz iteration: computed on the matrix itself, or on its Gram matrix."""
RootMethod = Literal["eigh", "newton"]
"""The method by which Shampoo's inverse roots are computed: from eigenvalues, or by matrix products alone."""
MOMENTUM: Final = "momentum_buffer"
"""The name of Muon's momentum in its state, here and in Megatron."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""The names of Adam's moments in the state of all optimizers that have them."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """The settings of every optimizer. The AdamW settings also apply to embeddings, output layer, norms and
    biases."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    PLAUSIBLE_LR: ClassVar[float] = 0.1

    lr: Annotated[Positive, "Peak learning rate.", Example("0.0003"), CURVE]
    lrs: Annotated[
        dict[str, Positive],
        "Peak learning rates by optimizer, used instead of lr unless lr is typed; for recipes.",
        Example("'{soap:0.002}'"),
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    min_lr: Annotated[NotNegative, "Learning rate at the end of the decay.", Example("0.00003"), CURVE] = 0.0
    min_lr_ratio: Annotated[
        Share | None,
        "min_lr as a share of lr, so that it changes with lr; null: min_lr is used as it is.",
        Example("0.1"),
        NOTHING,
    ] = None
    weight_decay: Annotated[
        NotNegative, "Decoupled weight decay; 1-D parameters (norms, biases) are excluded.", CURVE
    ] = 0.1
    clip_grad: Annotated[NotNegative, "Maximum global gradient norm; 0 switches clipping off.", CURVE] = 1.0
    clip: Annotated[
        Clip,
        "Which gradients clip_grad scales down, by the norm of all gradients. all: every gradient. adamw: only those of"
        " parameters that AdamW updates, so that a spike of the embeddings' gradients does not reduce the weight of"
        " the step in a matrix optimizer's momentum. none.",
        CURVE,
    ] = "all"
    beta1: Annotated[Share, "AdamW's decay of the first moment.", CURVE] = 0.9
    beta2: Annotated[Share, "AdamW's decay of the second moment.", CURVE] = 0.95
    eps: Annotated[Epsilon, "AdamW's term in the denominator.", Example("1e-8"), CURVE] = 1e-8


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Everything that the cost of an update depends on."""

    name: str
    """The optimizer whose update is priced; for a user's own optimizer, the optimizer that it resembles."""
    custom: bool = False
    """True for a user's optimizer, whose measurements have a separate label."""
    ns_steps: int = 5
    form: Literal["auto"] | Form = "standard"
    """The form of Muon's Newton-Schulz iteration; with auto, `costs.update.form_of` decides for each shape."""
    refresh_period: int = 10
    """The steps between refreshes of roots or eigenbases (Shampoo, SOAP, KL-Shampoo)."""
    spread: bool = False
    """True if each refresh is computed in parts, one in each step of the period."""
    max_preconditioner_dim: int = 8192
    """The longest side that is preconditioned (Shampoo, SOAP, KL-Shampoo)."""
    grafting: Literal["none", "sgd", "adam"] = "none"
    """The method to whose norm Shampoo's update is scaled."""
    roots: RootMethod = "eigh"
    """The method by which Shampoo's inverse roots are computed."""
    precision: Precision = "bf16"
    """The precision of the products of Newton-Schulz. Products with Kronecker factors are in fp32 or TF32."""
    tf32: bool = True
    """True if products with Kronecker factors use TF32 on GPUs that have it; refreshes never use TF32."""
    stack: Literal["auto"] | bool = False
    """True if Muon updates matrices of one shape in batched products; with auto, `costs.update.stack_of`
    decides for each shape."""
    graph: bool = False
    """True if Muon's updates of a micro-group are replayed as one CUDA graph."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one update."""

    products: tuple[tuple[int, int, int, int], ...] = ()
    """The dense products, as (count, m, k, n): `count` products of (m, k) by (k, n)."""
    symmetric: tuple[tuple[int, int, int], ...] = ()
    """The products with a symmetric result, as (count, m, k): `count` products of (m, k) by (k, m). A kernel
    that makes use of the symmetry needs half the operations."""
    qr: tuple[tuple[int, int], ...] = ()
    """The shapes (m, n), m >= n, of the matrices whose QR decomposition is computed with an explicit Q."""
    eigh: tuple[int, ...] = ()
    """The sides of the squares with an eigendecomposition."""
    elementwise: float = 0.0
    """The FLOPs of elementwise kernels. Only AdamW counts them: next to matrix products they are negligible."""
    traffic: float = 0.0
    """The bytes that elementwise kernels and copies read and write."""
    launches: float = 0
    """The number of kernel launches."""
    iteration: "Work | None" = None
    """The Newton-Schulz iteration in the run's precision, if the other products have factors in fp32."""

    @property
    def flops(self) -> float:
        """The FLOPs of all work. QR with explicit Q counts as 4 m n^2 - 4/3 n^3, eigh with vectors as 9 n^3
        (Golub & Van Loan, 4th ed., 5.2 and 8.3)."""
        return self.elementwise + self.product_flops + self.qr_flops + sum(9.0 * n**3 for n in self.eigh)

    @property
    def qr_flops(self) -> float:
        return sum(4.0 * m * n**2 - 4 / 3 * n**3 for m, n in self.qr)

    @property
    def product_flops(self) -> float:
        """The FLOPs of all products; products with a symmetric result count in full."""
        iteration = self.iteration.product_flops if self.iteration else 0.0
        return iteration + sum(2.0 * count * m * k * n for count, m, k, n in self.products) + self._symmetric_flops

    @property
    def symmetric_flops(self) -> float:
        return self._symmetric_flops + (self.iteration.symmetric_flops if self.iteration else 0.0)

    @property
    def _symmetric_flops(self) -> float:
        return sum(2.0 * count * m * k * m for count, m, k in self.symmetric)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule, as the planner sees it."""

    work: Callable[[Algorithm, int, int], tuple[Work, tuple[Work, ...]]]
    """A function that returns the work of every update of a (rows, cols) matrix, and the work that a refresh
    adds: an entry for each step of a period, from the first to the last step that computes a part of the refresh."""
    fragment_bytes: int
    """The bytes of memory traffic per element of the part of an update that needs only a fragment: weight decay,
    weight and, with Newton-Schulz, momentum and scaling. The write of the model's weight is not included."""
    moments: int
    """The number of fp32 state tensors of the shape of the weight; Shampoo's Adam grafting adds one."""
    row_vectors: int = 0
    """The number of state vectors with an element for each row."""
    orthogonal: bool = False
    """True if the update runs Newton-Schulz iterations, which need scratch."""
    shared: bool = False
    """True if the fragments of a matrix can be updated together (`costs.sharing`)."""
    packed: int = 0
    """The number of symmetric squares for each side that has a factor; half of each square is stored."""
    squares: int = 0
    """The number of other squares for each side that has a factor."""
    vectors: int = 0
    """The number of vectors of each side that has a factor."""
    begun_packed: int = 0
    """The number of packed symmetric squares, for each side that has a factor, that hold a refresh between
    its parts."""
    begun_squares: int = 0
    """The number of other squares, for each such side, that hold a refresh between its parts."""

    @property
    def preconditioned(self) -> bool:
        return self.packed > 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that other code knows about an optimizer without importing its class."""

    settings: type[OptimizerBase]
    """The settings, with `name` as a literal. The class takes the settings that are not in `OptimizerBase`
    under the same names."""
    rule: Rule
    update: str | None = None
    """The class, as `module:Class` of this package; None for AdamW, which is Megatron's."""

    @property
    def name(self) -> str:
        """The value of `optimizer.name`."""
        [name] = get_args(get_args(get_type_hints(self.settings, include_extras=True)["name"])[0])
        return str(name)


@cache
def known() -> Mapping[str, Facts]:
    """Returns the facts of every optimizer by name: imports the `*_facts` modules of this package in
    alphabetical order."""
    folders = import_module(__package__).__path__
    modules = sorted(path.stem for folder in folders for path in Path(folder).glob("*_facts.py"))
    facts = [facts for module in modules for facts in import_module(f"{__package__}.{module}").FACTS]
    return {each.name: each for each in facts}
