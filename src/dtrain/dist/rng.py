"""Control random numbers and bits: seeds, generators, deterministic algorithms and TensorFloat-32.

Seeds derive from names. The state of the global generators can be saved and restored. ``use_deterministic`` and ``use_tf32``
set torch's switches, and return the previous settings.

``fork_rng`` seeds the global generators for a block in a few microseconds, and ``SeedOnDraw`` seeds them only for functions
that draw. A loader reads the states once per batch, so a state that did not change since the last read is not read again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from dtrain.device import default_generators, find_accelerator, is_accelerator
from dtrain.errors import ConfigError

T = TypeVar("T")
# 624 words of state and the position in the state.
_MT19937_BYTES = 624 * 4 + 4
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


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
    for value in parts:
        text = f"{type(value).__name__}:{value}".encode()
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
    """Return the state of the global generators of Python, NumPy, torch and the current accelerator as plain data and tensors.

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
        "python": {"version": version, "internal": torch.tensor(internal, device="cpu"), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    accelerator = find_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Check a state for ``set_rng_state`` with temporary generators.

    Raises:
        ValueError: ``set_rng_state`` would not accept the state.
    """
    try:
        python, numpy = _decode_states(state)
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator("cpu").set_state(state["torch"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not a state of the random generators ({type(error).__name__}: {error})") from None


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state of the global generators from the result of ``rng_state``.

    Args:
        state: result of ``rng_state``.

    Mutates: the global generators of Python, NumPy, torch and the current accelerator.

    Example:
        state = dt.dist.rng_state()
        preview = sample(model)  # consumes random numbers
        dt.dist.set_rng_state(state)
    """
    python, numpy = _decode_states(state)
    random.setstate(python)
    _write_numpy_state(numpy)
    torch.set_rng_state(state["torch"])
    accelerator = find_accelerator()
    if accelerator is not None and accelerator.type in state and torch.accelerator.is_available():
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


def _decode_states(state: dict[str, Any]) -> tuple[Any, Any]:
    """Return the states of Python and NumPy from the result of ``rng_state``, as their generators take them."""
    python, numpy = state["python"], state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    return (
        (python["version"], tuple(python["internal"].tolist()), python["gauss"]),
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]),
    )


def hash_rng_state(device: torch.device) -> int:
    """Hash torch's RNG state on the CPU and on ``device`` to a number below 2**52.

    Host sync: none. The state of a device's generator is in host memory.
    """
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.blake2b(digest_size=8)
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 12


def seed_all(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy, torch and the accelerator from ``parts``, each with its own seed.

    Pass the rank for dropout and augmentation that differ between ranks. On a mesh with ``tp`` or ``cp``, pass
    ``dt.dist.data_rank(mesh)[0]`` instead, because ranks that share a batch must draw equal numbers. Checkpoints include the
    state of the generators.

    Args:
        parts: as in ``derive_seed``.

    Mutates: the global generators of Python, NumPy, torch and the accelerator.

    Example:
        with dt.init_dist() as info:
            dt.seed_all(seed, info.rank)
    """
    random.seed(derive_seed("python", *parts))
    np.random.seed(derive_seed("numpy", *parts) % 2**32)
    torch.manual_seed(derive_seed("torch", *parts))


@contextmanager
def seeded_rng(*parts: int | str) -> Iterator[None]:
    """Seed the global generators from ``parts`` in a context; restore their states at exit."""
    before = RNGSnapshot()
    seed_all(*parts)
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True, slots=True, kw_only=True)
class Determinism:
    """Settings of torch that control bitwise reproducibility."""

    algorithms: bool
    warn_only: bool
    fill_uninitialized_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool


def use_deterministic(settings: bool | Determinism = True) -> Determinism:
    """Make torch deterministic, or restore ``settings``; return the previous settings.

    Operations without a deterministic implementation raise. Seeds are not changed; see ``seed_all``.

    Args:
        settings: True for deterministic algorithms everywhere, False for torch's defaults, or the result of an earlier call,
            which restores the earlier settings.

    Mutates: torch's global switches (``torch.use_deterministic_algorithms``, ``torch.utils.deterministic``,
        ``torch.backends.cudnn``). If there is a GPU and CUDA has not started, also the variable ``CUBLAS_WORKSPACE_CONFIG`` of
        this process, which is not restored.

    Example:
        >>> import dtrain as dt
        >>> before = dt.dist.use_deterministic()
        >>> dt.dist.use_deterministic(before).algorithms
        True

    Raises:
        ConfigError: CUDA has started without ``CUBLAS_WORKSPACE_CONFIG``. cuBLAS reads the variable only at the start.

    Source: the page "Reproducibility" of PyTorch's documentation.
    """
    before = Determinism(
        algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized_memory=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
    )
    if isinstance(settings, bool):
        settings = Determinism(
            algorithms=settings,
            warn_only=False,
            fill_uninitialized_memory=True,
            cudnn_deterministic=settings,
            cudnn_benchmark=False,
        )
    if settings.algorithms and not settings.warn_only:
        _reserve_workspace()
    torch.use_deterministic_algorithms(settings.algorithms, warn_only=settings.warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    return before


def _reserve_workspace() -> None:
    """Set the variable for cuBLAS workspaces of a fixed size. Without them, cuBLAS does not sum in a fixed order."""
    if torch.cuda.device_count() == 0 or os.environ.get(_CUBLAS_WORKSPACE) in _DETERMINISTIC_WORKSPACES:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"use_deterministic: CUDA has started with {_CUBLAS_WORKSPACE}={os.environ.get(_CUBLAS_WORKSPACE)!r}. "
            f"Set the variable to {_DETERMINISTIC_WORKSPACES[0]!r} before the script starts, or call use_deterministic first."
        )
    os.environ[_CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tf32:
    """Settings for TensorFloat-32 in products of float32 numbers, on NVIDIA GPUs of the Ampere generation or newer.

    Args:
        matmul: if True, matrix products of cuBLAS use TensorFloat-32.
        cudnn: if True, convolutions and recurrent layers of cuDNN use TensorFloat-32.
    """

    matmul: bool
    cudnn: bool


def use_tf32(settings: bool | Tf32 = True) -> Tf32:
    """Switch TensorFloat-32 products on or off, or restore ``settings``; return the previous settings.

    Products lose 13 of float32's 23 bits and are up to 8 times as fast. Sums stay in float32. Only float32 tensors are
    affected, so nothing that ``Precision`` or ``autocast`` computes in 16 bits. torch starts with
    ``Tf32(matmul=False, cudnn=True)``.

    Args:
        settings: True or False for both kinds of products, or the result of an earlier call, which restores the earlier
            settings.

    Mutates: torch's global switches ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``, if
        they change.

    Example:
        >>> import dtrain as dt
        >>> before = dt.dist.use_tf32()
        >>> dt.dist.use_tf32(before)
        Tf32(matmul=True, cudnn=True)

    Raises:
        ConfigError: ``settings`` is neither a bool nor a ``Tf32``.

    Source: the page "CUDA semantics" of PyTorch's documentation.
    """
    if isinstance(settings, bool):
        settings = Tf32(matmul=settings, cudnn=settings)
    if not isinstance(settings, Tf32):
        raise ConfigError(
            f"use_tf32: settings must be True, False or the result of an earlier call, got {settings!r}. "
            "Pass use_tf32(True), for example."
        )
    # The newer switches can be read at any time.
    cudnn = torch.backends.cudnn
    kinds = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]  # type: ignore[attr-defined]
    products = torch.backends.cuda.matmul.fp32_precision
    before = Tf32(matmul=products == "tf32", cudnn=all(kind == "tf32" for kind in kinds))
    # These switches also set torch's newer ones (fp32_precision). After setting the newer ones, torch refuses to read these.
    if settings.matmul != before.matmul:
        torch.backends.cuda.matmul.allow_tf32 = settings.matmul
    if settings.cudnn != before.cudnn:
        torch.backends.cudnn.allow_tf32 = settings.cudnn
    return before


@dataclass(slots=True)
class _StateCache:
    """Last state that was read from a global generator, with the memory of the generator at that time."""

    # One tuple, so that two threads never combine the memory of one read with the state of another read.
    last: tuple[Any, Any] = (None, None)


# fork_rng runs once per batch. A read of a state makes hundreds of integers or an array, a comparison of memory does not.
_PYTHON_CACHE, _NUMPY_CACHE = _StateCache(), _StateCache()


def _read_python_state() -> Any:
    """Return Python's state, from the cache if no number was drawn since the last read."""
    memory = _find_python_memory()
    if memory is None:
        return random.getstate()
    generator, words = memory
    # gauss() makes numbers in pairs. The second number is an attribute.
    key = words.raw, generator.gauss_next
    cached_key, state = _PYTHON_CACHE.last
    if key != cached_key:
        state = random.getstate()
        _PYTHON_CACHE.last = key, state
    return state


@cache
def _find_python_memory() -> tuple[Any, Any] | None:
    """Return Python's global generator and the memory of its state; None if CPython's layout is not as expected.

    The memory is compared and never written.
    """
    # The functions of ``random`` are methods of the generator.
    generator: Any = getattr(random.random, "__self__", None)
    head = object.__basicsize__
    is_known = sys.implementation.name == "cpython" and isinstance(generator, random.Random)
    if not is_known or type(generator).__basicsize__ < head + _MT19937_BYTES:
        return None
    memory = _view_memory(id(generator) + head)
    # CPython stores the position before the words.
    position, *words = struct.unpack("=i624I", memory.raw)
    return (generator, memory) if (*words, position) == generator.getstate()[1] else None


def _view_memory(address: int) -> Any:
    """Return an object whose ``raw`` copies a generator's state, in a quarter of the time of ``ctypes.string_at``."""
    return (ctypes.c_char * _MT19937_BYTES).from_address(address)


def _read_numpy_state() -> Any:
    """Return NumPy's state, from the cache if no number was drawn since the last read.

    NumPy stores the second number of a pair of normal numbers outside of the compared memory. So a state with such a number is
    never taken from the cache.
    """
    words = _find_numpy_memory(np.random.get_bit_generator())  # type: ignore[attr-defined]
    if words is None:
        return np.random.get_state(legacy=False)
    memory = words.raw
    cached_memory, state = _NUMPY_CACHE.last
    if memory != cached_memory or state["has_gauss"]:
        state = np.random.get_state(legacy=False)
        _NUMPY_CACHE.last = memory, state
    return state


# The entry keeps its generator, and so the memory, alive.
@lru_cache(maxsize=8)
def _find_numpy_memory(generator: Any) -> Any | None:
    """Return the memory of the state of ``generator``; None if NumPy does not draw from a Mersenne Twister."""
    return _view_memory(generator.ctypes.state_address) if isinstance(generator, np.random.MT19937) else None


def _write_numpy_state(state: Any) -> None:
    """Write NumPy's state, the result of ``np.random.get_state``. Mutates: NumPy's global generator.

    The next read does not use the cache, because ``state`` may differ from the last state in a number outside of the memory.
    """
    np.random.set_state(state)
    _NUMPY_CACHE.last = (None, None)


class RNGSnapshot:
    """Snapshot of the global generators of Python, NumPy, torch (CPU) and the accelerators.

    Args:
        accelerators: generators of the accelerators; None lists all of them.
    """

    __slots__ = ("_accelerators", "_bit_generator", "_numpy", "_python", "_torch")

    def __init__(self, accelerators: Sequence[torch.Generator] | None = None) -> None:
        self._bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._python, self._numpy, self._torch = _read_python_state(), _read_numpy_state(), torch.default_generator.get_state()
        generators = default_generators() if accelerators is None else accelerators
        self._accelerators = [(generator, generator.get_state()) for generator in generators] if generators else []

    def is_current(self) -> bool:
        """Return True if no generator of the host has been used since. A state that cannot be cached counts as used."""
        # The caches return the same object if the memory of the generator is the same.
        if _read_python_state() is not self._python or _read_numpy_state() is not self._numpy:
            return False
        # A comparison of bytes takes a third of the time of ``torch.equal``.
        return torch.default_generator.get_state().numpy().tobytes() == self._torch.numpy().tobytes()

    def restore(self) -> None:
        """Restore the generators. Mutates: the global generators of Python, NumPy, torch (CPU) and the accelerators."""
        random.setstate(self._python)
        np.random.set_bit_generator(self._bit_generator)  # type: ignore[attr-defined]
        _write_numpy_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        for generator, state in self._accelerators:
            generator.set_state(state)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run a context with the generators at this snapshot. Mutates: the generators, inside the context."""
        current = RNGSnapshot()
        self.restore()
        try:
            yield
        finally:
            current.restore()


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
        self._python, self._numpy, self._torch = _read_python_state(), _read_numpy_state(), torch.default_generator.get_state()
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
            _write_numpy_state(self._numpy)
        _SPARE_BIT_GENERATORS.append(inner)
        torch.default_generator.set_state(self._torch)


# One generator for each open context. A list of the module, because a new generator takes as long as the rest of the context.
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
            before = RNGSnapshot(accelerators=())
            try:
                result = function()
            except BaseException as error:
                if before.is_current() or not isinstance(error, Exception):
                    before.restore()
                    raise
            else:
                if before.is_current():
                    return result
            before.restore()
            self.draws = True
        with fork_rng(seed()):
            return function()
