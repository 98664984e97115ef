"""Simulated iterations against closed forms, and the laws they obey whatever the run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import bucket_elements
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import PASS_S, StageTime, passes, stage_time
from canzona_cli.core.costs.modules import Module
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.costs.update import RULES, algorithm_of, flops, memory_rate, seconds
from canzona_cli.core.model.matrices import Matrix, matrices
from canzona_cli.core.phases import IN_STEP
from canzona_cli.core.planner import attempt, make
from canzona_cli.core.planner.assign import assign
from canzona_cli.core.planner.buckets import buckets
from canzona_cli.core.planner.chunks import Chunk
from canzona_cli.core.planner.groups import Grouping
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.planner.pipeline import HostedPipeline
from canzona_cli.core.planner.plan import PlanSettings
from canzona_cli.core.setup import ClusterConfig, Layout, Precision, Setup, SoapConfig, Splitting, Strategy
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.simulate import step as simulate_module
from canzona_cli.core.simulate.iteration import IterationTimeline, StageWork
from canzona_cli.core.simulate.predict import assign_layerwise, simulate_plan
from canzona_cli.core.simulate.step import StrategyResult, refreshes, simulate
from canzona_cli.core.simulate.update import RankUpdate, Workload
from canzona_cli.core.simulate.update_phase import Team, UpdatePhase
from tests.sizes import CPU, H100, Size, layout, run

STRATEGIES: tuple[AnyStrategy, ...] = ("adamw", "canzona", "asc", "layerwise", "sc")
FREE = replace(
    H100, intra_node_gb_per_s=1e15, inter_node_gb_per_s=1e15, intra_node_latency_us=0.0, inter_node_latency_us=0.0
)
"""A cluster whose transfers take no time."""
ONLY_PRODUCTS = replace(FREE, memory_gb_per_s=1e15, launch_us=0.0)
"""... and whose memory is infinitely fast."""
STANDARD_RATE = 700e12


def inputs(
    config: RunConfig, mesh: Layout, strategy: AnyStrategy, *, by_flops: bool = False, splitting: Splitting = "split"
) -> tuple[Setup, Layout, Workload]:
    """The whole way from shapes, with costs from the profile, or of fused weights from FLOPs at `STANDARD_RATE`."""
    how = algorithm_of(config.setup)
    members = matrices(config.model, mesh, "fused" if by_flops else splitting)
    plain = replace(how, form="standard")
    costs = [
        flops(plain, m.rows, m.cols) / STANDARD_RATE if by_flops else seconds(how, m.rows, m.cols, config.cluster)
        for m in members
    ]
    if strategy == "canzona" or strategy == "asc":
        return config.setup, mesh, planned_workload(config, mesh, strategy, members, costs)
    workload = Workload(strategy=strategy, matrices=members, costs=costs)
    if strategy == "layerwise":
        assignment, found = assign_layerwise(members, mesh, bucket_elements(config.setup, mesh))
        workload = replace(workload, assignment=assignment, buckets=found)
    return config.setup, mesh, workload


def planned_workload(
    config: RunConfig, mesh: Layout, strategy: Strategy, members: Sequence[Matrix], costs: Sequence[float]
) -> Workload:
    wanted, limit = PlanSettings(strategy=strategy), bucket_elements(config.setup, mesh)
    assignment = assign(members, costs, mesh, wanted, bucket_elements=limit)
    return Workload(
        strategy=strategy,
        matrices=members,
        costs=costs,
        assignment=assignment,
        buckets=buckets(members, assignment, mesh, wanted, limit),
        groups=Grouping(members, costs, wanted, HostedPipeline.of(config.setup, mesh)).micro_groups(assignment),
    )


@lru_cache(maxsize=256)
def simulated(config: RunConfig, mesh: Layout, strategy: AnyStrategy, by_flops: bool = False) -> StrategyResult:
    return simulate(*inputs(config, mesh, strategy, by_flops=by_flops))


def config_of(size: Size, mesh: Layout, cluster: ClusterConfig = H100) -> RunConfig:
    return run(size, mesh.world_size, strategy="canzona", cluster=cluster)


MESHES = (
    layout(count=2),
    layout(dp=4, count=1),
    layout(tp=2, dp=4, count=3),
    layout(tp=4, dp=8, micro=2, count=2),
    layout(tp=2, pp=2, dp=4, count=4),
    layout(tp=1, pp=4, dp=2, count=8),
    replace(layout(tp=8, dp=2, count=2), recompute="full"),
    replace(layout(tp=8, dp=4, count=2), sequence_parallel=False, recompute="selective"),
)

runs = st.tuples(st.sampled_from(("0.6b", "4b", "8b")), st.sampled_from(MESHES), st.sampled_from(STRATEGIES))


@settings(max_examples=30, deadline=None)
@given(of=runs, overlap=st.booleans(), ahead=st.booleans())
def test_phases_add_up_and_nothing_is_exposed_longer_than_it_takes(
    of: tuple[Size, Layout, AnyStrategy], overlap: bool, ahead: bool
) -> None:
    size, mesh, strategy = of
    config = config_of(size, mesh)
    parallel = replace(config.parallel, overlap_grad_reduce=overlap, overlap_param_gather=ahead)
    result = simulated(replace(config, parallel=parallel), mesh, strategy)
    for phases in (result.phases, result.mean_phases):
        assert all(value >= 0 for value in phases.values())
        assert sum(phases[name] for name in IN_STEP) == pytest.approx(result.iteration_s)
        for name in ("grad_reduce", "exchange", "param_gather"):
            assert phases[name] <= phases[f"{name}_total"] + 1e-9
    assert 0 <= result.optimizer_s <= result.iteration_s
    assert 0 <= result.slowest_rank < mesh.world_size
    # The one rank the plots show longest is busy within the iteration, one thing at a time on each stream.
    reach: dict[tuple[int, str], float] = {}
    for event in sorted(result.events, key=lambda e: (e.rank, e.stream, e.start_s)):
        assert 0 <= event.start_s < event.end_s <= result.iteration_s + 1e-9
        assert event.start_s >= reach.get((event.rank, event.stream), 0.0) - 1e-9
        reach[event.rank, event.stream] = event.end_s


def test_one_rank_takes_its_products_and_nothing_else() -> None:
    mesh = layout(count=3)
    config = config_of("0.6b", mesh, ONLY_PRODUCTS)
    stage = stage_time(config, mesh, 0)
    strategies: tuple[AnyStrategy, ...] = ("canzona", "layerwise", "sc")
    for strategy in strategies:
        result = simulated(config, mesh, strategy)
        assert result.phases["forward"] == pytest.approx(3 * stage.forward_s)
        assert result.phases["backward"] == pytest.approx(3 * stage.backward_s)
        members = matrices(config.model, mesh, "split")
        updates = sum(seconds(algorithm_of(config.setup), m.rows, m.cols, ONLY_PRODUCTS) for m in members)
        assert result.phases["matrix_update"] == pytest.approx(updates)
        assert result.iteration_s == pytest.approx(3 * (stage.forward_s + stage.backward_s) + updates)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transfers_that_take_no_time_are_never_waited_for(strategy: AnyStrategy) -> None:
    mesh = layout(tp=2, dp=4, count=2)
    phases = simulated(config_of("4b", mesh, FREE), mesh, strategy).phases
    for name in ("pipeline", "grad_reduce", "param_gather"):
        # The per-owner collectives still have to be issued.
        assert phases[name] < 1e-3
    if strategy in ("layerwise", "sc"):
        assert phases["exchange"] < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_overlap_all_communication_is_exposed(strategy: AnyStrategy) -> None:
    mesh = layout(tp=2, dp=8, count=2)
    config = config_of("4b", mesh)
    config = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False))
    phases = simulated(config, mesh, strategy).phases
    assert phases["grad_reduce"] > 0
    assert phases["grad_reduce"] == pytest.approx(phases["grad_reduce_total"])
    assert phases["param_gather"] == pytest.approx(phases["param_gather_total"])
    assert (phases["param_gather"] > 0) == (strategy != "sc")


def test_one_bucket_without_overlap_is_reduced_behind_the_backward() -> None:
    mesh = layout(dp=8)
    config = config_of("0.6b", mesh)
    config = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=False))
    phases = simulated(config, mesh, "adamw").phases
    size = 4 * 596_049_920 * 7 / 8
    ring = 7 * H100.intra_node_latency_us * 1e-6
    assert phases["grad_reduce"] == pytest.approx(size / 360e9 + ring, rel=1e-3)


def test_the_published_limits_of_32b_on_256_gpus() -> None:
    """Five steps on fused weights at 700 TFLOP/s: 19.8 ms perfectly spread, 158 ms with TP repeated, 5.06 s by all."""
    mesh = layout(tp=8, dp=32, count=8)
    config = config_of("32b", mesh, ONLY_PRODUCTS)
    named: tuple[AnyStrategy, ...] = ("canzona", "layerwise", "sc")
    updates = {s: simulated(config, mesh, s, True).mean_phases["matrix_update"] for s in named}
    assert updates["canzona"] == pytest.approx(19.8e-3, rel=0.005)
    assert updates["layerwise"] == pytest.approx(158e-3, rel=0.005)
    assert updates["sc"] == pytest.approx(5.06, rel=0.005)


@settings(max_examples=25, deadline=None)
@given(of=runs, faster=st.floats(1.0, 20.0))
def test_faster_links_never_make_an_iteration_longer(of: tuple[Size, Layout, AnyStrategy], faster: float) -> None:
    size, mesh, strategy = of
    config = config_of(size, mesh)
    quick = replace(
        H100,
        intra_node_gb_per_s=faster * H100.intra_node_gb_per_s,
        inter_node_gb_per_s=faster * H100.inter_node_gb_per_s,
    )
    slow = simulated(config, mesh, strategy).iteration_s
    assert simulated(replace(config, cluster=quick), mesh, strategy).iteration_s <= slow * (1 + 1e-9)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("size", ["0.6b", "8b"])
def test_balancing_pays(size: Size, mesh: Layout) -> None:
    config = config_of(size, mesh)
    times = {strategy: simulated(config, mesh, strategy).iteration_s for strategy in STRATEGIES}
    # Where there is nothing to balance, a bucket of asc's has fewer owners, and fewer collectives to launch.
    assert times["canzona"] <= times["asc"] * (1 + 1e-3)
    assert times["adamw"] <= min(times["canzona"], times["layerwise"]) <= times["sc"]


def test_a_plans_owners_are_numbered_so_that_reductions_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B on 256 H200: the same plan takes longer if its owners keep the numbers that balancing gave them."""
    mesh = layout(dp=256, count=1)
    # With shorter updates and smaller buckets, all of which are reduced to owners with either numbering.
    verified = "cluster.verified=[gram,graphs,fused,shared]"
    config = compose_run(["recipe=qwen3-8b", "gpus=256", "cluster=h200", verified]).config

    def planned() -> StrategyResult:
        make._unbounded.cache_clear()
        make._unbounded_attempts.cache_clear()
        return simulate_plan(config.setup, mesh, plan_unbounded(config.setup, mesh))

    numbered = planned()
    with monkeypatch.context() as patched:
        patched.setattr(attempt, "renumber_owners", lambda matrices, assignment, *_: assignment)
        unnumbered = planned()
    make._unbounded.cache_clear()
    make._unbounded_attempts.cache_clear()
    assert numbered.phases["matrix_update"] == pytest.approx(unnumbered.phases["matrix_update"], rel=1e-12)
    assert numbered.phases["grad_reduce_total"] < 0.8 * unnumbered.phases["grad_reduce_total"]
    assert numbered.iteration_s < 0.995 * unnumbered.iteration_s


def made_of(forward_s: float, backward_s: float) -> Module:
    """A module that sends nothing."""
    return Module(
        part="qkv",
        layer=0,
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=0.0,
        weights=1,
        moves=(Transfer(), Transfer()),
    )


def pipeline(
    seconds: Sequence[tuple[float, float]], hop_s: float = 0.0, *, vpp: int, count: int, tied: bool = False
) -> IterationTimeline:
    """`seconds`: by stage, of a model chunk's forward and backward."""
    works = []
    for stage, (forward, backward) in enumerate(seconds):
        chunks = ((made_of(forward, backward),),) * vpp
        time_of = StageTime(chunks=chunks, hop=Transfer(latency_s=hop_s), pass_s=0.0)
        meets = tied and stage in (0, len(seconds) - 1)
        works.append(
            StageWork(time=time_of, chunks=(), begin_s=0.0, tail_s=0.5 if meets else 0.0, shares_embedding=meets)
        )
    mesh = layout(pp=len(seconds), vpp=vpp, count=count)
    return IterationTimeline(mesh, works, Timeline(), overlap_reduce=True, overlap_gather=True)


def test_the_next_chain_starts_while_the_last_one_empties_and_none_ends_before_it_is_filled() -> None:
    """The expected times are by hand: after a backward of one module, three buckets are reduced, each 2 s on the link
    after 1 s of filling."""
    module = made_of(1.0, 1.0)
    time_of = StageTime(chunks=((module,),), hop=Transfer(), pass_s=0.0)

    def reduced(*fills: float) -> float:
        chunks = [
            Chunk(module=0, reduce=Transfer(latency_s=1.0, link_s=2.0, fill_s=fill_s), gather=Transfer())
            for fill_s in fills
        ]
        work = StageWork(time=time_of, chunks=chunks, begin_s=0.0, tail_s=0.0)
        made = IterationTimeline(layout(count=1), [work], Timeline(), overlap_reduce=True, overlap_gather=True)
        return made.reduced_s[0]

    assert reduced(0.0, 0.0, 0.0) == pytest.approx(2 + 3 * 3)
    assert reduced(1.0, 1.0, 0.0) == reduced(1.0, 1.0, 1.0) == pytest.approx(2 + 3 * 2 + 1)
    assert reduced(1.0, 0.25, 0.0) == pytest.approx(2 + 3 * 2 + 1 + 0.75)
    assert reduced(0.0) == reduced(1.0) == pytest.approx(2 + 3), "nobody has it sooner"


def test_buckets_arrive_while_gradients_are_set_to_zero_and_under_the_modules_before() -> None:
    """The expected times are by hand: three modules of 1 s, 3 s of zeroing, four buckets of 2 s of which the first two
    start at once."""
    module = made_of(1.0, 1.0)
    time_of = StageTime(chunks=((module,) * 4,), hop=Transfer(), pass_s=0.0)
    chunks = [Chunk(module=place, reduce=Transfer(), gather=Transfer(latency_s=2.0)) for place in (3, 2, 1, 0)]
    mesh = layout(count=1)

    def gathered(early: Sequence[int], ahead: int) -> float:
        work = StageWork(time=time_of, chunks=chunks, begin_s=3.0, tail_s=0.0, early=early)
        made = IterationTimeline(mesh, [work], Timeline(), overlap_reduce=True, overlap_gather=True, ahead=ahead)
        return made.phases(0)["param_gather"]

    # Waiting: 3 to 5, 6 to 7, then each second one.
    assert gathered((), 1) == pytest.approx(2 + 1 + 1 + 1)
    # There after 2, 5, 7 and 9 s; asked for at 3, 4, 6 and 8 s.
    assert gathered((3,), 1) == pytest.approx(0 + 1 + 1 + 1)
    # After 2, 4, 6 and 8 s, the third asked for at 3 s; needed at 3, 4, 5 and 7 s.
    assert gathered((3, 2), 2) == pytest.approx(0 + 0 + 1 + 1)


def test_aligned_gatherings_start_by_whole_model_chunks_on_all_stages_at_once() -> None:
    """The expected times are by hand: two stages of four chunks of two modules of 1 s, a bucket of 0.25 s for each,
    last ones first.

    The first forward starts at 0.5 s. From then on a stage forwards a micro-batch through a chunk every 2 s: the first
    stage begins with chunk 1 at 4.5 s and with chunk 2 at 8.5 s.
    """
    module = made_of(1.0, 1.0)
    time_of = StageTime(chunks=((module,) * 2,) * 4, hop=Transfer(), pass_s=0.0)
    chunks = [Chunk(module=place, reduce=Transfer(), gather=Transfer(latency_s=0.25)) for place in reversed(range(8))]
    work = StageWork(time=time_of, chunks=chunks, begin_s=0.0, tail_s=0.0, aligned=True)
    made = IterationTimeline(
        layout(pp=2, vpp=4, count=2), [work, work], Timeline(), overlap_reduce=True, overlap_gather=True
    )
    for stage in range(2):
        begun = [start for _, phase, start, _ in made.segments(stage) if phase == "param_gather"]
        assert begun == pytest.approx([0.0, 0.25, 0.5, 0.75, 4.5, 4.75, 8.5, 8.75])
    assert made.phases(0)["param_gather"] == pytest.approx(0.5)


def test_megatrons_strategies_gather_ahead_if_the_pipeline_is_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies: tuple[AnyStrategy, ...] = ("adamw", "layerwise", "canzona", "asc")
    interleaved, plain = layout(tp=4, pp=2, vpp=8, dp=32, count=8), layout(tp=4, pp=2, dp=32, count=8)

    def times(mesh: Layout) -> dict[AnyStrategy, float]:
        return {name: simulate(*inputs(config_of("32b", mesh), mesh, name)).iteration_s for name in strategies}

    found = {mesh: times(mesh) for mesh in (interleaved, plain)}
    monkeypatch.setattr(simulate_module, "aligns_param_gather", lambda *_: False)
    assert times(plain) == found[plain]
    longer = times(interleaved)
    assert longer["adamw"] > 1.01 * found[interleaved]["adamw"]
    assert longer["layerwise"] > 1.01 * found[interleaved]["layerwise"]
    assert all(longer[name] == found[interleaved][name] for name in ("canzona", "asc"))


def test_the_first_gathering_of_32b_is_hidden() -> None:
    config = config_of("32b", mesh := layout(tp=8, dp=32, count=2, micro=4))
    found = simulate_plan(config.setup, mesh, plan_unbounded(config.setup, mesh))
    assert found.phases["param_gather"] == 0.0 < found.phases["param_gather_total"]


def test_a_step_with_refreshes_lasts_as_long_as_the_slowest_ranks_of_a_period_do_on_average() -> None:
    """That is at least as long as for the rank that has most to do in all."""
    base = config_of("32b", mesh := layout(tp=1, dp=256, count=2, micro=1))
    optimizer = SoapConfig(name="soap", lr=base.optimizer.lr)
    config = replace(base, optimizer=optimizer)
    plan = plan_unbounded(config.setup, mesh)
    found = refreshes(config.setup, plan.matrices, plan.assignment.cells)
    assert found.mean_s >= found.most_s
    assert simulate_plan(config.setup, mesh, plan).phases["matrix_update"] == pytest.approx(found.mean_s, rel=0.01)


def test_a_tied_embeddings_gradient_is_summed_once_both_ends_have_it() -> None:
    apart, tied = (pipeline([(1.0, 2.0)] * 3, vpp=1, count=4, tied=tied) for tied in (False, True))
    first, between, last = apart.reduced_s
    assert last < between < first
    assert tied.reduced_s == pytest.approx([first + 0.5, between, first + 0.5])
    assert tied.phases(2)["grad_reduce"] == pytest.approx(first - last + 0.5)
    assert tied.phases(0)["grad_reduce"] == pytest.approx(0.5)


@pytest.mark.parametrize(("chunks", "count"), [(1, 6), (2, 8), (4, 4)])
def test_equal_stages_fill_and_drain_once(chunks: int, count: int) -> None:
    """1F1B: (m + (p - 1) / v) micro-batches' time from the first forward to the last backward (arXiv 2104.04473)."""
    stages, forward, backward = 4, 1.0 / chunks, 2.0 / chunks
    iteration = pipeline([(forward, backward)] * stages, vpp=chunks, count=count)
    # The first stage is last to finish; it waits for the pipeline behind it to fill and drain.
    assert iteration.reduced_s[0] == pytest.approx((chunks * count + stages - 1) * (forward + backward))
    phases = iteration.phases(0)
    assert phases["pipeline"] == pytest.approx((stages - 1) * (forward + backward))
    assert (phases["forward"], phases["backward"]) == pytest.approx((count * 1.0, count * 2.0))


_TABLE = tuple(
    (kind, ranks, size, 4e-3, 0.5)
    for kind in ("all_reduce", "all_gather", "reduce_scatter")
    for ranks in (2, 4)
    for size in (8.0, 1e9)
)
"""Each takes 4 ms and keeps half a core busy."""


@pytest.mark.parametrize(
    "mesh", [layout(tp=4, count=3), replace(layout(tp=2, count=3), cp=2), layout(tp=2, dp=2, count=3)]
)
def test_collectives_of_ranks_that_share_cores_leave_most_of_them_to_others(mesh: Layout) -> None:
    """Four ranks compute on two cores at half speed; what they tell one another keeps no rank's whole core busy, and
    takes no longer on a processor that computes more slowly."""
    cluster = replace(CPU, cores=2, collectives=_TABLE)
    for factor in (1.0, 3.0):
        slower = replace(cluster, pass_factors=(factor, factor))
        config = config_of("tiny", mesh, slower)
        apart = replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        config = replace(config, parallel=apart)
        stage = stage_time(config, mesh, 0)
        [(forward, backward)], [moves] = stage.computed, stage.moves
        phases = simulated(config, mesh, "adamw").phases
        for computed, moved, phase in ((forward, moves[0], "forward"), (backward, moves[1], "backward")):
            assert phases[phase] == pytest.approx(3 * (2 * computed + moved.seconds), rel=1e-6)
        # Of 4 layers: one for each of 4 weights, the embedding's and the output layer's (sequence parallelism), and
        # three for the loss; keys and values gathered, and their gradients scattered.
        whole = 4 * 4 + 2, 4 * (mesh.cp > 1)
        assert moves[0].seconds == pytest.approx(4e-3 * (sum(whole) + 3))
        assert moves[1].seconds == pytest.approx(4e-3 * sum(whole))


def test_every_pass_through_a_chunk_has_its_price() -> None:
    """That is why one layer a chunk is not the fastest pipeline."""
    plain, deep = layout(pp=2, count=4), layout(pp=2, vpp=14, count=4)
    phases = [simulated(config_of("0.6b", mesh, FREE), mesh, "canzona").phases for mesh in (plain, deep)]
    for direction in ("forward", "backward"):
        longer = phases[1][direction] - phases[0][direction]
        assert longer == pytest.approx(4 * 13 * PASS_S, rel=1e-6)


@pytest.mark.parametrize("mesh", [layout(dp=2), layout(tp=4, pp=2, dp=2, count=4), layout(pp=3, vpp=4, count=3)])
def test_stages_take_as_long_without_their_lists_of_modules(mesh: Layout) -> None:
    config = config_of("4b", mesh)
    others = (replace(mesh, micro_batch_size=2), replace(mesh, recompute="full"), replace(mesh, cp=2))
    for one in (mesh, *others, replace(mesh, sequence_parallel=False)):
        stages = [stage_time(config, one, stage) for stage in range(one.pp)]
        for found, stage in zip(passes(config.setup, one), stages, strict=True):
            assert found == [pytest.approx(one, rel=1e-12) for one in stage.passes]


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_keys_and_values_are_gathered_in_time_where_no_ring_hides_them(transformer_engine: bool) -> None:
    """8B, 4096 tokens over two ranks, keys and values of 8 heads of 128 in bf16: half of them come over the link, in
    each of 36 layers and in both directions."""
    mesh, seconds = replace(layout(), cp=2), []
    for rate in (450.0, 225.0):
        cluster = replace(H100, transformer_engine=transformer_engine, intra_node_gb_per_s=rate)
        stage = stage_time(config_of("8b", mesh, cluster), mesh, 0)
        seconds.append((stage.forward_s, stage.backward_s))
    received = 0 if transformer_engine else 36 * 4096 // 2 * 2 * 8 * 128 * 2
    for fast, slow in zip(*seconds, strict=True):
        assert slow - fast == pytest.approx(received / 360e9, rel=1e-6)


def test_a_ring_over_several_nodes_waits_for_the_network() -> None:
    """8B, 4096 tokens over two nodes, a head of 128 for each of 8 TP ranks: on a network that is too slow for
    attention to hide it, each of 36 layers waits for the keys and values of half a sequence, in bf16."""
    mesh, seconds = replace(layout(tp=8), cp=2), []
    for rate in (0.5, 0.25):
        cluster = replace(H100, transformer_engine=True, inter_node_gb_per_s=rate)
        stage = stage_time(config_of("8b", mesh, cluster), mesh, 0)
        assert {module.moves[0].link for module in stage.modules if module.part == "qkv"} == {"network"}
        seconds.append((stage.forward_s, stage.backward_s))
    received_s = 36 * 4096 // 2 * 2 * 128 * 2 / 0.45e9
    (fast, fast_back), (slow, slow_back) = seconds
    assert slow - fast == pytest.approx(received_s, rel=1e-6)
    assert slow_back - fast_back == pytest.approx(2 * received_s, rel=1e-6), "their gradients travel too"


def test_the_outputs_of_a_rings_slices_are_added_up() -> None:
    """Two slices of one sequence, or one whole sequence of half as many: the same tokens and products."""
    unsliced = stage_time(config_of("8b", layout(dp=2)), layout(dp=2), 0)
    mesh = replace(layout(micro=2), cp=2)
    sliced = stage_time(config_of("8b", mesh), mesh, 0)
    moved = 36 * 3 * 4096 * 32 * 128 * 2  # bytes: two reads and a write of an output of 32 heads, in bf16
    assert sliced.forward_s - unsliced.forward_s == pytest.approx(1.2 * moved / 3350e9, rel=0.4)
    added = [two.backward_s - one.backward_s for one, two in zip(unsliced.modules, sliced.modules, strict=True)]
    assert sum(added) == pytest.approx(2 * (sliced.forward_s - unsliced.forward_s), rel=0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_attention_on_a_cpu_takes_about_as_long_as_measured(precision: Precision) -> None:
    """One thread, 8 sequences of 256 and 8 heads of 32, a layer: 9.9 ms forward and 31.5 ms backward in bf16, 9.3 and
    20.2 in fp32, where products in fp32 ran at 85 GFLOP/s."""
    mesh = layout(micro=8)
    config = run("tiny", 1, precision=precision, micro_batch_size=8, cluster=replace(CPU, fp32_tflops=0.085))
    times = []
    for length in (256, 512):  # as many tokens: all but attention takes the same
        longer = replace(config, train=replace(config.train, seq_length=length))
        stage = stage_time(longer, replace(mesh, micro_batch_size=8 * 256 // length), 0)
        times.append((stage.forward_s, stage.backward_s))
    forward, backward = ((long - short) / 4 for short, long in zip(*times, strict=True))
    assert 0.5 < forward / 0.0096 < 2
    assert 0.5 < backward / 0.025 < 2


def test_traffic_on_the_same_link_slows_the_backward() -> None:
    """Gradient reduction and tensor parallelism share NVLink inside one machine; across machines they do not."""
    inside, across = layout(tp=4, dp=2, count=1), layout(tp=8, dp=2, count=1)
    for mesh, shared in ((inside, True), (across, False)):
        config = config_of("4b", mesh)
        alone = stage_time(config, mesh, 0).backward_s
        assert (simulated(config, mesh, "adamw").phases["backward"] > alone * 1.001) == shared


def test_padding_is_set_to_zero_with_the_gradients_around_it() -> None:
    """Buffers of twice the elements take a pass over the further ones; where transfers are free, nothing else."""
    mesh = layout(dp=4, count=2)
    setup, _, workload = inputs(config_of("0.6b", mesh, FREE), mesh, "canzona")
    padded = [
        replace(bucket, elements=2 * bucket.elements, padding=bucket.padding + bucket.elements)
        for bucket in workload.buckets
    ]
    longer_s = (
        simulate(setup, mesh, replace(workload, buckets=padded)).iteration_s
        - simulate(setup, mesh, workload).iteration_s
    )
    elements = sum(bucket.elements for bucket in workload.buckets)
    assert longer_s == pytest.approx(elements * 4 / memory_rate(setup.cluster))


def test_matrices_of_another_model_find_a_module() -> None:
    mesh = layout(dp=2, count=2)
    config = config_of("0.6b", mesh)
    base = matrices(config.model, mesh, "split")[0]
    members = [
        replace(base, index=n, name=f"layers.{n}.x", kind="other", layer=n, rows=512, cols=512, shard_dim=None, unit=n)
        for n in range(28)
    ]
    result = simulate(config.setup, mesh, planned_workload(config, mesh, "canzona", members, [1e-3] * len(members)))
    taken_s = 14 * 512 * 512 * 3 * 2 / memory_rate(config.cluster)
    assert result.phases["matrix_update"] == pytest.approx(14e-3 + 5e-6 + taken_s), (
        "the launch, and to take its weights"
    )


@pytest.mark.parametrize("mesh", [layout(tp=4, dp=64, count=2), layout(tp=2, pp=2, dp=96, count=4)])
@pytest.mark.parametrize("strategy", ["canzona", "asc", "layerwise"])
@pytest.mark.parametrize("splitting", ["split", "per_head"])
def test_owners_that_do_the_same_are_simulated_once(
    strategy: AnyStrategy, splitting: Splitting, mesh: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they come to the very same."""
    given_run = inputs(config_of("0.6b", mesh), mesh, strategy, splitting=splitting)
    once: list[Team] = []
    each: list[Team] = []
    updates = UpdatePhase._updates

    def counted(teams: list[Team]) -> StrategyResult:
        def update(self: UpdatePhase, team: Team) -> tuple[RankUpdate, ...]:
            teams.append(team)
            return updates(self, team)

        monkeypatch.setattr(UpdatePhase, "_updates", update)
        return simulate(*given_run)

    together = counted(once)
    monkeypatch.setattr(UpdatePhase, "_work_key", lambda self, index: index)
    apart = counted(each)
    assert len(once) < len(each)
    for name in ("iteration_s", "optimizer_s", "phases", "slowest_rank", "events"):
        assert getattr(together, name) == getattr(apart, name), name
    assert together.mean_phases == pytest.approx(apart.mean_phases, rel=1e-12)
    assert together.update_balance == pytest.approx(apart.update_balance, rel=1e-12)


def test_adamw_goes_first_and_its_parameters_travel_under_the_matrix_updates() -> None:
    """The engine's order hides AdamW's gathering; what is moved in all stays the same."""
    mesh = layout(tp=8, dp=32, micro=4, count=2)
    config = config_of("32b", mesh)
    ours, plain = (simulated(config, mesh, s) for s in ("canzona", "adamw"))
    assert ours.phases["param_gather"] < 0.5 * plain.phases["param_gather"]
    assert ours.phases["param_gather_total"] > 0.95 * plain.phases["param_gather_total"]
    without = replace(config, parallel=replace(config.parallel, overlap_param_gather=False))
    behind = simulated(without, mesh, "canzona")
    assert behind.phases["param_gather"] == pytest.approx(behind.phases["param_gather_total"])
    assert behind.iteration_s > ours.iteration_s
    last = [event for event in ours.events if event.rank == ours.slowest_rank and event.phase == "adamw_update"][-1]
    update = [event for event in ours.events if event.rank == ours.slowest_rank and event.phase == "matrix_update"]
    assert last.end_s <= min(event.start_s for event in update)


SMALL_MESHES = (layout(dp=4, count=2), layout(tp=2, dp=2, count=1), layout(tp=4, count=2), layout(tp=2, pp=2, count=4))


@pytest.mark.parametrize(("strategy", "mesh"), [*zip(STRATEGIES, (*SMALL_MESHES, SMALL_MESHES[1]), strict=True)])
def test_a_core_for_every_rank_is_as_good_as_a_device(strategy: AnyStrategy, mesh: Layout) -> None:
    alone = simulated(config_of("0.6b", mesh), mesh, strategy)
    # Twice as many, for a transfer may run under the work of the same rank.
    shared = simulated(config_of("0.6b", mesh, replace(H100, cores=2 * mesh.world_size)), mesh, strategy)
    assert shared.iteration_s == pytest.approx(alone.iteration_s, rel=1e-3)
    assert shared.optimizer_s == pytest.approx(alone.optimizer_s, rel=1e-3)


@pytest.mark.parametrize("mesh", SMALL_MESHES, ids=("dp4", "tp2-dp2", "tp4", "tp2-pp2"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_one_core_a_step_takes_the_work_of_all_ranks(strategy: AnyStrategy, mesh: Layout) -> None:
    cluster = replace(FREE, cores=1)
    config = config_of("0.6b", mesh, cluster)
    result = simulated(config, mesh, strategy)
    for name in ("forward", "backward"):
        ranks = mesh.world_size // mesh.pp
        work = (
            ranks
            * mesh.num_microbatches
            * sum(getattr(stage_time(config, mesh, stage), f"{name}_s") for stage in range(mesh.pp))
        )
        # Stages take turns on it: all of their passes lie within the iteration, one after another.
        assert result.iteration_s >= work - 1e-9
        if mesh.pp == 1:
            assert result.phases[name] == pytest.approx(work)
    everyone = [matrix.index for matrix in matrices(config.model, mesh, "split")]
    costs = inputs(config, mesh, strategy)[2].costs
    repeated = {"canzona": 1, "asc": 1, "layerwise": mesh.tp, "sc": mesh.tp * mesh.dp, "adamw": 0}[strategy]
    whole = repeated * sum(costs[index] for index in everyone)
    if strategy in ("layerwise", "sc"):
        # A duplicated update does its elementwise part on its own fragment only, and writes the bf16 weight.
        elements = sum(matrix.elements for matrix in matrices(config.model, mesh, "split"))
        elementwise_s = elements * (RULES["muon"].fragment_bytes + 2) / memory_rate(cluster)
        whole -= repeated * (1 - 1 / mesh.tp) * elementwise_s
    assert result.optimizer_s >= whole - 1e-9


def test_work_that_is_spread_gains_nothing_from_ranks_that_share_a_core() -> None:
    mesh = layout(tp=4, count=1)
    results = {
        strategy: simulated(config_of("0.6b", mesh, replace(ONLY_PRODUCTS, cores=1)), mesh, strategy)
        for strategy in ("canzona", "layerwise")
    }
    # Four ranks that repeat an update do four times the work of four that share it.
    ratio = results["layerwise"].optimizer_s / results["canzona"].optimizer_s
    assert ratio == pytest.approx(4.0, rel=0.01)
