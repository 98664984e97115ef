"""canzona's engine in a training loop of your own on Megatron-core, on GPUs or, as here, on the CPUs of a laptop:

torchrun --nproc-per-node 2 scripts/own_loop.py
"""

import os
import pydoc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from canzona_cli import Engine
from canzona_cli.core.megatron import cpu_backend

STEPS, LENGTH, SIZE, TP, LR = 20, 64, 8, 1, 0.01
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
Loss = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def batches() -> Iterator[torch.Tensor]:
    """Yields this data-parallel rank's sequences: the bytes of a module of Python's library."""
    text = torch.tensor(list(Path(pydoc.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        starts = torch.randint(len(text) - LENGTH, (SIZE,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(DEVICE)


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Loss]:
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=DEVICE).expand(SIZE, LENGTH)
    losses = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def main() -> None:
    if GPU:
        torch.cuda.set_device(DEVICE)
    else:
        cpu_backend.install()  # Megatron-core asks for CUDA; canzona's stand-ins answer on a CPU
    torch.distributed.init_process_group("nccl" if GPU else "gloo")
    parallel_state.initialize_model_parallel(TP)
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, num_query_groups=2, kv_channels=32,
        normalization="RMSNorm", qk_layernorm=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=TP,
        pipeline_dtype=torch.float32, use_cpu_initialization=not GPU, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH, position_embedding_type="rope")
    muon = OptimizerConfig(optimizer="muon", lr=LR, min_lr=LR / 10, muon_tp_mode="duplicated", clip_grad=1.0)

    engine = Engine(muon, "cluster=h100-80g" if GPU else "cluster=cpu")
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = engine.wrap([model.to(DEVICE)], ddp_config)  # for DistributedDataParallel(...)
    optimizer = engine.optimizer(chunks)  # for get_megatron_optimizer(...)

    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=LR / 10, lr_warmup_steps=2, lr_decay_steps=STEPS,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    data, forward_backward = batches(), get_forward_backward_func()
    for step in range(1, STEPS + 1):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        results = forward_backward(
            forward_step_func=forward_step, data_iterator=data, model=chunks, num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=SIZE, forward_only=False,
        )  # fmt: skip
        _, grad_norm, _ = optimizer.step()
        schedule.step(increment=1)
        if torch.distributed.get_rank() == 0:
            print(f"step {step:2} loss {results[0]['loss']:.4f} gradient norm {grad_norm:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
