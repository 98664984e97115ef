"""The engine in other training loops: Megatron-LM's own, or any loop over Megatron-core."""
