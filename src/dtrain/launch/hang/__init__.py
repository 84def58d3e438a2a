"""Detect ranks that make no progress, dump their stacks, and explain the hang."""
