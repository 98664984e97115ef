"""A profile of a machine that cannot exist is refused by the field that is wrong."""

from dataclasses import replace

import pytest

from canzona_cli.cluster.profiles import list_profiles
from canzona_cli.config.compose import compose_run
from canzona_cli.errors import ConfigError
from canzona_cli.planner.planner import make_plan
from canzona_cli.simulate.predict import simulate_run
from tests.planner.planning import grid

H100 = ("recipe=qwen3-8b", "gpus=64")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.matmul_tflops=[[2048,541],[8192,1200]]", "matmul_tflops"),  # the peak is 989
        ("cluster.fp32_tflops=5000", "fp32_tflops"),
        ("cluster.tf32_tflops=2000", "tf32_tflops"),
        ("cluster.qr_tflops=9000", "qr_tflops"),
        ("cluster.eigh_tflops=9000", "eigh_tflops"),
        ("cluster.inter_node_gb_per_s=9000", "inter_node_gb_per_s"),  # memory takes 3350
        ("cluster.intra_node_gb_per_s=9000", "intra_node_gb_per_s"),
        ("cluster.collectives=[[all_gather,8,1e9,0.001,0]]", "collectives"),  # 875 GB/s over links of 450
        ("cluster.collectives=[[send,2,1e9,0.001,0]]", "collectives"),
        ("cluster.step_factors.exchange=0", "step_factors.exchange"),
        ("cluster.step_factors.exchange=-1", "step_factors.exchange"),
        ("cluster.bf16_tflops=0", "bf16_tflops"),
        ("cluster.memory_gb_per_s=-3350", "memory_gb_per_s"),
        ("cluster.forward_factor=0", "forward_factor"),
    ],
)
def test_what_no_machine_does_is_refused_with_its_field(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run([*H100, override])
    (problem,) = caught.value.problems
    assert problem.key == f"cluster.{key}"
    assert problem.fix


@pytest.mark.parametrize(
    "override",
    [
        "cluster.matmul_tflops=[[8192,1010]]",  # a clock above the nominal one
        "cluster.collectives=[[all_gather,8,1e9,0.00195,0]]",  # 449 GB/s
        "cluster.collectives=[[all_reduce,8,1e9,0.0021,0]]",  # 833 GB/s by the ring's count: the switch does the sums
    ],
)
def test_what_a_good_machine_does_is_not(override: str) -> None:
    compose_run([*H100, override])


def test_an_update_beyond_the_peak_is_refused() -> None:
    row = "cluster.measured_updates=[[muon/standard/5,{rows},4096,{seconds}]]"
    # 5 steps of 4 m^2 n + 2 m^3 with m = n = 4096 are 2.06 TFLOP: 2.1 ms at the peak of 989 TFLOP/s.
    for seconds, sound in ((2.2e-3, True), (1.8e-3, False)):
        config = compose_run(["recipe=qwen3-8b", "gpus=1", row.format(rows=4096, seconds=seconds)]).config
        if sound:
            make_plan(config, grid(1, 64))
        else:
            with pytest.raises(ConfigError, match=r"cluster\.measured_updates"):
                make_plan(config, grid(1, 64))


def test_model_flop_utilisation_stays_below_a_hundred_per_cent() -> None:
    layout = replace(grid(1, 64), global_batch_size=256, num_microbatches=4, micro_batch_size=1)
    for factor, sound in ((0.9, True), (0.1, False)):
        factors = (f"cluster.{name}_factor={factor}" for name in ("forward", "backward"))
        config = compose_run([*H100, "optimizer=adamw", *factors]).config
        if sound:
            simulate_run(config, layout, None)
        else:
            with pytest.raises(ConfigError, match=r"cluster\.forward_factor: makes model FLOP utilisation \d\d\d%"):
                simulate_run(config, layout, None)


def test_the_profiles_that_come_with_it_are_sound_and_stand_for_what_they_are() -> None:
    found = {profile.name: profile for profile in list_profiles()}
    assert {"a100-80g", "b200", "cpu", "h100-80g", "h200"} <= set(found)
    assert not [profile.problems for profile in found.values() if profile.problems]
    for name, generation in (("a100-80g", 312), ("h100-80g", 989.4), ("b200", 2250)):
        profile = found[name]
        assert profile.cluster is not None
        assert profile.cluster.bf16_tflops == generation
        assert not profile.cluster.measured_on
    # A number without a word on where it is from is a guess: each line has its own, or one above it.
    for name in ("a100-80g", "b200"):
        lines = found[name].text.splitlines()
        numbers = [
            number for number, line in enumerate(lines) if line and line[0] != "#" and any(map(str.isdigit, line))
        ]
        for number in numbers:
            own, above = "#" in lines[number], lines[number - 1].startswith("#")
            assert own or above or lines[number].startswith(("name", "gpus_per_node")), lines[number]
