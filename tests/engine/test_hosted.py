"""A host's new weights are taken over as on a GPU, on a stand-in."""

import torch

from canzona_cli.engine.wire import Write, write_finite
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
        write_finite(writes, flags, on_host=False)
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
    write_finite(writes, torch.tensor([1.0, torch.inf, 3.0]), on_host=True)
    assert [set(target.flatten().tolist()) for target in targets] == [{1.0}, {0.0}, {3.0}]
