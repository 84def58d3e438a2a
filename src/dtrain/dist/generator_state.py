"""``fork_rng``: seed the global generators of Python, NumPy and torch for a block, in a few microseconds, and restore them.

``SeedOnDraw`` seeds them only for functions that draw. A loader reads the states once per batch, so a state that did not change
since the last read is not read again.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

# 624 words of state and the position in the state.
_MT19937_BYTES = 624 * 4 + 4


@dataclass(slots=True)
class _StateCache:
    """Last state that was read from a global generator, with the memory of the generator at that time."""

    # One tuple, so that two threads never combine the memory of one read with the state of another read.
    last: tuple[Any, Any] = (None, None)


# fork_rng runs once per batch. A read of a state makes hundreds of integers or an array, a comparison of memory does not.
_PYTHON_CACHE, _NUMPY_CACHE, _TORCH_CACHE = _StateCache(), _StateCache(), _StateCache()


def read_python_state() -> Any:
    """Return Python's state, from the cache if no number was drawn since the last read."""
    found = _find_python_memory()
    if found is None:
        return random.getstate()
    generator, address = found
    # gauss() makes numbers in pairs. The second number is an attribute.
    key = ctypes.string_at(address, _MT19937_BYTES), generator.gauss_next
    cached_key, state = _PYTHON_CACHE.last
    if key != cached_key:
        state = random.getstate()
        _PYTHON_CACHE.last = key, state
    return state


@cache
def _find_python_memory() -> tuple[Any, int] | None:
    """Return Python's global generator and the address of its state; None if CPython's layout is not as expected.

    The memory is compared and never written.
    """
    # The functions of ``random`` are methods of the generator.
    generator: Any = getattr(random.random, "__self__", None)
    head = object.__basicsize__
    is_known = sys.implementation.name == "cpython" and isinstance(generator, random.Random)
    if not is_known or type(generator).__basicsize__ < head + _MT19937_BYTES:
        return None
    # CPython stores the position before the words.
    position, *words = struct.unpack("=i624I", ctypes.string_at(id(generator) + head, _MT19937_BYTES))
    return (generator, id(generator) + head) if (*words, position) == generator.getstate()[1] else None


def read_numpy_state() -> Any:
    """Return NumPy's state, from the cache if no number was drawn since the last read.

    NumPy stores the second number of a pair of normal numbers outside of the compared memory. So a state with such a number is
    never taken from the cache.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    cached_memory, state = _NUMPY_CACHE.last
    if memory != cached_memory or state["has_gauss"]:
        state = np.random.get_state(legacy=False)
        _NUMPY_CACHE.last = memory, state
    return state


def read_torch_state() -> Tensor:
    """Return torch's state on the CPU, the same tensor as at the last read if no number was drawn since."""
    state = torch.default_generator.get_state()
    # A comparison of bytes takes a third of the time of ``torch.equal``.
    memory = state.numpy().tobytes()
    cached_memory, cached_state = _TORCH_CACHE.last
    if memory != cached_memory:
        cached_state = state
        _TORCH_CACHE.last = memory, state
    unchanged: Tensor = cached_state
    return unchanged


def write_numpy_state(state: Any) -> None:
    """Write NumPy's state, the result of ``np.random.get_state``. Mutates: NumPy's global generator.

    The next read does not use the cache, because ``state`` may differ from the last state in a number outside of the memory.
    """
    np.random.set_state(state)
    _NUMPY_CACHE.last = (None, None)


class fork_rng:
    """Context manager that seeds Python, NumPy and torch (CPU), and restores their states at exit.

    Takes about 15 microseconds if Python's and NumPy's generators are used only inside of such contexts.

    Args:
        seed: seed of the generators inside of the context.

    Mutates: the global generators of Python, NumPy and torch (CPU), inside of the context.
    """

    # A class with a verb as name, because a generator function would double the time per batch.
    __slots__ = ("_bit_generators", "_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._python, self._numpy, self._torch = read_python_state(), read_numpy_state(), torch.default_generator.get_state()
        # NumPy draws from another generator in the context. A write of the state would take longer.
        inner = _SPARE_BIT_GENERATORS.pop() if _SPARE_BIT_GENERATORS else np.random.MT19937(0)
        self._bit_generators = np.random.get_bit_generator(), inner  # type: ignore[attr-defined]
        np.random.set_bit_generator(inner)  # type: ignore[attr-defined]
        reseed(self._seed)

    def __exit__(self, *failure: object) -> None:
        random.setstate(self._python)
        outer, inner = self._bit_generators
        np.random.set_bit_generator(outer)  # type: ignore[attr-defined]
        # A change of generators discards the second number of a pair of normal numbers.
        if self._numpy["has_gauss"]:
            write_numpy_state(self._numpy)
        _SPARE_BIT_GENERATORS.append(inner)
        torch.default_generator.set_state(self._torch)


# One generator for each open context.
_SPARE_BIT_GENERATORS: list[np.random.MT19937] = []


def reseed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU with ``seed``.

    Faster than ``seed_all``, which uses different seeds and also seeds devices. Called once per batch.

    Mutates: the global generators of Python, NumPy and torch (CPU).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@dataclass(slots=True)
class SeedOnDraw:
    """Run functions with seeded global generators, and skip the seeding while no function draws a random number.

    Seeding and restoring three generators takes 30 microseconds in a loader, a comparison of their states 5. The first function
    that draws runs twice: its first result is dropped, the generators are restored, and it runs again with its seed. From then
    on each function is seeded before it runs.

    Args:
        draws: True if some function has drawn.
    """

    draws: bool = False

    def run(self, function: Callable[[], T], seed: Callable[[], int]) -> T:
        """Return the result of ``function``, as if it ran within ``fork_rng(seed())``.

        Mutates: ``draws``.
        """
        if not self.draws:
            before = _GlobalStates()
            try:
                result = function()
            except BaseException as error:
                if before.are_current() or not isinstance(error, Exception):
                    before.restore()
                    raise
            else:
                if before.are_current():
                    return result
            before.restore()
            self.draws = True
        with fork_rng(seed()):
            return function()


class _GlobalStates:
    """States of the global generators of Python, NumPy and torch (CPU) at the time of construction."""

    __slots__ = ("_bit_generator", "_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._python, self._numpy, self._torch = read_python_state(), read_numpy_state(), read_torch_state()

    def are_current(self) -> bool:
        """Return True if no generator has been used since. A state that cannot be cached counts as used."""
        # The caches return the same object if the memory of the generator is the same.
        return read_python_state() is self._python and read_numpy_state() is self._numpy and read_torch_state() is self._torch

    def restore(self) -> None:
        """Write the states back. Mutates: the global generators."""
        random.setstate(self._python)
        np.random.set_bit_generator(self._bit_generator)  # type: ignore[attr-defined]
        write_numpy_state(self._numpy)
        torch.default_generator.set_state(self._torch)
