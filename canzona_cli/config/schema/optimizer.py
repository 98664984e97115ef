"""How the weights are updated: one class of settings per optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

from canzona_cli.config.schema.field import (
    CURVE,
    NOTHING,
    OPTIMIZER,
    PLAN,
    SPREAD,
    Count,
    Epsilon,
    Example,
    NotNegative,
    Positive,
    Range,
    Share,
    Side,
)

UpdateName = Literal["adamw", "muon", "normuon", "shampoo", "kl-shampoo", "soap", "soap-muon"]
"""Update rules of our own and AdamW's."""
OptimizerName = UpdateName | Literal["custom"]
Clip = Literal["all", "adamw", "none"]
"""What clipping by the global norm acts on."""
Form = Literal["standard", "gram"]
"""How Newton-Schulz is worked out: on the matrix itself, or on its Gram matrix."""
STANDARD_ONLY = frozenset({"cans"})
"""Coefficients that the Gram form is not for (why: `optimizers.gram_form`)."""
RootMethod = Literal["eigh", "newton"]
"""How Shampoo's inverse roots are computed: from eigenvalues, or by products alone."""


@dataclass(frozen=True, kw_only=True)
class OptimizerBase:
    """What every optimizer shares. The AdamW values also govern embeddings, output layer, norms and biases."""

    PLAUSIBLE_LR: ClassVar[float] = 0.1

    lr: Annotated[Positive, "Peak learning rate.", Example("0.0003"), CURVE]
    lrs: Annotated[
        dict[OptimizerName, Positive],
        "A recipe's peak learning rates of some optimizers, by name, in place of lr unless that is typed.",
        Example("'{soap:0.002}'"),
        NOTHING,
    ] = field(default_factory=dict, hash=False)
    min_lr: Annotated[NotNegative, "Learning rate at the end of the decay.", Example("0.00003"), CURVE] = 0.0
    min_lr_ratio: Annotated[
        Share | None,
        "min_lr as a share of lr, so that it follows where lr is changed; null: min_lr itself counts.",
        Example("0.1"),
        NOTHING,
    ] = None
    weight_decay: Annotated[
        NotNegative, "Decoupled weight decay; 1-D parameters (norms, biases) are excluded.", CURVE
    ] = 0.1
    clip_grad: Annotated[NotNegative, "Maximum global gradient norm; 0 switches clipping off.", CURVE] = 1.0
    clip: Annotated[
        Clip,
        "Whose gradients clip_grad scales down, by the norm of all: all; adamw, those of AdamW's parameters, while a"
        " matrix optimizer has its own as they are (their size does not matter to a single update of Muon's, but to"
        " the weight of this step in its momentum, which a spike of the embeddings then leaves alone); none.",
        CURVE,
    ] = "all"
    beta1: Annotated[Share, "AdamW's decay of the first moment.", CURVE] = 0.9
    beta2: Annotated[Share, "AdamW's decay of the second moment.", CURVE] = 0.95
    eps: Annotated[Epsilon, "AdamW's term in the denominator.", Example("1e-8"), CURVE] = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerBase):
    """AdamW on every parameter, by Megatron's DistributedOptimizer."""

    name: Annotated[Literal["adamw"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzConfig(OptimizerBase):
    """What orthogonalises its update."""

    PLAUSIBLE_LR: ClassVar[float] = 0.5
    ns_steps: Annotated[int, Range(at_least=1, at_most=100), "Newton-Schulz iterations.", CURVE | PLAN] = 5
    coefficients: Annotated[
        Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"],
        "Polynomial of the Newton-Schulz iteration.",
        CURVE | PLAN,
    ] = "quintic"
    scale_mode: Annotated[
        Literal["spectral", "unit_rms_norm", "shape_scaling"],
        "How the update's size depends on the matrix shape: spectral is sqrt(max(rows, cols)).",
        CURVE,
    ] = "spectral"
    scale_factor: Annotated[
        Positive, "Multiplies the scaled update; 0.2 with spectral matches AdamW's update RMS (Moonshot 2025).", CURVE
    ] = 0.2


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(NewtonSchulzConfig):
    """What Muon and NorMuon share."""

    momentum: Annotated[Share, "Decay of the momentum.", CURVE] = 0.95
    nesterov: Annotated[bool, "Use Nesterov's form of the momentum.", CURVE] = True
    form: Annotated[
        Literal["auto"] | Form,
        "How the iteration is worked out: standard multiplies the matrix in every step; gram its Gram matrix, and the"
        " matrix every other step, which is less work where one side is longer; auto: for each shape, what the plan"
        " prices lower; standard on CPUs in bf16, whose digits are too few for gram, with the coefficients cans, and in"
        " Megatron's own Muon (sc, layerwise).",
        CURVE | PLAN,
    ] = "auto"
    stack: Annotated[
        Literal["auto"] | bool,
        "Update a host's matrices of one shape together, in batched products: for many small matrices on a GPU; auto:"
        " those that the plan prices lower so. On CPUs that is known only where canzona calibrate measured both ways.",
        CURVE | PLAN,
    ] = "auto"
    graph: Annotated[
        Literal["auto"] | bool,
        "On GPUs, capture the updates of a micro-group as one CUDA graph and replay it; where that fails, updates run"
        " kernel by kernel, with a warning. auto: on GPUs. It changes no result, but what plans take launches to cost:"
        " cluster.graph_launch_us each, and launch_us for each micro-group.",
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


@dataclass(frozen=True, kw_only=True)
class KroneckerConfig(OptimizerBase):
    """What Shampoo, SOAP and their kin share."""

    shampoo_beta: Annotated[Share, "Decay of the Kronecker factors.", CURVE] = 0.95
    precondition_frequency: Annotated[
        Count,
        "Steps between refreshes of what is derived from the factors: Shampoo's inverse roots, SOAP's eigenbases.",
        CURVE | PLAN,
    ] = 10
    max_preconditioner_dim: Annotated[Side, "A side longer than this is not preconditioned.", CURVE | PLAN] = 8192
    stagger: Annotated[
        bool,
        "Spread refreshes over the period, so that no step has all of them: a matrix's turn depends on the layout."
        " false: all at the same step; any layout trains the same model.",
        CURVE,
    ] = True
    tf32: Annotated[
        bool,
        "On GPUs, multiply in TF32; false: in full fp32, several times slower. Decompositions are always fp32.",
        CURVE | PLAN,
    ] = True


@dataclass(frozen=True, kw_only=True)
class ShampooConfig(KroneckerConfig):
    """Shampoo on matrices, AdamW on the rest (Gupta et al. 2018)."""

    name: Annotated[Literal["shampoo"], "The optimizer.", OPTIMIZER | PLAN]
    grafting: Annotated[
        Literal["none", "sgd", "adam"], "The method whose update's norm a Shampoo update is given.", CURVE | PLAN
    ] = "adam"
    roots: Annotated[
        Literal["auto"] | RootMethod,
        "How inverse roots are computed: eigh from eigenvalues, newton by products alone, which GPUs are better at;"
        " auto: what the plan prices lower. Both to the rounding of fp32.",
        CURVE | PLAN,
    ] = "auto"
    shampoo_eps: Annotated[
        Epsilon,
        "Added to the factors' eigenvalues, relative to the largest, besides sqrt(n) * 2^-23 of it, which is noise.",
        Example("1e-12"),
        CURVE,
    ] = 1e-12


@dataclass(frozen=True, kw_only=True)
class SoapConfig(KroneckerConfig):
    """SOAP on matrices, AdamW on the rest (Vyas et al. 2024)."""

    name: Annotated[Literal["soap"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class KLShampooConfig(KroneckerConfig):
    """KL-Shampoo on matrices, AdamW on the rest (Lin et al. 2025)."""

    name: Annotated[Literal["kl-shampoo"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class SoapMuonConfig(KroneckerConfig, NewtonSchulzConfig):
    """SOAP's update, orthogonalised, on matrices; AdamW on the rest (Vyas et al. 2025)."""

    name: Annotated[Literal["soap-muon"], "The optimizer.", OPTIMIZER | PLAN]


@dataclass(frozen=True, kw_only=True)
class CustomConfig(OptimizerBase):
    """Any torch optimizer on whole matrices, by its class: a user's own, or a file of `canzona_cli/optimizers`."""

    name: Annotated[Literal["custom"], "The optimizer.", OPTIMIZER | PLAN]
    PLAUSIBLE_LR: ClassVar[float] = 10.0
    source: Annotated[
        str,
        "FILE.py:Class, or module:Class of an installed package that `allow` names. It is called with the "
        "matrices, lr, weight_decay and `options`.",
        Example("my_optimizer.py:MyOptimizer"),
        OPTIMIZER | CURVE,
    ]
    allow: Annotated[
        tuple[str, ...], "Packages a class may be taken from; files need no entry.", Example("[my_package]"), NOTHING
    ] = ()
    options: Annotated[
        dict[str, bool | int | float | str | tuple[bool | int | float | str, ...]],
        "Further keyword arguments of the class: plain values and lists of them.",
        Example("'{momentum:0.9}'"),
        CURVE,
    ] = field(default_factory=dict, hash=False)
    cost_like: Annotated[
        UpdateName,
        "The optimizer whose update costs and state sizes plans assume for it, unless cluster.measured_updates has"
        " entries named custom.",
        SPREAD | PLAN,
    ] = "muon"

    @property
    def built_in(self) -> bool:
        """Whether the class is one of canzona's own, which a recipe may name without anybody's consent."""
        return self.source.startswith("canzona_cli.optimizers.")


OptimizerConfig = (
    AdamWConfig
    | MuonConfig
    | NorMuonConfig
    | ShampooConfig
    | KLShampooConfig
    | SoapConfig
    | SoapMuonConfig
    | CustomConfig
)
"""Identified by `name`."""

OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    get_args(get_args(get_type_hints(kind, include_extras=True)["name"])[0])[0]: kind
    for kind in get_args(OptimizerConfig)
}
