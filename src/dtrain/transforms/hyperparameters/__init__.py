"""Transforms of optimizer hyperparameters: schedules of the learning rate and other options."""
