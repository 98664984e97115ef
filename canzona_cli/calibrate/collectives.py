"""Measures collectives on the real backend by kind, group size and bytes.

On CPU ranks, the result is the time that a collective adds to a loop of computation, with all groups of a
size at the same time. In a loop of collectives alone, every rank is awake, every cache is warm and every core
is free: in training steps of four ranks on two cores, collectives took two to six times as long as in such a
loop.

On GPUs, the skew between ranks after a barrier and the launch time would be as long as the collective.
Therefore a row of collectives is timed between two events on the device. Before the row, all-reduces
synchronise the devices and keep them busy until the host has launched the row.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from canzona_cli.calibrate.profile import Effort, Measurement, Recorder
from canzona_cli.calibrate.timing import Team, joined
from canzona_cli.config.schema import Collective
from canzona_cli.megatron.owner_bucket_group import device_seconds, grouped, share_together
from canzona_cli.megatron.owner_collectives import broadcast_each, reduce_each
from canzona_cli.run.machine import cores
from canzona_cli.run.statistics import Quartiles

LEAST, MOST = 5, 200
ROW = 16
"""The number of collectives between two events on a GPU."""
_CALLS = 4
"""The most collectives, with computation between them, of a sample on CPU ranks; long collectives have fewer."""
_SIDE, _TOUCHED = 384, 1 << 20
"""The computation between collectives on CPU ranks: a bf16 product of square matrices of this side, and this
many bytes read and written. This takes about a millisecond."""
_PILOTS = 2
_GATHERING_BYTES = 64 << 20
"""The bytes of each all-reduce before a row; the all-reduce takes at least 0.2 ms over NVLink."""
_HEAD_START = 1.5
"""The time that the devices are kept busy before a row, as a multiple of the host's time to launch the row.
Otherwise, for collectives of less than 30 us, the host's launches would be measured."""
_MOST_AHEAD = 16
_LEAST_S = 1e-6
_LARGE_S = 1.5
"""The limit in seconds for the repetitions of the largest size; a size that would take longer is not
measured."""

Transfer = Callable[[], None]
Make = Callable[[int, "Members"], Transfer]
"""A function that allocates buffers of a number of bytes and returns the collective on them."""


class Members:
    """This rank's process group of `size` consecutive ranks.

    Args:
        team: the ranks of one or more complete groups, which measure at the same time.
    """

    def __init__(self, team: Team, size: int) -> None:
        """Makes the groups. Collective over all ranks of the job."""
        self.team, self.size, self.device = team, size, team.device
        # Groups with the default backend (NCCL or gloo), which a run's collectives use as well.
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, team.size, size)]
        self.groups = len(groups)
        place, self.rank = divmod(team.rank, size)
        self._group = groups[place if team.member else 0]

    @property
    def group(self) -> dist.ProcessGroup:
        return joined(self._group)

    def buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a buffer of about `size` bytes whose length is divisible by the number of ranks."""
        per_rank = max(1, size // (torch.empty(0, dtype=dtype).element_size() * self.size))
        return torch.ones(per_rank * self.size, dtype=dtype, device=self.device)


def group_sizes(ranks: int) -> list[int]:
    """Returns the group sizes to measure: the powers of two from 2, and the number of ranks."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return sizes if ranks in sizes or ranks == 1 else [*sizes, ranks]


def measure_collectives(members: Members, effort: Effort, recorder: Recorder) -> None:
    """Measures all kinds and sizes of collectives in groups of one size. Collective over the members."""
    for kind, make in KINDS.items():
        if kind == "send" and members.size != 2:
            continue
        longest = 0.0
        for size in effort.sizes:
            longest = measure(members, kind, make, size, effort.item_s, recorder)
        if effort.large is not None and longest * effort.large / effort.sizes[-1] * LEAST < _LARGE_S:
            measure(members, kind, make, effort.large, effort.item_s, recorder)
    if members.device.type == "cuda":
        share = share_together(members.group, members.device, device_seconds)
        recorder.add(Measurement.of("grouped_collectives", [float(grouped(share))]))


def measure(members: Members, kind: Collective, make: Make, size: int, budget_s: float, recorder: Recorder) -> float:
    """Measures and records a collective of one kind and size; returns its median, the same on all members."""
    run, team = make(size, members), members.team
    if members.device.type == "cpu":
        values, busy = _between_work(members, run, budget_s)
    else:
        once, busy = _in_a_row(members, run), 0.0
        pilot = team.decide(min(once() for _ in range(_PILOTS)))
        values = _slowest(team, [once() for _ in range(_repetitions(budget_s / 2, pilot))])
    recorder.add(Measurement.of("collectives", values, kind, members.size, size, busy=busy))
    return Quartiles.of(values).median


def _between_work(members: Members, run: Transfer, budget_s: float) -> tuple[list[float], float]:
    """Measures a collective interleaved with matrix products on CPU ranks.

    Returns:
        For each repetition the seconds that the collective adds on the slowest rank, and the number of
        processor cores that one group's collective occupies.
    """
    team, factor = members.team, torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    product, touched = torch.empty_like(factor), torch.ones(_TOUCHED // 4)

    def row(calls: int, *, communicating: bool) -> tuple[float, float]:
        """Makes `calls` calls; returns the wall and processor seconds of each, on average."""
        team.meet()
        begin, worked = time.perf_counter(), time.process_time()
        for _ in range(calls):
            torch.mm(factor, factor, out=product)
            touched.neg_()
            if communicating:
                run()
        return (time.perf_counter() - begin) / calls, (time.process_time() - worked) / calls

    def pair(calls: int) -> tuple[tuple[float, float], tuple[float, float]]:
        return row(calls, communicating=True), row(calls, communicating=False)

    pilot = team.decide(min(sum(wall for wall, _ in pair(1)) for _ in range(_PILOTS)))
    calls = max(1, min(_CALLS, int(budget_s / LEAST / pilot)))
    pairs = [pair(calls) for _ in range(_repetitions(budget_s, calls * pilot))]
    with_it = _slowest(team, [wall for (wall, _), _ in pairs])
    without = _slowest(team, [wall for _, (wall, _) in pairs])
    # A difference within the noise of the computation counts as a microsecond.
    added = [max(_LEAST_S, both - alone) for both, alone in zip(with_it, without, strict=True)]
    processor = [statistics.median(both - alone for (_, both), (_, alone) in pairs)]
    busy = sum(of_rank for (of_rank,) in team.gather(processor)) / members.groups / Quartiles.of(added).median
    return added, min(max(busy, 0.0), float(cores()))


def _repetitions(budget_s: float, pilot: float) -> int:
    return min(MOST, max(LEAST, int(budget_s / max(pilot, 1e-6))))


def _slowest(team: Team, seconds: Sequence[float]) -> list[float]:
    """Returns the longest time over ranks of each repetition: a collective ends when the last rank is done."""
    return [max(each) for each in zip(*team.gather(seconds), strict=True)]


def _in_a_row(members: Members, run: Transfer) -> Callable[[], float]:
    """Prepares the measurement of a row on GPUs; returns a function that measures the seconds of one
    collective."""
    gathering = _all_reduce(_GATHERING_BYTES, members)

    def row() -> None:
        for _ in range(ROW):
            run()

    def launching() -> float:
        """Returns the seconds that the host takes to launch a row."""
        begin = time.perf_counter()
        row()
        return time.perf_counter() - begin

    row()  # the first call makes NCCL's communicator
    busy_s = min(device_seconds(gathering) for _ in range(_PILOTS))
    launch_s = min(launching() for _ in range(_PILOTS))
    needed = members.team.decide(_HEAD_START * launch_s / max(busy_s, 1e-9))
    ahead = min(max(1, math.ceil(needed)), _MOST_AHEAD)

    def once() -> float:
        members.team.meet()
        for _ in range(ahead):
            gathering()
        return device_seconds(row) / ROW

    return once


def _all_reduce(size: int, members: Members) -> Transfer:
    data = members.buffer(size, torch.float32).zero_()  # zeros: repeated sums would overflow
    return lambda: _finish(dist.all_reduce(data, group=members.group, async_op=True))


def _reduce(size: int, members: Members) -> Transfer:
    """Prepares asynchronous reductions to owners, which a run uses for gradients."""
    parts = _ranges(members.buffer(size, torch.float32).zero_(), members)
    return lambda: _finish(*reduce_each(parts, members.group))


def _broadcast(size: int, members: Members) -> Transfer:
    """Prepares asynchronous broadcasts from owners, which a run uses for weights."""
    parts = _ranges(members.buffer(size, torch.bfloat16), members)
    return lambda: _finish(*broadcast_each(parts, members.group))


def _ranges(data: torch.Tensor, members: Members) -> list[tuple[torch.Tensor, int]]:
    """Returns (range, owner) pairs: on GPUs one for each rank, because in a run all ranges share the link and
    one launch; on CPU ranks only one, because gloo runs each collective in its own thread."""
    if members.device.type == "cpu":
        return [(data, 0)]
    return [(part, owner) for owner, part in enumerate(data.chunk(members.size))]


def _all_gather(size: int, members: Members) -> Transfer:
    buffer = members.buffer(size, torch.bfloat16)
    shard = buffer.chunk(members.size)[members.rank]
    return lambda: _finish(dist.all_gather_into_tensor(buffer, shard, group=members.group, async_op=True))


def _reduce_scatter(size: int, members: Members) -> Transfer:
    buffer = members.buffer(size, torch.float32).zero_()
    shard = buffer.chunk(members.size)[members.rank]
    return lambda: _finish(dist.reduce_scatter_tensor(shard, buffer, group=members.group, async_op=True))


def _all_to_all(size: int, members: Members) -> Transfer:
    """Prepares an all-to-all of equal parts: `size` bytes go to the other ranks; one more part stays here."""
    sent = members.buffer(max(1, size * members.size // (members.size - 1)), torch.float32)
    received = torch.empty_like(sent)
    return lambda: _finish(dist.all_to_all_single(received, sent, group=members.group, async_op=True))


def _send(size: int, members: Members) -> Transfer:
    data = members.buffer(size, torch.bfloat16)
    if members.rank == 0:
        return lambda: dist.send(data, group=members.group, group_dst=1)

    def receive() -> None:
        dist.recv(data, group=members.group, group_src=0)

    return receive


def _finish(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None
        work.wait()


KINDS: Mapping[Collective, Make] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
