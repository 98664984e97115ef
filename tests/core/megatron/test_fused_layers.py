"""The modules that Megatron would build from Transformer Engine, which is not installed here: only their choice is
seen, not what they compute."""

import pytest
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from canzona_cli.config.compose import compose_run
from canzona_cli.core.megatron.layers import layer_spec
from canzona_cli.core.model.families import family_of, layer_models
from canzona_cli.core.setup import ModelConfig

GPT2 = ("model.qk_norm=false", "model.layernorm=true", "model.biases=true", "model.gated=false", "model.positions=512")
EXPERTS = ("model.num_experts=4", "model.ffn_hidden_size=64", "model.moe_layer_freq=[0,1,0,1]")


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Megatron choose modules as if a current Transformer Engine were installed; each is a name of its own."""
    provider = transformer_engine_spec_provider
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider)
    monkeypatch.setattr(provider, "is_te_min_version", lambda *_, **__: True)
    for grouped in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        monkeypatch.setattr(provider, grouped, type(grouped, (), {}))


def _layer(model: ModelConfig) -> TransformerLayerSubmodules:
    return layer_spec(model, transformer_engine=True).submodules


@pytest.mark.parametrize("parts", [(), GPT2, *((part,) for part in GPT2)], ids=lambda parts: " ".join(parts) or "Qwen3")
def test_a_norm_is_part_of_the_linear_layer_that_its_name_says(parts: tuple[str, ...]) -> None:
    """Whatever parts of GPT-2 a model has: kinds of norms, biases, gates and positions are settings of the modules."""
    model = compose_run(["recipe=qwen3-tiny", *parts], training=False).config.model
    layer = _layer(model)
    attention, network = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    linear = {"qkv": attention.linear_qkv, "fc1": network.linear_fc1}
    fused = {vector.part for vector in family_of(model).vectors(model) if vector.fused}
    assert fused == {
        part for part, module in linear.items() if module is transformer_engine.TELayerNormColumnParallelLinear
    }
    assert (layer.input_layernorm, layer.pre_mlp_layernorm) == (IdentityOp, IdentityOp)
    assert attention.linear_proj is network.linear_fc2 is transformer_engine.TERowParallelLinear
    assert attention.core_attention is transformer_engine.TEDotProductAttention
    norms = {attention.q_layernorm, attention.k_layernorm}
    assert norms == {transformer_engine.TENorm if model.qk_norm else IdentityOp}


def test_the_norm_before_experts_is_a_module_of_its_own_and_those_of_other_layers_are_not() -> None:
    model = compose_run(["recipe=qwen3-tiny", "model.num_layers=4", *EXPERTS], training=False).config.model
    for kind in layer_models(model):
        layer, fused = _layer(kind), {vector.part for vector in family_of(kind).vectors(kind) if vector.fused}
        assert (layer.pre_mlp_layernorm is IdentityOp) is ("fc1" in fused) is (kind.num_experts == 0)
        if kind.num_experts:
            assert layer.mlp.func is MoELayer
            assert layer.mlp.keywords["submodules"].experts.func is TEGroupedMLP
