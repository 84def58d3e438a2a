"""Edits of normalization layers: ghost batch norm, fused and low-precision norms."""
