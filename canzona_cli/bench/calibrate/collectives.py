"""Times work on all ranks of a team, and measures collectives on the real backend by kind, group size and bytes.

On CPU ranks, the result is the time that a collective adds to a loop of computation, which all groups of the
same size run at once. A loop of nothing but collectives would be too fast, because every rank is awake, every
cache is warm and every core is free: in training steps of four ranks on two cores, collectives took two to
six times as long.

On GPUs, launching a collective may take as long as the collective itself, and the times at which ranks leave
a barrier differ by as much. Therefore a row of several collectives is timed between two events on the device.
Before the row, all-reduces synchronise the devices and keep them busy until the host has launched the row.
"""

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from canzona_cli.bench.calibrate.profile import Effort, Measurement, Recorder
from canzona_cli.core.host import cores
from canzona_cli.core.megatron.owner_bucket_group import device_seconds, grouped_time_ratio, is_grouped
from canzona_cli.core.megatron.owner_collectives import broadcast_each, reduce_each
from canzona_cli.core.megatron.parallel import gather
from canzona_cli.core.setup import Collective
from canzona_cli.records.statistics import Quartiles

Work = Callable[[], None]


LEAST_SAMPLES, MOST_SAMPLES = 3, 400
"""The minimum and maximum number of samples in a measurement. There are fewer than `LEAST_SAMPLES` only if they would
take more than four times the budget."""
_SAMPLE_S = 1e-3
"""The minimum length of a sample in seconds. A sample of faster work consists of several calls."""


class Team:
    """The first `size` ranks of the job, which measure while the other ranks sleep.

    The ranks synchronise over gloo even on GPUs, because a rank that waits in gloo does not occupy a core.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Makes the team's gloo group. All ranks of the job have to call this."""
        self.rank, self.size, self.device = rank, size, device
        self.member = rank < size
        self._group = dist.new_group(list(range(size)), backend="gloo", timeout=datetime.timedelta(minutes=10))

    def meet(self) -> None:
        """Waits until all members have called this."""
        if self.size > 1:
            dist.barrier(group=member_group(self._group))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gathers the values of all members on every member, in rank order."""
        return gather([*values], list[float], group=member_group(self._group))

    def decide(self, value: float) -> float:
        """Returns the largest of all members' values, so that all members make the same decision."""
        return max(member_value for (member_value,) in self.gather([value]))

    def samples(self, work: Work, budget_s: float) -> list[float]:
        """Measures the seconds of one call of `work` while all members run it; returns the samples of all
        members."""
        self.meet()
        return list(chain.from_iterable(self.gather(repeat(work, self.device, budget_s))))


def member_group(group: dist.ProcessGroup | int) -> dist.ProcessGroup:
    """Returns the result of `new_group` as a process group. This rank has to be a member of the group."""
    assert isinstance(group, dist.ProcessGroup), "not a member"
    return group


def repeat(work: Work, device: torch.device, budget_s: float) -> list[float]:
    """Measures the seconds of one call of `work`, with as many samples as the budget allows.

    The first call, which warms up, is not a sample. If it is short, neither is the second, which determines
    the number of calls in a sample.
    """
    first_s = time_calls(work, device)
    calls = max(1, round(_SAMPLE_S / max(time_calls(work, device), 1e-7))) if first_s < _SAMPLE_S else 1
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        samples.append(time_calls(work, device, calls))
        spent_s = time.perf_counter() - begin
        if (
            len(samples) >= MOST_SAMPLES
            or spent_s > 4 * budget_s
            or (spent_s > budget_s and len(samples) >= LEAST_SAMPLES)
        ):
            return samples


def time_calls(work: Work, device: torch.device, calls: int = 1) -> float:
    """Returns the mean seconds of `calls` consecutive calls, by `clock`."""
    wait(device)
    begin = clock(device)
    for _ in range(calls):
        work()
    wait(device)
    return (clock(device) - begin) / calls


def clock(device: torch.device) -> float:
    """Reads a clock in seconds with an arbitrary start: processor time on CPU ranks with one thread,
    otherwise wall time.

    A rank that shares a core sleeps while other ranks run. A sleep is longer than most measured operations,
    so wall time would include either a whole sleep or none. Processor time excludes sleep and other programs,
    but includes the effect of other ranks on the caches.
    """
    single_threaded = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if single_threaded else time.perf_counter()


def wait(device: torch.device) -> None:
    """Waits for a GPU to finish; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


LEAST, MOST = 5, 200
"""The minimum and maximum number of repetitions."""
ROW = 16
"""The number of collectives between two events on a GPU."""
_CALLS = 4
"""The maximum number of collectives, with computation between them, in a sample on CPU ranks. There are fewer
if they take long."""
_SIDE, _TOUCHED = 384, 1 << 20
"""The computation between collectives on CPU ranks: a bf16 matmul of square matrices with `_SIDE` rows, then
a pass that reads and writes `_TOUCHED` bytes. Together they take about a millisecond."""
_PILOTS = 2
"""The number of measurements that estimate a duration in advance."""
_SYNCHRONISING_BYTES = 64 << 20
"""The size in bytes of each all-reduce before a row, which takes at least 0.2 ms over NVLink."""
_HEAD_START = 1.5
"""The time for which the devices are kept busy before a row, as a multiple of the host's time to launch the
row. If it were shorter, the measured time of collectives under 30 us would be that of their launches."""
_MAX_SYNCHRONISING = 16
"""The maximum number of all-reduces before a row."""
_LEAST_S = 1e-6
_LARGE_S = 1.5
"""The time limit, in seconds, for measuring the largest size. If it would take longer, it is not measured."""

Transfer = Callable[[], None]
Make = Callable[[int, "Members"], Transfer]
"""A function that allocates buffers of a number of bytes, and returns a function that runs the collective on
them."""


class Members:
    """The process group of this rank.

    Args:
        team: the ranks of one or more complete groups, which measure at the same time.
        size: the number of ranks in a group.
        groups: the ranks of each group; None divides the team into groups of consecutive ranks.
    """

    def __init__(self, team: Team, size: int, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Makes the groups. All ranks of the job have to call this."""
        self.team, self.size, self.device = team, size, team.device
        ranks = [[*range(start, start + size)] for start in range(0, team.size, size)] if groups is None else groups
        # Use the default backend (NCCL or gloo), as a run's collectives do.
        made = [dist.new_group([*each]) for each in ranks]
        self.groups = len(made)
        index = next((index for index, each in enumerate(ranks) if team.rank in each), None)
        self.member = index is not None
        """True if this rank is in one of the groups."""
        self.rank = ranks[index or 0].index(team.rank) if self.member else 0
        self._group = made[index or 0]

    @property
    def group(self) -> dist.ProcessGroup:
        return member_group(self._group)

    def buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a buffer of about `size` bytes whose length is divisible by the number of ranks."""
        per_rank = max(1, size // (torch.empty(0, dtype=dtype).element_size() * self.size))
        return torch.ones(per_rank * self.size, dtype=dtype, device=self.device)


def group_sizes(ranks: int) -> list[int]:
    """Returns the group sizes to measure: the powers of two from 2 up to the number of ranks, and that
    number."""
    sizes = [2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks]
    return sizes if ranks in sizes or ranks == 1 else [*sizes, ranks]


def measure_collectives(members: Members, effort: Effort, recorder: Recorder) -> None:
    """Measures all kinds and sizes of collectives in groups of one size. All members have to call this."""
    for kind, make in KINDS.items():
        if kind == "send" and members.size != 2:
            continue
        seconds = 0.0
        for size in effort.sizes:
            seconds = measure(members, kind, make, size, effort.item_s, recorder)
        if effort.large is not None and seconds * effort.large / effort.sizes[-1] * LEAST < _LARGE_S:
            measure(members, kind, make, effort.large, effort.item_s, recorder)
    if members.device.type == "cuda":
        ratio = grouped_time_ratio(members.group, members.device, device_seconds)
        recorder.add(Measurement.of("grouped_collectives", [float(is_grouped(ratio))]))


def measure(members: Members, kind: Collective, make: Make, size: int, budget_s: float, recorder: Recorder) -> float:
    """Measures and records a collective of one kind and size; returns its median, the same on all members."""
    run, team = make(size, members), members.team
    busy_cores = 0.0
    if members.device.type == "cpu":
        values_s, busy_cores = _measure_between_work(members, run, budget_s)
    else:
        measure_once = _prepare_row(members, run)
        pilot_s = team.decide(min(measure_once() for _ in range(_PILOTS)))
        values_s = _slowest(team, [measure_once() for _ in range(_repetitions(budget_s / 2, pilot_s))])
    recorder.add(Measurement.of("collectives", values_s, kind, members.size, size, busy=busy_cores))
    return Quartiles.of(values_s).median


class _Times(NamedTuple):
    """The mean times of one iteration of a loop on this rank."""

    wall_s: float
    processor_s: float


def _measure_between_work(members: Members, run: Transfer, budget_s: float) -> tuple[list[float], float]:
    """Measures a collective interleaved with matmuls on CPU ranks.

    Returns:
        The seconds that the collective adds on the slowest rank, for each repetition, and the number of
        processor cores that the collective of one group occupies.
    """
    team, factor = members.team, torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    result, touched = torch.empty_like(factor), torch.ones(_TOUCHED // 4)

    def row(calls: int, *, communicating: bool) -> _Times:
        """Runs the computation `calls` times; returns the mean times of one iteration."""
        team.meet()
        begin, begin_processor = time.perf_counter(), time.process_time()
        for _ in range(calls):
            torch.mm(factor, factor, out=result)
            touched.neg_()
            if communicating:
                run()
        wall_s, processor_s = time.perf_counter() - begin, time.process_time() - begin_processor
        return _Times(wall_s=wall_s / calls, processor_s=processor_s / calls)

    def pair(calls: int) -> tuple[_Times, _Times]:
        return row(calls, communicating=True), row(calls, communicating=False)

    pilot_s = team.decide(min(sum(times.wall_s for times in pair(1)) for _ in range(_PILOTS)))
    calls = max(1, min(_CALLS, int(budget_s / LEAST / pilot_s)))
    pairs = [pair(calls) for _ in range(_repetitions(budget_s, calls * pilot_s))]
    both_s = _slowest(team, [both.wall_s for both, _ in pairs])
    alone_s = _slowest(team, [alone.wall_s for _, alone in pairs])
    # A difference within the noise of the computation is recorded as a microsecond.
    added_s = [max(_LEAST_S, both - alone) for both, alone in zip(both_s, alone_s, strict=True)]
    processor_s = statistics.median(both.processor_s - alone.processor_s for both, alone in pairs)
    total_processor_s = sum(seconds for (seconds,) in team.gather([processor_s]))
    busy_cores = total_processor_s / members.groups / Quartiles.of(added_s).median
    return added_s, min(max(busy_cores, 0.0), float(cores()))


def _repetitions(budget_s: float, pilot_s: float) -> int:
    return min(MOST, max(LEAST, int(budget_s / max(pilot_s, 1e-6))))


def _slowest(team: Team, seconds: Sequence[float]) -> list[float]:
    """Returns the longest time of each repetition over all ranks, because a collective ends when its last
    rank does."""
    return [max(seconds_of_ranks) for seconds_of_ranks in zip(*team.gather(seconds), strict=True)]


def _prepare_row(members: Members, run: Transfer) -> Callable[[], float]:
    """Prepares the measurement of `ROW` collectives in a row on GPUs. Returns a function that measures the
    seconds of one collective."""
    synchronise = _all_reduce(_SYNCHRONISING_BYTES, members)

    def row() -> None:
        for _ in range(ROW):
            run()

    def launch_seconds() -> float:
        """Returns the seconds that the host needs to launch `ROW` collectives."""
        begin = time.perf_counter()
        row()
        return time.perf_counter() - begin

    row()  # the first call makes NCCL's communicator
    busy_s = min(device_seconds(synchronise) for _ in range(_PILOTS))
    launch_s = min(launch_seconds() for _ in range(_PILOTS))
    needed = members.team.decide(_HEAD_START * launch_s / max(busy_s, 1e-9))
    count = min(max(1, math.ceil(needed)), _MAX_SYNCHRONISING)

    def measure_once() -> float:
        members.team.meet()
        for _ in range(count):
            synchronise()
        return device_seconds(row) / ROW

    return measure_once


def _all_reduce(size: int, members: Members) -> Transfer:
    data = members.buffer(size, torch.float32).zero_()  # zeros: repeated sums would overflow
    return lambda: _finish(dist.all_reduce(data, group=members.group, async_op=True))


def _reduce(size: int, members: Members) -> Transfer:
    """Prepares asynchronous reductions to owners, as a run uses them for gradients."""
    parts = _ranges(members.buffer(size, torch.float32).zero_(), members)
    return lambda: _finish(*reduce_each(parts, members.group))


def _broadcast(size: int, members: Members) -> Transfer:
    """Prepares asynchronous broadcasts from owners, as a run uses them for weights."""
    parts = _ranges(members.buffer(size, torch.bfloat16), members)
    return lambda: _finish(*broadcast_each(parts, members.group))


def _ranges(data: torch.Tensor, members: Members) -> list[tuple[torch.Tensor, int]]:
    """Returns (range, owner) pairs: on GPUs one for each rank, because in a run all ranges share the link and
    one launch; on CPU ranks only one, because gloo runs each collective in a separate thread."""
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
    """Prepares an all-to-all of equal parts. This rank sends `size` bytes to other ranks, and keeps one more
    part."""
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
