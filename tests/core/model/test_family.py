"""A Llama: every weight is routed, planned and priced, and has its place."""

from dataclasses import replace

import pytest
from published_rows import load_published

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.model.families import family_of, flops_per_token, parameter_count
from canzona_cli.core.model.geometry import fragment_blocks, unit_shape
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.setup import Layout

PUBLISHED_ELEMENTS = 8_030_261_248
"""Elements in the published safetensors of Llama-3.1-8B."""


def _llama() -> RunConfig:
    return compose_run(["recipe=llama3-8b", "gpus=16", "parallel.tp=2"]).config


def test_published_step_times_are_of_the_same_shape() -> None:
    for name, recipe in (("llama3.1-8b", "llama3-8b"), ("llama3.1-70b", "llama3-70b")):
        shape, model = load_published().models[name].settings, compose_run([f"recipe={recipe}"]).config.model
        assert shape == {setting: getattr(model, setting) for setting in shape}


def test_every_published_weight_is_counted_and_routed() -> None:
    config = _llama()
    routes = routing(config.setup)
    assert parameter_count(config.model).total == PUBLISHED_ELEMENTS
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == PUBLISHED_ELEMENTS
    assert not [route.pattern for route in routes.adamw if "self_attention" in route.pattern]


def test_a_layer_without_qk_norm_is_shorter_where_queries_are_made() -> None:
    config, layout = resolve(_llama())
    normalised = replace(config, model=replace(config.model, qk_norm=True))
    for module, longer in zip(*(stage_time(each, layout, 0).modules for each in (config, normalised)), strict=True):
        assert (module.forward_s < longer.forward_s) == (module.part == "qkv")


def _nemotron() -> RunConfig:
    shape = load_published().models["nemotron4-15b"].settings
    settings = [f"model.{name}={override_text(value)}" for name, value in shape.items()]
    return compose_run(["recipe=llama3-8b", "gpus=16", "parallel.tp=2", *settings], training=False).config


def test_without_a_gate_a_layer_has_one_matrix_fewer() -> None:
    config, layout = resolve(_nemotron())
    assert f"{parameter_count(config.model).non_embedding / 1e9:.1f} B" == "12.5 B", "arXiv 2402.16819, section 2"
    matrices = make_plan(config.setup, layout).matrices
    assert {matrix.kind: matrix.shape for matrix in matrices if matrix.kind in ("gate", "up", "down")} == {
        "up": (24576, 6144),
        "down": (6144, 24576),
    }


def test_a_gate_costs_as_much_as_half_of_the_width_without_one() -> None:
    """Equal elements take equal FLOPs and equal memory: of activations, 3 f with a gate and 2 f without."""
    plain, layout = resolve(_nemotron())
    gated = replace(plain, model=replace(plain.model, gated=True, ffn_hidden_size=16384))
    assert flops_per_token(plain.model, 4096) == flops_per_token(gated.model, 4096)
    for part, size in estimate(plain.setup, layout).parts.items():
        # Whole matrices are exchanged, and those without a gate are larger.
        assert size == estimate(gated.setup, layout).parts[part] or part == "exchange"


GPT2 = (
    *(
        "recipe=llama3-8b",
        "gpus=16",
        "model.layernorm=true",
        "model.biases=true",
        "model.gated=false",
        "model.positions=1024",
        "model.tied_embeddings=true",
    ),
    *("model.num_layers=12", "model.hidden_size=768", "model.ffn_hidden_size=3072", "model.num_attention_heads=12"),
    *("model.num_query_groups=12", "model.head_dim=64", "model.vocab_size=50257", "train.seq_length=1024"),
)
"""The smallest GPT-2 of Radford et al. 2019."""


def test_gpt2_has_the_parameters_of_the_published_safetensors() -> None:
    config = compose_run([*GPT2, "parallel.tp=1"], training=False).config
    routes = routing(config.setup)
    assert parameter_count(config.model).total == 124_439_808
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == 124_439_808
    assert sum(route.elements for route in routes.matrices) == 12 * 12 * 768**2
    stored = stage_weights(config.setup, Layout.plain(), 0)
    assert stored.matrices + stored.others == 124_439_808
    cut = stage_weights(config.setup, replace(Layout.plain(), tp=2), 0)
    # Norms, the biases after a sum over ranks, and positions are whole on both ranks.
    whole = (12 * 6 + 2 + 1024) * 768
    assert 2 * (cut.matrices + cut.others) == 124_439_808 + whole


def test_a_gated_model_with_biases_has_theirs_in_model_space() -> None:
    """`[gate_r; up_r]` and, by query group, `[queries; key; value]`, as the weights'."""
    model = replace(_llama().model, biases=True, layernorm=True)
    layer = "decoder.layers.3."
    gate, up = fragment_blocks(f"{layer}mlp.linear_fc1.bias", (14336,), model, tp=2, rank=1)
    assert (gate.unit, gate.unit_row, gate.row, gate.rows, gate.cols) == ("layers.3.gate.bias", 7168, 0, 7168, 1)
    assert (up.unit, up.unit_row, up.row) == ("layers.3.up.bias", 7168, 7168)
    assert unit_shape(up.unit, model) == (14336, 1)
    first = fragment_blocks(f"{layer}self_attention.linear_qkv.bias", (3072,), model, tp=2, rank=1)[:3]
    assert [(block.unit, block.unit_row, block.rows) for block in first] == [
        ("layers.3.q.bias", 2048, 512),
        ("layers.3.k.bias", 512, 128),
        ("layers.3.v.bias", 512, 128),
    ]
    [down] = fragment_blocks(f"{layer}mlp.linear_fc2.bias", (4096,), model, tp=2, rank=1)
    assert (down.unit, down.unit_row, down.rows) == ("layers.3.down.bias", 0, 4096)
    [fused] = fragment_blocks(f"{layer}mlp.linear_fc1.layer_norm_bias", (4096,), model, tp=2, rank=1)
    assert (fused.unit, unit_shape(fused.unit, model)) == ("layers.3.pre_mlp_layernorm.bias", (4096,))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_have_their_places_and_sizes_in_model_space(qk_norm: bool) -> None:
    model = replace(_llama().model, qk_norm=qk_norm)
    for norm in family_of(model).vectors(model):
        for name in {norm.name, norm.fused or norm.name}:
            [block] = fragment_blocks(f"decoder.layers.3.{name}", (norm.elements,), model, tp=2, rank=1)
            assert (block.unit, unit_shape(block.unit, model)) == (f"layers.3.{norm.name}", (norm.elements,))
