"""The traffic of data parallelism: the chunks of a stage's gradient buffers,
as Megatron fills and sends them.

A chunk is a bucket as the simulator needs it: how long its reduction and its gathering take, and which module
of the stage completes its gradients (the first one of the forward pass that has a parameter in it) and needs
its parameters.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import bucket_elements, element_bytes
from canzona_cli.costs.links import Groups, Links, Transfer, strided
from canzona_cli.costs.model import StageTime
from canzona_cli.model.families import family_of
from canzona_cli.model.family import Part
from canzona_cli.model.matrices import Matrix
from canzona_cli.planner.plan import Bucket
from canzona_cli.planner.reduction import ReductionModel


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One bucket on its way."""

    module: int
    """Number of the stage's module that completes it in the backward pass and needs it first in the forward pass."""
    reduce: Transfer
    gather: Transfer


def after_reduction(config: RunConfig, layout: Layout, stage: int) -> float:
    """Seconds of what follows it, synchronous: norms' gradients over TP under sequence parallelism, a tied
    embedding's over its two stages."""
    model, cluster = config.model, config.cluster
    links, (_, grad) = Links(cluster=cluster), element_bytes(config)
    total = 0.0
    if layout.sequence_parallel and layout.tp > 1:
        norms = sum(norm.elements for norm in family_of(model).norms(model) if "tp" in norm.copies)
        size = model.num_layers // layout.pp * norms * grad
        total += links.all_reduce(size, Groups.of(layout, cluster).holding("tp")).seconds
    if model.tied_embeddings and layout.pp > 1 and stage in (0, layout.pp - 1):
        apart = layout.owners * layout.tp * (layout.pp - 1)
        ends = strided(apart, 2, layout.world_size, cluster.gpus_per_node)
        total += links.all_reduce(model.vocab_size * model.hidden_size // layout.tp * grad, ends).seconds
    return total


class Buffers:
    """Builds a stage's chunks."""

    def __init__(self, config: RunConfig, layout: Layout, stage: int, time: StageTime) -> None:
        self._config, self._layout, self._stage, self._places = config, layout, stage, time.places
        modules = self._modules = time.modules
        self._links, self._group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).data
        self._width, self._grad = element_bytes(config)
        self._reductions = ReductionModel(config, layout)
        self._limit = bucket_elements(config, layout) if stage == 0 else None
        layer = family_of(config.model).work(config.model)
        self._part_of = {kind: work.part for work in layer for kind in work.weight.kinds}
        # The part that is ready last and needed first: the cautious guess for matrices of a user's own kinds.
        self._first = layer[0].part
        self._number = {(module.part, module.layer): number for number, module in enumerate(modules)}

    def everything(self, *, sharded: bool) -> list[Chunk]:
        """One buffer for all parameters: AdamW's (`DistributedOptimizer`), or, all-reduced, that of `sc`."""
        return [self._even(size, module, sharded=sharded) for size, module in self._cut(self._parameters(layers=True))]

    def others(self) -> list[Chunk]:
        """The buffer of what AdamW updates besides the matrices: embedding, norms, output layer."""
        return [self._even(size, module, sharded=True) for size, module in self._cut(self._parameters(layers=False))]

    def matrices(self, buckets: Iterable[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """The matrices' buckets, in the order they fill."""
        of_stage = [bucket for bucket in buckets if bucket.stage == self._stage]
        return [
            Chunk(
                module=min(self._module(matrices[index]) for part in bucket.ranges for index in part.matrices),
                reduce=reduced,
                gather=gathered,
            )
            for bucket, (reduced, gathered) in zip(of_stage, self._reductions.in_turn(of_stage), strict=True)
        ]

    def _even(self, elements: int, module: int, *, sharded: bool) -> Chunk:
        if not sharded:
            reduced = self._links.all_reduce(elements * self._grad, self._group)
            return Chunk(module=module, reduce=reduced, gather=Transfer())
        return Chunk(
            module=module,
            reduce=self._links.reduce_scatter(elements * self._grad, self._group),
            gather=self._links.all_gather(elements * self._width, self._group),
        )

    def _parameters(self, *, layers: bool) -> list[tuple[int, int]]:
        """(elements, module) in registration order; norms count to the module behind them."""
        model, parameters = self._config.model, []
        family, norms = family_of(model), Counter[Part]()
        for norm in family.norms(model):
            norms[norm.part] += norm.elements
        part_of = {work.weight.name: work.part for work in family.work(model)}
        registered: list[Part] = ["embedding", *(part_of[weight.name] for weight in family.weights(model)), "output"]
        order = sorted(
            range(len(self._modules)), key=lambda n: (self._modules[n].layer, registered.index(self._modules[n].part))
        )
        for number in order:
            module = self._modules[number]
            weights = module.weights if layers or module.part in ("embedding", "output") else 0
            parameters.append((weights + norms[module.part], number))
        return [(size, number) for size, number in parameters if size]

    def _cut(self, parameters: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(elements, module) of each bucket: last registered first, closed once it holds enough,
        or all of a chunk."""
        ranges: list[tuple[int, int]] = []
        for places in reversed(self._places):
            filled, first = 0, places.stop
            for size, module in reversed(parameters):
                if module in places:
                    filled, first = filled + size, min(first, module)
                if self._limit is not None and filled >= self._limit:
                    ranges.append((filled, first))
                    filled, first = 0, places.stop
            if filled:
                ranges.append((filled, first))
        return ranges

    def _module(self, matrix: Matrix) -> int:
        return self._number[self._part_of.get(matrix.kind, self._first), matrix.layer]
