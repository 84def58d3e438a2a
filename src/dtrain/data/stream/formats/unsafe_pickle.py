"""Pickled values, which run code when they are read: formats refuse shards that have them unless ``allow_pickle=True``."""

from __future__ import annotations

import pickle

loads = pickle.loads
dumps = pickle.dumps
