"""Running out of memory on a laptop: a limit on the bytes of tensors, and a real ``torch.OutOfMemoryError`` at it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from dtrain.dist import collectives
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import MemoryStats, use_device_memory
from dtrain.memory.live_tensors import LiveBytes, LiveStorage

__all__ = ["UNLIMITED", "MemoryBudget", "memory_budget"]

UNLIMITED = sys.maxsize
"""The limit of a rank that has none."""

BACKEND_RELEASE_S = 0.02  # gloo's threads drop what they have sent when they get Python's lock, which sleeping gives them


class MemoryBudget:
    """What the tensors of this rank hold, and may hold. It is also the gauge of every device while its context is open.

    Args:
        limit: bytes; may be set at any time. A limit below what is live takes effect at the next allocation.
        rank: of whom it is, for messages.
        shared: whether there are other ranks, so that threads of the backend hold tensors too. Before it refuses, it then waits
            a moment for what they are about to drop.
        stack_depth: how many lines of code ``storages`` names for each storage.
    """

    def __init__(self, limit: int, *, rank: int = 0, shared: bool = False, stack_depth: int = 0) -> None:
        self.refused = 0
        self.rank = rank
        self._shared = shared
        self._tracker = LiveBytes(admit=self._check_allocation, stack_depth=stack_depth)
        self.limit = limit

    @property
    def limit(self) -> int:
        """The most bytes that tensors may hold at once; ``UNLIMITED`` for a rank that has no budget."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = _check_limit(limit)

    @property
    def live(self) -> int:
        """Bytes that tensors hold now."""
        return self._tracker.live

    @property
    def peak(self) -> int:
        """The most that they have held at once since the last ``reset``. What was refused is not in it."""
        return self._tracker.peak

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` that were made before the context, instead of waiting for the first operation that uses them."""
        self._tracker.count(tensors)

    def storages(self) -> list[LiveStorage]:
        """What is held now, the largest first."""
        return self._tracker.storages()

    def reset(self) -> None:
        """Let the peak start again from what is live."""
        self._tracker.reset()

    def read(self) -> MemoryStats:
        """The same numbers as any gauge has them."""
        return MemoryStats(live=self.live, peak=self.peak, capacity=self.limit, used_by_others=0, alloc_retries=0)

    def release(self) -> None:
        """Nothing: a CPU's allocator keeps no cache."""

    def __repr__(self) -> str:
        return f"MemoryBudget(rank={self.rank}, live={self.live}, peak={self.peak}, limit={self.limit}, refused={self.refused})"

    def _check_allocation(self, wanted: int) -> torch.OutOfMemoryError | None:
        live = self.live
        if live + wanted > self._limit and self._shared:
            time.sleep(BACKEND_RELEASE_S)
            live = self.live
        if live + wanted <= self._limit or _is_control_allocation():
            return None
        self.refused += 1
        limit, free = _format_bytes(self._limit), _format_bytes(max(0, self._limit - live))
        return torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {_format_bytes(wanted)}. The memory budget of rank {self.rank} is {limit}, of which "
            f"{free} is free; its tensors hold {_format_bytes(live)}, at most {_format_bytes(self.peak)}."
        )


@contextmanager
def memory_budget(
    max_bytes: int | Sequence[int] | Mapping[int, int],
    *,
    rank: int | None = None,
    existing: Iterable[Tensor] = (),
    stack_depth: int = 0,
) -> Iterator[MemoryBudget]:
    """A context in which tensors of this rank may hold so many bytes, and an allocation beyond them fails as on a GPU.

    It counts storages, each once: activations, gradients, optimizer state, buffers of a collective, parameters that FSDP2 has
    gathered, copies and tensors made in backward. What was made before the context counts from the first operation that uses
    it, or at once when it is named in ``existing``. The operation whose result would pass the budget raises
    ``torch.OutOfMemoryError``; that result is dropped, and a storage that was to grow keeps its size. A collective is refused
    before it begins.

    What dtrain's own agreements between ranks allocate counts, and is never refused: on a GPU it would lie on the host.

    Not seen: what an operation allocates and frees again inside itself (a convolution's workspace), and memory outside of
    tensors. Inside the context nothing is compiled: ``torch.compile`` runs what it is given as it is, also what it compiled
    before. It is for tests: an operation takes about ten microseconds more.

    Args:
        max_bytes: of every rank; or a sequence with one budget per rank; or a mapping by rank, and ranks that it does not name have
            none.
        rank: the only rank that has a budget, where ``max_bytes`` is one number; the others only count.
        existing: tensors that are there already and count from the start, as in ``existing=model.parameters()``.
        stack_depth: record so many lines of code for each storage, for ``MemoryBudget.storages`` and ``write_snapshot``; slow.

    Returns:
        A context with the ``MemoryBudget``: ``live``, ``peak``, ``limit`` (may be set), ``refused`` (how often it has raised).

    Mutates: the gauge of this process, and ``torch.UntypedStorage.resize_``, until the context is left.

    Raises:
        ConfigError: a budget that is no whole number of bytes >= 0, or for ranks that do not exist.

    Example:
        >>> with memory_budget(100) as budget:
        ...     kept = torch.zeros(10)
        ...     try:
        ...         kept.repeat(2)
        ...     except torch.OutOfMemoryError:
        ...         budget.live, budget.peak, budget.refused
        (40, 40, 1)
    """
    here = get_dist_info()
    limit = _limit_of(max_bytes, rank, here.rank, here.world_size)
    budget = MemoryBudget(limit, rank=here.rank, shared=here.world_size > 1, stack_depth=stack_depth)
    budget.count(existing)
    with use_device_memory(budget), budget._tracker:
        yield budget


def _limit_of(given: int | Sequence[int] | Mapping[int, int], only: int | None, rank: int, world_size: int) -> int:
    """The budget of ``rank``."""
    if isinstance(given, str) or not isinstance(given, (Sequence, Mapping)):
        if only is not None and (type(only) is not int or not 0 <= only < world_size):
            raise ConfigError(f"memory_budget: rank={only} is none of the {world_size} ranks, so nobody would have a budget")
        return _check_limit(given) if only in (None, rank) else UNLIMITED
    if only is not None:
        raise ConfigError(f"memory_budget: rank={only} is for one number of bytes, got {given!r}; leave it out")
    by_rank = given if isinstance(given, Mapping) else dict(enumerate(given))
    strays = sorted(set(by_rank) - set(range(world_size)))
    if strays or (not isinstance(given, Mapping) and len(given) != world_size):
        raise ConfigError(
            f"memory_budget: needs a budget for each of {world_size} ranks, got {given!r}; a mapping may name some"
        )
    return _check_limit(by_rank.get(rank, UNLIMITED))


def _check_limit(limit: int) -> int:
    if type(limit) is not int or limit < 0:
        raise ConfigError(f"memory_budget: needs a whole number of bytes >= 0, got {limit!r}")
    return limit


def _is_control_allocation() -> bool:
    """Whether dtrain's own agreements between ranks are what allocates: a GPU's memory would not hold those few numbers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != collectives.__file__:
        frame = frame.f_back
    return frame is not None


def _format_bytes(count: int) -> str:
    if count == UNLIMITED:
        return "unlimited"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
