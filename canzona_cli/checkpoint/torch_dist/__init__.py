"""Checkpoints in Megatron's distributed format `torch_dist`: import and export."""
