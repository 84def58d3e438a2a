"""Shard a model with FSDP2 and tensor parallelism: wrapping, gradient synchronization, precision, buffers, compilation."""
