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

from dtrain.dtensor import is_dtensor
from dtrain.errors import StepError

_MAX_IN_FLIGHT = 4  # tensors that leave at once: each lives on the device until it has arrived
_PREFETCH_COUNT = 2  # tensors that backward fetches before it asks for them


class ActivationOffloader:
    """Takes the tensors that blocks save for backward to the host, and fetches them back in reverse order.

    Args:
        min_bytes: smaller ones stay where they are.
        copies_on_cpu: take tensors of the CPU too, which saves nothing: for tests.
    """

    def __init__(self, *, min_bytes: int, copies_on_cpu: bool = False) -> None:
        self._min_bytes = min_bytes
        self._copies_on_cpu = copies_on_cpu
        self._streams: dict[torch.device, _CopyStreams] = {}
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffloader:
        """A copy of a model has a shelf of its own; streams and what lies on this one are not copied."""
        copied = ActivationOffloader(min_bytes=self._min_bytes, copies_on_cpu=self._copies_on_cpu)
        memo[id(self)] = copied
        return copied

    @contextmanager
    def offload_saved_tensors(self, module: nn.Module) -> Iterator[None]:
        """Take what is saved inside, but parameters and buffers of ``module``, and views of them."""
        stays = {_storage_id(t) for t in (*module.parameters(), *module.buffers()) if not is_dtensor(t)}
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, stays), _unpack):
            yield

    def _pack(self, tensor: Tensor, stays: set[int]) -> Tensor | _OffloadedTensor:
        moves = tensor.device.type not in ("cpu", "meta") or self._copies_on_cpu
        if not moves or type(tensor) is not Tensor or tensor.nbytes < self._min_bytes:
            return tensor
        if (
            _storage_id(tensor) in stays or tensor.nbytes > tensor.untyped_storage().nbytes()
        ):  # expanded: a copy would be larger
            return tensor
        if tensor.device not in self._streams:
            self._streams[tensor.device] = _CopyStreams(tensor.device)
        box, new = self._streams[tensor.device].offload(tensor)
        if new:
            box.previous, self._last = self._last, weakref.ref(box)
        return box


class _OffloadedTensor:
    """One tensor in host memory.

    While it is on its way there, the box holds the original: dropping that sooner would let the computation write over it.
    """

    __slots__ = (
        "__weakref__",
        "_copied",
        "_copy_streams",
        "_fetched",
        "_host",
        "_original",
        "_stream",
        "_version",
        "_was_modified",
        "previous",
    )

    def __init__(self, lane: _CopyStreams, original: Tensor, stream: Any) -> None:
        self.previous: weakref.ref[_OffloadedTensor] | None = (
            None  # the one that was put before this one: backward asks for it after this
        )
        self._copy_streams = lane
        self._original: Tensor | None = original
        self._version, self._was_modified = original._version, False
        self._stream = stream  # the one that computes
        self._host, self._copied = lane.copy_to_host(original, stream)
        self._fetched: tuple[Tensor, Any] | None = None

    @property
    def is_in_flight(self) -> bool:
        return self._original is not None

    def release_original(self) -> None:
        """Let go of the original, whose memory is then reused in the order of the computation.

        The device waits, not the host: the host runs ahead, and would fill the device with tensors that have not left yet.
        """
        if self._original is not None:
            self._stream.wait_event(self._copied)
            self._was_modified = self._original._version != self._version
            self._original = None

    def __del__(self) -> None:
        self.release_original()  # a graph that no backward has followed

    def start_fetch(self) -> None:
        """Begin the copy back, if it is not under way."""
        if self._fetched is None:
            self.release_original()
            self._fetched = self._copy_streams.copy_to_device(self._host, self._copied)

    def fetch(self) -> Tensor:
        """The tensor on its device again; those put before it are begun.

        Raises:
            StepError: it was changed while it was copied. Without offloading that is an error of autograd's.
        """
        self.start_fetch()
        if self._was_modified:
            raise StepError(
                f"offload_activations: a tensor {list(self._host.shape)} that backward needs was changed in place after it was "
                "used; change a copy"
            )
        assert self._fetched is not None
        (tensor, arrived), self._fetched = self._fetched, None  # a kept graph fetches once more
        before = self.previous
        for _ in range(_PREFETCH_COUNT):
            box = before() if before is not None else None
            if box is None:
                break
            box.start_fetch()
            before = box.previous
        return self._copy_streams.wait_for_copy(tensor, arrived)


def _unpack(packed: Tensor | _OffloadedTensor) -> Tensor:
    return packed.fetch() if isinstance(packed, _OffloadedTensor) else packed


class _CopyStreams:
    """The streams to and from one device. On the CPU they are empty words, and a copy is a copy."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        self._device = device
        self._pins_memory = device.type != "cpu"
        self._out, self._in = self._api.Stream(), self._api.Stream()
        self._in_flight: deque[weakref.ref[_OffloadedTensor]] = deque()
        self._offloaded: dict[Any, weakref.ref[_OffloadedTensor]] = {}  # three layers that save one input share a box

    def offload(self, tensor: Tensor) -> tuple[_OffloadedTensor, bool]:
        """A box for ``tensor``, and whether it is a new one. Its copy begins when what has been issued so far is done."""
        key = (_storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._offloaded.get(key)
        box = known() if known is not None else None
        if box is not None and box.is_in_flight:  # so the original lives, and the key is that of no other tensor
            return box, False
        box = _OffloadedTensor(self, tensor, self._api.current_stream())
        self._in_flight.append(weakref.ref(box))
        self._offloaded[key] = weakref.ref(box)
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            old = self._in_flight.popleft()()
            if old is not None:
                old.release_original()
        if len(self._offloaded) > 8 * _MAX_IN_FLIGHT:
            self._offloaded = {
                k: ref for k, ref in self._offloaded.items() if (found := ref()) is not None and found.is_in_flight
            }
        return box, True

    def copy_to_host(self, tensor: Tensor, now: Any) -> tuple[Tensor, Any]:
        """A host copy, and an event behind it."""
        self._out.wait_stream(now)
        with self._api.stream(self._out):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._pins_memory)
            host.copy_(tensor, non_blocking=True)
            return host, self._record_event(self._out)

    def copy_to_device(self, host: Tensor, ready: Any) -> tuple[Tensor, Any]:
        """A copy on the device, and an event behind it."""
        self._in.wait_event(ready)
        with self._api.stream(self._in):
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
            return tensor, self._record_event(self._in)

    def wait_for_copy(self, tensor: Tensor, arrived: Any) -> Tensor:
        """``tensor``, once its copy is done, for the stream that computes."""
        now = self._api.current_stream()
        now.wait_event(arrived)
        if self._pins_memory:
            tensor.record_stream(now)  # it was allocated for the other stream, which must not reuse it before this one is done
        return tensor

    def _record_event(self, stream: Any) -> Any:
        event = self._api.Event()
        event.record(stream)
        return event


def _storage_id(tensor: Tensor) -> int:
    """What tensors that share memory have in common, also those that are not real."""
    return int(tensor.untyped_storage()._cdata)
