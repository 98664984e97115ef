"""Traffic that overlaps: messages between stages that nobody waits for at once, and AdamW's buckets with those of
matrices."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import StageTime
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.planner.chunks import Chunk, Stream
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.compare import study_run
from canzona_cli.core.simulate.iteration import IterationTimeline, StageWork
from canzona_cli.core.simulate.update import Workload
from canzona_cli.core.simulate.update_phase import UpdatePhase
from tests.core.simulate.test_step import made_of, pipeline
from tests.sizes import layout, run

MODULE = made_of(1.0, 1.0)
TRAVELS = Transfer(latency_s=1.0, link_s=2.0)


def test_a_rank_waits_for_its_last_backward_message_once_it_sends_the_next() -> None:
    """The rule is Megatron's `send_prev_wait_handle`, whatever messages of forward passes go between. Hops are long,
    and the third stage is much faster than the second, so without the wait it would run ahead."""
    iteration = pipeline([(1.0, 2.0), (5.0, 0.2), (0.1, 0.2)], 4.0, vpp=2, count=9)
    for stage in (1, 2):
        arrivals = [ran.end for _, ran in iteration._streams["send", stage, "backward"]]
        passes = [
            (phase, start, end)
            for _, phase, start, end in iteration.segments(stage)
            if phase in ("forward", "backward") and start < end
        ]
        backwards = [number for number, (phase, _, _) in enumerate(passes) if phase == "backward"]
        assert len(arrivals) == len(backwards) == 2 * 9
        after = [passes[number + 1][1] for number in backwards[:-1]]
        assert all(start >= arrived - 1e-9 for start, arrived in zip(after[1:], arrivals, strict=False))


@pytest.mark.parametrize("mesh", [layout(tp=2, dp=32), layout(dp=64)], ids=("tp2", "tp1"))
def test_a_rank_without_matrices_updates_adamws_parameters_on_shared_cores_too(mesh: Layout) -> None:
    """It takes as long as on a device of its own, with a core for everything; and every rank counts AdamW once."""
    config = run("tiny", mesh.world_size, strategy="canzona")
    plan = plan_unbounded(config.setup, mesh)
    workload = Workload(
        strategy="canzona",
        matrices=plan.matrices,
        costs=plan.costs,
        assignment=plan.assignment,
        buckets=plan.buckets,
        groups=plan.groups,
    )
    alone, _ = UpdatePhase(config.setup, mesh, workload, cores=None).run(None)
    shared, _ = UpdatePhase(config.setup, mesh, workload, cores=1e6).run([[]])
    idle = [cell for cell in shared if not cell.team.groups]
    assert idle
    assert all(cell.seconds == pytest.approx(alone[0].adamw_s) for cell in idle)
    assert all(cell.adamw_s == pytest.approx(alone[0].adamw_s) for cell in shared)


@pytest.mark.parametrize(("stream", "seconds"), [("data", 2 * (1 + 2)), ("adamw", 1 + 2 * 2), ("experts", 1 + 2 * 2)])
def test_two_buckets_with_own_communicators_share_a_link(stream: Stream, seconds: float) -> None:
    """The expected times are by hand: a module, after it a bucket of AdamW's (of experts) and one of matrices, each 1 s
    of latency and 2 s on the link."""
    chunks = [
        Chunk(module=0, reduce=TRAVELS, gather=TRAVELS, stream=stream),
        Chunk(module=0, reduce=TRAVELS, gather=TRAVELS),
    ]
    time = StageTime(chunks=((MODULE,),), hop=Transfer(), pass_s=0.0)
    work = StageWork(time=time, chunks=chunks, begin_s=0.0, tail_s=0.0, early=(0, 1))
    made = IterationTimeline(layout(count=1), [work], Timeline(), overlap_reduce=True, overlap_gather=True)
    phases = made.phases(0)
    assert phases["param_gather"] == pytest.approx(seconds)
    assert phases["grad_reduce"] == pytest.approx(seconds)
    assert made.reduced_s[0] == pytest.approx(2 * seconds + 2)


def test_four_ranks_on_one_core_update_four_times_as_long_with_experts_too() -> None:
    """`layerwise` has each expert updated by one rank, so with TP its ranks do different work."""

    def updating(cores: int) -> dict[str, float]:
        settings = ("recipe=qwen3-moe-tiny", "gpus=4", "parallel.tp=2", "parallel.pp=1", "parallel.ep=2", "cluster=cpu")
        studied = study_run(*fit.resolve(compose_run([*settings, f"cluster.cores={cores}"]).config.setup))
        return {name: ran.result.phases.get("matrix_update", 0.0) for name, ran in studied.strategies.items()}

    shared, alone = updating(1), updating(4)
    assert shared["layerwise"] > 0
    assert shared == {name: pytest.approx(4 * seconds) for name, seconds in alone.items()}
