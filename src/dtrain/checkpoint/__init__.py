"""Checkpoints: one folder per step, written and verified by all ranks, loadable at any world size."""
