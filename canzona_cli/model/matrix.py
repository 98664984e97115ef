"""A matrix: what a matrix-based optimizer updates as one, and its place in the model."""

from dataclasses import dataclass
from typing import Literal

from canzona_cli.fields import CountOrZero, Side

Kind = Literal["q", "k", "v", "qkv", "gate", "up", "fc1", "proj", "down", "other"]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A logical, full 2-D weight that the optimizer treats as one."""

    index: CountOrZero
    """Position in the plan's list."""
    name: str
    """The name, as layers.3.gate; layers are numbered over the whole model."""
    kind: Kind
    layer: CountOrZero
    stage: CountOrZero
    """Pipeline stage."""
    chunk: CountOrZero = 0
    """Model chunk of its stage, the one with the first layers being 0 (`Layout.vpp`)."""
    rows: Side
    cols: Side
    shard_dim: Literal[0, 1] | None
    """Dimension that tensor parallelism cuts; None where every TP rank holds it whole."""
    parameter: str
    """The Megatron parameter it is part of: decoder.layers.3.mlp.linear_fc1.weight."""
    unit: CountOrZero
    """Matrices of one unit must have the same owner: q,
    k and v lie interleaved in one range of the buffer."""
    home: CountOrZero | None = None
    """The one TP rank that stores it, whole (a head's matrix); None for every other kind of matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def replicated(self) -> bool:
        """True where every TP rank holds the whole of it."""
        return self.shard_dim is None and self.home is None

    @property
    def cut_long(self) -> bool:
        """True where tensor parallelism cuts its long side (of a square either), so that fragments have all
        of the other."""
        return self.shard_dim is not None and self.shape[self.shard_dim] >= self.shape[1 - self.shard_dim]

    def holders(self, tp: int) -> range:
        """TP ranks that store a part of it: all of them, or its home alone."""
        return range(tp) if self.home is None else range(self.home, self.home + 1)

    def held_elements(self, tp: int) -> int:
        """Elements on each of its `holders`."""
        return self.elements if self.shard_dim is None or self.home is not None else self.elements // tp

    def fragment_shape(self, tp: int) -> tuple[int, int]:
        """Rows and columns on each of its `holders`, in whatever order those of the cut dimension come."""
        if self.shard_dim is None:
            return self.shape
        return (self.rows // tp, self.cols) if self.shard_dim == 0 else (self.rows, self.cols // tp)

    def fragment_elements(self, tp: int) -> int:
        """Elements on one TP rank; with a home, its share on average:
        the heads of a unit are dealt out evenly."""
        return self.elements if self.replicated else self.elements // tp
