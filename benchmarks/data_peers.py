"""Define the peers of the data benchmark, and how to start them."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1] / "tests"))

PEERS = ("torchdata", "mosaicml-streaming")


def versions() -> str:
    """Return the versions of the peers."""
    texts = []
    for package in PEERS:
        try:
            texts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            texts.append(f"{package} not installed")
    return "peers: " + ", ".join(texts)


def mosaicml() -> ModuleType | None:
    """The real mosaicml-streaming, None where it is not installed."""
    try:
        return importlib.import_module("places.mosaicml")
    except ImportError:
        return None


def mosaicml_shuffles() -> ModuleType | None:
    """Its shuffles."""
    return None if mosaicml() is None else importlib.import_module("streaming.base.shuffle")


def servers() -> ModuleType:
    """Servers on this machine."""
    return importlib.import_module("places.servers")
