"""Copies of a GPU's state are pinned up to a share of the machine's memory."""

from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from canzona_cli.checkpoint.snapshot import PINNED_SHARE, Snapshots
from canzona_cli.core.megatron.model import Trainee

KIB = 1 << 10


@pytest.mark.parametrize(("nodes", "held"), [(1, 2), (2, 4)])
def test_a_save_pins_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch, nodes: int, held: int) -> None:
    """Four ranks on one or two machines, of whose memory each rank may pin two or four tensors of five."""
    empty, asked = torch.empty, []

    def recorded(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * 2 * KIB / PINNED_SHARE))
    world = SimpleNamespace(device=torch.device("cuda"), world_size=4)
    setup = SimpleNamespace(cluster=SimpleNamespace(nodes=nodes))
    snapshots = Snapshots(cast(Trainee, SimpleNamespace(world=world, setup=setup)))
    state = torch.arange(KIB // 4, dtype=torch.float32)
    for _ in range(2):
        copies = [snapshots._copy(f"layers.{number}.q/master", state + number) for number in range(5)]
    assert asked == [True] * held + [False] * (5 - held), "made once, used again"
    for number, copy in enumerate(copies):
        assert torch.frombuffer(copy.data, dtype=torch.float32).equal(state + number)
