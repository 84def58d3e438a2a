"""The real ``mosaicml-streaming``: its writers and readers of MDS, without the datasets of its own.

``import streaming`` imports torchvision for those, which needs a build of its own for each torch. All else is under
``streaming.base``, so where torchvision is not there a bare package takes the place of the top one, before anything below it
is imported. Where the package is not installed, tests that import this are skipped.
"""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest


def _open_the_way() -> None:
    if "streaming" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    spec = importlib.util.find_spec("streaming")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("mosaicml-streaming is not installed; the sessions of nox install it", allow_module_level=True)
    top = ModuleType("streaming")
    top.__spec__, top.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules["streaming"] = top


_open_the_way()

from streaming.base import JSONWriter, MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.compression import compress, get_compressions  # noqa: E402
from streaming.base.format.mds import MDSReader  # noqa: E402
from streaming.base.format.mds.encodings import get_mds_encodings, mds_decode, mds_encode  # noqa: E402
from streaming.base.hashing import get_hash, get_hashes  # noqa: E402
from streaming.base.shared import memory  # noqa: E402

__all__ = [
    "JSONWriter",
    "MDSReader",
    "MDSWriter",
    "StreamingDataset",
    "compress",
    "get_compressions",
    "get_hash",
    "get_hashes",
    "get_mds_encodings",
    "mds_decode",
    "mds_encode",
    "released",
]


@contextmanager
def released() -> Iterator[None]:
    """A block whose datasets give back their shared memory at its end, not when the process ends: each has hundreds of files.

    Mutates: the package's module of shared memory, for the time of the block.
    """
    cleanups = []
    before, memory.atexit = memory.atexit, SimpleNamespace(register=cleanups.append)
    try:
        yield
    finally:
        memory.atexit = before
        gc.collect()
        for cleanup in reversed(cleanups):
            cleanup()
