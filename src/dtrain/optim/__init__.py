"""Optimizers and parameter groups."""
