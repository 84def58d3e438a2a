"""Transforms of weights: averages, freezing, local training."""
