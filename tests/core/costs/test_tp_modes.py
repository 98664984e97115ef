"""The prices of the TP modes of Megatron's Muon against its own code."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch.utils.flop_counter import FlopCounterMode

from canzona_cli.core.costs.tp_modes import distributed_time, distributed_work, uncut_side
from canzona_cli.core.costs.update import seconds
from canzona_cli.core.optimizers.facts import Algorithm
from tests import sizes
from tests.sizes import H100

MUON = Algorithm(name="muon")


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (64, 64)])
def test_the_work_on_a_fragment_is_that_of_emerging_optimizers(
    shape: tuple[int, int], shard_dim: Literal[0, 1]
) -> None:
    """`newton_schulz_tp` transposes fragments that are cut by rows, whatever their shape, with several TP ranks."""
    matrix, tp = sizes.matrix(0, *shape, shard_dim), 4
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(matrix.fragment_shape(tp)), 5, "quintic", transpose=shard_dim == 0)
    work = distributed_work(MUON, shape, uncut_side(matrix), tp)
    assert work.matmul_flops == counter.get_total_flops()


def test_experts_that_no_tp_rank_shares_have_squares_of_the_side_that_tp_would_leave_whole() -> None:
    """Megatron sets their `partition_dim` too. Qwen3-30B-A3B: squares of 2,048, never of 768 or 1,536."""
    down = sizes.matrix(0, 2048, 768, None)
    assert uncut_side(replace(down, kind="down")) == 2048
    assert uncut_side(replace(sizes.matrix(0, 1536, 2048, None), kind="fc1")) == 2048


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_fragment_takes_less_time_than_the_matrix_and_more_than_its_share(tp: int) -> None:
    """A layer's largest matrices in Qwen3-32B."""
    for matrix in (sizes.matrix(0, 51200, 5120, 0), sizes.matrix(0, 5120, 25600, 1)):
        shape = matrix.shape
        whole_s = seconds(MUON, *shape, H100, "megatron")
        assert whole_s / tp < distributed_time(MUON, matrix, tp, H100).alone_s < whole_s
