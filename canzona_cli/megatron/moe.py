"""The layers of families with experts, as Megatron-core's specifications and settings."""

from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from canzona_cli.config.execution import dispatcher_of
from canzona_cli.config.schema import Layout, ModelConfig, RunConfig
from canzona_cli.megatron import dense
from canzona_cli.megatron.experts import GroupedExperts

_BALANCING = {"none": "none", "sequence": "seq_aux_loss", "global": "global_aux_loss"}


class _UnbiasedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router without the expert bias, which canzona's models do not have. Megatron compiles the
    function that counts tokens for this bias, so every rank would load torch's compiler, which takes longer
    than a rank's first step."""

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Does nothing, because canzona's models have no expert bias."""


def layer_spec(model: ModelConfig, *, transformer_engine: bool) -> ModuleSpec:
    """Returns the specification of a layer, built from Transformer Engine's modules or from Megatron's own
    and `GroupedExperts`."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.num_experts, moe_grouped_gemm=True, qk_layernorm=model.qk_norm
        )
    spec = dense.layer_spec(model, transformer_engine=False)
    spec.submodules.mlp = partial(MoELayer, submodules=MoESubmodules(experts=GroupedExperts, router=_UnbiasedRouter))
    return spec


def transformer_settings(config: RunConfig, layout: Layout) -> dict[str, object]:
    """Returns the settings of `TransformerConfig` that determine the computation of a layer.

    Megatron averages gradients over the data-parallel ranks, but has already divided the balancing loss over
    the global batch by the number of these ranks. So the weight of this loss is multiplied by that number;
    otherwise the loss would depend on the layout.
    """
    model = config.model
    weight = model.balancing_weight * (layout.dp if model.balancing_loss == "global" else 1)
    return dense.transformer_settings(config, layout) | {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_router_load_balancing_type": _BALANCING[model.balancing_loss],
        "moe_aux_loss_coeff": weight if model.balancing_loss != "none" else 0.0,
        # The router computes in fp32, because bf16 would round close scores to ties.
        "moe_router_dtype": "fp32",
        # If experts are not divided among ranks, no token is sent to another rank; only TP ranks gather
        # theirs.
        "moe_token_dispatcher_type": "allgather" if layout.ep == 1 else dispatcher_of(config),
        "moe_grouped_gemm": True,
        # One parameter for all experts would not be a matrix.
        "moe_single_grouped_weight": False,
    }


model_settings = dense.model_settings
