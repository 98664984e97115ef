"""The problem of assigning the matrices of a pipeline stage to cells, and a solution."""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from canzona_cli.core.costs.sharing import SharedCosts
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.buckets import Parameter, Part, Pool
from canzona_cli.core.planner.packing import HostPacker
from canzona_cli.core.planner.plan import Cell, sum_by_cell
from canzona_cli.core.setup import Mesh

Owners = dict[int, int]
"""The owner of each unit, by the unit's number."""


@dataclass(frozen=True, kw_only=True)
class PoolProblem:
    """The assignment problem of one pool, which is either the matrices that all ranks of a pipeline stage
    store, or the experts of one expert-parallel rank in the stage."""

    pool: Pool
    matrices: Sequence[Matrix]
    costs: Sequence[float]
    """The seconds that a host takes to update each matrix alone; with strategy paper, its elements."""
    shared_costs: SharedCosts
    """The costs of the matrices that are shared, by index."""
    buckets: Sequence[Sequence[Parameter]]
    mesh: Mesh

    @cached_property
    def owners(self) -> int:
        """The number of possible owners of a unit."""
        return self.mesh.reducers(self.pool.expert_rank)

    @cached_property
    def tp(self) -> int:
        """The number of possible hosts of an owner's matrix; 1 for experts, whose owners are single ranks."""
        return self.mesh.tp if self.pool.expert_rank is None else 1

    @cached_property
    def parts(self) -> list[list[Part]]:
        """The parts of each bucket, in buffer order."""
        return [[part for parameter in bucket for part in parameter.parts] for bucket in self.buckets]

    @cached_property
    def units(self) -> dict[int, tuple[int, ...]]:
        """The matrices of each unit; units are in registration order."""
        parameters = (parameter for bucket in reversed(self.buckets) for parameter in reversed(bucket))
        return {part.unit: part.matrices for parameter in parameters for part in parameter.parts}

    @cached_property
    def packer(self) -> HostPacker:
        return HostPacker(self.costs, self.tp, self.shared_costs)

    @cached_property
    def kinds(self) -> dict[int, Hashable]:
        """The kind of each unit. Units of one kind have the same costs and sizes, so owners may exchange
        them."""

        def describe(index: int) -> tuple[float, int, bool]:
            return self.costs[index], self.matrices[index].elements, index in self.shared_costs

        return {unit: tuple(sorted(map(describe, members))) for unit, members in self.units.items()}

    def cost(self, unit: int) -> float:
        return sum(self.costs[index] for index in self.units[unit])

    def matrices_of_owners(self, owners: Owners) -> list[list[int]]:
        """Lists the matrices of each owner in ascending order."""
        by_owner: list[list[int]] = [[] for _ in range(self.owners)]
        for unit, owner in owners.items():
            by_owner[owner] += self.units[unit]
        return [sorted(matrices) for matrices in by_owner]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a pipeline stage, which are divided among ranks. All expert-parallel ranks have equal experts."""

    problem: PoolProblem
    """The problem of the first expert-parallel rank."""
    ranks: Sequence[Sequence[int]]
    """The matrices of each expert-parallel rank, in the same order."""

    def in_order(self, owners: Owners) -> list[int]:
        """Returns the owner of each of a rank's matrices, given the owners of the first rank's units."""
        return [owners[self.problem.matrices[index].unit] for index in self.ranks[0]]

    def cells(self, rank: int, owners: Sequence[int]) -> Iterator[tuple[int, Cell]]:
        """Yields each matrix of an expert-parallel rank with the cell of its owner.

        Args:
            owners: the owner of each matrix, see `in_order`.
        """
        mesh = self.problem.mesh
        cells = [Cell.at(cell, mesh) for cell in mesh.expert_cells(rank)]
        return zip(self.ranks[rank], map(cells.__getitem__, owners), strict=True)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """An assignment of a stage's matrices to cells."""

    problem: PoolProblem
    """The problem of the stage."""
    cells: Mapping[int, Cell]
    shared: Set[int]
    """The indices of the shared matrices."""

    @cached_property
    def fullest(self) -> int:
        """The number of matrix elements on the fullest cell."""
        matrices, tp = self.problem.matrices, self.problem.mesh.tp
        placed = (
            (cell, matrices[index].elements // tp, True)
            if index in self.shared
            else (cell, matrices[index].elements, False)
            for index, cell in self.cells.items()
        )
        return max(sum_by_cell(placed, 0, cells=self.problem.mesh.cells, tp=tp))
