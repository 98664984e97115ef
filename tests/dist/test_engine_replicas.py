"""What several ranks store alike stays alike: three real steps in bf16."""

import pytest
import torch

from canzona_cli.training.step import train_step
from tests.dist.engine_support import batches, resolve
from tests.dist.jobs import build, planned
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, assemble, part_of

STEPS = 3
LAYOUTS = {
    "tp2 dp2": ("gpus=4", "parallel.tp=2", "parallel.pp=1", "train.micro_batch_size=4"),
    "tp4": ("gpus=4", "parallel.tp=4", "parallel.pp=1", "train.micro_batch_size=4"),
    "tp2 pp2, tied": ("gpus=4", "parallel.tp=2", "parallel.pp=2", "train.micro_batch_size=4"),
    "pp2 dp2, tied": ("gpus=4", "parallel.tp=1", "parallel.pp=2"),
}
NORMS = ("norm.weight", "layernorm.weight")


@pytest.mark.parametrize(
    "where",
    ["tp2 dp2", "tp2 pp2, tied", *(pytest.param(where, marks=pytest.mark.sweep) for where in ("tp4", "pp2 dp2, tied"))],
)
def test_replicas_are_equal_to_the_last_bit(where: str) -> None:
    """Norms and q/k norms on all TP ranks, everything on all DP ranks, tied embeddings on the first and last stage."""
    config, layout = resolve("optimizer.lr=0.02", *LAYOUTS[where])
    assert config.model.tied_embeddings

    plan = planned(config, layout)

    def rank() -> tuple[Part, Part]:
        trainee = build(config, layout, plan)
        before, stream = part_of(trainee.chunks, trainee.world), batches(trainee, STEPS)
        for _ in range(STEPS):
            train_step(trainee, stream)
        finish_gathering(trainee)
        return before, part_of(trainee.chunks, trainee.world)

    found = run_ranks(layout.world_size, rank)
    # `assemble` compares them; here it is made sure that there was something to compare, and that it moved.
    before = assemble([first for first, _ in found], config.model)
    after = assemble([last for _, last in found], config.model)
    copies = [part.fragments for _, part in found]
    for name in {name for part in copies for name in part}:
        holders = sum(name in part for part in copies)
        assert holders == layout.world_size // (1 if layout.pp == 1 else layout.pp), name
    assert sum("output_layer.weight" in part for part in copies) == (layout.tp * layout.dp if layout.pp > 1 else 0)
    norms = [name for name in after if name.endswith(NORMS)]
    assert len(norms) == 4 * config.model.num_layers + 1
    assert [name for name in after if torch.equal(before[name], after[name])] == []
