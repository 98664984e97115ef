"""Facts about optimizers that need no torch: settings, price, state, and where the class is.

An optimizer is a module of facts, `NAME_facts.py` with a tuple `FACTS`, beside the module of its class, and a
recipe. Settings, help, plans, memory and the engine ask `known` for it; nothing else names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args, get_type_hints

from canzona_cli.fields import CURVE, NOTHING, Epsilon, Example, NotNegative, Positive, Precision, Share

Clip = Literal["all", "adamw", "none"]
"""The parameters whose gradients are clipped by the global norm."""
Form = Literal["standard", "gram"]
"""The way that Newton-Schulz is worked out: on the matrix itself, or on its Gram matrix."""
RootMethod = Literal["eigh", "newton"]
"""The way that Shampoo's inverse roots are computed: from eigenvalues, or by products alone."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """The settings of every optimizer. The AdamW values also govern embeddings, output layer,
    norms and biases."""

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
    """The optimizer whose update is priced; for a user's own optimizer the one it is like."""
    custom: bool = False
    """A user's own: measurements are looked up under its own label."""
    ns_steps: int = 5
    form: Literal["auto"] | Form = "standard"
    """Muon's form: how Newton-Schulz is worked out; auto: `costs.update.form_of` says it for each shape."""
    refresh_period: int = 10
    """Shampoo and SOAP: steps between refreshes of roots or eigenbases."""
    max_preconditioner_dim: int = 8192
    """Shampoo and SOAP: a side longer than this is not preconditioned."""
    grafting: Literal["none", "sgd", "adam"] = "none"
    """Shampoo: whose update's norm it is given."""
    roots: RootMethod = "eigh"
    """Shampoo: how its inverse roots are computed."""
    precision: Precision = "bf16"
    """The type of products of Newton-Schulz. Those with factors are in fp32."""
    tf32: bool = True
    """Shampoo and SOAP: in TF32 where there is any, but for refreshes."""
    stack: Literal["auto"] | bool = False
    """Muon: matrices of one shape in batched products; auto:
    `costs.update.stack_of` says it for each shape."""
    graph: bool = False
    """Muon: a micro-group's updates are replayed as one CUDA graph."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one update."""

    products: tuple[tuple[int, int, int, int], ...] = ()
    """Dense products: how many of (m, k) by (k, n)."""
    symmetric: tuple[tuple[int, int, int], ...] = ()
    """Products of (m, k) by (k, m) whose result is symmetric; a kernel that knows it needs half of it."""
    qr: tuple[int, ...] = ()
    """Sides of the squares whose Q is computed."""
    eigh: tuple[int, ...] = ()
    """Sides of the squares whose eigenvectors are computed."""
    elementwise: float = 0.0
    """FLOPs of elementwise kernels, counted for AdamW alone: next to matrix products they are negligible."""
    traffic: float = 0.0
    """Bytes elementwise kernels and copies move."""
    launches: float = 0
    iteration: "Work | None" = None
    """Newton-Schulz in the run's precision, beside products with factors in fp32."""

    @property
    def flops(self) -> float:
        """QR with explicit Q is 4/3 n^3 + 4/3 n^3, eigh with vectors 9 n^3 (Golub & Van Loan,
        4th ed., 5.2 and 8.3)."""
        return (
            self.elementwise
            + self.product_flops
            + sum(8 / 3 * n**3 for n in self.qr)
            + sum(9.0 * n**3 for n in self.eigh)
        )

    @property
    def product_flops(self) -> float:
        """The FLOPs of all products, symmetric ones in full."""
        beside = self.iteration.product_flops if self.iteration else 0.0
        return beside + sum(2.0 * count * m * k * n for count, m, k, n in self.products) + self._symmetric_flops

    @property
    def symmetric_flops(self) -> float:
        return self._symmetric_flops + (self.iteration.symmetric_flops if self.iteration else 0.0)

    @property
    def _symmetric_flops(self) -> float:
        return sum(2.0 * count * m * k * m for count, m, k in self.symmetric)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule, as plans know it."""

    work: Callable[[Algorithm, int, int], tuple[Work, Work]]
    """The work of every update of a (rows, cols) matrix, and the work that one with a refresh does on top."""
    fragment_bytes: int
    """Memory traffic per element, besides writing the weight,
    of what an update of one matrix does on a fragment only:
    decay, weight and, with Newton-Schulz, momentum and scaling."""
    moments: int
    """State with an element for each of the weight, in fp32; another one for Shampoo's Adam grafting."""
    row_vectors: int = 0
    """State with an element for each row."""
    orthogonal: bool = False
    """Newton-Schulz iterations, with scratch for them."""
    shared: bool = False
    """True where fragments can be updated together (`costs.sharing`)."""
    packed: int = 0
    """Symmetric squares for each side that has a factor, kept by half."""
    squares: int = 0
    """Other squares for each such side."""
    vectors: int = 0
    """Vectors for each such side."""

    @property
    def preconditioned(self) -> bool:
        return self.packed > 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An optimizer, as everything but its own class knows it."""

    settings: type[OptimizerBase]
    """Its settings, with `name` as a literal; the class takes what is not in `OptimizerBase` by the same names."""
    rule: Rule
    update: str | None = None
    """`module:Class` of this package; None for AdamW, which is Megatron's."""

    @property
    def name(self) -> str:
        """The value of `optimizer.name`."""
        [name] = get_args(get_args(get_type_hints(self.settings, include_extras=True)["name"])[0])
        return str(name)


@cache
def known() -> Mapping[str, Facts]:
    """Imports every module of facts in this package, in the order of their names."""
    folders = import_module(__package__).__path__
    modules = sorted(path.stem for folder in folders for path in Path(folder).glob("*_facts.py"))
    facts = [facts for module in modules for facts in import_module(f"{__package__}.{module}").FACTS]
    return {each.name: each for each in facts}
