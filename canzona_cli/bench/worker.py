"""One rank of a bench: `python -m canzona_cli.bench.worker SITTING_DIR`, started by torchrun."""

import sys
import time
from pathlib import Path

from canzona_cli.bench.results import BenchFiles, Turns, write_samples
from canzona_cli.records.files import RunFiles, append_json_line, cache_root
from canzona_cli.records.records import Ending, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import Journal, RankRecord

SLOW_IMPORTS = (*IMPORTED_BY_ALL, "canzona_cli.bench.turns")


def sitting_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Builds a model, an optimizer and batches for each strategy, and runs all turns; rank 0 writes the
    samples."""
    import canzona_cli.core.megatron.quick_import  # noqa: F401 - before anything imports Megatron
    from canzona_cli.bench.turns import RunningStrategy, gather_samples, take_turns
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.core.megatron import parallel
    from canzona_cli.core.planner.plan_file import read_plan
    from canzona_cli.core.setup import Execution
    from canzona_cli.records.corpus import read_corpus
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import BatchStream, build_datasets

    turns = Turns.read(files)
    inputs, journal = BenchFiles(files.root.parent), Journal(files, writes=rank == 0)
    configs = {name: load_resolved(inputs.config(name)) for name in turns.names}
    first_config = configs[turns.names[0]]
    world = join(first_config, read_layout(files.layout), alive=record.watchdog.progress)
    data = build_datasets(first_config, read_corpus(files), cache=cache_root() / "indices").train
    running: dict[str, RunningStrategy] = {}
    for name, config in configs.items():
        journal.stage("build model", name)
        plan = read_plan(inputs.plan(name)) if config.execution is Execution.PLANNED else None
        trainee = assemble(config, world, plan)
        running[name] = RunningStrategy(trainee=trainee, batches=BatchStream(data, world))

    def on_turn(name: str, loss: float) -> None:
        record.step, record.loss = len(running[name].losses), loss
        if rank == 0:
            append_json_line(files.metrics, {"step": record.step, "loss": loss, "name": name, "time": time.time()})

    journal.stage("train", f"{turns.rounds} rounds of {', '.join(turns.names)}")
    finished = take_turns(turns, running, stop_requested=lambda: rank == 0 and files.stop_requested(), on_turn=on_turn)
    if finished:
        samples = gather_samples(running)
        if rank == 0:
            write_samples(files, samples)
    parallel.shutdown()
    return "done" if finished else "interrupted"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sitting_rank)
