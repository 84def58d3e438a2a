"""``HostScalar``: a device scalar on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostScalar:
    """A device scalar on its way to the host, read without waiting for the device.

    ``post`` starts a copy into a host buffer that was made once; ``peek`` returns the value if it has arrived, on a CPU it
    always has; ``wait`` is for one that should have arrived long ago.
    """

    __slots__ = ("_buffer", "_event", "_posted", "_view")

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._buffer = torch.zeros((), dtype=torch.float64, pin_memory=cuda)
        self._view = self._buffer.numpy()
        self._event = torch.cuda.Event() if cuda else None
        self._posted = False

    def post(self, value: Tensor) -> None:
        """Start copying the scalar ``value`` ``[]``."""
        self._buffer.copy_(value, non_blocking=True)
        self._posted = True
        if self._event is not None:
            self._event.record()

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted = False

    def peek(self) -> float | None:
        """The last posted value, or None when nothing was posted or it is still on its way."""
        if not self._posted or (self._event is not None and not self._event.query()):
            return None
        return float(self._view)

    def wait(self) -> float | None:
        """The last posted value, once it has arrived; None when nothing was posted."""
        if self._event is not None and self._posted:
            self._event.synchronize()
        return self.peek()
