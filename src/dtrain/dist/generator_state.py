"""Seed the global generators for a block and restore them (``fork_rng``), in a few microseconds, once per batch of a loader.

Reads of the states of Python's and NumPy's generators make hundreds of Python objects. So the states are copied as memory.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

# 624 words of state and the position in the state.
_MT19937_BYTES = 624 * 4 + 4


@dataclass(slots=True)
class _NumpyStateCache:
    """Last state that was read, and the generator's memory at that time."""

    raw: bytes = b""
    state: Any = None


# One cache for NumPy's one global generator. fork_rng runs once per batch, and a read of the state takes tens of microseconds.
_NUMPY_CACHE = _NumpyStateCache()


def read_numpy_state() -> Any:
    """Return NumPy's state, from the cache if no number was drawn since the last read, because reading is slow.

    NumPy stores the second number of a pair of normal numbers outside of the compared memory. So a state with such a number is
    never taken from the cache.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if raw != _NUMPY_CACHE.raw or _NUMPY_CACHE.state["has_gauss"]:
        _NUMPY_CACHE.raw, _NUMPY_CACHE.state = raw, np.random.get_state(legacy=False)
    return _NUMPY_CACHE.state


@cache
def _python_generator() -> tuple[Any, int] | None:
    """Return Python's global generator and the address of its state; None if the state is not where CPython stores it."""
    # The functions of ``random`` are methods of the generator.
    generator: Any = getattr(random.random, "__self__", None)
    head = object.__basicsize__
    is_known = sys.implementation.name == "cpython" and isinstance(generator, random.Random)
    if not is_known or type(generator).__basicsize__ < head + _MT19937_BYTES:
        return None
    # CPython stores the position before the words.
    position, *words = struct.unpack("=i624I", ctypes.string_at(id(generator) + head, _MT19937_BYTES))
    return (generator, id(generator) + head) if (*words, position) == generator.getstate()[1] else None


def _read_python_state() -> Any:
    found = _python_generator()
    if found is None:
        return random.getstate()
    generator, address = found
    # gauss() makes numbers in pairs. The second number is an attribute.
    return ctypes.string_at(address, _MT19937_BYTES), generator.gauss_next


def _restore_python_state(state: Any) -> None:
    found = _python_generator()
    if found is None:
        random.setstate(state)
        return
    generator, address = found
    memory, generator.gauss_next = state
    ctypes.memmove(address, memory, _MT19937_BYTES)


class fork_rng:
    """Context manager that seeds Python, NumPy and torch (CPU), and restores their states at exit.

    Takes about 15 microseconds if NumPy is used only inside of such contexts.

    Args:
        seed: seed of the generators inside of the context.

    Mutates: the global generators of Python, NumPy and torch (CPU), inside of the context.
    """

    # A class with a verb as name, because a generator function would double the time per batch.
    __slots__ = ("_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._python, self._numpy = _read_python_state(), read_numpy_state()
        self._torch = torch.default_generator.get_state()
        reseed(self._seed)

    def __exit__(self, *failure: object) -> None:
        _restore_python_state(self._python)
        _restore_numpy_state(self._numpy)
        torch.default_generator.set_state(self._torch)


def reseed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU with ``seed``.

    Faster than ``seed_all``, which uses different seeds and also seeds devices. Called once per batch.

    Mutates: the global generators of Python, NumPy and torch (CPU).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _restore_numpy_state(state: Any) -> None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937) or state is not _NUMPY_CACHE.state or state["has_gauss"]:
        np.random.set_state(state)
        return
    # Seeding discards the second number of a pair of normal numbers, which is not in the copied memory.
    np.random.seed(0)
    ctypes.memmove(generator.ctypes.state_address, _NUMPY_CACHE.raw, _MT19937_BYTES)
