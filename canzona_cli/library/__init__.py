"""canzona's engine for other training loops: Megatron-LM's `pretrain`, or any loop on Megatron-core."""
