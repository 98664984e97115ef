"""A small run to show: its configuration, its layout, and records like a worker's."""

import math
from collections.abc import Iterator

from canzona_cli.config.schema import (
    ClusterConfig,
    DataConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    MuonConfig,
    RunConfig,
    TrainConfig,
)

STEPS = 300

CONFIG = RunConfig(
    name="qwen3-tiny",
    gpus=4,
    model=ModelConfig(
        name="qwen3-tiny",
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=768,
        num_attention_heads=8,
        num_query_groups=4,
        head_dim=32,
        vocab_size=16384,
        tied_embeddings=True,
    ),
    train=TrainConfig(steps=STEPS, seq_length=256, batch_tokens=8192),
    optimizer=MuonConfig(name="muon", lr=3e-3),
    engine=EngineConfig(strategy="layerwise"),
    cluster=ClusterConfig(
        name="cpu",
        device="cpu",
        gpus_per_node=8,
        memory_gib=4.0,
        reserved_gib=0.5,
        bf16_tflops=1.2,
        memory_gb_per_s=20.0,
        intra_node_gb_per_s=5.0,
        inter_node_gb_per_s=1.0,
    ),
    data=DataConfig(source="stdlib"),
)

LAYOUT = Layout(
    tp=2,
    pp=1,
    cp=1,
    dp=2,
    micro_batch_size=4,
    num_microbatches=4,
    global_batch_size=32,
    recompute="none",
    sequence_parallel=False,
)

CORPUS: dict[str, object] = {"tokenizer": "bpe-16384", "tokens": 9_412_345, "documents": 1204, "vocab_size": 16384}


def metrics(steps: int = STEPS, step_s: float = 0.4) -> Iterator[dict[str, object]]:
    """Lines of metrics.jsonl for a loss that falls from ln(16384), a little ragged."""
    for step in range(1, steps + 1):
        yield {
            "step": step,
            "loss": 3.6 + (math.log(16384) - 3.6) * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7),
            "lr": 3e-3 * min(1.0, step / 20),
            "grad_norm": 0.8 + 0.2 * math.cos(step),
            "tokens_per_s": 8192 / step_s,
            "step_s": step_s,
            "tokens": 8192 * step,
            "time": 1_700_000_000 + step * step_s,
        }
