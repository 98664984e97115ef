"""All code that uses private names of Megatron-core, or changes what it does."""
