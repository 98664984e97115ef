"""Messages between ranks arrive unchanged and without pickles: in every test here, reading a pickle fails."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from canzona_cli.core.errors import Problem
from canzona_cli.core.megatron.parallel import exchange_objects_as_json, gather
from canzona_cli.core.reading import Damaged, parse
from tests.dist.ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Said:
    """A message with a field of every kind that records have."""

    text: str
    number: float
    large: int
    found: Mapping[str, float]
    problems: tuple[Problem, ...] = ()


def said(rank: int) -> Said:
    problems = tuple(Problem(key=f"rank {rank}", value=number, reason="é" * 50 * rank) for number in range(rank))
    return Said(text="" if rank else "é\n", number=math.pi * rank, large=1 << 62, found={"x": 0.1}, problems=problems)


def work() -> tuple[list[Said], float, list[object]]:
    """A record of another length on each rank; a number that JSON has no word for; what Megatron asks."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    heard = gather(said(rank), Said)
    odd = gather(Said(text="", number=math.inf, large=0, found={"x": math.nan}), Said)[1 - rank]
    assert math.isnan(odd.found["x"])
    own: object = [(None, False), ((("lr", 0.1 * rank),), True)]
    everyone: list[object] = [None, None]
    with exchange_objects_as_json():
        torch.distributed.all_gather_object(everyone, own)
    with pytest.raises(AssertionError, match="nothing by pickles"):
        torch.distributed.all_gather_object([*everyone], own)
    return heard, odd.number, everyone


def test_records_of_any_length_arrive_on_all_ranks_in_order_and_pickles_nowhere() -> None:
    asked = [((None, False), ((("lr", 0.1 * rank),), True)) for rank in range(2)]
    for heard, number, everyone in run_ranks(2, work):
        assert heard == [said(0), said(1)]
        assert number == math.inf
        assert everyone == asked


def test_what_is_no_such_record_is_refused() -> None:
    with pytest.raises(Damaged):
        parse(Said, b"\x80\x04\x95 a pickle")
