"""The mesh of a job's ranks, and the layout of a run."""

from dataclasses import dataclass, replace
from functools import cached_property

from canzona_cli.core.fields import Count, Ranks
from canzona_cli.core.setup.cluster import HashedOnce
from canzona_cli.core.setup.sections import Recompute


@dataclass(frozen=True, kw_only=True)
class Mesh(HashedOnce):
    """The ranks of a job along each parallel axis: `gpus == tp * pp * cp * dp`. A plan is made for a mesh.

    Each rank of a stage is a cell: cell `owner * tp + host` is the owner-th data- and context-parallel rank
    and the host-th tensor-parallel rank.
    """

    tp: Ranks
    pp: Ranks
    vpp: Count = 1
    """The number of model chunks of each pipeline stage. Chunk c of stage s is part `c * pp + s` of the
    model, which has `pp * vpp` parts."""
    cp: Ranks
    dp: Ranks
    ep: Ranks = 1
    """The number of a pipeline stage's ranks among which a layer's experts are divided. Expert parallelism is
    not a separate axis: the rank in cell c has the experts of expert-parallel rank `c % ep`."""

    __hash__ = HashedOnce.__hash__

    @property
    def owners(self) -> int:
        """The number of data- and context-parallel ranks. Gradients are reduced over these ranks, and a
        stage's matrices are divided among them."""
        return self.dp * self.cp

    @property
    def cells(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.owners * self.tp

    @property
    def expert_owners(self) -> int:
        """The number of ranks of a stage that have the same experts and reduce their gradients: the cells
        with the same `expert_rank`. `expert_owner` is the index of a cell among them."""
        return self.cells // self.ep

    def reducers(self, expert_rank: int | None) -> int:
        """Returns the number of ranks that reduce a matrix's gradients, one of which owns the matrix.

        Args:
            expert_rank: the matrix's `Matrix.expert_rank`.
        """
        return self.owners if expert_rank is None else self.expert_owners

    @property
    def expert_tp(self) -> int:
        """The number of parts into which TP cuts an expert's matrices; 1 if experts are divided among
        ranks."""
        return self.tp if self.ep == 1 else 1

    def expert_rank(self, cell: int) -> int:
        """Returns the expert-parallel rank of a cell, in Megatron's numbering."""
        return cell % self.ep

    def expert_cells(self, rank: int) -> range:
        """Returns the cells of a stage with an expert-parallel rank, in the order of `expert_owner`.

        Args:
            rank: the expert-parallel rank.
        """
        return range(rank, self.cells, self.ep)

    def expert_owner(self, cell: int) -> int:
        """Returns the index of a cell among the cells with the same experts."""
        return cell // self.ep

    @property
    def world_size(self) -> int:
        return self.cells * self.pp

    def rank(self, stage: int, cell: int) -> int:
        """Returns the global rank of a stage's cell in Megatron's order: tp innermost, then cp, dp, pp."""
        return stage * self.cells + cell


@dataclass(frozen=True, kw_only=True)
class Layout(Mesh):
    """A resolved layout of a job: the mesh, batch sizes and recomputation, without nulls."""

    micro_batch_size: Count
    """The number of sequences in a micro-batch."""
    num_microbatches: Count
    """The number of micro-batches in a step on one data-parallel rank (gradient accumulation)."""
    global_batch_size: Count
    """The number of sequences in a step: `dp * micro_batch_size * num_microbatches`."""
    recompute: Recompute
    sequence_parallel: bool

    __hash__ = HashedOnce.__hash__

    @classmethod
    def plain(
        cls, *, pp: int = 1, vpp: int = 1, dp: int = 1, micro_batch_size: int = 1, num_microbatches: int = 1
    ) -> "Layout":
        """Returns a layout without tensor and context parallelism and without recomputation."""
        return cls(
            tp=1,
            pp=pp,
            vpp=vpp,
            cp=1,
            dp=dp,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            global_batch_size=dp * micro_batch_size * num_microbatches,
            recompute="none",
            sequence_parallel=False,
        )

    @property
    def batch_multiple(self) -> int:
        """The number of sequences of which every batch is a multiple."""
        return batch_multiple(self.pp, self.vpp, self.dp, self.micro_batch_size)

    @property
    def mesh(self) -> Mesh:
        """The mesh of this layout."""
        return Mesh(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=self.dp, ep=self.ep)

    @cached_property
    def bare(self) -> "Layout":
        """The layout reduced to its tensor-, pipeline-, data- and expert-parallel ranks and its model chunks.
        It is a cache key for results that depend only on these. Context-parallel ranks are counted as
        data-parallel ranks."""
        return replace(
            self,
            cp=1,
            dp=self.owners,
            micro_batch_size=1,
            num_microbatches=1,
            global_batch_size=self.owners,
            recompute="none",
            sequence_parallel=False,
        )

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The number of ranks along each axis, for display: (("TP", 2), ("DP", 4)). Axes with one rank are
        omitted, except DP."""
        axes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("DP", self.dp), ("EP", self.ep))
        return tuple((name, ranks) for name, ranks in axes if ranks > 1 or name == "DP")


def batch_multiple(pp: int, vpp: int, dp: int, micro: int) -> int:
    """Returns the number of sequences of which a global batch must be a multiple.

    Interleaved schedules need micro-batches in groups of `pp`.
    """
    return dp * micro * (pp if vpp > 1 else 1)
