"""The routing table, counted by hand, and what is refused: a matrix optimizer without a matrix."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.model.matrices import routing

SHAPE = (
    *("recipe=qwen3-tiny", "model.num_layers=3", "model.hidden_size=32", "model.ffn_hidden_size=48"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=8"),
)


def _table(*overrides: str) -> dict[str, tuple[int, int]]:
    found = routing(compose_run([*SHAPE, *overrides]).config.setup)
    return {one.pattern: (one.count, one.elements) for one in (*found.matrices, *found.adamw)}


def test_splittings_and_adamw() -> None:
    heads = _table("optimizer=muon", "engine.splitting=per_head")
    assert heads["layers.*.q.*"] == (12, 3 * 32 * 32)
    assert heads["layers.*.k.*"] == (6, 3 * 16 * 32)
    # Megatron's own Muon leaves gate and up together.
    assert _table("optimizer=muon", "engine.strategy=sc")["layers.*.fc1"] == (3, 3 * 96 * 32)
    alone = routing(compose_run([*SHAPE, "optimizer=adamw"]).config.setup)
    assert alone.matrices == ()
    both = _table("optimizer=muon")
    assert sum(one.elements for one in alone.adamw) == sum(elements for _, elements in both.values())


@pytest.mark.parametrize("optimizer", ["shampoo", "soap"])
def test_an_optimizer_that_would_treat_nothing_as_a_matrix_is_refused(optimizer: str) -> None:
    """The shortest side of any matrix is 16, of k and v."""
    config = compose_run([*SHAPE, "gpus=1", f"optimizer={optimizer}", "optimizer.max_preconditioner_dim=15"]).config
    with pytest.raises(ConfigError, match=r"max_preconditioner_dim=16") as refused:
        resolve(config)
    assert [problem.key for problem in refused.value.problems] == ["optimizer.max_preconditioner_dim"]
    resolve(compose_run([*SHAPE, "gpus=1", f"optimizer={optimizer}", "optimizer.max_preconditioner_dim=16"]).config)
