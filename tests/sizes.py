"""Runs of every Qwen3 size, built from the schema alone, for tests of counts, memory and fitting."""

from dataclasses import replace
from typing import Literal, get_args

from canzona_cli.config.schema import DataConfig, RunConfig
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.setup import (
    AdamWConfig,
    ClusterConfig,
    EngineConfig,
    FastPath,
    Layout,
    ModelConfig,
    MuonConfig,
    ParallelConfig,
    Precision,
    Recompute,
    Strategy,
    TrainConfig,
)

Size = Literal["tiny", "0.6b", "1.7b", "4b", "8b", "14b", "32b"]

# layers, hidden, ffn, heads, groups, head dim, vocabulary, tied
SHAPES: dict[Size, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (4, 256, 768, 8, 4, 32, 384, True),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True),
    "1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True),
    "4b": (36, 2560, 9728, 32, 8, 128, 151936, True),
    "8b": (36, 4096, 12288, 32, 8, 128, 151936, False),
    "14b": (40, 5120, 17408, 40, 8, 128, 151936, False),
    "32b": (64, 5120, 25600, 64, 8, 128, 151936, False),
}

H100 = ClusterConfig(
    name="h100-80g",
    device="cuda",
    gpus_per_node=8,
    memory_gib=79.6,
    reserved_gib=6.0,
    bf16_tflops=989.4,
    memory_gb_per_s=3350.0,
    intra_node_gb_per_s=450.0,
    inter_node_gb_per_s=50.0,
    transformer_engine=True,
    verified=get_args(FastPath),
)
"""GPUs that have shown every fast path, so that tests of a fast path's choice find it chosen by its price."""
CPU = ClusterConfig(
    name="cpu",
    device="cpu",
    gpus_per_node=8,
    memory_gib=4.0,
    reserved_gib=0.5,
    bf16_tflops=1.2,
    memory_gb_per_s=10.0,
    intra_node_gb_per_s=2.0,
    inter_node_gb_per_s=1.0,
)


def model(size: Size) -> ModelConfig:
    layers, hidden, ffn, heads, groups, head_dim, vocabulary, tied = SHAPES[size]
    return ModelConfig(
        name=f"qwen3-{size}",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tied_embeddings=tied,
    )


def matrix(index: int, rows: int, cols: int, shard_dim: Literal[0, 1] | None = 0) -> Matrix:
    """A matrix that is all of its layer."""
    return Matrix(
        index=index, name=f"layers.{index}.any", kind="other", layer=index, stage=0, rows=rows, cols=cols,
        shard_dim=shard_dim, parameter=f"layers.{index}.any.weight", unit=index,
    )  # fmt: skip


def llama(size: Size) -> ModelConfig:
    """Returns a Llama of this shape: without QK-norm, and with its own rotary base and epsilon."""
    return replace(model(size), name=f"llama-{size}", qk_norm=False, rope_base=500_000.0, norm_eps=1e-5)


def run(
    size: Size,
    gpus: int,
    *,
    strategy: Strategy | Literal["adamw"] = "layerwise",
    tp: int | None = None,
    pp: int | None = None,
    sequence_parallel: bool | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    recompute: Recompute | None = None,
    precision: Precision = "bf16",
    grad_reduce_dtype: Precision = "fp32",
    cluster: ClusterConfig | None = None,
) -> RunConfig:
    small = size == "tiny"
    return RunConfig(
        name=f"qwen3-{size}",
        gpus=gpus,
        model=model(size),
        train=TrainConfig(
            steps=10,
            seq_length=256 if small else 4096,
            batch_tokens=8192 if small else 1 << 20,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            recompute=recompute,
            precision=precision,
            grad_reduce_dtype=grad_reduce_dtype,
        ),
        optimizer=AdamWConfig(name="adamw", lr=1e-3) if strategy == "adamw" else MuonConfig(name="muon", lr=1e-3),
        engine=EngineConfig(strategy="layerwise" if strategy == "adamw" else strategy),
        cluster=cluster or (CPU if small else H100),
        data=DataConfig(source="stdlib"),
        parallel=ParallelConfig(tp=tp, pp=pp, sequence_parallel=sequence_parallel),
    )


def layout(*, tp: int = 1, pp: int = 1, vpp: int = 1, dp: int = 1, micro: int = 1, count: int = 1) -> Layout:
    plain = Layout.plain(pp=pp, vpp=vpp, dp=dp, micro_batch_size=micro, num_microbatches=count)
    return replace(plain, tp=tp, sequence_parallel=tp > 1)
