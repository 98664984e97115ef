"""A Llama: every weight is routed, planned and priced, and has its place."""

from dataclasses import replace

import pytest
from published_rows import load_published

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.model.families import family_of, flops_per_token, parameter_count
from canzona_cli.core.model.geometry import fragment_blocks, unit_shape
from canzona_cli.core.model.matrices import routing
from canzona_cli.core.planner.make import make_plan

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
    settings = [f"model.{name}={str(value).lower()}" for name, value in shape.items()]
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


def test_training_without_a_gate_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"model\.gated.*can only be planned"):
        compose_run(["recipe=llama3-tiny", "model.gated=false"])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_have_their_places_and_sizes_in_model_space(qk_norm: bool) -> None:
    model = replace(_llama().model, qk_norm=qk_norm)
    for norm in family_of(model).norms(model):
        for name in {norm.name, norm.fused or norm.name}:
            [block] = fragment_blocks(f"decoder.layers.3.{name}", (norm.elements,), model, tp=2, rank=1)
            assert (block.unit, unit_shape(block.unit, model)) == (f"layers.3.{norm.name}", (norm.elements,))
