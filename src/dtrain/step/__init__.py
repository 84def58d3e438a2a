"""Run a training step: microbatches, loss normalization, the optimizer, evaluation, automatic microbatching."""
