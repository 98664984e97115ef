"""Reads user-defined decoder-only models from YAML files with the shapes of their matrices.

    name: my-model
    hidden_size: 4096          # width of the residual stream
    embedding: 524288000       # elements
    output: 524288000          # elements of the output layer; 0 if it shares the embedding
    layers: 32
    other: 8192                # elements of a layer that are not in matrices: norms, biases, routers
    matrices:                  # matrices of one layer, in the order in which the model registers them
      - {name: proj, rows: 4096, cols: 4096, shard: cols}
      - {name: q, rows: 4096, cols: 4096, shard: rows, unit: qkv, parameter: qkv.weight}
      - {name: k, rows: 1024, cols: 4096, shard: rows, unit: qkv, parameter: qkv.weight}
      - ...

`shard` is the dimension that tensor parallelism divides: rows, cols or none. Matrices of the same `unit` have
the same owner; by default each matrix is a unit. `count: 8` means eight matrices of one shape. If layers
differ, `blocks:` is a list of consecutive blocks of layers, each with its `layers`, `other` and `matrices`.
`heads`, `kv_heads` and `head_dim` optionally describe attention.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from annotated_types import MinLen

from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.core.fields import Range, Side, bound_text
from canzona_cli.core.model.family import Kind
from canzona_cli.core.model.matrices import LayerBlock, LayerMatrix, Matrix, number_matrices
from canzona_cli.core.reading import LARGEST_YAML, Unreadable, adapter, parse_yaml, read_plain
from canzona_cli.core.setup import Layout, ModelConfig

if TYPE_CHECKING:
    from pydantic import ValidationError

_SHARDS: Mapping[str, Literal[0, 1] | None] = {"rows": 0, "cols": 1, "none": None}
_MOST_MATRICES = 500_000
"""The maximum number of matrices in a model; a plan of this size takes a minute."""
_HEAD_DIM = 128
"""The width of a head in a model that does not give one."""
_NO_OTHER_KEYS = {"extra": "forbid"}
_Text = Annotated[str, MinLen(1)]
_Number = Annotated[int, Range(at_least=1, at_most=2048)]
"""The number of layers in a block, or of equal matrices."""
_Elements = Annotated[int, Range(at_least=0, at_most=10**12)]
_REASONS = {
    "missing": "has no value",
    "unexpected_keyword_argument": "is not one of the keys that a file of shapes has",
    "int_type": "is not a whole number",
    "string_type": "is not text",
    "list_type": "is not a list",
    "dataclass_type": "is not a mapping of names to values",
    "too_short": "is empty",
    "string_too_short": "is empty",
}
"""The reasons to show, by pydantic's name for the error."""


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The shapes of a user's model."""

    name: str
    hidden_size: int
    embedding: int
    output: int
    """The elements of the output layer; 0 if it is tied to the embedding."""
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[LayerBlock, ...]
    others: tuple[int, ...]
    """The elements of one layer that AdamW updates, by block."""

    @property
    def layers(self) -> int:
        return sum(block.layers for block in self.blocks)

    @property
    def layer_matrices(self) -> int:
        """The elements of all matrices."""
        return sum(block.layers * sum(m.elements for m in block.matrices) for block in self.blocks)

    @property
    def digest(self) -> str:
        """The SHA-256, in hexadecimal, of everything on which planning depends: all fields except `name`, and
        except `expert` of each matrix, which is always None in a user's model."""
        content = asdict(
            replace(self, name=""),
            dict_factory=lambda pairs: {name: value for name, value in pairs if name != "expert"},
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def matrices(self, layout: Layout) -> tuple[Matrix, ...]:
        """Lists the matrices in the file's order, layer by layer.

        Raises:
            ConfigError: see `canzona_cli.core.model.matrices.matrices`.
        """
        return number_matrices(self.blocks, layout)

    def stand_in(self, base: ModelConfig) -> ModelConfig:
        """Returns a dense model with the same number of layers and nearly the same number of elements.

        The feed-forward width is rounded to a multiple of 128. The model replaces the shapes in estimates
        that do not depend on single matrices: memory of activations, and the time of forward and backward.
        Every token is assumed to pass through every matrix.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        rest = self.layer_matrices // self.layers - attention
        return replace(
            base,
            name=self.name,
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=max(1, round(rest / (3 * self.hidden_size * 128))) * 128,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=max(1, self.embedding // self.hidden_size),
            tied_embeddings=self.output == 0,
            qk_norm=False,
            num_experts=0,
            gated=True,
            layernorm=False,
            biases=False,
            positions=0,
        )


@dataclass(frozen=True, kw_only=True)
class _MatrixEntry:
    """The entry of a matrix, or of several equal matrices, in a file."""

    __pydantic_config__ = _NO_OTHER_KEYS
    name: _Text
    rows: Side
    cols: Side
    shard: Literal["rows", "cols", "none"]
    unit: _Text | None = None
    parameter: _Text | None = None
    count: _Number = 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of the copies' names; a single matrix has none."""
        return tuple(f".{copy}" for copy in range(self.count)) if self.count > 1 else ("",)


@dataclass(frozen=True, kw_only=True)
class _BlockEntry:
    """The entry of a block of equal layers in a file."""

    __pydantic_config__ = _NO_OTHER_KEYS
    layers: _Number
    other: _Elements = 0
    matrices: Annotated[list[_MatrixEntry], MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class _File:
    """The contents of a file, with a single block of layers if the file does not list blocks."""

    __pydantic_config__ = _NO_OTHER_KEYS
    name: _Text = "shapes"
    hidden_size: Side
    embedding: _Elements
    output: _Elements = 0
    heads: Side | None = None
    kv_heads: Side | None = None
    head_dim: Side = _HEAD_DIM
    blocks: Annotated[list[_BlockEntry], MinLen(1)]


def load_shapes(path: Path) -> ModelShapes:
    """Reads a file of shapes.

    Raises:
        ConfigError: the file cannot be read, or its values are incomplete or impossible. The error lists
            every such value; repeated names and too many matrices are reported once there is none.
    """
    from pydantic import ValidationError

    try:
        tree = parse_yaml(read_plain(path, most=LARGEST_YAML))
    except Unreadable as error:
        fix = "give a YAML file with name, hidden_size, embedding, output, layers and matrices"
        raise ConfigError(Problem(key="--shapes", value=str(path), reason=f"{error}", fix=fix)) from None
    if not isinstance(tree, Mapping):
        fix = "start it with `name: my-model`, then give hidden_size, embedding, output, layers and matrices"
        reason = "is not a mapping of names to values"
        raise ConfigError(Problem(key="--shapes", value=str(path), reason=reason, fix=fix))
    prefix = ""
    if "blocks" not in tree:
        block = {key: tree[key] for key in ("layers", "other", "matrices") if key in tree}
        tree = {**{key: value for key, value in tree.items() if key not in block}, "blocks": [block]}
        prefix = "blocks.0."
    try:
        file = adapter(_File).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(*_type_problems(error, prefix, path.name)) from None
    refuse(_matrix_problems(file, prefix, path.name))
    heads = file.heads or max(1, file.hidden_size // file.head_dim)
    return ModelShapes(
        name=file.name,
        hidden_size=file.hidden_size,
        embedding=file.embedding,
        output=file.output,
        heads=heads,
        kv_heads=file.kv_heads or heads,
        head_dim=file.head_dim,
        blocks=tuple(LayerBlock(layers=block.layers, matrices=tuple(_matrices(block))) for block in file.blocks),
        others=tuple(block.other for block in file.blocks),
    )


def _type_problems(error: "ValidationError", prefix: str, file_name: str) -> Iterator[Problem]:
    """Yields a problem for each value that pydantic refused.

    Args:
        prefix: the prefix that pydantic's keys have and the file's keys do not.
    """
    for detail in error.errors(include_url=False):
        context, value = detail.get("ctx", {}), detail["input"]
        reason = _REASONS.get(detail["type"], "")
        if detail["type"] == "literal_error":
            reason = f"must be {context['expected']}".replace("'", "")
        elif bound := bound_text(detail["type"], context, value):
            reason = f"must be {bound}"
        shown = value if isinstance(value, str | int | float) else None
        key = ".".join(map(str, detail["loc"])).removeprefix(prefix)
        yield Problem(key=key, value=shown, reason=f"{reason or detail['msg'].lower()} (in {file_name})")


def _matrix_problems(file: _File, prefix: str, file_name: str) -> Iterator[Problem]:
    """Yields a problem if there are too many matrices in all layers, otherwise one for each repetition of a
    name within a layer."""
    total = sum(block.layers * sum(entry.count for entry in block.matrices) for block in file.blocks)
    if total > _MOST_MATRICES:
        reason = f"must be at most {_MOST_MATRICES:,} in all layers (in {file_name})"
        yield Problem(key="matrices", value=total, reason=reason)
        return
    for block_index, block in enumerate(file.blocks):
        earlier: set[str] = set()
        for matrix_index, entry in enumerate(block.matrices):
            names = {entry.name, *(entry.name + suffix for suffix in entry.suffixes)}
            if names & earlier:
                key = f"blocks.{block_index}.matrices.{matrix_index}.name".removeprefix(prefix)
                reason = f"is the name of two matrices in one layer (in {file_name})"
                yield Problem(key=key, value=entry.name, reason=reason)
            earlier |= names


def _matrices(block: _BlockEntry) -> Iterator[LayerMatrix]:
    """Yields the matrices of one layer."""
    units: dict[str, int] = {}
    for entry in block.matrices:
        for suffix in entry.suffixes:
            unit = (entry.unit or f"{entry.name}:own") + suffix
            yield LayerMatrix(
                name=entry.name + suffix,
                kind=_kind(entry.name),
                rows=entry.rows,
                cols=entry.cols,
                shard_dim=_SHARDS[entry.shard],
                parameter=(entry.parameter or f"{entry.name}.weight") + suffix,
                unit=units.setdefault(unit, len(units)),
            )


def _kind(name: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    return next((kind for kind in kinds if kind == name), "other")
