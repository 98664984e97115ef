"""Models in which only some layers have experts: their size, their costs, and settings that make no model."""

from dataclasses import replace

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.costs.model import passes, stage_time
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.model.families import flops_per_token, layer_models, parameter_count
from canzona_cli.core.model.matrices import matrices, routing
from canzona_cli.core.planner.make import plan_unbounded
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate.estimate import estimated_step_seconds, least_step_seconds
from tests import sizes

DEEPSEEK = (
    *("recipe=qwen3-30b-a3b", "gpus=8", "model.num_layers=28", "model.hidden_size=2048", "model.ffn_hidden_size=1408"),
    *("model.num_attention_heads=16", "model.num_query_groups=16", "model.head_dim=128", "model.vocab_size=102400"),
    *("model.num_experts=64", "model.experts_per_token=6", "model.shared_ffn_hidden_size=2816", "model.qk_norm=false"),
    *(f"model.moe_layer_freq=[0{',1' * 27}]", "model.dense_ffn_hidden_size=10944"),
)
HALF = ("recipe=qwen3-30b-a3b", "gpus=16", "model.num_layers=8", "model.dense_ffn_hidden_size=5120")


def _run(*overrides: str) -> RunConfig:
    return compose_run(list(overrides), training=False).config


def _mesh(pp: int = 1, vpp: int = 1, ep: int = 4) -> Layout:
    return replace(sizes.layout(tp=1, pp=pp, vpp=vpp, dp=16 // pp, micro=1, count=8), ep=ep)


def test_deepseekmoe_has_its_published_size() -> None:
    """DeepSeekMoE 16B (arXiv 2401.06066): 16.4B parameters, 2.8B of them active; its first layer is dense."""
    config = _run(*DEEPSEEK)
    count, routes = parameter_count(config.model), routing(config.setup)
    assert (f"{count.total / 1e9:.1f}", f"{count.active / 1e9:.1f}") == ("16.4", "2.8")
    assert sum(route.elements for route in (*routes.matrices, *routes.adamw)) == count.total
    by_name = {route.pattern: route.count for route in routes.matrices}
    assert (by_name["layers.*.gate"], by_name["layers.*.experts.*.gate"]) == (1, 27 * 64)
    named = {matrix.name: (matrix.rows, matrix.cols) for matrix in matrices(config.model, _mesh(), "split")}
    assert named["layers.0.gate"] == (10944, 2048)
    assert named["layers.1.experts.63.down"] == (2048, 1408)
    assert not {"layers.0.experts.0.gate", "layers.1.gate"} & named.keys()


@pytest.mark.parametrize(
    ("frequency", "layers"), [("2", "10101010"), ("3", "10010010"), ("[0,0,1,1,1,1,1,1]", "00111111")]
)
def test_experts_are_in_megatrons_layers(frequency: str, layers: str) -> None:
    """Megatron's rule: layer i has experts if i is a multiple of the number."""
    model = _run(*HALF, f"model.moe_layer_freq={frequency}").model
    assert "".join(str(int(kind.num_experts > 0)) for kind in layer_models(model)) == layers
    dense, sparse = (flops_per_token(each, 4096) for each in (layer_models(model)[layers.index(d)] for d in "01"))
    share = layers.count("1") / 8
    assert flops_per_token(model, 4096) == pytest.approx(share * sparse + (1 - share) * dense, rel=1e-12)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_stage_has_the_costs_of_its_own_layers(vpp: int) -> None:
    """The first stage has only dense layers, the second only layers with experts."""
    frequency = "[0,0,0,0,1,1,1,1]" if vpp == 1 else "[0,0,1,1,0,0,1,1]"
    model = _run(*HALF, f"model.moe_layer_freq={frequency}").setup
    dense, sparse = (replace(model, model=layer_models(model.model)[layer]) for layer in (0, 7))
    mesh = _mesh(pp=2, vpp=vpp)
    for stage in range(2):
        of_dense, of_sparse, of_mixed = (stage_time(each, mesh, stage).passes for each in (dense, sparse, model))
        assert list(of_mixed) == [pytest.approx((of_dense, of_sparse)[stage][chunk]) for chunk in range(vpp)]
        assert passes(model, mesh)[stage] == [pytest.approx(of_chunk) for of_chunk in of_mixed]
    stored = sum(stage_weights(model, replace(mesh, ep=1), stage).matrices for stage in range(2))
    assert stored == parameter_count(model.model).layer_matrices


@pytest.mark.parametrize("strategy", ["canzona", "layerwise", "sc", "adamw"])
def test_memory_lies_between_that_of_a_dense_model_and_of_one_with_experts_everywhere(strategy: str) -> None:
    choice = "optimizer=adamw" if strategy == "adamw" else f"engine.strategy={strategy}"
    mixed = _run(*HALF, "model.moe_layer_freq=2", choice).setup
    sparse, dense = (replace(mixed, model=kind) for kind in layer_models(mixed.model)[:2])
    for mesh in (_mesh(), _mesh(pp=2), _mesh(pp=2, vpp=2)):
        low, middle, high = (
            estimate(setup, mesh if setup is not dense else replace(mesh, ep=1)).parts
            for setup in (dense, mixed, sparse)
        )
        for part in ("weights", "gradients", "optimizer"):
            if strategy != "layerwise":  # whose padding depends on how sizes follow one another
                assert middle[part] == pytest.approx((low[part] + high[part]) / 2, rel=0.02), part
            assert low[part] < middle[part] < high[part]
        assert low["activations"] < middle["activations"] < high["activations"]


def test_a_list_of_ones_is_experts_in_every_layer() -> None:
    listed = _run(*HALF, "model.moe_layer_freq=[1,1,1,1,1,1,1,1]").setup
    usual = _run(*[each for each in HALF if "dense" not in each]).setup
    for mesh in (_mesh(), _mesh(pp=2, vpp=2)):
        assert estimate(listed, mesh) == estimate(usual, mesh)
        assert estimated_step_seconds(listed, mesh) == estimated_step_seconds(usual, mesh)
        ours, theirs = plan_unbounded(listed, mesh), plan_unbounded(usual, mesh)
        assert (ours.matrices, ours.assignment) == (theirs.matrices, theirs.assignment)


@pytest.mark.parametrize("frequency", ["2", "[0,0,0,1,1,1,1,1]", "[1,1,0,0,0,0,0,0]"])
def test_the_quick_bound_of_a_step_is_below_its_estimate(frequency: str) -> None:
    setup = _run(*HALF, f"model.moe_layer_freq={frequency}").setup
    for mesh in (_mesh(), _mesh(pp=2), _mesh(pp=4), _mesh(pp=2, vpp=2)):
        assert least_step_seconds(setup, mesh) <= estimated_step_seconds(setup, mesh) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.moe_layer_freq=[0,1]",), "has 2 entries, and model.num_layers is 8"),
        (("model.moe_layer_freq=[0,0,0,0,0,0,0,0]",), "leaves no layer with experts"),
        (("model.moe_layer_freq=[0,2]",), "must be at most 1"),
        (("model.moe_layer_freq=0",), "is not a list of valid entries"),
        (("model.moe_layer_freq=2", "parallel.tp=3"), "ffn rows of layers without experts"),
        (("model.moe_layer_freq=2", "model.num_experts=0"), "model.num_experts=8"),
        (("model.moe_layer_freq=1",), "model.moe_layer_freq=2"),
    ],
)
def test_settings_that_make_no_model_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _run(*HALF, *overrides)
    assert words in " ".join(f"{problem.reason} {problem.fix}" for problem in caught.value.problems)
