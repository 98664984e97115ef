"""The destinations of a step's tokens are summed over ranks, and experts that get none are named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.records.files import RunFiles
from canzona_cli.training.measure import STARVATION_WINDOW, StarvationWatch
from canzona_cli.training.records import Journal
from canzona_cli.training.step import Routing

EVEN = Routing(balancing_loss=1.0, tokens=((4.0, 4.0), (4.0, 4.0)))
ONE_SIDED = replace(EVEN, tokens=((4.0, 4.0), (8.0, 0.0)))


@pytest.mark.parametrize(("kind", "parts"), [("sequence", 2 * 4), ("global", 4)])
def test_sums_of_all_ranks_become_a_mean_over_what_they_are_parts_of(kind: str, parts: int) -> None:
    """Each data-parallel rank has sequences of its own, while every rank has a part of the global batch."""
    typed = ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=2", "train.recompute=none"]
    config, layout = resolve(compose_run(["recipe=moe-tiny", "gpus=2", f"model.balancing_loss={kind}", *typed]).config)
    assert (layout.dp, layout.num_microbatches) == (2, 4)
    layer = [1.5 * parts, *[2.0] * 7, 18.0]
    routing = Routing.from_sums(layer * config.model.num_layers, config.model, dp=2, micro_batches=4)
    assert routing.balancing_loss == pytest.approx(1.5)
    assert routing.tokens == ((*[2.0] * 7, 18.0),) * config.model.num_layers
    assert routing.load == pytest.approx(18 * 8 / 32)


def _reported(folder: Path, steps: list[Routing | None]) -> list[dict[str, object]]:
    files = RunFiles(folder)
    watch = StarvationWatch(Journal(files, writes=True), last_step=len(steps))
    for step, routing in enumerate(steps, start=1):
        watch.after_step(step, routing)
    if not files.events.exists():
        return []
    return [json.loads(line) for line in files.events.read_text(encoding="utf-8").splitlines()]


def test_an_expert_without_a_token_in_all_steps_is_named(tmp_path: Path) -> None:
    [event] = _reported(tmp_path, [ONE_SIDED] * 3)
    assert (event["event"], event["level"]) == ("starved_experts", "warning")
    assert event["detail"] == "1 of 4 experts got no token in 3 steps: layers.1.experts.1"


def test_one_token_in_a_window_suffices(tmp_path: Path) -> None:
    assert _reported(tmp_path, [EVEN, *[ONE_SIDED] * (STARVATION_WINDOW - 1)]) == []
    assert len(_reported(tmp_path, [EVEN, *[ONE_SIDED] * (2 * STARVATION_WINDOW - 1)])) == 1, "the second window"


def test_dense_models_are_not_watched(tmp_path: Path) -> None:
    assert _reported(tmp_path, [None] * 3) == []
