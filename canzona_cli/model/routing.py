"""The routing of parameters: matrices, for the run's optimizer, and the others, for AdamW."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from canzona_cli.config.execution import Execution, execution_of, splitting_of
from canzona_cli.config.schema import KroneckerConfig, OptimizerName, RunConfig
from canzona_cli.config.settings import problem_with
from canzona_cli.errors import ConfigError
from canzona_cli.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of
from canzona_cli.model.matrices import layer_matrices, layer_shapes

_LAYER = "decoder.layers.*."


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Parameters or matrices whose names differ only in their numbers."""

    pattern: str
    """The name of matrices, layers.*.q, or layers.*.q.* where each head is one;
    else Megatron's name of a parameter."""
    count: int
    elements: int
    """Elements of all together."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of a whole model."""

    VERSION: ClassVar[int] = 1
    optimizer: OptimizerName
    matrices: tuple[Routed, ...]
    """Matrices that `optimizer` updates whole; none where that is AdamW."""
    adamw: tuple[Routed, ...]
    """Parameters that AdamW updates element by element."""


def routing(config: RunConfig) -> Routing:
    """Routes a run's parameters; `tests/dist/test_initial_weights.py` compares it with Megatron's model.

    Raises:
        ConfigError: a matrix optimizer would have no matrix.
    """
    model, layers = config.model, config.model.num_layers
    alone = execution_of(config) is Execution.ADAMW
    vocabulary = model.vocab_size * model.hidden_size
    family = family_of(model)
    weights = {weight.name: weight.elements for weight in family.weights(model)} if alone else {}
    norms = {norm.name: norm.elements for norm in family.norms(model)}
    rest = (
        Routed(pattern=EMBEDDING, count=1, elements=vocabulary),
        *(
            Routed(pattern=_LAYER + name, count=layers, elements=layers * elements)
            for name, elements in (weights | norms).items()
        ),
        Routed(pattern=FINAL_NORM, count=1, elements=model.hidden_size),
        *(() if model.tied_embeddings else (Routed(pattern=OUTPUT, count=1, elements=vocabulary),)),
    )
    return Routing(optimizer=config.optimizer.name, matrices=() if alone else _matrices(config), adamw=rest)


def _matrices(config: RunConfig) -> tuple[Routed, ...]:
    model, splitting, chosen = config.model, splitting_of(config), config.optimizer
    if isinstance(chosen, KroneckerConfig):
        longest, shortest = chosen.max_preconditioner_dim, min(map(min, layer_shapes(model, splitting)))
        if shortest > longest:
            reason = f"no side of any matrix is as short as that, so {chosen.name} would treat nothing as a matrix"
            fix = f"use at least optimizer.max_preconditioner_dim={shortest}, or optimizer=adamw"
            raise ConfigError(problem_with(config, "optimizer.max_preconditioner_dim", reason, fix))
    counts, elements = Counter[str](), Counter[str]()
    for matrix in layer_matrices(model, splitting):
        pattern = "layers.*." + re.sub(r"\.\d+$", ".*", matrix.name)
        counts[pattern] += model.num_layers
        elements[pattern] += model.num_layers * matrix.rows * matrix.cols
    return tuple(Routed(pattern=pattern, count=counts[pattern], elements=elements[pattern]) for pattern in counts)
