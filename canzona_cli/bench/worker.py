"""One rank of a bench's sitting: `python -m canzona_cli.bench.worker SITTING_DIR`, started by torchrun."""

import sys
import time
from pathlib import Path

from canzona_cli.bench.sitting import BenchFiles, Turns, write_samples
from canzona_cli.run.files import RunFiles, append_json_line
from canzona_cli.run.records import Ending, read_layout
from canzona_cli.training.process import IMPORTED_BY_ALL, run_rank
from canzona_cli.training.records import Journal, RankRecord

SLOW_IMPORTS = (*IMPORTED_BY_ALL, "canzona_cli.bench.turns")


def bench_rank(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    """Run one sitting; rank 0 writes the samples. Every strategy has its own model, optimizer and batches."""
    from canzona_cli.bench.turns import RunningStrategy, gather_samples, take_turns
    from canzona_cli.config.caches import cache_root
    from canzona_cli.config.compose import load_resolved
    from canzona_cli.config.execution import Execution, execution_of
    from canzona_cli.engine.kernels import choose_kernels
    from canzona_cli.megatron import parallel
    from canzona_cli.planner.plan_file import read_plan
    from canzona_cli.run.corpus import read_corpus
    from canzona_cli.training.assemble import assemble, join
    from canzona_cli.training.data import BatchStream, build_datasets

    turns, inputs = Turns.read(files), BenchFiles(files.root.parent)
    configs = {name: load_resolved(inputs.config(name)) for name in turns.names}
    first = next(iter(configs.values()))
    world = join(first, read_layout(files.layout), alive=record.heart.progress)
    journal = Journal(files, writes=rank == 0)
    data = build_datasets(first, read_corpus(files), cache=cache_root(first) / "indices").train
    strategies: dict[str, RunningStrategy] = {}
    for name, config in configs.items():
        journal.stage("build model", name)
        plan = read_plan(inputs.plan(name)) if execution_of(config) is Execution.PLANNED else None
        strategies[name] = RunningStrategy(trainee=assemble(config, world, plan), batches=BatchStream(data, world))

    # As in training: what is timed runs on the kernels that a run would choose here.
    ours = next((config for config in configs.values() if execution_of(config).ours), first)
    choose_kernels(ours, world.device, alive=record.heart.progress)

    def tell(number: int, name: str, loss: float) -> None:
        record.step, record.loss = len(strategies[name].losses), loss
        if rank == 0:
            line = {"step": record.step, "loss": loss, "strategy": name, "round": number + 1, "rounds": turns.rounds}
            append_json_line(files.metrics, {**line, "time": time.time()})

    journal.stage("train", f"{turns.rounds} rounds of {', '.join(turns.names)}")
    finished = take_turns(turns, strategies, stop_requested=lambda: rank == 0 and files.stop_requested(), tell=tell)
    if finished:
        samples = gather_samples(strategies)
        if rank == 0:
            write_samples(files, samples)
    parallel.shutdown()
    return "done" if finished else "interrupted"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), bench_rank)
