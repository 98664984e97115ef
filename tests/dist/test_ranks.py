"""The ranks that tests start."""

import os
import signal
import time

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.dist.ranks import run_ranks


def test_the_store_outlives_the_first_answer() -> None:
    """Rank 0 has it. Rank 1 may still be making a group when rank 0 is done."""

    def rank() -> str:
        torch.distributed.init_process_group("gloo")
        store = distributed_c10d._get_default_store()
        if torch.distributed.get_rank() == 0:
            store.set("told", "by rank 0")
            return "by rank 0"
        time.sleep(1)
        return store.get("told").decode()

    assert run_ranks(2, rank) == ["by rank 0", "by rank 0"]


def test_a_failure_is_reported_while_other_ranks_wait() -> None:
    def rank() -> None:
        torch.distributed.init_process_group("gloo")
        if torch.distributed.get_rank() == 1:
            raise ValueError("of rank 1")
        time.sleep(600)

    with pytest.raises(AssertionError, match=r"(?s)ValueError: of rank 1.*rank 0 hangs"):
        run_ranks(2, rank)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_rank_is_missed_while_the_other_has_answered(dying: int) -> None:
    def rank() -> None:
        if int(os.environ["RANK"]) == dying:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match=rf"rank {dying} died without a word$"):
        run_ranks(2, rank)
