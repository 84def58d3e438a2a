"""Compute the order of samples: permutations, block shuffles, mixtures, the last batch of an epoch."""
