"""The assignment problem of the matrices of a pipeline stage, and one answer to it."""

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
from canzona_cli.planner.plan import Cell

Owners = dict[int, int]
"""The owner of each unit."""


def cell_at(number: int, mesh: Mesh) -> Cell:
    """Returns the cell with this number in its stage, `owner * tp + host`."""
    owner, host = divmod(number, mesh.tp)
    return Cell(owner=owner, host=host)


@dataclass(frozen=True, kw_only=True)
class PoolProblem:
    """The assignment problem of one pool of matrices: those of a pipeline stage, or of the experts of one
    expert-parallel rank in it."""

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

    def cell(self, owner: int, host: int = 0) -> Cell:
        """Returns the cell of an owner's host."""
        rank = self.pool.expert_rank
        return Cell(owner=owner, host=host) if rank is None else self._cells[owner]

    @cached_property
    def _cells(self) -> Sequence[Cell]:
        """The cells that store this problem's experts, by owner."""
        return [cell_at(cell, self.mesh) for cell in range(self.pool.expert_rank or 0, self.mesh.cells, self.mesh.ep)]

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
        """The seconds of each matrix summed over all ranks, with every matrix shared that may be."""
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
        """The kind of each unit; units of one kind may be exchanged."""
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
        """Adds up the elements of every bucket's busiest owner, which decide how long a bucket is
        communicated."""
        total = 0
        for parts in self.parts:
            held: Counter[int] = Counter()
            for part in parts:
                first = part.matrices[0]
                held[placed.cells[first].reduces(self.matrices[first], self.mesh)] += part.elements
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
        problem, tp = self.problem, self.problem.mesh.tp
        busy = [0.0] * problem.mesh.cells
        for index, cell in self.cells.items():
            first = cell.owner * tp
            if index not in self.shared:
                busy[first + cell.host] += problem.costs[index]
                continue
            for place in range(first, first + tp):
                busy[place] += problem.shares[index].each
        return rounded(max(busy))

    @cached_property
    def fullest(self) -> int:
        """The elements of matrices that the fullest cell holds."""
        problem, tp = self.problem, self.problem.mesh.tp
        held = [0] * problem.mesh.cells
        for index, cell in self.cells.items():
            for keeper, elements in cell.held(problem.matrices[index], tp, shared=index in self.shared):
                held[keeper.owner * tp + keeper.host] += elements
        return max(held)
