"""The order of passes that is simulated, and that memory is counted from, is the one Megatron-core runs."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from canzona_cli.core.costs.buffers import layers_in_flight, warmup_forwards
from canzona_cli.core.setup.stages import chunk_layers
from canzona_cli.core.simulate.iteration import _one_f_one_b
from tests.sizes import layout


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 1, 1), (4, 1, 6), (2, 2, 2), (2, 3, 8), (4, 2, 8), (4, 4, 4)])
def test_passes_come_in_megatrons_order(pp: int, vpp: int, count: int) -> None:
    mesh = layout(pp=pp, vpp=vpp, count=count)
    table = get_schedule_table(count, vpp, pp)
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        virtual = None if vpp == 1 else vpp
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        _, _, ahead, _ = get_pp_rank_microbatches(count, vpp, pp, p2p_communicator=communicator)
        assert warmup_forwards(mesh, stage) == ahead
        steps = _one_f_one_b(mesh, stage)
        assert [(one.micro, one.chunk) for one in steps if one.direction == "forward"] == table
        assert [(one.micro, vpp - 1 - one.chunk) for one in steps if one.direction == "backward"] == table
        # Of uneven stages, the layers of each chunk.
        layers = 2 * pp * vpp - 2 if pp * vpp > 2 else 3
        held = [len(chunk_layers(layers, mesh, stage, chunk)) for chunk in range(vpp)]
        in_flight = accumulate((1 if one.direction == "forward" else -1) * held[one.chunk] for one in steps)
        assert layers_in_flight(layers, mesh, stage) == max(in_flight)
        kept = [0]
        for one in steps:
            kept.append(kept[-1] + (1 if one.direction == "forward" else -1))
        assert [one.direction for one in steps].index("backward") == min(ahead + 1, len(table))
        assert max(kept) == min(ahead + 1, len(table))
        assert kept[-1] == 0
