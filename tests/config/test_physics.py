"""A profile of a machine that cannot exist is refused by the field that is wrong."""

from dataclasses import replace

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.profiles import list_profiles
from canzona_cli.config.resolve import resolve
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.simulate.predict import simulate_run
from tests.core.planner.planning import grid
from tests.refusals import refused

H100 = ("recipe=qwen3-8b", "gpus=64")


def test_model_flop_utilisation_stays_below_a_hundred_per_cent() -> None:
    layout = replace(grid(1, 64), global_batch_size=256, num_microbatches=4, micro_batch_size=1)
    for factor, sound in ((0.9, True), (0.1, False)):
        config = compose_run([*H100, "optimizer=adamw", f"cluster.pass_factors=[{factor},{factor}]"]).config
        if sound:
            simulate_run(config.setup, layout, None)
        else:
            with pytest.raises(ConfigError, match=r"cluster\.pass_factors: makes model FLOP utilisation \d\d\d%"):
                simulate_run(config.setup, layout, None)


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


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.bf16_tflops=99000", "cluster.bf16_tflops"),  # forty B200s
        ("cluster.bf16_tflops=0.001", "cluster.bf16_tflops"),  # which would train faster than it multiplies
        ("cluster.memory_gib=100000", "cluster.memory_gib"),
        ("cluster.memory_gib=2", "cluster.reserved_gib"),
        ("cluster.inter_node_gb_per_s=0", "cluster.inter_node_gb_per_s"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_before_it_is_planned_for(override: str, key: str) -> None:
    problems = refused(lambda: resolve(compose_run([*H100, override]).config))
    assert key in {problem.key for problem in problems}
