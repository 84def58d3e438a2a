"""Transforms of batches: augmentation, mixing, label smoothing, resizing, selective backprop."""
