"""Prices of forward and backward that shapes and links alone do not have."""

from dataclasses import replace

import numpy as np
import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs.links import Transfer
from canzona_cli.core.costs.model import StageTime, stage_time, units_taken
from canzona_cli.core.costs.modules import QK_NORM_PASSES, Module, slowest_gpu_factor
from canzona_cli.core.costs.timeline import Timeline
from canzona_cli.core.costs.update import algorithm_of, matmul_rate, matmul_seconds, memory_rate, seconds, update_times
from canzona_cli.core.model.matrices import matrices
from canzona_cli.core.planner.chunks import Chunk
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Execution
from canzona_cli.core.setup.execution import splitting_of
from canzona_cli.core.simulate.iteration import IterationTimeline, StageWork
from canzona_cli.core.simulate.predict import simulate_run
from tests.sizes import CPU, H100, layout, run


def test_a_tensor_parallel_collective_hides_all_but_one_piece_under_its_product() -> None:
    cluster = replace(H100, collective_units=0.1)
    mesh, config = replace(layout(tp=4), sequence_parallel=True), run("8b", 4, cluster=cluster)
    hidden = replace(config, cluster=replace(cluster, tp_overlap=True))
    widths = {
        "qkv": (4096, 6144 // 4),
        "proj": (4096 // 4, 4096),
        "fc1": (4096, 2 * 12288 // 4),
        "fc2": (12288 // 4, 4096),
    }
    for serial, overlapped in zip(
        stage_time(config, mesh, 0).modules, stage_time(hidden, mesh, 0).modules, strict=True
    ):
        before, after = serial.moves[0], overlapped.moves[0]
        left = before.link_s
        if sides := widths.get(serial.part):
            # Three of four pieces travel under the product, and take a tenth of their time from it. Its pieces run at
            # the rate of smaller products.
            piece_s, whole_s = (matmul_seconds(cluster, tokens, *sides, "bf16") for tokens in (1024, 4096))
            left = left * (1 - 3 / 4 * 0.9) + 4 * piece_s - whole_s
        assert after.link_s == pytest.approx(left)
        assert after.latency_s == before.latency_s
        if serial.part in ("proj", "fc2"):
            assert overlapped.moves[1] == after, "gathering the output's gradient is cut likewise"
        elif serial.part in widths:
            assert overlapped.moves[1] == serial.moves[1], "hidden as a whole"


def test_megatron_hides_collectives_of_the_backward_pass_under_products_that_do_not_need_them() -> None:
    """`LinearWithGradAccumulationAndAsyncCommunication`: with sequence parallelism it gathers the input again and
    scatters its gradient, without it reduces the latter; only layers that are cut by rows have these."""
    cluster = replace(H100, collective_units=0.1, intra_node_gb_per_s=2000.0)
    config, mesh = run("8b", 4, cluster=cluster), layout(tp=4)
    for sequence_parallel, hidden, not_hidden in ((True, 2.0, 1.0), (False, 2.0, 0.0)):
        placed = replace(mesh, sequence_parallel=sequence_parallel)
        for module in stage_time(config, placed, 0).modules:
            half_s, back_s = (move.seconds for move in module.moves)
            if module.part in ("qkv", "fc1"):
                assert back_s == pytest.approx(0.1 * hidden * half_s)
            elif module.part in ("proj", "fc2"):
                assert back_s == pytest.approx(not_hidden * half_s)
    cpu = run("8b", 4, cluster=CPU)
    assert all(there == back for there, back in (one.moves for one in stage_time(cpu, mesh, 0).modules[1:-1]))


def test_a_product_hides_no_more_than_it_takes() -> None:
    slow_links = replace(H100, intra_node_gb_per_s=1.0)
    mesh, config = replace(layout(tp=2), sequence_parallel=True), run("8b", 2, cluster=slow_links)
    hidden = replace(config, cluster=replace(slow_links, tp_overlap=True))
    piece_s, product_s = (matmul_seconds(H100, tokens, 2048, 4096, "bf16") for tokens in (2048, 4096))
    (serial, overlapped) = (
        next(module for module in stage_time(one, mesh, 0).modules if module.part == "proj") for one in (config, hidden)
    )
    saved = product_s - (2 * piece_s - product_s)
    assert serial.moves[0].link_s - overlapped.moves[0].link_s == pytest.approx(saved)
    qkv = next(module for module in stage_time(config, mesh, 0).modules if module.part == "qkv")
    qkv_s = matmul_seconds(H100, 4096, 4096, 6144 // 2, "bf16")
    assert qkv.moves[1].seconds == pytest.approx(2 * (qkv.moves[0].seconds - qkv_s))


def test_a_reduction_takes_its_units_from_the_backward_under_it() -> None:
    module = Module(
        part="fc1", layer=0, forward_s=1.0, backward_s=2.0, again_s=0.0, weights=1, moves=(Transfer(), Transfer())
    )
    time = StageTime(chunks=((module, module._replace(part="fc2")),), hop=Transfer(), pass_s=0.0)
    chunks = [Chunk(module=number, reduce=Transfer(link="network", link_s=0.5), gather=Transfer()) for number in (0, 1)]

    def reduced(units: float) -> float:
        stage = StageWork(time=time, chunks=chunks, begin_s=0.0, tail_s=0.0)
        (end,) = IterationTimeline(
            layout(), [stage], Timeline(), overlap_reduce=True, overlap_gather=False, units=units
        ).reduced_s
        return end

    # The second module's gradients travel under the first one's backward, the first one's under nothing.
    assert reduced(0.0) == pytest.approx(2 * 1.0 + 2 * 2.0 + 0.5)
    assert reduced(0.1) - reduced(0.0) == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize("ranks", [1, 8, 64, 1024])
def test_everybody_waits_for_the_slowest_gpu(ranks: int) -> None:
    slow = replace(H100, speed_spread=0.02)
    drawn = np.random.default_rng(0).standard_normal((2000, ranks)).max(axis=1)
    assert slowest_gpu_factor(slow, ranks) - 1 == pytest.approx(0.02 * drawn.mean(), abs=0.02 * 0.06)
    assert slowest_gpu_factor(H100, ranks) == 1.0


def test_products_keep_to_the_power_limit_and_small_ones_stay_below_it() -> None:
    table = replace(H100, matmul_tflops=((2048, 500.0), (8192, 800.0)))
    limited = replace(table, sustained_tflops=600.0)
    assert matmul_rate(limited, 8192, "bf16") == 600e12
    assert matmul_rate(limited, 2048, "bf16") == matmul_rate(table, 2048, "bf16") == 500e12


def test_norms_of_queries_and_keys_cost_only_models_that_have_them() -> None:
    config = run("8b", 1)
    without = replace(config, model=replace(config.model, qk_norm=False))
    more = [sum(module.forward_s for module in stage_time(one, layout(), 0).modules) for one in (config, without)]
    # Read and write of queries and keys: 40 heads of 128, at the rate of 2.41 TB/s, 1.2 times for what is not fused.
    passes_s = 36 * 2 * 4096 * 40 * 128 * 2 * 1.2 / (0.72 * 3350e9)
    assert more[0] - more[1] == pytest.approx(QK_NORM_PASSES * passes_s)


def test_an_eager_update_of_megatrons_takes_at_least_the_launches_of_its_kernels() -> None:
    how, launches_s = algorithm_of(run("0.6b", 8).setup), 39 * 5e-6
    assert seconds(how, 128, 1024, H100, "megatron") == pytest.approx(launches_s)
    assert seconds(how, 5120, 25600, H100, "megatron") > 10 * launches_s
    quick_cpu = replace(CPU, bf16_tflops=1e3, memory_gb_per_s=1e6, launch_us=5.0)
    assert seconds(how, 128, 1024, quick_cpu, "megatron") > launches_s, "a CPU runs what it launches"


@pytest.mark.parametrize("strategy", ["canzona", "asc", "paper", "layerwise", "sc"])
@pytest.mark.parametrize("launch_us", [1e4, 8.0, 0.0])
def test_launches_are_hidden_under_kernels_in_every_strategy_alike(strategy: str, launch_us: float) -> None:
    """One rank updates everything, so it takes as long as the longer of two sums over all matrices: of kernels, or of
    launches. In each matrix alone, the longer one may be the other."""
    eager = ["optimizer.form=standard", "optimizer.stack=false", "optimizer.graph=false"]
    small = ["train.global_batch_size=1", "train.micro_batch_size=1", "train.seq_length=128"]
    settings = ["recipe=qwen3-0.6b", "gpus=1", "cluster=h100-80g", f"cluster.launch_us={launch_us}"]
    config, mesh = resolve(
        compose_run([*settings, *eager, *small, f"engine.strategy={strategy}"], training=False).config
    )
    members = matrices(config.model, mesh, splitting_of(config.setup))
    times = update_times(config.setup, members)
    device_s, host_s = (sum(part) for part in zip(*times, strict=True))
    planned = config.execution is Execution.PLANNED
    result = simulate_run(config.setup, mesh, make_plan(config.setup, mesh) if planned else None)
    # The engine reads two bf16 weights and writes one, in order not to wait for the check of finite values.
    selected_s = 6 * sum(matrix.elements for matrix in members) / memory_rate(config.cluster) if planned else 0.0
    assert result.phases["matrix_update"] == pytest.approx(max(device_s, host_s) + selected_s, rel=1e-6)
    if launch_us == 8.0:
        assert max(device_s, host_s) < 0.99 * sum(time.alone_s for time in times)


def test_collectives_take_units_for_each_network_port_they_use() -> None:
    cluster = replace(H100, collective_units=0.12)
    for tp, cells, share in ((1, 16, 1.0), (4, 16, 2 / 8), (8, 16, 1 / 8), (1, 8, 1.0)):
        config = run("8b", tp * cells, cluster=cluster)
        assert units_taken(config.setup, layout(tp=tp, dp=cells)) == pytest.approx(0.12 * share)
