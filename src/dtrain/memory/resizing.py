"""Sees storages that are resized by themselves, which no dispatch mode does: FSDP2 empties and fills gathered parameters so."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import UntypedStorage

__all__ = ["SeesResizes", "unwatch", "watch"]


class SeesResizes(Protocol):
    """Is asked before each resize of a storage in this process, and told after it."""

    def before_resize(self, storage: UntypedStorage, size: int) -> BaseException | None:
        """The error that refuses ``size`` bytes, or None."""

    def after_resize(self, storage: UntypedStorage, size: int) -> None:
        """The storage has ``size`` bytes now."""


_watching: list[SeesResizes] = []
_lock = threading.Lock()
_UNSEEN: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]


def watch(who: SeesResizes) -> None:
    """Let ``who`` see resizes, until ``unwatch``.

    Mutates: ``torch.UntypedStorage.resize_``, a method inherited from C++, while anybody watches.
    """
    with _lock:
        _watching.append(who)
        UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]


def unwatch(who: SeesResizes) -> None:
    """Take back one ``watch``; the order does not matter."""
    with _lock:
        del _watching[next(i for i in reversed(range(len(_watching))) if _watching[i] is who)]
        if not _watching:
            del UntypedStorage.resize_


def _resize(self: UntypedStorage, size: int) -> Any:
    watching = tuple(_watching)
    for who in watching:
        refusal = who.before_resize(self, size)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # no ring of an error, its traceback and this frame: it would keep all frames above until collected
    found = _UNSEEN(self, size)
    for who in watching:
        who.after_resize(self, size)
    return found
