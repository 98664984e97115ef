"""The data-parallel traffic of a pipeline stage: the buckets of its gradient buffers, in Megatron's order.

A `Chunk` is a bucket as the simulator and the planner's `Exposure` need it: the times of its reduction and
its gathering, and the module of the stage that completes its gradients in the backward pass. In the forward
pass, the same module is the first with a parameter in the bucket, so it is the first to need the gathered
parameters.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.costs.links import Group, Groups, Links, Transfer, strided_group
from canzona_cli.core.costs.model import StageTime
from canzona_cli.core.model.families import (
    family_of,
    layer_kinds,
    layer_models,
    small_parameters,
    stage_blocks,
    weights_of_layers,
)
from canzona_cli.core.model.family import Part
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.plan import Bucket, Range, SameObject, rank_buckets
from canzona_cli.core.planner.reduction import GATHERED_AHEAD, ReductionModel, adamw_apart
from canzona_cli.core.setup import Layout, ModelConfig, Setup

Stream = Literal["data", "experts", "adamw"]
"""A communicator of data-parallel traffic. Its transfers run one after another; transfers of different
communicators share the links. Experts that are divided among ranks have a separate communicator. Under a plan
on GPUs, AdamW's parameters have one too (`planner.reduction.adamw_apart`)."""
STREAMS: Final[tuple[Stream, ...]] = get_args(Stream)


class Chunk(NamedTuple):
    """A bucket with its two transfers."""

    module: int
    """The index, within the stage, of the module that completes the bucket's gradients in the backward pass
    and is the first to need its parameters in the forward pass."""
    reduce: Transfer
    gather: Transfer
    stream: Stream = "data"


def merge_streams(streams: Iterable[Sequence[Chunk]]) -> list[Chunk]:
    """Merges the chunks of several streams into the order in which buckets fill. The chunks of each stream
    are already in this order."""
    return list(heapq.merge(*streams, key=lambda chunk: -chunk.module))


@dataclass(frozen=True, kw_only=True)
class GatheringOrder:
    """The order in which a stage's chunks are gathered under a plan: model chunk by model chunk, first the
    chunks of AdamW's parameters, then those of matrices, both in the order of the forward pass."""

    overlapped: Sequence[int] = ()
    """The chunks gathered while matrices are updated: AdamW's parameters of the first model chunk."""
    afterwards: Sequence[int] = ()
    """The chunks gathered after the updates."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], adamw_count: int, places: Sequence[range]) -> "GatheringOrder":
        """Returns the order in which the engine gathers a stage's chunks
        (`megatron.owner_bucket_group.gathering_order`).

        Args:
            chunks: the chunks of AdamW's parameters, followed by the chunks of matrices.
            adamw_count: the number of chunks of AdamW's parameters.
            places: the places of the modules of each model chunk (`StageTime.places`).
        """
        overlapped: list[int] = []
        afterwards: list[int] = []
        for model_chunk, modules in enumerate(places):
            indices = [index for index in reversed(range(len(chunks))) if chunks[index].module in modules]
            adamw = [index for index in indices if index < adamw_count]
            matrices = [index for index in indices if index >= adamw_count]
            if model_chunk == 0:
                overlapped = adamw
            else:
                afterwards += adamw
            afterwards += matrices
        return cls(overlapped=overlapped, afterwards=afterwards)

    @property
    def early(self) -> list[int]:
        """The chunks whose gathering starts before the forward pass."""
        return [*self.overlapped, *self.afterwards[:GATHERED_AHEAD]]


def seconds_after_reduction(setup: Setup, layout: Layout, stage: int) -> float:
    """Returns the seconds of the blocking all-reduces that follow a stage's gradient reduction.

    With sequence parallelism the gradients of norms and routers are summed over TP (and here also those of biases
    that TP divides); a tied embedding's gradients are summed over the first and the last stage.
    """
    model, cluster = setup.model, setup.cluster
    links, gradient_bytes = Links(cluster=cluster), setup.train.gradient_bytes
    total = 0.0
    if layout.sequence_parallel and layout.tp > 1:
        elements = sum(n * small_parameters(kind, layout.tp) for kind, n in stage_blocks(model, layout, stage))
        size = elements * gradient_bytes
        total += links.all_reduce(size, Groups.of(layout, cluster).tp).seconds
    if model.tied_embeddings and layout.pp > 1 and stage in (0, layout.pp - 1):
        stride = layout.owners * layout.tp * (layout.pp - 1)
        both_ends = strided_group(stride, 2, layout.world_size, cluster.gpus_per_node)
        embedding_bytes = model.vocab_size * model.hidden_size // layout.tp * gradient_bytes
        total += links.all_reduce(embedding_bytes, both_ends).seconds
    return total


class ChunkBuilder:
    """The builder of the chunks of one stage."""

    def __init__(self, setup: Setup, layout: Layout, stage: int, time: StageTime, reductions: ReductionModel) -> None:
        self._setup, self._layout, self._stage = setup, layout, stage
        self._modules, self._places = time.modules, time.places
        self._links, self._groups = Links(cluster=setup.cluster), Groups.of(layout, setup.cluster)
        self._weight_bytes, self._gradient_bytes = setup.train.weight_bytes, setup.train.gradient_bytes
        self._limit = bucket_elements(setup, layout) if stage == 0 else None
        self._reductions = reductions
        layer = family_of(setup.model).modules(setup.model)
        self._part_of = {kind: work.part for work in layer for kind in work.weight.kinds}
        # A user's shapes may have other kinds of matrices. They are assumed to be in the part whose gradients
        # are ready last and whose weights are needed first, so that no step is predicted too short.
        self._default_part = layer[0].part
        self._first_modules: dict[SameObject[tuple[Range, ...]], int] = {}
        self._module_index = {(module.part, module.layer): index for index, module in enumerate(self._modules)}

    def everything(self, *, sharded: bool) -> list[Chunk]:
        """Builds the chunks of a stage whose matrices have no owners: those of the buffer with all
        parameters, followed by those of experts that are divided among ranks.

        Args:
            sharded: True for AdamW's `DistributedOptimizer`; False for `sc`, which all-reduces gradients and
                gathers nothing.
        """
        data = self._groups.data
        chunks = [self._even(*cut, data, sharded=sharded) for cut in self._cut(self._parameters(layers=True))]
        if self._layout.ep == 1:
            return chunks
        experts = [(module.weights, index) for index, module in enumerate(self._modules) if module.dispatched]
        of_experts = (self._even(*cut, self._groups.experts, sharded=sharded) for cut in self._cut(experts))
        return [*chunks, *(chunk._replace(stream="experts") for chunk in of_experts)]

    def adamw(self, *, planned: bool) -> list[Chunk]:
        """Builds the chunks of the parameters that AdamW updates: embedding, norms, biases, routers and output
        layer.

        Args:
            planned: True under a plan, False for layerwise.
        """
        stream: Stream = "adamw" if planned and adamw_apart(self._setup.cluster.device) else "data"
        return [
            self._even(*cut, self._groups.data, sharded=True)._replace(stream=stream)
            for cut in self._cut(self._parameters(layers=False))
        ]

    def matrices(self, buckets: Iterable[Bucket], matrices: Sequence[Matrix]) -> list[Chunk]:
        """Builds the chunks of the matrices' buckets, in the order in which buckets fill. The experts of the
        first expert-parallel rank represent the experts of all ranks."""
        streams: dict[int | None, list[Bucket]] = {}
        for bucket in rank_buckets(buckets, self._stage):
            streams.setdefault(bucket.expert_rank, []).append(bucket)
        return merge_streams(list(self._matrix_chunks(stream, matrices)) for stream in streams.values())

    def _matrix_chunks(self, buckets: Sequence[Bucket], matrices: Sequence[Matrix]) -> Iterator[Chunk]:
        """Yields the chunks of buckets that have the same `Bucket.expert_rank`."""
        for bucket, (reduced, gathered) in zip(buckets, self._reductions.in_sequence(buckets), strict=True):
            key = SameObject(bucket.ranges)  # the alternatives of a plan have the same
            if key not in self._first_modules:
                of_ranges = (matrices[index] for part in bucket.ranges for index in part.matrices)
                self._first_modules[key] = self.first_module(of_ranges)
            module = self._first_modules[key]
            stream: Stream = "data" if bucket.expert_rank is None else "experts"
            yield Chunk(module=module, reduce=reduced, gather=gathered, stream=stream)

    def _even(self, elements: int, module: int, group: Group, *, sharded: bool) -> Chunk:
        size = elements * self._gradient_bytes
        if not sharded:
            return Chunk(module=module, reduce=self._links.all_reduce(size, group), gather=Transfer())
        return Chunk(
            module=module,
            reduce=self._links.reduce_scatter(size, group),
            gather=self._links.all_gather(elements * self._weight_bytes, group),
        )

    def _parameters(self, *, layers: bool) -> list[tuple[int, int]]:
        """Lists the parameters of a buffer as (elements, module), in registration order. A norm or router
        belongs to the module that uses its output, a bias to its linear layer.

        Args:
            layers: False to leave out the matrices of the layers. Experts that are divided among ranks are
                never listed.
        """
        model = self._setup.model
        kinds, small = layer_models(model), Counter[tuple[ModelConfig, Part]]()
        for kind in layer_kinds(model):
            for parameter in family_of(kind).small(kind):
                small[kind, parameter.part] += parameter.elements
        parts = dict.fromkeys(self._part_of[weight.kind] for weight in weights_of_layers(model))
        registered: list[Part] = ["embedding", *parts, "output"]
        order = sorted(
            range(len(self._modules)),
            key=lambda place: (self._modules[place].layer, registered.index(self._modules[place].part)),
        )
        parameters: list[tuple[int, int]] = []
        for place in order:
            module = self._modules[place]
            outside, elements = module.part in ("embedding", "output"), 0
            # Of several modules of one part, the last has the norm and the router.
            if not outside and self._module_index[module.part, module.layer] == place:
                elements = small[kinds[module.layer], module.part]
            if outside or (layers and not module.dispatched):
                elements += module.weights
            if elements:
                parameters.append((elements, place))
        return parameters

    def _cut(self, parameters: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Cuts parameters into buckets, starting with the parameter that was registered last; returns
        (elements, first module) of each bucket.

        A bucket ends once it has `_limit` elements, and at the end of a model chunk.
        """
        ranges: list[tuple[int, int]] = []
        for places in reversed(self._places):
            elements, first_module = 0, places.stop
            for size, module in reversed(parameters):
                if module in places:
                    elements, first_module = elements + size, min(first_module, module)
                if self._limit is not None and elements >= self._limit:
                    ranges.append((elements, first_module))
                    elements, first_module = 0, places.stop
            if elements:
                ranges.append((elements, first_module))
        return ranges

    def first_module(self, matrices: Iterable[Matrix]) -> int:
        """Returns the `Chunk.module` of a bucket of these matrices."""
        places = {(matrix.kind, matrix.layer) for matrix in matrices}  # few, even with many thousands of experts
        return min(self._module_index[self._part_of.get(kind, self._default_part), layer] for kind, layer in places)
