"""Pickle and unpickle values. Unpickling runs code, so formats refuse pickled values unless ``allow_pickle=True``."""

from __future__ import annotations

import pickle

loads = pickle.loads
dumps = pickle.dumps
