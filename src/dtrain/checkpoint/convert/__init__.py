"""Weights of a checkpoint in the formats of others, and back; and what differs between two checkpoints. All of it in pieces."""
