"""The settings of Megatron that canzona's engine does not support, each with the reason and the fix."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from canzona_cli.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A setting for which the engine supports only one value."""

    name: str
    """The field of Megatron's configuration; Megatron-LM's option has the same name with dashes."""
    value: object
    """The supported value."""
    reason: str
    fix: str = ""
    """The fix; empty if the fix is to keep the supported value."""


def problems(config: object, limits: Iterable[Limit]) -> Iterator[Problem]:
    """Yields a problem for each setting in `config`, one of Megatron's configurations, that has an
    unsupported value."""
    for limit in limits:
        actual = getattr(config, limit.name)
        if actual != limit.value:
            fix = limit.fix or f"leave {limit.name} at {limit.value}"
            yield Problem(key=limit.name, value=actual, reason=limit.reason, fix=fix)


_ON_DEVICE: Final = "the engine keeps fp32 masters and optimizer state on the device that updates a matrix"
UNTRIED: Final = "the engine has not been run with it"
"""The reason for a limit on a setting that may work but was never tried."""
_OTHER_LAYERS: Final = "the engine supports only the matrices of dense decoders"
_EVEN_STAGES: Final = "the plan gives every model chunk the same number of layers"

OPTIMIZER: Final = (
    Limit(name="fp16", value=False, reason="the engine does not scale the loss", fix="train in bf16"),
    Limit(name="loss_scale", value=None, reason="the engine does not scale the loss"),
    Limit(name="use_precision_aware_optimizer", value=False, reason="AdamW's masters and moments are fp32"),
    Limit(name="optimizer_cpu_offload", value=False, reason=_ON_DEVICE),
    Limit(name="overlap_param_gather_with_optimizer_step", value=False, reason="the engine chooses what overlaps"),
    Limit(
        name="optimizer_cuda_graph",
        value=False,
        reason="the host reads the gradient norm in every step",
        fix="turn it off; canzona's optimizer.graph captures the updates of matrices",
    ),
    Limit(name="log_num_zeros_in_grad", value=False, reason="no rank has the gradients of all matrices to count"),
    Limit(name="reuse_grad_buf_for_mxfp8_param_ag", value=False, reason=UNTRIED),
    Limit(
        name="muon_scalar_optimizer",
        value="adam",
        reason="Megatron's AdamW updates the parameters that are not matrices",
    ),
)
"""The limits on `OptimizerConfig`."""

BUCKETS: Final = (
    Limit(name="use_distributed_optimizer", value=True, reason="parameters must be views of Megatron's buffers"),
    Limit(name="num_distributed_optimizer_instances", value=1, reason="a plan has one owner for each matrix"),
    Limit(name="average_in_collective", value=False, reason="gradients are summed on their way to the owners"),
    Limit(name="reduce_scatter_with_fp32_accumulation", value=False, reason="gradients are reduced to owners instead"),
    Limit(name="param_name_patterns_for_fp32_local_accumulation", value=(), reason="buckets have one gradient dtype"),
    Limit(name="reuse_grad_buf_for_mxfp8_param_ag", value=False, reason=UNTRIED),
    Limit(name="fp8_param_gather", value=False, reason="weights are gathered in bf16 or fp32"),
    Limit(name="fp4_param_gather", value=False, reason="weights are gathered in bf16 or fp32"),
    Limit(name="use_megatron_fsdp", value=False, reason="matrices would not have owners"),
    Limit(name="nccl_ub", value=False, reason=UNTRIED),
    Limit(name="delay_wgrad_compute", value=False, reason=UNTRIED),
)
"""The limits on `DistributedDataParallelConfig`."""

MODEL: Final = (
    Limit(name="num_moe_experts", value=None, reason=f"{_OTHER_LAYERS}; `canzona train` trains experts"),
    Limit(name="multi_latent_attention", value=False, reason=_OTHER_LAYERS),
    Limit(name="experimental_attention_variant", value=None, reason=_OTHER_LAYERS),
    Limit(name="attention_output_gate", value=False, reason=_OTHER_LAYERS),
    Limit(name="heterogeneous_block_specs", value=False, reason=_OTHER_LAYERS),
    Limit(name="is_hybrid_model", value=False, reason=_OTHER_LAYERS),
    Limit(name="mtp_num_layers", value=None, reason="Megatron clips the gradients of these layers by their own norm"),
    Limit(
        name="gated_linear_unit",
        value=True,
        reason="the first matrices of the feed-forward layers are a gate and a projection",
        fix="use a gated activation (--swiglu)",
    ),
    Limit(name="qk_clip", value=False, reason="it would change weights, but not the masters that the engine keeps"),
    Limit(name="fp8", value=None, reason=UNTRIED),
    Limit(name="fp4", value=None, reason=UNTRIED),
    Limit(name="cuda_graph_impl", value="none", reason=UNTRIED),
    Limit(name="num_layers_in_first_pipeline_stage", value=None, reason=_EVEN_STAGES),
    Limit(name="num_layers_in_last_pipeline_stage", value=None, reason=_EVEN_STAGES),
    Limit(name="pipeline_model_parallel_layout", value=None, reason=_EVEN_STAGES),
    Limit(name="account_for_embedding_in_pipeline_split", value=False, reason=_EVEN_STAGES),
    Limit(name="account_for_loss_in_pipeline_split", value=False, reason=_EVEN_STAGES),
)
"""The limits on `TransformerConfig`."""
