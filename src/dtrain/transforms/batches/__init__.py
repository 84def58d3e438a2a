"""Transforms of batches: augmentation, mixing, resizing, sequence length, label smoothing."""
