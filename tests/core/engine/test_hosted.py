"""A host's new weights are taken over as on a GPU, on a stand-in."""

import pytest
import torch

from canzona_cli.core.engine.wire import Copy, Write, join_copies, join_writes, write_finite
from tests.cuda_stand_in import cuda_stand_in


def test_weights_are_written_where_they_are_finite_without_waiting_and_without_memory() -> None:
    """`torch.where` of two dtypes would work in the wider one: 4 bytes for each element of the largest matrices."""
    sources = [torch.full((8, 12), 1.001), torch.full((8, 12), torch.nan), torch.full((8, 12), 3.0).bfloat16()]
    targets = [torch.zeros(8, 12, dtype=torch.bfloat16) for _ in sources]
    rounded = torch.empty_like(targets[0])
    writes = [
        (place, Write(target=target, source=source, rounded=rounded))
        for place, (target, source) in enumerate(zip(targets, sources, strict=True))
    ]
    flags = torch.stack([source.float().sum() for source in sources])
    with cuda_stand_in() as record:
        write_finite(join_writes(writes), flags, on_host=False)
    assert record.host_reads == record.host_waits == []
    assert max(record.made_bytes) < rounded.nbytes
    # 1.001 rounds to 1 in bf16.
    assert [set(target.flatten().tolist()) for target in targets] == [{1.0}, {0.0}, {3.0}]


def test_each_weight_has_the_flag_at_its_own_place() -> None:
    """CPUs read the flags; places come in no order."""
    sources = [torch.full((2, 3), value) for value in (1.0, 2.0, 3.0)]
    targets = [torch.zeros(2, 3) for _ in sources]
    writes = [
        (place, Write(target=targets[place], source=sources[place], rounded=targets[place])) for place in (2, 0, 1)
    ]
    write_finite(join_writes(writes), torch.tensor([1.0, torch.inf, 3.0]), on_host=True)
    assert [set(target.flatten().tolist()) for target in targets] == [{1.0}, {0.0}, {3.0}]


@pytest.mark.parametrize("broken", [(), (3,), tuple(range(8))])
@pytest.mark.parametrize("on_host", [True, False])
def test_experts_are_written_together_but_judged_one_by_one(on_host: bool, broken: tuple[int, ...]) -> None:
    """Gate and up of each, as Megatron has them; a flag for every other place is somebody else's."""
    sources = torch.full((8, 3, 5), 2.0)
    targets = torch.zeros(8, 2, 3, 5, dtype=torch.bfloat16)
    flags = torch.full((16,), torch.nan)
    flags[::2] = 1.0
    for place in broken:
        flags[2 * place] = torch.inf
    rounded = torch.empty(8, 3, 5, dtype=torch.bfloat16)
    writes = [
        (2 * place, Write(target=targets[place, 1], source=sources[place], rounded=rounded[place]))
        for place in range(8)
    ]
    [together] = join_writes(writes)
    write_finite([together], flags, on_host=on_host)
    assert not targets[:, 0].any()
    assert [float(target.sum()) for target in targets[:, 1]] == [0.0 if place in broken else 30.0 for place in range(8)]


def test_copies_of_two_shapes_in_turn_are_two() -> None:
    """Downs and gates are in one message; clipping scales both."""
    message, buffer = torch.zeros(4 * (6 + 10)), torch.arange(4.0 * (6 + 10))
    parts = [6, 10] * 4
    copies = [
        Copy(target.view(2, -1), source.view(2, -1))
        for target, source in zip(message.split(parts), buffer.split(parts), strict=True)  # type: ignore[no-untyped-call]
    ]
    together = join_copies(copies)
    assert [tuple(copy.target.shape) for copy in together] == [(4, 2, 3), (4, 2, 5)]
    for copy in together:
        copy.run(0.5)
    assert torch.equal(message, 0.5 * buffer)
