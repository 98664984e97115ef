"""One rank of `canzona doctor --links`: `python -m canzona_cli.bench.links_worker DIR`, started by torchrun."""

import sys
import time
from pathlib import Path

from canzona_cli.bench.links import LinkTime, LinkTimes, rounds
from canzona_cli.launch.torchrun import node_count, ranks_per_node
from canzona_cli.records.codec import save
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import Ending, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import RankRecord

SLOW_IMPORTS = IMPORTED_BY_ALL
_BUDGET_S = 1.0
"""The seconds for each size of all-reduces over all ranks."""
_REPETITIONS = 5
_CPU_SIZES, _GPU_SIZES = (64 << 10, 8 << 20), (1 << 20, 16 << 20, 128 << 20)
"""The bytes of the all-reduces. Larger ones would take minutes on links so slow that the check should find them."""


def time_links(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Times all-reduces over all ranks, then over single machines and pairs of machines."""
    import torch.distributed as dist

    from canzona_cli.bench.calibrate.collectives import KINDS, Members, measure
    from canzona_cli.bench.calibrate.profile import Recorder
    from canzona_cli.bench.calibrate.timing import Team, wait
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.megatron import parallel
    from canzona_cli.training.assemble import join

    config = load_resolved(files.config)
    world = join(config, read_layout(files.layout), alive=record.watchdog.progress)
    machines, per_machine, device = node_count(config), ranks_per_node(config), world.device
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
