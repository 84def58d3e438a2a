"""Transforms of weights: averages, freezing, local SGD, DiLoCo, batch-norm statistics."""
