"""`canzona doctor --links`: times all-reduces over all machines of a run in about a minute, compares them with the
run's cluster profile, and names machines that are slower than the others.

`python -m canzona_cli.bench.links DIR` is one of the check's ranks, which torchrun starts. Only ranks import torch.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from canzona_cli.bench.calibrate.profile import shorten
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.links import Links, strided_group
from canzona_cli.core.errors import ConfigError, ExitCode, problem_with, write_error
from canzona_cli.core.setup import ClusterConfig, Layout
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.machines import Machines
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.launch.view import TrainView
from canzona_cli.records.breakdown import describes_machine
from canzona_cli.records.codec import load, save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import Ending, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import RankRecord

WORKER_MODULE: Final = "canzona_cli.bench.links"
LIMIT_S: Final = 60.0
"""The seconds without progress after which a rank counts as hung."""
SLOW: Final = 1.5
"""The factor from which a time is too slow: compared with the profile, or with the fastest pair of machines. Ports or
NVLinks at half their rate take 1.84 to 1.97 times as long for 128 MiB on 8 to 32 GPUs; healthy H100 machines took 0.92
to 1.28 times the profile's time on 16 to 64 (nccl-tests, issue 309)."""
_SHARED: Final = "run.dir=DIR, a directory that every machine shares"


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """The measured time of an all-reduce over all ranks of some machines."""

    machines: tuple[int, ...]
    """The ranks of the nodes."""
    ranks: int
    bytes: int
    seconds: float

    @property
    def bus_gb_per_s(self) -> float:
        """The bytes that each rank sends in a ring, per second, which can be compared with a link's bandwidth."""
        return bus_gb_per_s(self, self.seconds)


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """The contents of links.json."""

    times: tuple[LinkTime, ...]


def bus_gb_per_s(transfer: LinkTime, seconds: float) -> float:
    """Returns the bandwidth of a ring that all-reduces a transfer's bytes in `seconds`."""
    return 2 * (transfer.ranks - 1) / transfer.ranks * transfer.bytes / seconds / 1e9


@dataclass(frozen=True, kw_only=True)
class LinkCheck:
    """The times of a run's links, and what they mean."""

    cluster: ClusterConfig
    names: tuple[str, ...]
    """The names of the machines, by node rank."""
    times: tuple[LinkTime, ...]

    @property
    def overall(self) -> tuple[LinkTime, ...]:
        """The all-reduces over all ranks, in ascending order of bytes."""
        return tuple(time for time in self.times if len(time.machines) == len(self.names))

    def predicted_s(self, time: LinkTime) -> float | None:
        """Returns the seconds of an all-reduce over all ranks by the profile; None if the profile describes no real
        machine."""
        if not describes_machine(self.cluster.device, calibrated=self.cluster.calibrated):
            return None
        group = strided_group(1, time.ranks, time.ranks, time.ranks // len(time.machines))
        return Links(cluster=self.cluster).all_reduce(time.bytes, group).seconds

    @property
    def slow_machines(self) -> tuple[str, ...]:
        """The machines that are slow by themselves, or with each of their neighbours. On CPUs, where other programs
        share the cores, none."""
        if self.cluster.device == "cpu":
            return ()
        return tuple(name for machine, name in enumerate(self.names) if self._is_slow(machine))

    def _is_slow(self, machine: int) -> bool:
        for size in (1, 2):
            times = [time for time in self.times if len(time.machines) == size < len(self.names)]
            its = [time.seconds for time in times if machine in time.machines]
            if its and min(its) > SLOW * min(time.seconds for time in times):
                return True
        return False

    @property
    def slower_than_profile(self) -> bool:
        """True if the largest all-reduce over all ranks takes much longer than the profile says."""
        predicted_s = self.predicted_s(self.overall[-1])
        return predicted_s is not None and self.overall[-1].seconds > SLOW * predicted_s

    @property
    def ok(self) -> bool:
        return not (self.slow_machines or self.slower_than_profile)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.ok else ExitCode.ENVIRONMENT

    def as_json(self) -> dict[str, object]:
        """Returns the output of `canzona doctor --links --json`. New keys do not change `version`."""
        return {
            "version": 1,
            "ok": self.ok,
            "exit_code": int(self.exit_code),
            "machines": list(self.names),
            "slow_machines": list(self.slow_machines),
            "all_reduces": [{**asdict(time), "predicted_s": self.predicted_s(time)} for time in self.overall],
            "parts": [asdict(time) for time in self.times if time not in self.overall],
        }


def rounds(machines: int, ranks_per_machine: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields groups of machines that are timed together: each machine alone, then each with its neighbours in a ring.
    Leaves out groups of one rank, and those that are the whole run."""
    if machines > 1 and ranks_per_machine > 1:
        yield [(machine,) for machine in range(machines)]
    if machines > 2:
        odd: list[tuple[int, ...]] = [(machine, machine + 1) for machine in range(1, machines - 1, 2)]
        yield [(machine, machine + 1) for machine in range(0, machines - 1, 2)]
        if machines % 2:
            yield odd
            yield [(machines - 1, 0)]
        else:
            yield [*odd, (machines - 1, 0)]


def check_links(config: RunConfig, view: TrainView, *, say: Callable[[str], None]) -> LinkCheck:
    """Times the links of a run's machines. Called on each of them; the results are the same on all.

    Args:
        config: the resolved configuration, with the settings of the Slurm step.

    Raises:
        ConfigError: there is only one rank, or a setting for several machines is missing.
        EnvironmentProblem: a machine lacks something, or did not arrive.
        CanzonaError: a rank failed or hung.
        KeyboardInterrupt: somebody stopped the ranks.
    """
    if config.gpus < 2:
        raise ConfigError(problem_with(config, "gpus", "a single rank has no links", "gpus=2 or more"))
    layout = Layout.plain(dp=config.gpus)
    config = fill(shorten(config), layout)
    preflight.check_machine(config, layout)
    preflight.check_nodes(config)
    nodes, node_rank = torchrun.node_count(config), config.cluster.node_rank or 0
    root = Path(f"{config.run.dir}/links").absolute() if nodes > 1 else Path(tempfile.mkdtemp(prefix="canzona-links-"))
    files = RunFiles(root)
    machines = Machines(files, node_rank=node_rank, nodes=nodes)
    if node_rank == 0:
        _write_inputs(files, config, layout)
        machines.gather(config.cluster.rdzv_endpoint or "", say=say)
    else:
        config = replace(config, cluster=replace(config.cluster, rdzv_endpoint=machines.arrive()))
    per_node = torchrun.ranks_per_node(config)
    ranks = range(node_rank * per_node, (node_rank + 1) * per_node)
    command = torchrun.build(config, root, module=WORKER_MODULE)
    outcome = Supervision(files, command, view, ranks=ranks, machines=machines, hang_timeout_s=LIMIT_S, say=say).run()
    if outcome.status in ("interrupted", "preempted"):
        raise KeyboardInterrupt
    if outcome.status != "done":
        raise outcome.error()
    times = load(files.root / "links.json", LinkTimes, key="run.dir", fix=_SHARED).times
    check = LinkCheck(cluster=config.cluster, names=machines.names, times=times)
    if nodes == 1:
        shutil.rmtree(root, ignore_errors=True)
    return check


def _write_inputs(files: RunFiles, config: RunConfig, layout: Layout) -> None:
    """Fills a new folder with what the ranks read; an earlier check's folder is removed."""
    try:
        shutil.rmtree(files.root, ignore_errors=True)
        for folder in (files.ranks, files.logs):
            folder.mkdir(parents=True)
        write_text_atomic(files.config, dump_resolved(config))
        save(files.layout, layout)
    except OSError as error:
        raise write_error("run.dir", files.root, error, fix=_SHARED) from None


SLOW_IMPORTS = IMPORTED_BY_ALL
_BUDGET_S = 1.0
"""The seconds for each size of all-reduces over all ranks."""
_REPETITIONS = 5
_CPU_SIZES, _GPU_SIZES = (64 << 10, 8 << 20), (1 << 20, 16 << 20, 128 << 20)
"""The bytes of the all-reduces. Larger ones would take minutes on links so slow that the check should find them."""


def time_links(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Times all-reduces over all ranks, then over single machines and pairs of machines."""
    import torch.distributed as dist

    from canzona_cli.bench.calibrate.collectives import KINDS, Members, Team, measure, wait
    from canzona_cli.bench.calibrate.profile import Recorder
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.megatron import parallel
    from canzona_cli.training.assemble import join

    config = load_resolved(files.config)
    world = join(config, read_layout(files.layout), alive=record.watchdog.progress)
    machines, per_machine, device = torchrun.node_count(config), torchrun.ranks_per_node(config), world.device
    team, nowhere = Team(rank, world.world_size, device), Recorder(files, writes=False)
    sizes = _CPU_SIZES if device.type == "cpu" else _GPU_SIZES
    members = Members(team, world.world_size)
    times = []
    for size in sizes:
        record.step += 1
        seconds = measure(members, "all_reduce", KINDS["all_reduce"], size, _BUDGET_S, nowhere)
        times.append(LinkTime(machines=(*range(machines),), ranks=team.size, bytes=size, seconds=seconds))
    for groups in rounds(machines, per_machine):
        record.step += 1
        ranks = [[node * per_machine + local for node in group for local in range(per_machine)] for group in groups]
        members = Members(team, len(ranks[0]), ranks)
        mine_s = [0.0]
        if members.member:
            run = KINDS["all_reduce"](size, members)
            mine_s = []
            for _ in range(1 + _REPETITIONS):  # the first call makes the communicator, and takes longest
                dist.barrier(group=members.group)
                wait(device)
                begin = time.perf_counter()
                run()
                wait(device)
                mine_s.append(time.perf_counter() - begin)
        best_s = [seconds for (seconds,) in team.gather([min(mine_s)])]
        times += [
            LinkTime(machines=group, ranks=len(its), bytes=size, seconds=max(best_s[each] for each in its))
            for group, its in zip(groups, ranks, strict=True)
        ]
    if rank == 0:
        save(files.root / "links.json", LinkTimes(times=tuple(times)))
    parallel.shutdown()
    return "done"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), time_links)
