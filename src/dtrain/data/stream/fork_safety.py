"""``ForkRegistry``: close file handles and reset threads in a forked child, because the child shares the locks of handles.

``FORK_REGISTRY`` is the only state of ``data.stream`` in a module. A hook of ``os.register_at_fork`` belongs to the process and
cannot be removed, so one hook serves all datasets, which the registry holds by weak references.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """Object with file handles or threads."""

    def after_fork(self) -> None:
        """Reset the object in a forked child: close its copies of handles, and start without threads."""


class ForkRegistry:
    """Registry of objects to reset after a fork, one per process. The first use installs a hook, which is permanent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Lock for opening and closing a handle. A fork waits for it, so every handle is either registered or not open."""
        self._registered: WeakSet[ForkAware] = WeakSet()
        self._hooked = False

    def register(self, instance: ForkAware) -> None:
        """Call ``instance.after_fork()`` in every child that is forked from now on, for as long as ``instance`` lives."""
        with self.lock:
            self._registered.add(instance)
            if not self._hooked:
                self._hooked = True
                os.register_at_fork(
                    before=lambda: self.lock.acquire(),
                    after_in_parent=lambda: self.lock.release(),
                    after_in_child=self._after_fork_in_child,
                )

    def _after_fork_in_child(self) -> None:
        self.lock = threading.RLock()
        for instance in list(self._registered):
            instance.after_fork()


FORK_REGISTRY = ForkRegistry()
