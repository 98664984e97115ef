"""The layers of each pipeline stage and model chunk.

With `pp` stages of `vpp` model chunks, a model is cut into `pp * vpp` parts in order; chunk c of stage s is
part `c * pp + s`. If the layers do not divide evenly, the loss counts as a layer of the last part, and
possibly the embedding as a layer of the first part. These parts then have one layer fewer than the others.
Llama-3.1 405B with its 126 layers was trained in this way on 16 stages (arXiv 2407.21783, section 3.3.2).

No setting is needed, because for given layers, stages and chunks at most one way of counting gives whole
layers. The exceptions are a model of one part, which is not cut, and a model of two parts, which is cut in the
same place whether both the embedding and the loss count or neither does.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from canzona_cli.core.errors import Problem
from canzona_cli.core.setup import Mesh


class CountedParts(NamedTuple):
    """The parts of the model that count as additional layers."""

    embedding: bool
    loss: bool


COUNTINGS = (CountedParts(False, False), CountedParts(False, True), CountedParts(True, True))
"""The possible ways of counting, in order of preference."""


def count_parts_as_layers(layers: int, parts: int) -> CountedParts | None:
    """Decides whether the embedding and the loss count as layers when `layers` layers are cut into `parts`
    parts with at least one layer each. Returns None if no way of counting gives whole layers."""
    for counting in COUNTINGS:
        layers_each, rest = divmod(layers + sum(counting), parts)
        if rest == 0 and layers_each - any(counting) >= 1:
            return counting
    return None


@lru_cache(maxsize=1024)
def possible_pp(layers: int) -> tuple[int, ...]:
    """Returns, in ascending order, the possible numbers of pipeline stages for `layers` layers."""
    return tuple(pp for pp in range(1, layers + 1) if count_parts_as_layers(layers, pp) is not None)


@lru_cache(maxsize=1024)
def possible_vpp(layers: int, pp: int) -> tuple[int, ...]:
    """Returns, in ascending order, the possible numbers of model chunks per stage with `pp` stages. For a
    single stage, which has no other stage to interleave with, only 1 is possible."""
    if pp == 1:
        return (1,)
    return tuple(vpp for vpp in range(1, layers // pp + 2) if count_parts_as_layers(layers, pp * vpp) is not None)


def pipeline_problems(layers: int, pp: int | None, vpp: int | None) -> Iterator[Problem]:
    """Yields a problem if `layers` cannot be cut into `pp` stages of `vpp` model chunks each. None stands for
    a value that is chosen later."""
    if pp is None:
        possible = sorted({chunks for stages in possible_pp(layers) for chunks in possible_vpp(layers, stages)})
        if vpp is not None and vpp not in possible:
            reason = f"cannot split the stages of {layers} layers into {vpp} chunks"
            yield Problem("parallel.vpp", reason, f"use one of {number_list(possible)}", value=vpp)
        return
    chunks = vpp or 1
    if count_parts_as_layers(layers, pp) is None:
        reason = f"cannot split {layers} layers into {pp} stages, even if the loss or the embedding counts as a layer"
        yield Problem("parallel.pp", reason, f"use one of {number_list(possible_pp(layers))}", value=pp)
    elif chunks > 1 and pp == 1:
        reason = "model chunks interleave pipeline stages, but with parallel.pp=1 there is only one stage"
        yield Problem("parallel.vpp", reason, "use parallel.vpp=1, or a larger parallel.pp", value=vpp)
    elif count_parts_as_layers(layers, pp * chunks) is None:
        reason = f"cannot split {layers} layers into {pp} stages of {chunks} chunks"
        fix = f"use one of {number_list(possible_vpp(layers, pp))}"
        yield Problem("parallel.vpp", reason, fix, value=vpp)


def number_list(numbers: Sequence[int]) -> str:
    """Formats numbers for a message, separated by commas."""
    return ", ".join(str(number) for number in numbers)


@lru_cache(maxsize=1024)
def cut_layers(layers: int, parts: int) -> tuple[range, ...]:
    """Returns the layers of each part of the model, in order."""
    counting = count_parts_as_layers(layers, parts)
    assert counting is not None, f"{layers} layers in {parts} parts should have been refused"
    layers_each = (layers + sum(counting)) // parts
    starts = [0, *(part * layers_each - counting.embedding for part in range(1, parts)), layers]
    return tuple(range(start, end) for start, end in pairwise(starts))


def chunk_layers(layers: int, mesh: Mesh, stage: int, chunk: int) -> range:
    """Returns the indices of the layers in a stage's model chunk, in a model with `layers` layers."""
    return cut_layers(layers, mesh.pp * mesh.vpp)[chunk * mesh.pp + stage]


def stage_layers(layers: int, mesh: Mesh, stage: int) -> int:
    """Returns the number of layers of a stage, which does not depend on the number of model chunks."""
    return len(cut_layers(layers, mesh.pp)[stage])


def most_layers(layers: int, mesh: Mesh) -> int:
    """Counts the layers of the stage with the most layers, which is the first or the second stage."""
    return max(stage_layers(layers, mesh, stage) for stage in range(min(2, mesh.pp)))
