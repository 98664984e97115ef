"""The settings of Megatron that canzona's engine does not support, each with the reason and the fix."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from canzona_cli.core.errors import Problem


@dataclass(frozen=True)
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
_ON_GPUS: Final = "it needs GPUs, and in other training loops the engine has only been run on CPUs"
_IN_BF16: Final = "weights are gathered in bf16 or fp32"
_ALTERNATING: Final = "the rows of gate and projection would alternate in blocks"
_OTHER_LAYERS: Final = "the engine supports only the matrices of dense decoders and of experts"

OPTIMIZER: Final = (
    Limit(
        "optimizer",
        "muon",
        "canzona replaces Megatron's Muon",
        "use muon; the setting optimizer=soap, or shampoo, then chooses another of canzona's optimizers",
    ),
    Limit("fp16", False, "the engine does not scale the loss", "train in bf16"),
    Limit("loss_scale", None, "the engine does not scale the loss"),
    Limit("use_precision_aware_optimizer", False, "AdamW's masters and moments are fp32"),
    Limit("optimizer_cpu_offload", False, _ON_DEVICE),
    Limit("overlap_param_gather_with_optimizer_step", False, "the engine chooses what overlaps"),
    Limit(
        "optimizer_cuda_graph",
        False,
        "the host reads the gradient norm in every step",
        "turn it off; canzona's optimizer.graph captures the updates of matrices",
    ),
    Limit("log_num_zeros_in_grad", False, "no rank has the gradients of all matrices to count"),
    Limit("reuse_grad_buf_for_mxfp8_param_ag", False, _IN_BF16),
    Limit("muon_scalar_optimizer", "adam", "Megatron's AdamW updates the parameters that are not matrices"),
)
"""The limits on `OptimizerConfig`."""

BUCKETS: Final = (
    Limit("use_distributed_optimizer", True, "parameters must be views of Megatron's buffers"),
    Limit("num_distributed_optimizer_instances", 1, "a plan has one owner for each matrix"),
    Limit("reduce_scatter_with_fp32_accumulation", False, "gradients are reduced to owners instead"),
    Limit("param_name_patterns_for_fp32_local_accumulation", (), "buckets have one gradient dtype"),
    Limit("reuse_grad_buf_for_mxfp8_param_ag", False, _IN_BF16),
    Limit("fp8_param_gather", False, _IN_BF16),
    Limit("fp4_param_gather", False, _IN_BF16),
    Limit("use_megatron_fsdp", False, "matrices would not have owners"),
    Limit("nccl_ub", False, _ON_GPUS),
    Limit("delay_wgrad_compute", False, _ON_GPUS),
)
"""The limits on `DistributedDataParallelConfig`."""

MODEL: Final = (
    Limit("use_grouped_gemm_for_shared_expert", False, _ALTERNATING),
    Limit("moe_shared_expert_glu_interleave_size", None, _ALTERNATING),
    Limit("moe_latent_size", None, _OTHER_LAYERS),
    Limit("moe_single_grouped_weight", False, "one parameter with the weights of all experts is not a matrix"),
    Limit("moe_single_grouped_bias", False, "one parameter with the biases of all experts looks like a matrix"),
    Limit("moe_mlp_glu_interleave_size", None, _ALTERNATING),
    Limit("multi_latent_attention", False, _OTHER_LAYERS),
    Limit("experimental_attention_variant", None, _OTHER_LAYERS),
    Limit("attention_output_gate", False, _OTHER_LAYERS),
    Limit("heterogeneous_block_specs", False, _OTHER_LAYERS),
    Limit("is_hybrid_model", False, _OTHER_LAYERS),
    Limit("mtp_num_layers", None, "Megatron clips the gradients of these layers by their own norm"),
    Limit("qk_clip", False, "it would change weights, but not the masters that the engine keeps"),
    Limit("fp8_param", False, _IN_BF16),
    Limit("fp4", None, _ON_GPUS),
    Limit("cuda_graph_impl", "none", _ON_GPUS),
)
"""The limits on `TransformerConfig`."""
