"""Measures the overhead of canzona's training loop over a bare Megatron-core step of the same model.

    python -m torch.distributed.run --nproc-per-node 2 scripts/loop_overhead.py --steps 40 --out overhead.json \
        recipe=qwen3-tiny gpus=2

Two copies of the model are trained in turns in the same process, one with a bare loop (schedule, optimizer step), the
other with canzona's (phase timing, loss reduction, learning-rate schedule, records on disk). With --timing, both run
canzona's step, one of them without timers, which shows the cost of timing phases. Prints quartiles of both loops and of
the ratios of pairs, for wall time and for rank 0's processor time, which depends less on other programs. Raw seconds
are written to --out.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.cluster import fit
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import Execution
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.megatron import parallel
from canzona_cli.megatron.model import Trainee
from canzona_cli.planner.make import make_plan
from canzona_cli.run.files import RunFiles
from canzona_cli.run.statistics import Quartiles
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import Batch, BatchStream, build_datasets
from canzona_cli.training.loop import step_metrics
from canzona_cli.training.records import Journal
from canzona_cli.training.step import train_step

WARM_UP = 5


def bare_step(trainee: Trainee, batches: Iterator[Batch]) -> None:
    """Runs a step as in the simplest Megatron-core training loop."""

    def mean(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (losses.float() * mask).sum() / mask.sum()
        return loss, loss.detach()

    def forward(data: Iterator[Batch], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., object]]:
        batch = next(data)
        output = module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(mean, batch["loss_mask"])

    for chunk in trainee.chunks:
        chunk.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    layout = trainee.world.layout
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=list(trainee.chunks),
        num_microbatches=layout.num_microbatches,
        seq_length=trainee.config.train.seq_length,
        micro_batch_size=layout.micro_batch_size,
        forward_only=False,
    )
    trainee.optimizer.step()
    trainee.schedule.step(increment=1)


def canzona_step(trainee: Trainee, batches: Iterator[Batch], files: RunFiles, journal: Journal, step: int) -> None:
    """Runs a step as `canzona_cli.training.loop.train` does."""
    started = time.perf_counter()
    progress = Progress(step=step, samples=0, tokens=0)
    result = train_step(trainee, batches, stop_requested=lambda: trainee.world.rank == 0 and files.stop_requested())
    journal.step(step_metrics(trainee, progress, result, time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timing", action="store_true", help="compare canzona's step with and without its timers")
    parser.add_argument("overrides", nargs="+")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    steps = arguments.steps + WARM_UP
    config, layout = fit.resolve(compose_run([*arguments.overrides, f"train.steps={steps}"]).config)
    corpus = ensure_corpus(config)
    if config.cluster.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the launcher does
    world = join(config, layout)
    plan = make_plan(config, layout) if config.execution is Execution.PLANNED else None
    data = build_datasets(config, corpus, cache=config.data.cache_root / "indices").train
    bare, ours = (assemble(config, world, plan, timed=timed) for timed in (False, True))
    bare_batches, our_batches = BatchStream(data, world), BatchStream(data, world)
    baseline, measured = ("untimed", "timed") if arguments.timing else ("bare", "canzona")
    wall: dict[str, list[float]] = {baseline: [], measured: []}
    processor: dict[str, list[float]] = {baseline: [], measured: []}
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(Path(folder))
        journal = Journal(files, writes=world.rank == 0)
        for step in range(steps):
            turns: list[tuple[str, Callable[[], object]]]
            if arguments.timing:
                turns = [
                    (baseline, partial(train_step, bare, bare_batches)),
                    (measured, partial(train_step, ours, our_batches)),
                ]
            else:
                turns = [
                    (baseline, partial(bare_step, bare, bare_batches)),
                    (measured, partial(canzona_step, ours, our_batches, files, journal, step)),
                ]
            # The order alternates, so that neither loop always runs with the caches that the other one filled.
            for name, turn in turns if step % 2 else reversed(turns):
                torch.distributed.barrier()
                started, started_cpu = time.perf_counter(), time.process_time()
                turn()
                torch.distributed.barrier()
                wall[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - started_cpu)
    if world.rank == 0:
        print(f"{layout.world_size} ranks, {arguments.steps} steps each")
        reported = {"wall": report("wall", wall), "processor": report("processor", processor)}
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"ranks": layout.world_size, **reported}, indent=1) + "\n")
    parallel.shutdown()


def report(clock: str, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Prints the quartiles of each loop and of their ratio; returns the values, without warm-up steps."""
    samples = {name: values[WARM_UP:] for name, values in seconds.items()}
    baseline, measured = samples
    samples[f"{measured} / {baseline}"] = [m / b for b, m in zip(samples[baseline], samples[measured], strict=True)]
    for name, values in samples.items():
        spread = Quartiles.of(values)
        unit = "" if "/" in name else " s"
        print(f"{clock:10} {name:15} median {spread.median:.4f}{unit}, quartiles {spread.low:.4f} to {spread.high:.4f}")
    return samples


if __name__ == "__main__":
    main()
