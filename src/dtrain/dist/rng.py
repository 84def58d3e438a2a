"""Random numbers: seeds derived from names, generators of their own, and all RNG state out and in as plain data."""

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
    """A 63-bit seed that depends on every part and on their order; the same on every machine and Python version.

    >>> derive_seed(0, "ema", 1) == derive_seed(0, "ema", 1), derive_seed(0, "ema", 1) == derive_seed(0, "ema", 2)
    (True, False)

    Source: the first 8 bytes of BLAKE2b over the length-prefixed parts.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """A fresh generator on ``device``, seeded by ``parts``: no generator state has to be saved."""
    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def rng_state() -> dict[str, Any]:
    """The state of the global generators of Python, NumPy, torch and the current CUDA device, as plain data and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
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
    """See whether ``set_rng_state`` would take this, with generators that nobody uses.

    Raises:
        ValueError: it would not, or not all of it.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        random.Random().setstate((python["version"], tuple(python["internal"]), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.RandomState().set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
        torch.Generator().set_state(state["torch"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not a state of the random generators ({type(error).__name__}: {error})") from None


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned.

    Mutates: the global generators of Python, NumPy, torch and the current CUDA device.
    """
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def hash_rng_state(device: torch.device) -> int:
    """A number that differs where torch's next random numbers on the CPU or on ``device`` do; below 2**52.

    Host sync: none; a device's generator keeps its state on the host.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.blake2b(digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 12


def seed_all(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy, torch and CUDA from ``parts``, each with a stream of its own.

    ``seed_all(seed, dist.rank)`` at the start of a run lets dropout and augmentation differ between ranks; on a mesh with
    ``tp`` or ``cp``, whose ranks work on one batch together, ``seed_all(seed, data_rank(mesh)[0])``. A checkpoint carries the
    streams on.

    Mutates: those generators.
    """
    random.seed(derive_seed("python", *parts))
    np.random.seed(derive_seed("numpy", *parts) % 2**32)
    torch.manual_seed(derive_seed("torch", *parts))


class RNGSnapshot:
    """The global generators of Python, NumPy, torch and every CUDA device as they were, to go back to."""

    __slots__ = ("_cuda", "_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), _read_numpy_state(), torch.get_rng_state()
        generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        self._cuda = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Mutates: those generators."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for generator, state in self._cuda:
            generator.set_state(state)


_MT19937_BYTES = 624 * 4 + 4  # the words of its state, and the position in them


@dataclass(slots=True)
class _NumpyStateCache:
    """The state that was read last, and the memory of the generator at that time."""

    raw: bytes = b""
    state: Any = None


_NUMPY_CACHE = _NumpyStateCache()


def _read_numpy_state() -> Any:
    """NumPy's state: the one read last if nothing was drawn since. Reading it takes longer than all else in this module.

    The generator keeps the second of a pair of normal numbers outside of that memory, so a state that has one is read anew.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if raw != _NUMPY_CACHE.raw or _NUMPY_CACHE.state["has_gauss"]:
        _NUMPY_CACHE.raw, _NUMPY_CACHE.state = raw, np.random.get_state(legacy=False)
    return _NUMPY_CACHE.state


def fork_rng(seed: int) -> AbstractContextManager[None]:
    """A block in which Python, NumPy and torch draw on the CPU from streams that begin at ``seed``; then they go on as before.

    About 25 microseconds, as long as NumPy is not used outside of such blocks.

    Mutates: the global generators of Python, NumPy and torch (CPU), for the time of the block.
    """
    return _ForkedRNG(seed)


class _ForkedRNG:
    """A class, since it is entered once per batch: a generator would take as long again as two of the three states."""

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
    """Let Python, NumPy and torch draw on the CPU from streams that begin at ``seed``.

    ``seed_all`` gives each its own seed, and devices too; here that would take as long as reading a small batch.

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
    np.random.seed(0)  # forgets the second of a pair of normal numbers, which is not in that memory
    ctypes.memmove(generator.ctypes.state_address, _NUMPY_CACHE.raw, _MT19937_BYTES)
