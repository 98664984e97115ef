"""All code that uses Megatron-core's internals."""
