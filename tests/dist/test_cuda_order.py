"""Training steps on a stand-in for CUDA: what a real device would be free to reorder, and what anybody waits for.

Real ranks, real steps, with clipping and guards; only the device is not there (`tests.cuda_stand_in`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from megatron.core.utils import get_model_config

from canzona_cli.checkpoint.manifest import Shard
from canzona_cli.checkpoint.snapshot import Snapshots
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.engine.wire import SideStream
from canzona_cli.core.megatron import quick_import
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.timers import StepTiming
from canzona_cli.core.phases import StepTimeline
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.reduction import GATHERED
from canzona_cli.core.setup import Layout, Reduction
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.step import train_step
from tests.cuda_stand_in import COMPUTE, DEVICE, Record, cuda_stand_in
from tests.dist.engine_support import SMALL_GROUPS, Digests, batches, engine_of, resolve, weights
from tests.dist.jobs import build, planned
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import finish_gathering

STEPS = 2
EVERY_WAY = {"alltoall_base_", "broadcast_", "reduce_", "_reduce_scatter_base_", "_allgather_base_"}
SETTINGS = (
    "gpus=4",
    "parallel.tp=2",
    "parallel.pp=1",
    "optimizer.clip_grad=0.01",
    *SMALL_GROUPS,
    "parallel.bucket_elements=10000",
    "train.micro_batch_size=4",
)


@dataclass(frozen=True, kw_only=True)
class Stood:
    """One rank's steps on the stand-in."""

    losses: list[float]
    weights: Digests
    saved: Digests
    """The content of a checkpoint, if one were saved."""
    host: list[tuple[list[str], list[str]]]
    """The places, step by step, where the host waited for the device, and where it read a tensor without waiting."""
    races: list[str]
    foreign: list[str]
    unordered: list[str]
    """Races of a step whose streams were never joined."""
    early: list[str]
    """Waits of the computing stream with products between them and the first use of what was waited for."""
    waiting: dict[str, set[str]]
    """The collectives that each stream was made to wait for."""
    side_stream: list[str]
    """Operations on the stream beside."""
    timings: list[StepTiming]
    timelines: list[StepTimeline]
    pinned: int
    landing: int
    """Tensors that were still being copied when a save was given them to write."""
    unwaited: int
    """The same number as `landing`, for a save that does not wait for the device."""


@pytest.fixture(scope="module")
def small() -> tuple[RunConfig, Layout]:
    return resolve(*SETTINGS)


@pytest.fixture(scope="module")
def stood(small: tuple[RunConfig, Layout]) -> list[Stood]:
    config, layout = small
    return run_ranks(layout.world_size, lambda: _steps(config, layout))


def _steps(config: RunConfig, layout: Layout) -> Stood:
    with _standing(config, layout) as (trainee, record):
        stream = batches(trainee)
        timer, losses, host = trainee.timer, [], []
        for _ in range(STEPS):
            before = len(record.host_waits), len(record.host_reads)
            losses.append(train_step(trainee, stream).loss)
            host.append((record.host_waits[before[0] :], record.host_reads[before[1] :]))
        races, foreign, early = list(record.races), list(record.foreign), _early(record)
        waiting: dict[str, set[str]] = {}
        for wait in record.waits:
            waiting.setdefault(wait.stream, set()).add(wait.collective.name.removeprefix("c10d::"))
        beside = engine_of(trainee).matrices.groups[0]._wiring.side_stream._stream.name  # type: ignore[attr-defined]
        aside = [found.name for found in record.operations if found.stream == beside]
        timings, timelines = list(timer.timings()), timer.timelines()
        pinned = record.pinned
        saved = _hashes(Snapshots(trainee).take())
        pinned, landing = record.pinned - pinned, record.landing()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("torch.cuda.synchronize", lambda device: None)
            Snapshots(trainee).take()
            unwaited = record.landing()
        finish_gathering(trainee)
        held, unordered = weights(trainee), len(record.races)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SideStream, "join", lambda self: None)
            train_step(trainee, stream)
            trainee.chunks[0].zero_grad_buffer()
        return Stood(
            losses=losses,
            weights=held,
            saved=saved,
            host=host,
            races=races,
            foreign=foreign,
            unordered=record.races[unordered:],
            early=early,
            waiting={("beside" if name == beside else name): found for name, found in waiting.items()},
            side_stream=aside,
            timings=timings,
            timelines=timelines,
            pinned=pinned,
            landing=landing,
            unwaited=unwaited,
        )


@contextmanager
def _standing(config: RunConfig, layout: Layout) -> Iterator[tuple[Trainee, Record]]:
    """A trainee on the stand-in, before its first step."""
    plan = planned(config, layout)
    assert plan is not None
    plan = in_every_way(plan)
    world = replace(join(config, layout), device=DEVICE)
    with pytest.MonkeyPatch.context() as patched, cuda_stand_in() as record:
        # Compiling is not what is looked at, and each rank would import the compiler.
        patched.setattr(quick_import, "_compile", lambda function, **_: function)
        patched.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)  # as on CUDA
        trainee = assemble(config, world, plan)
        megatron = get_model_config(trainee.chunks[0])
        assert megatron.batch_p2p_comm
        assert not megatron.batch_p2p_sync, "every transfer between stages would make the host wait"
        # It would be compiled, and rounds in other places.
        megatron.bias_activation_fusion = False
        record.forget()
        yield trainee, record


def in_every_way(plan: Plan) -> Plan:
    """Every other bucket in a ring, the rest by owner; of two numbers all have the same sum."""
    ways: list[Reduction] = [("ring", "reduce")[number % 2] for number in range(len(plan.buckets))]
    assert len(ways) > 2
    changed = (
        replace(one, reduction=way, gathering=GATHERED[way]) for one, way in zip(plan.buckets, ways, strict=True)
    )
    return replace(plan, buckets=tuple(changed))


def _hashes(shard: Shard) -> Digests:
    return {name: hashlib.sha256(b"".join(buffer.chunks())).hexdigest() for name, buffer in shard.tensors.items()}


def _early(record: Record) -> list[str]:
    """Each wait of the computing stream that a product stands behind before anything uses what was waited for.

    An all-to-all in which this rank sends and receives nothing is left out: its ring, on the same communicator, is
    waited for at the same place.
    """
    found = []
    for wait in record.waits:
        if wait.stream != COMPUTE or not wait.collective.storages:
            continue
        for operation in record.operations[wait.position :]:
            if operation.stream != COMPUTE:
                continue
            if operation.storages & wait.collective.storages:
                break
            if operation.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"):
                found.append(f"{wait.collective.name} before {operation.name}")
                break
    return found


def test_nothing_that_shares_memory_is_left_in_any_order(stood: list[Stood]) -> None:
    for rank in stood:
        assert rank.races == rank.foreign == []
        # The check can fail: without the streams' meeting, the next step writes what is still being read.
        assert rank.unordered
        # And there was something to check.
        assert {"aten::copy_", "aten::where"} <= set(rank.side_stream)


def test_shared_matrices_are_left_in_no_order_and_waited_for_by_nobody() -> None:
    """One matrix is computed while another travels. Of squares of side 64 (k and v) the Gram form is not trusted in
    bf16, and repairs wait: so they are none here."""
    shared = ("engine.mode=shared", "optimizer.form=gram", "model.num_query_groups=8", "model.num_layers=1")
    config, layout = resolve(*SETTINGS, *shared, "gpus=2")

    def rank() -> tuple[set[str], list[str], list[list[str]]]:
        with _standing(config, layout) as (trainee, record):
            assert {group.hosted for group in engine_of(trainee).matrices.sharing}
            stream, host = batches(trainee), []
            for _ in range(STEPS):
                before = len(record.host_waits)
                train_step(trainee, stream)
                host.append(record.host_waits[before:])
            return {found.name for found in record.operations}, [*record.races, *record.foreign], host

    for names, wrong, host in run_ranks(layout.world_size, rank):
        assert "aten::addmm" in names
        assert wrong == []
        assert host == [["event at megatron/timers.py:wait_for"]] * STEPS


def test_the_host_waits_once_a_step(stood: list[Stood]) -> None:
    """The one wait is for the gradient norm; the loss, requests and failures of the last update come with it."""
    for rank in stood:
        for number, (waits, reads) in enumerate(rank.host):
            assert waits == ["event at megatron/timers.py:wait_for"]
            # Once, Megatron moves its table of angles to the device.
            assert reads == (["to at embeddings/rotary_pos_embedding.py:get_emb"] if number == 0 else [])


def test_the_computing_stream_waits_for_a_collective_when_it_needs_it(stood: list[Stood]) -> None:
    for rank in stood:
        assert rank.early == []
        assert EVERY_WAY | {"allreduce_"} <= rank.waiting[COMPUTE]
        assert rank.waiting["beside"] == {"alltoall_base_"}
        # What a watcher waits for is held up by nobody: nothing is enqueued behind it.
        assert len(rank.waiting) == 4


def test_the_same_comes_out_as_on_the_cpu(small: tuple[RunConfig, Layout], stood: list[Stood]) -> None:
    config, layout = small

    def on_cpu() -> tuple[list[float], Digests, Digests]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
            patched.setattr(
                "canzona_cli.core.megatron.model.use_processor_norms", lambda model: None
            )  # GPUs have torch's
            trainee = build(config, layout)
            stream = batches(trainee)
            losses = [train_step(trainee, stream).loss for _ in range(STEPS)]
            finish_gathering(trainee)
            return losses, weights(trainee), _hashes(Snapshots(trainee).take())

    for (losses, held, saved), rank in zip(run_ranks(layout.world_size, on_cpu), stood, strict=True):
        assert rank.losses == losses
        assert rank.weights == held
        assert rank.saved == saved
        assert rank.pinned == len(saved)


def test_a_save_reads_what_has_been_copied(stood: list[Stood]) -> None:
    for rank in stood:
        assert rank.landing == 0
        # The check can fail: copies into pinned memory go on behind the host.
        assert rank.unwaited > 0


def test_a_steps_time_is_told_from_events_that_have_passed(stood: list[Stood]) -> None:
    """The stand-in's events refuse to be read before the host knows that they have passed, as CUDA's do."""
    for rank in stood:
        assert len(rank.timings) == STEPS
        for timing in rank.timings:
            assert {"exchange_total", "grad_reduce_total", "param_gather_total"} <= timing.phases.keys()
        ends = [line.end_s for line in rank.timelines]
        assert ends == sorted(ends)
        for line, timing in zip(rank.timelines, rank.timings[-len(rank.timelines) :], strict=True):
            assert line.end_s - line.start_s == pytest.approx(timing.step_s)
