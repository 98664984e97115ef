"""One rank of a calibration: `python -m canzona_cli.bench.calibrate.worker DIR`, started by torchrun."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from canzona_cli.bench.calibrate.profile import (
    PART_NAMES,
    Facts,
    Orders,
    Part,
    Record,
    Recorder,
    shorten,
    verified_paths,
)
from canzona_cli.records.files import RunFiles, append_json_line
from canzona_cli.records.records import Ending, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import RankRecord

SLOW_IMPORTS = (*IMPORTED_BY_ALL, "canzona_cli.bench.calibrate.compute")


def calibrate_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Measures all parts on one rank. Rank 0 writes each number as soon as it is known."""
    started = time.monotonic()
    import torch

    from canzona_cli.bench.calibrate.collectives import Members, Team, group_sizes, measure_collectives
    from canzona_cli.bench.calibrate.compute import (
        measure_adamw,
        measure_arithmetic,
        measure_memory,
        measure_model,
        measure_updates,
    )
    from canzona_cli.bench.calibrate.fast_paths import compare_all
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.engine.build import try_graphs
    from canzona_cli.core.megatron import parallel
    from canzona_cli.core.optimizers import cpu_matmuls
    from canzona_cli.training.assemble import join

    orders = Orders.read(files)
    effort = orders.effort
    config = load_resolved(files.config)
    world = join(config, read_layout(files.layout), alive=record.watchdog.progress)
    ranks, device = world.world_size, world.device
    recorder = Recorder(files, writes=rank == 0)
    workers = Team(rank, orders.workers, device)
    all_ranks = Team(rank, ranks, device)
    # On CPUs all groups of a size measure at the same time, because they share the cores.
    sizes = {size: ranks // size * size if device.type == "cpu" else size for size in group_sizes(ranks)}
    groups = [Members(Team(rank, members, device), size) for size, members in sizes.items()]
    facts = Facts(
        torch=torch.__version__,
        backend=str(torch.distributed.get_backend()),
        threads=torch.get_num_threads(),
        workers=workers.size,
        bf16_in_fp32=cpu_matmuls.is_installed(),
    )
    recorder.report(Record(facts=facts))

    @contextmanager
    def part(name: Part) -> Iterator[None]:
        """Announces a part before the block, and records it as done after the block. All ranks wait for each
        other at both ends."""
        all_ranks.meet()
        record.step += 1
        if rank == 0:
            stage = {"time": time.time(), "event": "stage", "stage": PART_NAMES[name], "detail": ""}
            append_json_line(files.events, stage)
        yield
        all_ranks.meet()  # ranks that do not measure this part sleep here
        recorder.report(Record(done=(name,)))

    with part("arithmetic"):
        if workers.member:
            measure_arithmetic(workers, effort, recorder)
    with part("memory"):
        if workers.member:
            measure_memory(workers, effort, recorder)
    with part("adamw"):
        if workers.member:
            measure_adamw(workers, config, effort, recorder)
    if groups:
        with part("collectives"):
            for members in groups:
                if members.team.member:
                    measure_collectives(members, effort, recorder)
                all_ranks.meet()
    with part("model"):
        measure_model(all_ranks, shorten(config), world, effort, recorder)
    with part("updates"):
        try_graphs(config.setup, device)
        if workers.member:
            checked = Record(fast_paths=compare_all(device, record.watchdog.progress))
            recorder.report(checked)
            # Measure updates in the way in which runs with the new profile execute them.
            verified = verified_paths(config.cluster, checked)
            config = replace(config, cluster=replace(config.cluster, verified=verified))
            measure_updates(workers, config, effort, recorder, lambda: time.monotonic() - started)
    parallel.shutdown()
    return "done"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), calibrate_rank)
