"""Small runs that save and go on elsewhere, on real ranks, and what their checkpoints hold."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from safetensors import safe_open

from canzona_cli.checkpoint import commit, manifest
from canzona_cli.checkpoint.manifest import Header, Manifest, Progress
from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.checkpoint.snapshot import Snapshots
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.geometry import stored_blocks, unit_shape
from canzona_cli.core.setup import Layout, ModelConfig
from canzona_cli.training.assemble import assemble as assemble_trainee
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import SMALL, Runs, on_ranks, planned, ranks_of
from tests.dist.samples import samples_of
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, Weights, assemble, part_of
from tests.waiting import PATIENCE_S

FIXED = (*SMALL, "train.steps=40", "parallel.tp=1", "parallel.pp=1")
Units = dict[str, np.ndarray]
"""The content of a checkpoint in model space, by unit and field, such as `layers.0.q/master`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that saves: its settings, how many steps it trains (with none it only saves again), and the run whose
    checkpoint it starts from."""

    settings: tuple[str, ...]
    steps: int = 0
    start: "Case | None" = None
    weights_only: bool = False

    @property
    def depth(self) -> int:
        """Returns the number of runs that come before it."""
        return 0 if self.start is None else self.start.depth + 1


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The part of a run that one rank saw."""

    losses: list[float]
    part: Part
    """Its weights after restoring, or at the end where it trained."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    losses: list[float]
    weights: Weights
    checkpoint: Path


def resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


def saving_runs(folder: Path, cases: Iterable[Case]) -> Runs[Case, Outcome]:
    """Runs with a checkpoint each under `folder`. A run starts in other processes than those that saved what it starts
    from."""

    def run(together: Sequence[Case]) -> list[Outcome]:
        made = {case: resolve(*case.settings) for case in together}
        plans = {case: planned(*made[case]) for case in together}
        starts = {case: None if case.start is None else runs[case.start].checkpoint for case in together}
        stores = {case: Path(mkdtemp(dir=folder)) for case in together}

        def work(case: Case, world: World) -> Ran:
            trainee = assemble_trainee(made[case][0], world, plans[case])
            return train(made[case][0], trainee, stores[case], case, starts[case])

        return [
            Outcome(
                losses=ranks[0].losses,
                weights=assemble([rank.part for rank in ranks], made[case][0].model),
                checkpoint=next(stores[case].glob("step-*")),
            )
            for case, ranks in on_ranks(made, work).items()
        ]

    runs = Runs(cases, lambda case: (ranks_of(case.settings), case.depth), run)
    return runs


def train(config: RunConfig, trainee: Trainee, store: Path, case: Case, start: Path | None) -> Ran:
    """Restore, make the case's steps, save."""
    world, layout, done = trainee.world, trainee.world.layout, 0
    if start is not None:
        manifest = verify_together(world, start)
        restore(trainee, start, manifest, weights_only=case.weights_only)
        done = 0 if case.weights_only else manifest.progress.step
        assert trainee.schedule.num_steps == done, "the learning rate is that of another step"
    samples = samples_of(config.setup, 40 * layout.global_batch_size)
    batches = BatchStream(samples, world, first_sample=done * layout.global_batch_size)
    losses = [train_step(trainee, batches).loss for _ in range(case.steps)]
    if case.steps:
        finish_gathering(trainee)
    save(config, trainee, store, done + case.steps)
    return Ran(losses=losses, part=part_of(trainee.chunks, world))


def save(config: RunConfig, trainee: Trainee, store: Path, step: int) -> None:
    """A checkpoint, written at once."""
    world: World = trainee.world
    partial_folder = commit.begin(store, step) if world.rank == 0 else manifest.partial_path(store, step)
    shard = Snapshots(trainee).take()
    commit.write_part(partial_folder, world.rank, shard)
    if world.rank == 0:
        header = Header(
            progress=Progress(step=step, samples=step * world.layout.global_batch_size, tokens=0),
            optimizer=trainee.setup.optimizer.name,
            strategy=trainee.setup.engine.strategy,
            splitting=trainee.setup.engine.splitting,
            world_size=world.world_size,
            created=time.time(),
            canzona="0",
        )
        texts = {"config.yaml": dump_resolved(config), "layout.json": json.dumps(asdict(world.layout))}
        commit.finish(partial_folder, world.world_size, header, texts, timeout_s=PATIENCE_S)
    torch.distributed.barrier()


@cache
def units_of(checkpoint: Path, model: ModelConfig) -> Units:
    """Assembles the content of a checkpoint from its files alone; state that is no element of a matrix is left as it
    is."""
    whole: Units = {}
    stored: dict[str, torch.Tensor] = {}
    for name, entry in read_manifest(checkpoint).tensors.items():
        with safe_open(checkpoint / entry.file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if (piece := entry.piece) is None:
            stored[name] = tensor
            continue
        shape = unit_shape(piece.unit, model)
        place = torch.arange(piece.start, piece.end)
        target = stored.setdefault(entry.whole_name(name), torch.full(shape, torch.nan)).view(-1, shape[-1])
        where = piece.row + place // piece.cols, piece.col + place % piece.cols
        assert target[where].isnan().all(), "two ranks wrote it"
        target[where] = tensor
    shapes: Mapping[str, torch.Size] = {
        name.rpartition("/")[0]: tensor.shape for name, tensor in stored.items() if name.endswith("/master")
    }
    for name, tensor in stored.items():
        base, _, field = name.rpartition("/")
        if base.startswith("random."):
            continue
        if field not in ("master", "exp_avg", "exp_avg_sq", "momentum_buffer") or tensor.shape != shapes[base]:
            whole[name] = tensor.numpy()
            continue
        flat = tensor if tensor.dim() == 2 else tensor.view(1, -1)
        for block in stored_blocks(base, tensor.shape, model):
            key = f"{block.unit}/{field}"
            rows = np.zeros((0, block.cols), dtype=np.float32) if key not in whole else whole[key]
            if len(rows) < block.unit_row + block.rows:
                rows = np.concatenate([rows, np.full((block.unit_row + block.rows - len(rows), block.cols), np.nan)])
            rows[block.unit_row : block.unit_row + block.rows] = flat[block.row : block.row + block.rows].numpy()
            whole[key] = rows.astype(np.float32)
    return whole


def random_states_of(checkpoint: Path) -> Units:
    """The states of all ranks' random generators, by rank and generator."""
    states = {name: entry for name, entry in manifest_of(checkpoint).tensors.items() if name.startswith("random.")}
    assert states
    found = {}
    for name, entry in states.items():
        with safe_open(checkpoint / entry.file, framework="pt") as opened:
            found[name] = opened.get_tensor(name).numpy()
    return found


def manifest_of(checkpoint: Path) -> Manifest:
    return read_manifest(checkpoint)
