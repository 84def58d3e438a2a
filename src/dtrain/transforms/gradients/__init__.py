"""Transforms of gradients: clipping, centralization, SAM, non-finite steps, noise scale."""
