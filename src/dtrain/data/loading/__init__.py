"""Positions to batches: grids of batches, feeds, loader processes, and the ``Loader`` over them."""
