"""Transforms of optimizer hyperparameters: learning rate and other options, by schedule."""
