"""The problem of assigning the matrices of a pipeline stage to cells, and a solution."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from canzona_cli.config.schema import Mesh
from canzona_cli.costs.sharing import Share
from canzona_cli.costs.update import rounded
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.bounds import stage_bound
from canzona_cli.planner.buckets import Parameter, Part, Pool
from canzona_cli.planner.packing import HostPacker
from canzona_cli.planner.plan import Cell, per_cell

Owners = dict[int, int]
"""The owner of each unit."""


@dataclass(frozen=True, kw_only=True)
class PoolProblem:
    """The assignment problem of one pool: the matrices that all ranks of a pipeline stage store, or the
    experts of one expert-parallel rank in the stage."""

    pool: Pool
    matrices: Sequence[Matrix]
    costs: Sequence[float]
    """The seconds that a host takes to update each matrix alone."""
    shares: Mapping[int, Share]
    all_shared: bool
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
    def together(self) -> list[float]:
        """The seconds of each matrix, summed over all ranks, if every matrix is shared that may be shared."""
        each = {index: self.tp * share.each for index, share in self.shares.items()}
        return [each.get(index, cost) for index, cost in enumerate(self.costs)]

    @cached_property
    def bound(self) -> float:
        """The lower bound of the seconds of the stage's busiest cell."""
        return stage_bound(self.matrices, self.costs, self.pool.stage, self.mesh, self.shares)

    @cached_property
    def packer(self) -> HostPacker:
        return HostPacker(self.costs, self.tp, self.shares, all_shared=self.all_shared)

    @cached_property
    def kinds(self) -> dict[int, Hashable]:
        """The kind of each unit. Owners may exchange units of the same kind."""
        return {
            unit: tuple(
                sorted((self.costs[index], self.matrices[index].elements, index in self.shares) for index in members)
            )
            for unit, members in self.units.items()
        }

    def cost(self, unit: int) -> float:
        return sum(self.costs[index] for index in self.units[unit])

    def held(self, owners: Owners) -> list[list[int]]:
        """Lists the matrices of each owner, ascending."""
        held: list[list[int]] = [[] for _ in range(self.owners)]
        for unit, owner in owners.items():
            held[owner] += self.units[unit]
        return [sorted(matrices) for matrices in held]

    def height(self, owners: Owners) -> float:
        """Packs every owner's matrices onto its hosts and returns the seconds of the busiest cell."""
        return max(self.packer.height(matrices) for matrices in self.held(owners))

    def reach(self, placed: "Placed") -> float:
        """Adds up the elements of every bucket's busiest owner, which determine the time to communicate a
        bucket."""
        total = 0
        for parts in self.parts:
            held: Counter[int] = Counter()
            for part in parts:
                first = part.matrices[0]
                held[placed.cells[first].reducing_rank(self.matrices[first], self.mesh)] += part.elements
            total += max(held.values())
        return float(total)

    def least_reach(self) -> float:
        """Returns a lower bound of `reach`."""
        sizes = [[part.elements for part in parts] for parts in self.parts]
        return sum(max(sum(held) / self.owners, max(held)) for held in sizes)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An assignment: the cell of every matrix, with the load it results in."""

    problem: PoolProblem
    """The problem of the stage."""
    cells: Mapping[int, Cell]
    shared: Set[int]

    @cached_property
    def busiest(self) -> float:
        """The seconds of the busiest cell."""
        costs, shares = self.problem.costs, self.problem.shares
        placed = (
            (cell, shares[index].each, True) if index in self.shared else (cell, costs[index], False)
            for index, cell in self.cells.items()
        )
        return rounded(max(per_cell(placed, 0.0, cells=self.problem.mesh.cells, tp=self.problem.mesh.tp)))

    @cached_property
    def fullest(self) -> int:
        """The elements of matrices that the fullest cell holds."""
        matrices, tp = self.problem.matrices, self.problem.mesh.tp
        placed = (
            (cell, matrices[index].elements // tp, True)
            if index in self.shared
            else (cell, matrices[index].elements, False)
            for index, cell in self.cells.items()
        )
        return max(per_cell(placed, 0, cells=self.problem.mesh.cells, tp=tp))
