"""One rank of a calibration: `python -m canzona_cli.calibrate.worker DIR`, started by torchrun."""

import json
import sys
import time
from pathlib import Path

from canzona_cli.calibrate.effort import Orders
from canzona_cli.calibrate.measurement import WHAT, Facts, Part, Recorder
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.training.process import run_rank
from canzona_cli.training.records import Ending, RankRecord


def calibrate_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Measure everything; rank 0 writes each number down as soon as it is known."""
    begun = time.monotonic()
    import torch

    from canzona_cli.calibrate.collectives import Members, group_sizes, measure_collectives
    from canzona_cli.calibrate.compute import measure_arithmetic, measure_memory
    from canzona_cli.calibrate.model_step import measure_model
    from canzona_cli.calibrate.profile import shortened
    from canzona_cli.calibrate.team import Team
    from canzona_cli.calibrate.updates import measure_adamw, measure_updates
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.config.schema import Layout
    from canzona_cli.megatron import parallel
    from canzona_cli.training.assemble import join

    orders = Orders.read(files)
    spend = orders.effort
    config = load_resolved(files.config)
    world = join(config, Layout(**json.loads(files.layout.read_text(encoding="utf-8"))))
    ranks, device = world.world_size, world.device
    recorder = Recorder(files, writes=rank == 0)
    workers = Team(rank, orders.workers, device)
    everybody = Team(rank, ranks, device)
    groups = [Members(Team(rank, size, device)) for size in group_sizes(ranks)]
    recorder.facts(
        Facts(
            torch=torch.__version__,
            backend=str(torch.distributed.get_backend()),
            threads=torch.get_num_threads(),
            workers=workers.size,
        )
    )

    def begin(part: Part) -> None:
        everybody.meet()
        record.step += 1
        if rank == 0:
            stage = {"time": time.time(), "event": "stage", "stage": WHAT[part], "detail": ""}
            append_json_line(files.events, stage)

    def done(part: Part) -> None:
        everybody.meet()  # those that had nothing to do sleep here
        recorder.done(part)

    begin("arithmetic")
    if workers.member:
        measure_arithmetic(workers, spend, recorder)
    done("arithmetic")
    begin("memory")
    if workers.member:
        measure_memory(workers, spend, recorder)
    done("memory")
    begin("adamw")
    if workers.member:
        measure_adamw(workers, config, spend, recorder)
    done("adamw")
    if groups:
        begin("collectives")
        for members in groups:
            if members.team.member:
                measure_collectives(members, spend, recorder)
            everybody.meet()
        done("collectives")
    begin("model")
    measure_model(workers, shortened(config), world, spend, recorder)
    done("model")
    begin("updates")
    if workers.member:
        measure_updates(workers, config, spend, recorder, lambda: time.monotonic() - begun)
    done("updates")
    parallel.shutdown()
    return "done"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), calibrate_rank)
