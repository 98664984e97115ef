"""A model of another family's shapes goes through the same value: Llama 3.1 8B, which has no QK-norm."""

from dataclasses import asdict, replace

import pytest

from canzona_cli.bench.published import load_published
from canzona_cli.cluster.fit import resolve
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.model import stage_time
from canzona_cli.model.families import family_of, parameter_count
from canzona_cli.model.geometry import fragment_blocks, unit_shape
from canzona_cli.model.matrices import routing
from canzona_cli.planner.make import make_plan
from canzona_cli.simulate.predict import predict

PUBLISHED_ELEMENTS = 8_030_261_248
"""Elements in the published safetensors of Llama-3.1-8B."""


def _llama() -> RunConfig:
    shape = asdict(load_published().models["llama3.1-8b"])
    settings = [f"model.{name}={str(value).lower()}" for name, value in shape.items()]
    return compose_run(["recipe=qwen3-8b", "gpus=16", "parallel.tp=2", *settings]).config


def test_every_published_weight_is_counted_and_routed() -> None:
    config = _llama()
    routes = routing(config)
    assert parameter_count(config.model).total == PUBLISHED_ELEMENTS
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == PUBLISHED_ELEMENTS
    assert not [route.pattern for route in routes.adamw if "self_attention" in route.pattern]


def test_a_plan_has_every_matrix_and_a_predicted_step() -> None:
    config, layout = resolve(_llama())
    plan = make_plan(config, layout)
    assert sum(matrix.elements for matrix in plan.matrices) == parameter_count(config.model).layer_matrices
    assert {matrix.shape for matrix in plan.matrices if matrix.kind == "gate"} == {(14336, 4096)}
    assert predict(config, layout, plan).iteration_s > 0


def test_a_layer_without_qk_norm_is_shorter_where_queries_are_made() -> None:
    config, layout = resolve(_llama())
    normalised = replace(config, model=replace(config.model, qk_norm=True))
    for module, longer in zip(*(stage_time(each, layout, 0).modules for each in (config, normalised)), strict=True):
        assert (module.forward_s < longer.forward_s) == (module.part == "qkv")


@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_have_their_places_and_sizes_in_model_space(qk_norm: bool) -> None:
    model = replace(_llama().model, qk_norm=qk_norm)
    for norm in family_of(model).norms(model):
        for name in {norm.name, norm.fused or norm.name}:
            [block] = fragment_blocks(f"decoder.layers.3.{name}", (norm.elements,), model, tp=2, rank=1)
            assert (block.unit, unit_shape(block.unit, model)) == (f"layers.3.{norm.name}", (norm.elements,))
