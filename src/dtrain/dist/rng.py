"""Derive seeds from names, make generators from seeds, and save, restore and fork the global random number generators."""

from __future__ import annotations

import ctypes
import hashlib
import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from all parts and their order, equal on every machine and Python version.

    Args:
        parts: whole numbers and text.

    Example:
        >>> import dtrain as dt
        >>> first, second = dt.dist.derive_seed(0, "ema", 1), dt.dist.derive_seed(0, "ema", 2)
        >>> first == second
        False

    Source: the first 8 bytes of BLAKE2b over the length-prefixed parts.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """Make a generator on ``device`` seeded by ``parts``, so that no generator state has to be saved.

    Args:
        device: device of the generator.
        parts: as in ``derive_seed``.

    Example:
        >>> import dtrain as dt
        >>> noise = torch.randn(8, generator=dt.dist.generator("cpu", 1, "noise"))
        >>> noise.equal(torch.randn(8, generator=dt.dist.generator("cpu", 1, "noise")))
        True
    """
    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy, torch and the current CUDA device as plain data and tensors.

    Example:
        >>> import dtrain as dt
        >>> state = dt.dist.rng_state()
        >>> first = torch.rand(4)
        >>> dt.dist.set_rng_state(state)
        >>> first.equal(torch.rand(4))
        True
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        # Tensors, because code that walks through a saved tree would visit hundreds of numbers one by one.
        "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Check a state for ``set_rng_state`` with temporary generators.

    Raises:
        ValueError: ``set_rng_state`` would not accept the state.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        random.Random().setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.RandomState().set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
        torch.Generator().set_state(state["torch"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not a state of the random generators ({type(error).__name__}: {error})") from None


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state of the global generators from the result of ``rng_state``.

    Args:
        state: result of ``rng_state``.

    Mutates: the global generators of Python, NumPy, torch and the current CUDA device.

    Example:
        state = dt.dist.rng_state()
        preview = sample(model)  # consumes random numbers
        dt.dist.set_rng_state(state)
    """
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def hash_rng_state(device: torch.device) -> int:
    """Hash torch's RNG state on the CPU and on ``device`` to a number below 2**52.

    Host sync: none. The state of a device's generator is in host memory.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.blake2b(digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 12


def seed_all(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy, torch and CUDA from ``parts``, each with its own seed.

    Pass the rank for dropout and augmentation that differ between ranks. On a mesh with ``tp`` or ``cp``, pass
    ``dt.dist.data_rank(mesh)[0]`` instead, because ranks that share a batch must draw equal numbers. Checkpoints include the
    state of the generators.

    Args:
        parts: as in ``derive_seed``.

    Mutates: the global generators of Python, NumPy, torch and CUDA.

    Example:
        with dt.init_dist() as info:
            dt.seed_all(seed, info.rank)
    """
    random.seed(derive_seed("python", *parts))
    np.random.seed(derive_seed("numpy", *parts) % 2**32)
    torch.manual_seed(derive_seed("torch", *parts))


class RNGSnapshot:
    """Snapshot of the global generators of Python, NumPy, torch and every CUDA device."""

    __slots__ = ("_cuda", "_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), _read_numpy_state(), torch.get_rng_state()
        generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        self._cuda = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Restore the generators. Mutates: the global generators of Python, NumPy, torch and every CUDA device."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for generator, state in self._cuda:
            generator.set_state(state)


# 624 words of state and the position in the state.
_MT19937_BYTES = 624 * 4 + 4


@dataclass(slots=True)
class _NumpyStateCache:
    """Last state that was read, and the generator's memory at that time."""

    raw: bytes = b""
    state: Any = None


_NUMPY_CACHE = _NumpyStateCache()


def _read_numpy_state() -> Any:
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


def fork_rng(seed: int) -> AbstractContextManager[None]:
    """Seed Python, NumPy and torch (CPU) with ``seed`` inside of a context, and restore their states afterwards.

    Takes about 25 microseconds if NumPy is used only inside of such contexts.

    Mutates: the global generators of Python, NumPy and torch (CPU), inside of the context.
    """
    return _ForkedRNG(seed)


class _ForkedRNG:
    """Context manager of ``fork_rng``. A class, because a generator function would double the time per batch."""

    __slots__ = ("_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), _read_numpy_state(), torch.default_generator.get_state()
        reseed(self._seed)

    def __exit__(self, *failure: object) -> None:
        random.setstate(self._python)
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
