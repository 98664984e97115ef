"""canzona: train Qwen3-size models with matrix-based optimizers at full speed inside Megatron-core."""

__version__ = "0.1.0"
