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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from canzona_cli.config.reading import LARGEST_YAML, Unreadable, parse_yaml, read_plain
from canzona_cli.config.schema import Layout, ModelConfig
from canzona_cli.errors import ConfigError, Problem, refuse
from canzona_cli.model.family import Kind
from canzona_cli.model.matrices import LayerBlock, LayerMatrix, Matrix, number_matrices

_SHARDS: Mapping[str, Literal[0, 1] | None] = {"rows": 0, "cols": 1, "none": None}
_TOP = ("name", "hidden_size", "embedding", "output", "heads", "kv_heads", "head_dim", "layers", "other", "matrices")
_MATRIX = ("name", "rows", "cols", "shard", "unit", "parameter", "count")
_LONGEST = 1 << 24
"""The maximum number of rows, and of columns, of a matrix."""
_LARGEST = 10**12
"""The maximum number of elements of the embedding, of the output layer, and of `other`."""
_MOST = 2048
"""The maximum number of layers in a block, and the maximum `count`."""
_MOST_MATRICES = 500_000
"""The maximum number of matrices in a model; a plan of this size takes a minute."""
_HEAD_DIM = 128
"""The width of a head in a model that does not give one."""


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
            ConfigError: see `canzona_cli.model.matrices.matrices`.
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
        )


def load_shapes(path: Path) -> ModelShapes:
    """Reads a file of shapes.

    Raises:
        ConfigError: the file cannot be read, or its values are incomplete or impossible. The error lists
            every problem.
    """
    try:
        tree = parse_yaml(read_plain(path, most=LARGEST_YAML))
    except Unreadable as error:
        fix = "give a YAML file with name, hidden_size, embedding, output, layers and matrices"
        raise ConfigError(Problem(key="--shapes", value=str(path), reason=f"{error}", fix=fix)) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(
            Problem(
                key="--shapes",
                value=str(path),
                reason="is not a mapping of names to values",
                fix="start it with `name: my-model`, then give hidden_size, embedding, output, layers and matrices",
            )
        )
    reader = _Reader(where=path.name)
    shapes = reader.model(tree)
    refuse(reader.problems)
    return shapes


class _Reader:
    """A reader of values that collects all problems. It replaces each invalid value with a valid value, so
    that it can go on."""

    def __init__(self, where: str) -> None:
        self.problems: list[Problem] = []
        self._where = where

    def model(self, tree: Mapping[object, object]) -> ModelShapes:
        parts = tree.get("blocks")
        if parts is None:
            self._check_keys(tree, _TOP, "")
            parts = [tree]
        else:
            self._check_keys(tree, ("blocks", *(key for key in _TOP if key not in ("layers", "other", "matrices"))), "")
        hidden = self._number(tree, "hidden_size", "", least=1)
        head_dim = self._number(tree, "head_dim", "", least=1, default=_HEAD_DIM)
        heads = self._number(tree, "heads", "", least=1, default=max(1, hidden // head_dim))
        blocks, others = [], []
        if not isinstance(parts, list) or not parts:
            self._report("blocks", parts, "is not a list of blocks of layers")
            parts = []
        for index, part in enumerate(parts):
            prefix = "" if part is tree else f"blocks.{index}."
            if not isinstance(part, Mapping):
                self._report(prefix.rstrip("."), part, "is not a block of layers with its matrices")
                continue
            if part is not tree:
                self._check_keys(part, ("layers", "other", "matrices"), prefix)
            count = self._number(part, "layers", prefix, least=1, most=_MOST)
            others.append(self._number(part, "other", prefix, least=0, most=_LARGEST, default=0))
            blocks.append(
                LayerBlock(
                    layers=count,
                    matrices=tuple(islice(self._matrices(part.get("matrices"), prefix), _MOST_MATRICES + 1)),
                )
            )
            if (total := sum(block.layers * len(block.matrices) for block in blocks)) > _MOST_MATRICES:
                self._report(f"{prefix}matrices", total, f"must be at most {_MOST_MATRICES:,} in all layers")
                break
        return ModelShapes(
            name=self._text(tree, "name", "", default="shapes"),
            hidden_size=hidden,
            embedding=self._number(tree, "embedding", "", least=0, most=_LARGEST),
            output=self._number(tree, "output", "", least=0, most=_LARGEST, default=0),
            heads=heads,
            kv_heads=self._number(tree, "kv_heads", "", least=1, default=heads),
            head_dim=head_dim,
            blocks=tuple(blocks),
            others=tuple(others),
        )

    def _matrices(self, entries: object, prefix: str) -> Iterator[LayerMatrix]:
        if not isinstance(entries, list) or not entries:
            self._report(f"{prefix}matrices", entries, "is not a list of matrices")
            return
        units: dict[str, int] = {}
        names: set[str] = set()
        for index, entry in enumerate(entries):
            at = f"{prefix}matrices.{index}."
            if not isinstance(entry, Mapping):
                self._report(at.rstrip("."), entry, "is not a matrix: {name: ..., rows: ..., cols: ..., shard: ...}")
                continue
            self._check_keys(entry, _MATRIX, at)
            name = self._text(entry, "name", at)
            if name in names:
                self._report(f"{at}name", name, "is the name of two matrices in one layer")
            names.add(name)
            shard = self._text(entry, "shard", at)
            if shard and shard not in _SHARDS:
                self._report(f"{at}shard", shard, "must be rows, cols or none")
            rows, cols = self._number(entry, "rows", at, least=1), self._number(entry, "cols", at, least=1)
            copies = self._number(entry, "count", at, least=1, most=_MOST, default=1)
            for copy in range(copies):
                suffix = f".{copy}" if copies > 1 else ""
                unit = self._text(entry, "unit", at, default=f"{name}:own") + suffix
                yield LayerMatrix(
                    name=name + suffix,
                    kind=_kind(name),
                    rows=rows,
                    cols=cols,
                    shard_dim=_SHARDS.get(shard),
                    parameter=self._text(entry, "parameter", at, default=f"{name}.weight") + suffix,
                    unit=units.setdefault(unit, len(units)),
                )

    def _number(
        self,
        tree: Mapping[object, object],
        key: str,
        at: str,
        *,
        least: int,
        most: int = _LONGEST,
        default: int | None = None,
    ) -> int:
        value = tree.get(key, default)
        if value is None:
            self._report(at + key, None, "has no value")
        elif isinstance(value, bool) or not isinstance(value, int):
            self._report(at + key, value, "is not a whole number")
        elif value < least:
            self._report(at + key, value, f"must be at least {least}")
        elif value > most:
            self._report(at + key, value, f"must be at most {most}")
        else:
            return value
        return max(least, 1)

    def _text(self, tree: Mapping[object, object], key: str, at: str, *, default: str | None = None) -> str:
        value = tree.get(key, default)
        if isinstance(value, str) and value:
            return value
        self._report(at + key, value, "has no value" if value is None else "is not text")
        return ""

    def _check_keys(self, tree: Mapping[object, object], keys: Sequence[str], at: str) -> None:
        for key in tree:
            if key not in keys:
                self._report(f"{at}{key}", None, f"is not one of {', '.join(keys)}")

    def _report(self, key: str, value: object, reason: str) -> None:
        self.problems.append(Problem(key=key, value=value, reason=f"{reason} (in {self._where})"))


def _kind(name: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    return next((kind for kind in kinds if kind == name), "other")
