"""A checkpoint that was forged with all its hashes right is refused whole, by all ranks together, with exit code 5."""

from functools import partial
from pathlib import Path

import torch

from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import CheckpointInvalid
from canzona_cli.planner.plan import Plan
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.attacks import forge
from tests.dist.jobs import build, planned
from tests.dist.ranks import run_ranks
from tests.dist.samples import RandomTokens
from tests.dist.saved import resolve, save
from tests.dist.synthetic import finish_gathering

RUN = ("gpus=2", "optimizer=soap", "parallel.pp=1")


def _attacked(config: RunConfig, layout: Layout, plan: Plan | None, root: Path) -> dict[str, str]:
    """One rank that saves after a step, and is then given each of the forgeries; what it said to each."""
    trainee = build(config, layout, plan)
    samples = RandomTokens(
        samples=layout.global_batch_size, seq_length=config.train.seq_length, vocab_size=config.model.vocab_size
    )
    train_step(trainee, BatchStream(samples, trainee.world))
    finish_gathering(trainee)
    save(trainee, root / "honest", 1)
    honest = root / "honest" / "step-00000001"
    if trainee.world.rank == 0:
        for kind, (change, _) in forge.KINDS.items():
            forge.forged(honest, root / kind, change)
        forge.odd_header(forge.copied(honest, root / "a header that the library refuses" / honest.name))
    torch.distributed.barrier()
    said = {}
    for kind in (*forge.KINDS, "a header that the library refuses", "honest"):
        folder = root / kind / honest.name
        try:
            restore(trainee, folder, verify_together(trainee.world, folder))
            said[kind] = ""
        except CheckpointInvalid as error:
            said[kind] = str(error)
    return said


def test_whatever_is_forged_all_ranks_refuse_it_and_take_the_honest_one(tmp_path: Path) -> None:
    config, layout = resolve(*RUN)
    first, second = run_ranks(2, partial(_attacked, config, layout, planned(config, layout), tmp_path))
    assert first.pop("honest") == second.pop("honest") == ""
    assert "its header cannot be read" in first.pop("a header that the library refuses")
    missing = {kind: said for kind, said in first.items() if kind in forge.KINDS and forge.KINDS[kind][1] not in said}
    assert missing == {}
    assert first.keys() == forge.KINDS.keys()
    assert {kind: said for kind, said in second.items() if kind in first and said != first[kind]} == {}
