"""The costs of an update: FLOPs against hand counts and counted runs, seconds against closed forms."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.update import (
    MEMORY_EFFICIENCY,
    PRICED_STACK,
    STACK_BYTES,
    STACK_GAIN,
    UpdateTime,
    adamw_seconds,
    algorithm_of,
    duration,
    flops,
    form_of,
    label,
    matmul_rate,
    matmul_seconds,
    period_seconds,
    seconds,
    stack_of,
    summed,
    update_time,
    work,
)
from canzona_cli.core.optimizers.facts import Algorithm, Work
from canzona_cli.core.optimizers.gram_form import gram_newton_schulz
from canzona_cli.core.optimizers.matrix_optimizer import Workspace
from canzona_cli.core.optimizers.newton_schulz import coefficients
from canzona_cli.core.optimizers.shampoo import Shampoo as OurShampoo
from canzona_cli.core.optimizers.soap import SOAP as OurSOAP
from canzona_cli.core.setup import CustomConfig, UpdateName
from tests.sizes import CPU, H100, run

MUON = STANDARD = Algorithm(name="muon")
GRAM = replace(MUON, form="gram")
SHAMPOO = Algorithm(name="shampoo")
SOAP = Algorithm(name="soap")
ADAMW = Algorithm(name="adamw")
EVERY = [*(Algorithm(name=name) for name in get_args(UpdateName)), GRAM]
IDEAL = replace(H100, matmul_tflops=((1024, 700.0),), memory_gb_per_s=1e15, launch_us=0.0)
"""700 TFLOP/s from 1024 on, and nothing else takes time."""


def counted(run_it: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run_it()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("rows", "cols"), [(24, 56), (56, 24), (32, 32), (1, 40), (37, 1)])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_newton_schulz_flops_equal_a_counted_run(rows: int, cols: int, steps: int) -> None:
    x = torch.randn(rows, cols)
    assert flops(replace(MUON, ns_steps=steps), rows, cols) == counted(lambda: newton_schulz(x, steps))


@pytest.mark.parametrize(("rows", "cols"), [(40, 200), (200, 40), (64, 64)])
def test_five_steps_of_each_form_by_hand(rows: int, cols: int) -> None:
    """The counts in units of u = 2 m^3, with r = n / m: standard 5 (2 r + 1), Gram 4 r + 14."""
    m, n = sorted((rows, cols))
    u, r = 2 * m**3, n / m
    ideal = replace(IDEAL, matmul_tflops=((1, 700.0),))
    for form, full in ((STANDARD, 5 * (2 * r + 1)), (GRAM, 4 * r + 14)):
        assert flops(form, rows, cols) == pytest.approx(full * u)
        assert seconds(form, rows, cols, ideal) * 700e12 == pytest.approx(full * u)


@pytest.mark.parametrize(("rows", "cols"), [(24, 56), (56, 24), (32, 32)])
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 9])
def test_gram_flops_equal_a_counted_run(rows: int, cols: int, steps: int) -> None:
    x = torch.randn(rows, cols)
    x /= x.norm()
    made = counted(lambda: gram_newton_schulz(x, coefficients("quintic", steps), Workspace()))
    assert flops(replace(GRAM, ns_steps=steps), rows, cols) == made


def test_the_form_of_a_shape_is_the_one_that_takes_less() -> None:
    """Long matrices are iterated on by their Gram matrix, near-square ones themselves; Megatron's Muon always."""
    auto = replace(STANDARD, form="auto")
    assert [form_of(auto, *shape, H100) for shape in ((5120, 25600), (25600, 5120), (5120, 5120))] == [
        "gram", "gram", "standard",
    ]  # fmt: skip
    for shape in ((5120, 25600), (5120, 5120)):
        chosen = replace(auto, form=form_of(auto, *shape, H100))
        assert seconds(auto, *shape, H100) == seconds(chosen, *shape, H100) == period_seconds(auto, *shape, H100)[0]
        assert seconds(auto, *shape, H100) <= min(seconds(form, *shape, H100) for form in (STANDARD, GRAM)) / 0.98
        assert seconds(auto, *shape, H100, "megatron") == seconds(STANDARD, *shape, H100, "megatron")


def test_on_cpus_half_precision_has_too_few_digits_for_the_gram_form() -> None:
    cpu, auto = replace(H100, device="cpu"), replace(STANDARD, form="auto")
    forms = [form_of(replace(auto, precision=precision), 5120, 25600, cpu) for precision in ("bf16", "fp32")]
    assert forms == ["standard", "gram"]
    assert form_of(GRAM, 5120, 25600, cpu) == "gram"
    in_fp32 = replace(cpu, bf16_in_fp32=True)
    assert [form_of(auto, *shape, in_fp32) for shape in ((5120, 25600), (5120, 5120))] == ["gram", "standard"]


def test_a_form_that_was_not_measured_is_priced_beside_the_one_that_was() -> None:
    shape = (512, 2560)
    profile = replace(H100, measured_updates=((label(STANDARD), *shape, 0.25),))
    ratio = seconds(GRAM, *shape, H100) / seconds(STANDARD, *shape, H100)
    assert seconds(GRAM, *shape, profile) == pytest.approx(0.25 * ratio)
    both = replace(profile, measured_updates=(*profile.measured_updates, (label(GRAM), *shape, 0.3)))
    assert seconds(GRAM, *shape, both) == 0.3
    auto = replace(STANDARD, form="auto")
    assert (form_of(auto, *shape, both), seconds(auto, *shape, both)) == ("standard", 0.25)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 80)])
def test_flops_equal_a_counted_run(shape: tuple[int, int]) -> None:
    """The class that runs is counted, in a step that refreshes and in one that does not; a side of 80 has no factor.

    The counter knows products only.
    """
    weight = torch.nn.Parameter(torch.randn(shape))
    optimizer = OurSOAP([weight], 1e-3, precondition_frequency=3, max_preconditioner_dim=64)

    def update() -> None:
        weight.grad = torch.randn(shape)
        optimizer.step()

    update()  # the first bases are eigenvectors, which no later step computes
    found = {counted(update) for _ in range(6)}
    how = Algorithm(name="soap", max_preconditioner_dim=64)
    step, [refresh] = work(how, *shape)
    sides = [side for side in shape if side <= 64]
    qr = sum(8 / 3 * side**3 for side in sides)
    assert sorted(found) == [step.flops, pytest.approx(step.flops + refresh.flops - qr)]
    assert flops(how, *shape) == pytest.approx(step.flops + refresh.flops / how.refresh_period)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_parts_of_a_refresh_are_priced_as_they_are_run(name: UpdateName) -> None:
    """The class that runs is counted in each step of the third period, products alone. Newton's iteration begins with
    ten products by a vector, which are not priced."""
    period, shape = 5, (24, 40)
    weight = torch.nn.Parameter(torch.randn(shape))
    settings = {"precondition_frequency": period, "max_preconditioner_dim": 64, "spread": True}
    kinds = {"soap": OurSOAP, "shampoo": partial(OurShampoo, roots="newton")}
    optimizer = kinds[name]([weight], 1e-3, **settings)  # type: ignore[operator]

    def update() -> None:
        weight.grad = torch.randn(shape)
        optimizer.step()

    for _ in range(2 * period):
        update()
    how = Algorithm(name=name, max_preconditioner_dim=64, refresh_period=period, spread=True, roots="newton")
    step, parts = work(how, *shape)
    for number, part in enumerate(parts):
        vectors = sum(10 * 2 * side**2 for side in shape) if name == "shampoo" and number == 0 else 0
        assert counted(update) - vectors == pytest.approx(step.flops + part.matmul_flops), number


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_spread_refresh_makes_no_step_long(name: UpdateName) -> None:
    """The matrix is the one whose refresh takes longest, on an H100 alone; refreshed as a whole it takes 3.6 to 5.9
    times as long."""
    whole = Algorithm(name=name, roots="newton")
    h100 = compose_run(["recipe=tiny", "cluster=h100-80g"]).config.cluster
    long, spread = (period_seconds(a, 8192, 5120, h100) for a in (whole, replace(whole, spread=True)))
    assert len(long) == len(spread) == whole.refresh_period
    assert max(spread) < max(long) / 2.5
    assert sum(spread) <= 1.05 * sum(long)


def test_shampoo_flops_by_hand() -> None:
    # 10 x 20: statistics 2 * 10 * 20 * (10 + 20), both roots applied as much again.
    assert work(SHAMPOO, 10, 20)[0].flops == 2 * 12_000
    # A refresh: eigenvectors 9 n^3 and one product 2 n^3 a side.
    [refresh] = work(SHAMPOO, 10, 20)[1]
    assert refresh.flops == 11 * (1_000 + 8_000)
    assert flops(SHAMPOO, 10, 20) == pytest.approx(24_000 + 99_000 / 10)


def test_adamw_flops_by_hand() -> None:
    # moments 3 + 4, bias-corrected root 3 and quotient 2, decay 1, weight 2
    assert flops(ADAMW, 3, 7) == 15 * 21


@pytest.mark.parametrize("a", [SHAMPOO, SOAP])
def test_a_side_that_is_too_long_has_no_preconditioner(a: Algorithm) -> None:
    short = replace(a, max_preconditioner_dim=16)
    one_sided = 2 * 16 * 16 * 40 * (2 if a.name == "shampoo" else 3)
    assert work(short, 16, 40)[0].flops == one_sided == work(short, 40, 16)[0].flops
    step, parts = work(replace(short, max_preconditioner_dim=8), 16, 40)
    assert (step.flops, parts) == (0, ())


@pytest.mark.parametrize("a", EVERY)
@given(rows=st.integers(1, 6000), cols=st.integers(1, 6000))
def test_costs_are_positive_and_the_same_for_the_transpose(a: Algorithm, rows: int, cols: int) -> None:
    assert seconds(a, rows, cols, H100) > 0
    assert flops(a, rows, cols) == pytest.approx(flops(a, cols, rows))
    assert seconds(a, rows, cols, H100) == pytest.approx(seconds(a, cols, rows, H100))
    steps = period_seconds(a, rows, cols, H100)
    assert sum(steps) / len(steps) == pytest.approx(seconds(a, rows, cols, H100))


@pytest.mark.parametrize("a", EVERY)
@given(rows=st.integers(1, 6000), cols=st.integers(1, 6000), more=st.integers(1, 2000))
def test_a_larger_matrix_costs_more(a: Algorithm, rows: int, cols: int, more: int) -> None:
    """Unless both are so small that they take as long as their launches."""
    assert flops(a, rows + more, cols) > flops(a, rows, cols)
    assert seconds(a, rows + more, cols, H100) >= seconds(a, rows, cols, H100)
    free = replace(H100, launch_us=0.0)
    assert seconds(a, rows + more, cols, free) > seconds(a, rows, cols, free)


def test_an_update_takes_as_long_as_its_kernels_or_as_their_launches() -> None:
    work_of = work(MUON, 512, 512)[0]
    slow = replace(H100, launch_us=105.0)
    assert seconds(MUON, 512, 512, slow) == pytest.approx(work_of.launches * 105e-6)
    free = replace(H100, launch_us=0.0)
    half = replace(free, memory_gb_per_s=H100.memory_gb_per_s / 2)
    moved = work_of.traffic / (MEMORY_EFFICIENCY["cuda"] * H100.memory_gb_per_s * 1e9)
    assert seconds(MUON, 512, 512, half) - seconds(MUON, 512, 512, free) == pytest.approx(moved)
    time = update_time(MUON, 5120, 25600, H100)
    assert time.alone_s == time.device_s
    assert time.host_s == pytest.approx(work_of.launches * 5e-6)
    # A CPU runs what it launches.
    cpu = replace(CPU, launch_us=105.0)
    added_s = seconds(MUON, 512, 512, cpu) - seconds(MUON, 512, 512, replace(cpu, launch_us=0.0))
    assert added_s == pytest.approx(work_of.launches * 105e-6)


def test_updates_one_after_another_take_as_long_as_the_longer_of_two_sums() -> None:
    large, small = UpdateTime(3.0, 1.0), UpdateTime(1.0, 2.0)
    assert summed([large, small]) == (4.0, 3.0)
    assert summed([large, small]).alone_s == 4.0 < large.alone_s + small.alone_s
    assert summed([small] * 3).alone_s == 6.0


def test_replayed_kernels_take_what_a_graph_takes_for_them() -> None:
    """A graph replays our own updates on GPUs without the host; what a kernel takes besides its work remains."""
    replayed = replace(MUON, graph=True)
    assert update_time(MUON, 512, 512, H100).host_s > 0.0 == update_time(replayed, 512, 512, H100).host_s
    assert seconds(replayed, 512, 512, H100) <= seconds(MUON, 512, 512, H100)
    long, none = (replace(H100, launch_us=50.0, graph_launch_us=graph_us) for graph_us in (40.0, 0.0))
    added_s = seconds(replayed, 512, 512, long) - seconds(replayed, 512, 512, none)
    assert added_s == pytest.approx(work(MUON, 512, 512)[0].launches * 40e-6)
    quick = replace(H100, launch_us=0.5)
    assert seconds(MUON, 512, 512, quick) == seconds(replayed, 512, 512, quick)
    own = seconds(replayed, 512, 512, H100, "megatron")
    assert own == seconds(MUON, 512, 512, H100, "megatron")
    assert algorithm_of(run("8b", 8, strategy="asc", cluster=H100).setup).graph
    assert not algorithm_of(run("8b", 8, strategy="sc", cluster=H100).setup).graph
    assert not algorithm_of(run("8b", 8, strategy="asc", cluster=CPU).setup).graph
    asked = compose_run(["recipe=8b", "optimizer.graph=false"]).config
    assert not algorithm_of(asked.setup).graph


def test_rates_are_interpolated_between_measured_sizes() -> None:
    profile = replace(H100, matmul_tflops=((1024, 200.0), (4096, 700.0)))
    assert matmul_rate(profile, 1024, "bf16") == pytest.approx(200e12)
    assert matmul_rate(profile, 2048, "bf16") == pytest.approx(450e12)  # half-way in log(size)
    assert matmul_rate(profile, 4096, "bf16") == matmul_rate(profile, 1e6, "bf16") == 700e12
    assert matmul_rate(profile, 256, "bf16") == pytest.approx(50e12)
    assert matmul_seconds(profile, 1024, 4096, 2048, "bf16") == pytest.approx(2 * 2**33 / 450e12)


def test_units_that_are_not_there_run_as_slow_as_what_is() -> None:
    assert matmul_rate(H100, 4096, "fp32") == matmul_rate(H100, 4096, "tf32") == pytest.approx(989.4e12 / 16)
    profile = replace(H100, fp32_tflops=50.0, tf32_tflops=400.0)
    assert (matmul_rate(profile, 1, "fp32"), matmul_rate(profile, 1, "tf32")) == (50e12, 400e12)
    assert seconds(SOAP, 2048, 2048, profile) < seconds(SOAP, 2048, 2048, replace(profile, tf32_tflops=None))
    assert seconds(replace(MUON, precision="fp32"), 2048, 2048, H100) > seconds(MUON, 2048, 2048, H100)


def test_a_measured_update_replaces_the_model() -> None:
    profile = replace(H100, measured_updates=((label(MUON), 512, 256, 0.25), (label(SOAP), 512, 256, 0.5)))
    assert seconds(MUON, 512, 256, profile) == period_seconds(MUON, 512, 256, profile)[0] == 0.25
    assert seconds(MUON, 256, 512, profile) == seconds(MUON, 256, 512, H100)
    assert seconds(replace(MUON, ns_steps=6), 512, 256, profile) == seconds(replace(MUON, ns_steps=6), 512, 256, H100)
    ratio = period_seconds(SOAP, 512, 256, H100)[0] / seconds(SOAP, 512, 256, H100)
    assert period_seconds(SOAP, 512, 256, profile)[0] == pytest.approx(0.5 * ratio)


def test_adamw_is_memory_traffic() -> None:
    # Fused: gradient 4, master and two moments 8 each, bf16 weight 2 bytes.
    assert adamw_seconds(1e9, H100) == pytest.approx(30e9 / (0.72 * 3350e9))
    assert adamw_seconds(1e9, replace(H100, transformer_engine=False)) > 2 * adamw_seconds(1e9, H100)
    assert seconds(ADAMW, 1000, 1000, CPU) == adamw_seconds(1e6, CPU)


def test_what_a_run_says_is_what_is_priced() -> None:
    assert algorithm_of(run("32b", 256).setup) == replace(MUON, form="auto", stack="auto")
    assert algorithm_of(run("32b", 256, strategy="adamw").setup) == ADAMW
    assert algorithm_of(run("tiny", 2, precision="fp32").setup).precision == "fp32"
    soap = compose_run(["recipe=32b", "optimizer=soap", "optimizer.precondition_frequency=7"], training=False).config
    assert algorithm_of(soap.setup) == Algorithm(name="soap", refresh_period=7, spread=True)
    for at_once in (
        replace(soap, optimizer=replace(soap.optimizer, stagger=False)),  # type: ignore[call-arg]
        replace(soap, engine=replace(soap.engine, strategy="layerwise")),
    ):
        assert not algorithm_of(at_once.setup).spread
    dims = ["optimizer.max_preconditioner_dim=64"]
    shampoo = compose_run(["recipe=32b", "optimizer=shampoo", *dims], training=False).config
    assert algorithm_of(shampoo.setup) == Algorithm(name="shampoo", max_preconditioner_dim=64, spread=True)


def test_small_matrices_of_a_gpu_are_stacked_where_that_takes_less() -> None:
    """The price comes from the model or from two measurements; on CPUs from measurements alone. Stacks never take more
    scratch than allowed."""
    auto = replace(MUON, stack="auto")
    found = {(m, n): stack_of(auto, m, n, H100) for m, n in ((128, 5120), (5120, 1024), (5120, 5120), (5120, 25600))}
    assert found[128, 5120] > found[5120, 1024] > 1
    assert found[5120, 5120] == found[5120, 25600] == 1
    for (m, n), count in found.items():
        assert count == 1 or count * 4 * (m * n + min(m, n) ** 2) <= STACK_BYTES["cuda"]
        alone, together = (seconds(replace(auto, stack=stack), m, n, H100) for stack in (False, True))
        assert seconds(auto, m, n, H100) == (together if count > 1 else alone)
        assert (together <= STACK_GAIN * alone) == (count > 1)
    launches = 5 * 5 * H100.launch_us * 1e-6
    apart, together_time = (update_time(replace(auto, stack=stack), 128, 5120, H100) for stack in (False, True))
    assert apart.host_s - together_time.host_s == pytest.approx((1 - 1 / PRICED_STACK) * launches), "of Newton-Schulz"
    assert together_time.device_s < apart.device_s, "small products are slow"

    assert stack_of(auto, 64, 128, CPU) == 1
    rows = (("muon/standard/5", 64, 128, 1.0), ("muon/standard/5/stacked", 64, 128, 0.9))
    assert stack_of(auto, 64, 128, replace(CPU, measured_updates=rows[:1])) == 1
    measured = replace(CPU, measured_updates=rows)
    assert stack_of(auto, 64, 128, measured) > 1
    assert seconds(auto, 64, 128, measured) == 0.9
    assert stack_of(auto, 64, 128, replace(measured, measured_updates=(rows[0], (*rows[1][:3], 0.96)))) == 1
    assert stack_of(replace(auto, stack=True), 5120, 25600, H100) == 2, "as asked for"
    assert stack_of(replace(auto, stack=False), 128, 5120, H100) == 1
    assert stack_of(replace(SOAP, stack="auto"), 128, 5120, H100) == 1


def test_a_users_own_optimizer_is_priced_like_the_one_it_names_until_it_is_measured() -> None:
    own = CustomConfig(name="custom", lr=1e-3, source="mine.py:Mine", cost_like="soap")
    how = algorithm_of(replace(run("32b", 256), optimizer=own).setup)
    assert (how.name, how.custom, label(how)) == ("soap", True, "custom")
    assert seconds(how, 512, 256, H100) == seconds(SOAP, 512, 256, H100)
    profile = replace(H100, measured_updates=(("custom", 512, 256, 0.25), ("soap", 512, 256, 0.5)))
    assert seconds(how, 512, 256, profile) == 0.25


def test_megatrons_muon_launches_as_many_kernels_as_it_is_charged() -> None:
    """Counted as the operations that Megatron's class dispatches: an `addmm` that adds another matrix copies it first.
    Up to three more gather a matrix that TP divides and copy the weight for the model."""
    weight = torch.nn.Parameter(torch.randn(48, 128))
    optimizer = TensorParallelMuon([weight])
    counts = Counter[str]()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func.name().partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    weight.grad = torch.randn(48, 128)
    optimizer.step()  # makes the state
    with Counting():  # type: ignore[no-untyped-call]
        optimizer.step()
    views = ("transpose", "expand", "view", "empty_like", "detach")
    launched = [
        count * (2 if name == "aten::addmm" else 1)
        for name, count in counts.items()
        if name.startswith("aten::") and name.removeprefix("aten::") not in views
    ]
    assert 0 <= work(MUON, 48, 128)[0].launches - sum(launched) <= 3


def test_a_decomposition_takes_the_latency_of_its_columns_on_gpus() -> None:
    """NVIDIA's kernels work on one column after another; on CPUs, profiles have what was measured."""
    free = replace(H100, qr_tflops=1e9, eigh_tflops=1e9)
    assert duration(Work(qr=((1024, 256),)), "fp32", free).device_s == pytest.approx(256 * 4e-6)
    assert duration(Work(eigh=(256,)), "fp32", free).device_s == pytest.approx(2 * 256 * 4e-6)
    on_cpu = replace(CPU, qr_tflops=0.5)
    assert duration(Work(qr=((256, 256),)), "fp32", on_cpu).device_s == pytest.approx(8 / 3 * 256**3 / 0.5e12)


@pytest.mark.parametrize("profile", ["h100-80g", "h200", "cpu"])
def test_built_in_profiles_are_complete_and_never_promise_more_than_the_peak(profile: str) -> None:
    cluster = compose_run(["recipe=tiny", f"cluster={profile}"]).config.cluster
    assert cluster.matmul_tflops
    assert None not in (cluster.fp32_tflops, cluster.qr_tflops, cluster.eigh_tflops)
    # The CPU's peak is itself a measurement, on another day.
    assert max(rate for _, rate in cluster.matmul_tflops) <= cluster.bf16_tflops * (1.1 if profile == "cpu" else 1)
