"""Qwen3 models with experts, by their published sizes; their matrices in model space and in plans."""

from dataclasses import replace

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.model.families import flops_per_token, parameter_count
from canzona_cli.core.model.geometry import fragment_blocks, stored_blocks, unit_shape, weight_of, whole_shape
from canzona_cli.core.model.matrices import layer_matrices, matrices, routing
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.simulate.predict import predict

TYPED = ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=1", "train.recompute=none"]


def _run(*overrides: str) -> RunConfig:
    return compose_run(list(overrides), training=False).config


@pytest.mark.parametrize(
    ("recipe", "total", "active", "matrices"),
    [
        # The model cards: 30.5B and 3.3B, 235B and 22B; the totals are those of the published safetensors.
        ("qwen3-30b-a3b", 30_532_122_624, 3.35e9, 48 * (128 * 3 + 4)),
        ("qwen3-235b-a22b", 235_093_634_560, 22.2e9, 94 * (128 * 3 + 4)),
        ("qwen3-moe-tiny", 4_041_216, 1.68e6, 4 * (8 * 3 + 4)),
        ("qwen3-moe-mini", 131_184_640, 46.2e6, 12 * (16 * 3 + 4)),
    ],
)
def test_parameters_are_those_published(recipe: str, total: int, active: float, matrices: int) -> None:
    config = _run(f"recipe={recipe}")
    count, routes = parameter_count(config.model), routing(config.setup)
    assert count.total == total
    assert count.active == pytest.approx(active, rel=0.01)
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == total
    assert sum(route.count for route in routes.matrices) == matrices


def test_a_network_that_processes_every_token_has_the_size_of_qwen2s() -> None:
    """Qwen2-57B-A14B by its published shapes; its report says 57B and 14B. Biases of queries, keys and values, and
    gates of one row, are not counted: 0.3M and 0.1M."""
    config = _run(
        "recipe=qwen3-30b-a3b",
        *("model.num_layers=28", "model.hidden_size=3584", "model.ffn_hidden_size=2560", "model.vocab_size=151936"),
        *("model.num_attention_heads=28", "model.num_query_groups=4", "model.head_dim=128", "model.qk_norm=false"),
        *("model.num_experts=64", "model.experts_per_token=8", "model.shared_ffn_hidden_size=20480"),
    )
    count, routes = parameter_count(config.model), routing(config.setup)
    assert count.total == pytest.approx(57.41e9, rel=1e-3)
    assert count.active == pytest.approx(14.2e9, rel=0.01)
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == count.total
    each = {matrix.name: (matrix.rows, matrix.cols) for matrix in layer_matrices(config.model, "split")}
    assert [each[f"shared.{kind}"] for kind in ("gate", "up")] == [(20480, 3584)] * 2
    assert each["shared.down"] == (3584, 20480)
    plain = replace(config.model, shared_ffn_hidden_size=0)
    shared = 28 * 3 * 3584 * 20480
    assert flops_per_token(config.model, 4096) - flops_per_token(plain, 4096) == 6 * shared
    assert unit_shape("layers.3.shared.down", config.model) == (3584, 20480)


def test_a_plan_divides_the_network_that_processes_every_token_like_dense_matrices() -> None:
    config, layout = resolve(
        _run(
            *("recipe=qwen3-moe-tiny", "gpus=4", "parallel.tp=2", "parallel.ep=2", "parallel.pp=1", "parallel.cp=1"),
            *("model.shared_ffn_hidden_size=384", "optimizer=muon", "engine.splitting=split"),
        )
    )
    plan = make_plan(config.setup, layout)
    of_shared = [matrix for matrix in plan.matrices if ".shared." in matrix.name]
    assert len(of_shared) == 3 * config.model.num_layers
    assert all(matrix.expert_rank is None and matrix.shard_dim is not None for matrix in of_shared)
    without = replace(config, model=replace(config.model, shared_ffn_hidden_size=0))
    time_s = predict(config.setup, layout, plan).iteration_s
    assert time_s > predict(without.setup, layout, make_plan(without.setup, layout)).iteration_s


def test_routers_are_left_to_adamw_and_gate_and_up_are_apart() -> None:
    routes = routing(_run("recipe=qwen3-moe-tiny").setup)
    assert {route.pattern: route.count for route in routes.matrices if "experts" in route.pattern} == {
        "layers.*.experts.*.gate": 32,
        "layers.*.experts.*.up": 32,
        "layers.*.experts.*.down": 32,
    }
    assert "decoder.layers.*.mlp.router.weight" in {route.pattern for route in routes.adamw}


def test_a_token_costs_the_products_of_its_experts() -> None:
    model = _run("recipe=qwen3-moe-mini").model
    count = parameter_count(model)
    used = count.active - count.vectors - count.routers  # the embedding, which is also the output layer, once
    assert flops_per_token(model, 1) == pytest.approx(6 * used, rel=1e-3)


def test_weights_are_in_transformer_engines_order() -> None:
    """All experts' fc1, then all experts' fc2, so that each kind is one block of the gradient buffer."""
    model = _run("recipe=qwen3-moe-tiny").model
    names = [matrix.name for matrix in layer_matrices(model, "split")]
    assert names[:6] == ["proj", "q", "k", "v", "experts.0.gate", "experts.0.up"]
    assert names[-2:] == ["experts.6.down", "experts.7.down"]
    assert names.index("experts.7.up") < names.index("experts.0.down")


def test_experts_have_their_places_in_model_space() -> None:
    model = _run("recipe=qwen3-moe-tiny").model
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight5"
    [gate, up] = fragment_blocks(name, (), model, tp=2, rank=1)
    assert [(block.unit, block.unit_row, block.rows, block.cols) for block in (gate, up)] == [
        ("layers.3.experts.5.gate", 64, 64, 256),
        ("layers.3.experts.5.up", 64, 64, 256),
    ]
    assert unit_shape("layers.3.experts.5.down", model) == (256, 128)
    assert whole_shape("layers.3.experts.5.fc1", model) == (256, 256)
    assert [block.unit for block in stored_blocks("layers.3.experts.5.fc1", (256, 256), model)] == [gate.unit, up.unit]


def test_a_router_is_one_unit_that_every_rank_has() -> None:
    model = _run("recipe=qwen3-moe-tiny").model
    name = "decoder.layers.3.mlp.router.weight"
    assert weight_of(name, model) is None
    [block] = fragment_blocks(name, (8, 256), model, tp=2, rank=1)
    assert (block.unit, block.rows, block.cols) == ("layers.3.mlp.router.weight", 8, 256)
    assert unit_shape(block.unit, model) == (8, 256)


def test_a_plan_balances_experts_with_the_dense_matrices() -> None:
    config, layout = resolve(_run("recipe=qwen3-moe-mini", "gpus=4", *TYPED))
    plan = make_plan(config.setup, layout)
    assert len(plan.matrices) == len(matrices(config.model, layout, "split")) == 12 * 52
    assert max(plan.loads(0)) <= 1.01 * plan.lower_bounds[0]
    assert predict(config.setup, layout, plan).iteration_s > 0


def test_memory_counts_a_tokens_copies() -> None:
    few, many = (
        resolve(_run("recipe=qwen3-moe-mini", f"model.experts_per_token={chosen}", *TYPED)) for chosen in (2, 4)
    )
    few_bytes, many_bytes = (estimate(run[0].setup, run[1]).parts["activations"] for run in (few, many))
    # Two more experts of a token: its copy and result, 2 * 512, and 5 * 384 of SwiGLU, 2 bytes each, 12 layers.
    assert many_bytes - few_bytes == 12 * 512 * 2 * (2 * 512 + 5 * 384) * 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_experts=1"], "is fewer than model.experts_per_token=2"),
        (["model.experts_per_token=1", "model.num_experts=8"], "at least 2"),
        (["model.balancing_loss=aux_loss", "model.num_experts=8"], "sequence"),
        (["model.num_experts=8", "parallel.tp=3"], "tp"),
        (["model.experts_per_token=4"], "has no effect: model.num_experts is 0"),
        (["model.balancing_loss=none"], "has no effect: model.num_experts is 0"),
        (["model.balancing_weight=0.01"], "has no effect: model.num_experts is 0"),
        (["recipe=qwen3-moe-tiny", "model.balancing_loss=none", "model.balancing_weight=0.01"], "loss is none"),
    ],
)
def test_impossible_experts_are_refused(overrides: list[str], words: str) -> None:
    recipe = () if overrides[0].startswith("recipe=") else ("recipe=qwen3-tiny",)
    with pytest.raises(ConfigError, match=words):
        _run(*recipe, *overrides)
