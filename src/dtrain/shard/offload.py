"""``Shelf``: tensors saved for backward, kept in host memory in between."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtrain.errors import StepError
from dtrain.tensors import is_distributed

_ON_THE_WAY = 4  # tensors that leave at once: each lives on the device until it has arrived
_AHEAD = 2  # tensors that backward fetches before it asks for them


class Shelf:
    """Takes the tensors that blocks save for backward to the host, and fetches them back in reverse order.

    Args:
        min_bytes: smaller ones stay where they are.
        copies_on_cpu: take tensors of the CPU too, which saves nothing: for tests.
    """

    def __init__(self, *, min_bytes: int, copies_on_cpu: bool = False) -> None:
        self._min_bytes = min_bytes
        self._copies_on_cpu = copies_on_cpu
        self._lanes: dict[torch.device, _Lane] = {}
        self._last: weakref.ref[_Box] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Shelf:
        """A copy of a model has a shelf of its own; streams and what lies on this one are not copied."""
        copied = Shelf(min_bytes=self._min_bytes, copies_on_cpu=self._copies_on_cpu)
        memo[id(self)] = copied
        return copied

    @contextmanager
    def taking(self, module: nn.Module) -> Iterator[None]:
        """Take what is saved inside, but parameters and buffers of ``module``, and views of them."""
        stays = {_storage(t) for t in (*module.parameters(), *module.buffers()) if not is_distributed(t)}
        with saved_tensors_hooks(lambda tensor: self._put(tensor, stays), _get):
            yield

    def _put(self, tensor: Tensor, stays: set[int]) -> Tensor | _Box:
        moves = tensor.device.type not in ("cpu", "meta") or self._copies_on_cpu
        if not moves or type(tensor) is not Tensor or tensor.nbytes < self._min_bytes:
            return tensor
        if _storage(tensor) in stays or tensor.nbytes > tensor.untyped_storage().nbytes():  # expanded: a copy would be larger
            return tensor
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = _Lane(tensor.device)
        box, new = self._lanes[tensor.device].send(tensor)
        if new:
            box.earlier, self._last = self._last, weakref.ref(box)
        return box


class _Box:
    """One tensor in host memory.

    While it is on its way there, the box holds the original: dropping that sooner would let the computation write over it.
    """

    __slots__ = ("__weakref__", "_back", "_done", "_host", "_lane", "_original", "_spoilt", "_stream", "_version", "earlier")

    def __init__(self, lane: _Lane, original: Tensor, stream: Any) -> None:
        self.earlier: weakref.ref[_Box] | None = None  # the one that was put before this one: backward asks for it after this
        self._lane = lane
        self._original: Tensor | None = original
        self._version, self._spoilt = original._version, False
        self._stream = stream  # the one that computes
        self._host, self._done = lane.copied_out(original, stream)
        self._back: tuple[Tensor, Any] | None = None

    @property
    def leaving(self) -> bool:
        return self._original is not None

    def settle(self) -> None:
        """Let go of the original, whose memory is then reused in the order of the computation.

        The device waits, not the host: the host runs ahead, and would fill the device with tensors that have not left yet.
        """
        if self._original is not None:
            self._stream.wait_event(self._done)
            self._spoilt = self._original._version != self._version
            self._original = None

    def __del__(self) -> None:
        self.settle()  # a graph that no backward has followed

    def start(self) -> None:
        """Begin the copy back, if it is not under way."""
        if self._back is None:
            self.settle()
            self._back = self._lane.copied_in(self._host, self._done)

    def take(self) -> Tensor:
        """The tensor on its device again; those put before it are begun.

        Raises:
            StepError: it was changed while it was copied. Without offloading that is an error of autograd's.
        """
        self.start()
        if self._spoilt:
            raise StepError(
                f"offload_activations: a tensor {list(self._host.shape)} that backward needs was changed in place after it was "
                "used; change a copy"
            )
        assert self._back is not None
        (tensor, arrived), self._back = self._back, None  # a kept graph fetches once more
        before = self.earlier
        for _ in range(_AHEAD):
            box = before() if before is not None else None
            if box is None:
                break
            box.start()
            before = box.earlier
        return self._lane.landed(tensor, arrived)


def _get(packed: Tensor | _Box) -> Tensor:
    return packed.take() if isinstance(packed, _Box) else packed


class _Lane:
    """The streams to and from one device. On the CPU they are empty words, and a copy is a copy."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        self._device = device
        self._pins = device.type != "cpu"
        self._out, self._in = self._api.Stream(), self._api.Stream()
        self._leaving: deque[weakref.ref[_Box]] = deque()
        self._known: dict[Any, weakref.ref[_Box]] = {}  # three layers that save one input share a box

    def send(self, tensor: Tensor) -> tuple[_Box, bool]:
        """A box for ``tensor``, and whether it is a new one. Its copy begins when what has been issued so far is done."""
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._known.get(key)
        box = known() if known is not None else None
        if box is not None and box.leaving:  # so the original lives, and the key is that of no other tensor
            return box, False
        box = _Box(self, tensor, self._api.current_stream())
        self._leaving.append(weakref.ref(box))
        self._known[key] = weakref.ref(box)
        while len(self._leaving) > _ON_THE_WAY:
            old = self._leaving.popleft()()
            if old is not None:
                old.settle()
        if len(self._known) > 8 * _ON_THE_WAY:
            self._known = {k: ref for k, ref in self._known.items() if (found := ref()) is not None and found.leaving}
        return box, True

    def copied_out(self, tensor: Tensor, now: Any) -> tuple[Tensor, Any]:
        """A host copy, and an event behind it."""
        self._out.wait_stream(now)
        with self._api.stream(self._out):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._pins)
            host.copy_(tensor, non_blocking=True)
            return host, self._event(self._out)

    def copied_in(self, host: Tensor, ready: Any) -> tuple[Tensor, Any]:
        """A copy on the device, and an event behind it."""
        self._in.wait_event(ready)
        with self._api.stream(self._in):
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
            return tensor, self._event(self._in)

    def landed(self, tensor: Tensor, arrived: Any) -> Tensor:
        """``tensor``, once its copy is done, for the stream that computes."""
        now = self._api.current_stream()
        now.wait_event(arrived)
        if self._pins:
            tensor.record_stream(now)  # it was allocated for the other stream, which must not reuse it before this one is done
        return tensor

    def _event(self, stream: Any) -> Any:
        event = self._api.Event()
        event.record(stream)
        return event


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common, also those that are not real."""
    return int(tensor.untyped_storage()._cdata)
