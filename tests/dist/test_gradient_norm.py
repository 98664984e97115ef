"""The norm of all gradients is one number: whatever the layout, with strategy sc, and with Megatron's own AdamW.

Clipping is active in the first steps of a run, so otherwise what AdamW's parameters learn would depend on the layout.
The models are the recipes' own, because only long slices show how squares are added. Batches are short, of random
tokens, and passes are in fp32: in bf16 the gradients themselves depend on the layout, by 1e-4 of their norm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.parallel import World
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import Runs, on_ranks, planned
from tests.dist.owner_support import main_grad
from tests.dist.samples import samples_of

Model = Literal["tiny", "mini"]
MODELS: Mapping[Model, tuple[str, ...]] = {
    "tiny": ("recipe=qwen3-tiny", "train.batch_tokens=512"),
    "mini": ("recipe=qwen3-mini", "train.seq_length=64", "train.batch_tokens=128"),
}
"""Two sequences. The longest slices on one rank have 3 million elements (tiny) and 43 million (mini)."""
LAYOUTS = {
    "one rank": ("gpus=1", "parallel.tp=1", "parallel.pp=1"),
    "tp2": ("gpus=2", "parallel.tp=2", "parallel.pp=1"),
    "dp2": ("gpus=2", "parallel.tp=1", "parallel.pp=1"),
    "pp2": ("gpus=2", "parallel.tp=1", "parallel.pp=2"),
    "tp2 dp2": ("gpus=4", "parallel.tp=2", "parallel.pp=1"),
    "tp2 pp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
}
MUON = ("optimizer=muon", "optimizer.ns_steps=1")  # the update comes after the norm
UPDATES = {
    "canzona": (*MUON, "engine.strategy=canzona"),
    "sc": (*MUON, "engine.strategy=sc"),
    "adamw": ("optimizer=adamw",),
}
FIXED = ("train.precision=fp32", "train.micro_batch_size=1", "train.recompute=none", "parallel.cp=1")
AGREE = 1e-6
"""The largest relative difference of two norms; in fp32 the gradients of layouts differ by about 1e-7 in norm."""

Run = tuple[Model, str, str]
"""A model, a layout and who updates it."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The norm that a step returned on every rank, and the norm of the gradients in the first rank's buffers."""

    returned: float
    in_buffers: float
    """Computed with numpy in fp64."""


def _first_norms(runs: Sequence[Run]) -> list[Norm]:
    made = {run: jobs.resolve(*MODELS[run[0]], *LAYOUTS[run[1]], *UPDATES[run[2]], *FIXED) for run in runs}
    plans = {run: planned(*case) for run, case in made.items()}

    def work(run: Run, world: World) -> Norm:
        config = made[run][0]
        trainee = assemble(config, world, plans[run])
        step, in_buffers = trainee.optimizer.step, list[float]()

        def record_and_step() -> object:
            gradients = (main_grad(param).numpy() for _, param in global_parameters(trainee.chunks))
            in_buffers.append(sum(float(np.square(each, dtype=np.float64).sum()) for each in gradients) ** 0.5)
            return step()

        trainee.optimizer.step = record_and_step
        batch = samples_of(config.setup, world.layout.global_batch_size)
        result = train_step(trainee, BatchStream(batch, world))
        assert result.grad_norm > config.optimizer.clip_grad, "clipping is not active"
        return Norm(returned=result.grad_norm, in_buffers=in_buffers[0])

    norms = on_ranks(made, work)
    assert all(len({norm.returned for norm in ranks}) == 1 for ranks in norms.values()), "ranks disagree"
    return [ranks[0] for ranks in norms.values()]


USUALLY: list[Run] = [
    *(("tiny", "one rank", update) for update in UPDATES),
    ("tiny", "tp2", "canzona"),
]
SWEPT: list[Run] = [
    *(("tiny", layout, update) for layout in LAYOUTS for update in UPDATES if ("tiny", layout, update) not in USUALLY),
    *(("mini", layout, "canzona") for layout in LAYOUTS),
    # Making a model and its masters on each rank takes long: the others only with the longest and the shortest slices.
    *(("mini", layout, update) for layout in ("one rank", "tp2 dp2") for update in ("sc", "adamw")),
]
RUNS = Runs(USUALLY, lambda run: (run[0], LAYOUTS[run[1]]), _first_norms, SWEPT)


@pytest.mark.parametrize(
    "run", [*USUALLY, *(pytest.param(run, marks=pytest.mark.sweep) for run in SWEPT)], ids=" ".join
)
def test_the_first_step_has_the_norm_of_the_gradients(run: Run) -> None:
    """Numpy's, of the gradients on one rank."""
    expected = RUNS[run[0], "one rank", "canzona"].in_buffers
    assert RUNS[run].returned == pytest.approx(expected, rel=AGREE)
