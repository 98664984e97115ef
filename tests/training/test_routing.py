"""The destinations of a step's tokens are summed over ranks."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.training.step import Routing


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
