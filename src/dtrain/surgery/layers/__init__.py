"""Edits of single layers: blur pooling, factorization, gated linear units, squeeze-excite, weight standardization."""
