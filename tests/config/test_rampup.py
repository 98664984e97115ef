"""The ramp-up of the batch: which ones are refused, the layouts that divide it, and what a dry run says about it."""

from dataclasses import replace

import pytest

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.checkpoint.torch_dist.arguments import schedule_state
from canzona_cli.cli.views.header import describe_batch, outlook
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.possible import possible_layouts
from tests.refusals import refused

TINY = ("recipe=qwen3-tiny", "gpus=4", "train.steps=20", "train.global_batch_size=32")
DP4 = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1")


def _resolved(*overrides: str) -> tuple[RunConfig, Layout]:
    return resolve(compose_run([*TINY, *overrides]).config)


@pytest.mark.parametrize(
    ("rampup", "words"),
    [
        ("[[8,4],[8,4]]", "rising numbers of sequences below the batch of 32"),
        ("[[32,4]]", "rising numbers of sequences below the batch of 32"),
        ("[[8,10],[16,10]]", "takes all of train.steps=20"),
        ("[[8,1],[10,1],[18,1]]", "its batch of 10, 18 sequences is not a multiple of dp 4"),
        ("[[0,4]]", "contains 0"),
        ("[8,4]", "is not a list of valid entries"),
    ],
)
def test_a_ramp_up_that_cannot_work_is_refused_by_its_name(rampup: str, words: str) -> None:
    (problem,) = refused(_resolved, *DP4, f"train.batch_rampup={rampup}")
    assert problem.key == "train.batch_rampup"
    assert words in problem.reason


def test_every_layout_divides_all_batches() -> None:
    whole = compose_run([*TINY]).config.setup
    setup = replace(whole, train=replace(whole.train, batch_rampup=((2, 3), (6, 1))))
    layouts = possible_layouts(setup)
    assert {layout.batch_multiple for layout in layouts} == {1, 2}
    assert {layout.batch_multiple for layout in possible_layouts(whole)} > {1, 2}
    (problem,) = refused(
        _resolved, *DP4[1:], "parallel.tp=null", "train.micro_batch_size=4", "train.batch_rampup=[[6,3]]"
    )
    assert (problem.key, problem.fix) == ("train.batch_rampup", "use multiples of 4 sequences")


def test_the_rest_of_a_run_counts_the_sequences_of_the_ramp_up() -> None:
    config, layout = _resolved(*DP4, "train.batch_rampup=[[8,3],[16,2]]", "schedule.warmup_steps=4")
    assert describe_batch(layout, config.train).endswith(", after 3 steps of 8, 2 of 16")
    sequences = 3 * 8 + 2 * 16 + 15 * 32
    assert outlook(config, layout, 0.5).training_s == pytest.approx(0.5 * sequences / 32)
    state = schedule_state(config, Progress(step=4, samples=40, tokens=40 * 256))
    # Megatron's schedule counts samples, so the end of the warm-up is where our run is after four steps.
    assert (state["lr_warmup_steps"], state["num_steps"]) == (40, 40)
    assert state["lr_decay_steps"] == state["wd_incr_steps"] == sequences
