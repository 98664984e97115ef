"""The memory of a rank in a real step: the most bytes of tensors at once, against the plan's account."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import pytest
import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch._C._distributed_c10d import Work

from canzona_cli.core.costs.buffers import micro_batch_tokens, transient
from canzona_cli.core.costs.update import algorithm_of
from canzona_cli.core.megatron import parallel
from canzona_cli.core.optimizers import cpu_matmuls
from canzona_cli.core.planner.memory import plan_memory
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.engine_support import tensor_bytes
from tests.dist.ranks import run_ranks
from tests.dist.samples import samples_of


@dataclass(frozen=True, kw_only=True)
class Used:
    """The bytes of tensors of one rank."""

    kept: int
    """The bytes kept from step to step."""
    peak: int
    """The largest number of bytes within a step."""


@pytest.mark.parametrize(
    ("size", "cut", "precision", "sequences"),
    [
        ("tiny", "tp=2", "bf16", 4),
        pytest.param("tiny", "tp=1", "bf16", 4, marks=pytest.mark.sweep),
        # As wide as can be computed in seconds; its layers are alike.
        pytest.param("mini model.num_layers=2", "tp=2", "bf16", 2, marks=pytest.mark.sweep),
        pytest.param("mini model.num_layers=2", "tp=1", "fp32", 2, marks=pytest.mark.sweep),
    ],
)
def test_a_step_takes_the_memory_that_its_plan_says(size: str, cut: str, precision: str, sequences: int) -> None:
    """They agree within 5% on the rank that needs most (seen 2.8%), with and without what is kept from step to step."""
    config, layout = jobs.resolve(
        *f"recipe=qwen3-{size}".split(),
        "gpus=2",
        f"parallel.{cut}",
        "parallel.pp=1",
        "parallel.cp=1",
        "train.recompute=none",
        f"train.micro_batch_size={sequences}",
        f"train.global_batch_size={2 * sequences}",
        f"train.precision={precision}",
        f"cluster.bf16_in_fp32={cpu_matmuls.is_slow()}",
    )
    plan = jobs.planned(config, layout)
    assert plan is not None

    def rank() -> Used:
        logging.disable(logging.WARNING)
        Work.wait = wait_until_released  # type: ignore[method-assign, assignment]
        trainee = jobs.build(config, layout, plan)
        batches = BatchStream(samples_of(config.setup, 5 * layout.global_batch_size), trainee.world)
        train_step(trainee, batches)  # makes AdamW's state
        kept = tensor_bytes(trainee)
        return Used(kept=kept, peak=kept + most_at_once(lambda: train_step(trainee, batches)))

    ranks = run_ranks(layout.world_size, rank)
    memory = plan_memory(config.setup, layout, plan)
    used = ranks[memory.worst.rank]
    passing = sum(memory.parts[part] for part in ("activations", "logits", "workspace"))
    assert used.peak - used.kept == pytest.approx(passing, rel=0.05)
    assert used.peak == pytest.approx(memory.total, rel=0.05)


@pytest.mark.sweep
@pytest.mark.parametrize("cluster", ["cpu", "h100-80g"])
def test_the_loss_takes_as_many_bytes_for_a_logit_as_the_plan_counts(cluster: str) -> None:
    """GPUs run Megatron's fused loss, which is compiled; it needs a processor's compiler here."""
    config, layout = jobs.resolve("recipe=qwen3-tiny", "gpus=1", f"cluster={cluster}")
    logits = micro_batch_tokens(config.setup, layout) * config.model.vocab_size
    fused = config.cluster.device == "cuda"

    def rank() -> float:
        world = parallel.initialize(layout, "cpu", seed=1)
        # One column: a processor without bf16 multiplies fp32 copies of these, which must not count.
        inputs, weights = (torch.randn(rows, 1).bfloat16().requires_grad_() for rows in (256, 8192))
        labels = torch.randint(8192, (256, 1))
        loss_of = fused_vocab_parallel_cross_entropy if fused else vocab_parallel_cross_entropy

        def step() -> None:
            # The logits have no name here, because Megatron's model drops them when it returns the loss.
            loss = loss_of(torch.nn.functional.linear(inputs[:, None], weights), labels, tp_group=world.groups.tp)
            loss.float().mean().backward()

        step()  # compiles
        return most_at_once(step) / (256 * 8192)

    needed = transient(config.setup, algorithm_of(config.setup), layout, 0)
    assert run_ranks(1, rank) == [pytest.approx(needed.logits / logits, rel=0.01)]


_wait = Work.wait


def wait_until_released(work: Work, *timeout: timedelta) -> bool:
    """Waits for a collective, then gives the thread of gloo that ran it the time to let go of its tensors. Where two
    ranks have two cores, that thread may otherwise hold them until the step's next pause."""
    done = _wait(work, *timeout)
    time.sleep(1e-3)
    return done


def most_at_once(step: Callable[[], object]) -> int:
    """Returns the most bytes of tensors that `step` has at once, without those from before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    assert profile.kineto_results is not None
    changes = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    most: int = max(accumulate(event.nbytes() for event in changes))
    return most
