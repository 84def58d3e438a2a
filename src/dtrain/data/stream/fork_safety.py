"""What a process holds that its children must not: open handles whose locks are shared with the child, and threads."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """Something with handles or threads."""

    def after_fork(self) -> None:
        """Called in the child: close its copies of the handles, and begin without threads."""


class ForkRegistry:
    """Tells what asks for it of a fork. One per process; the hook cannot be taken back, so it is set at the first use."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a handle is opened or closed: no fork happens then, so a handle is known or not there."""
        self._registered: WeakSet[ForkAware] = WeakSet()
        self._hooked = False

    def register(self, thing: ForkAware) -> None:
        """Call ``thing.after_fork()`` in every child that is forked from now on, for as long as ``thing`` lives."""
        with self.lock:
            self._registered.add(thing)
            if not self._hooked:
                self._hooked = True
                os.register_at_fork(
                    before=lambda: self.lock.acquire(),
                    after_in_parent=lambda: self.lock.release(),
                    after_in_child=self._after_fork_in_child,
                )

    def _after_fork_in_child(self) -> None:
        self.lock = threading.RLock()
        for thing in list(self._registered):
            thing.after_fork()


FORK_REGISTRY = ForkRegistry()
