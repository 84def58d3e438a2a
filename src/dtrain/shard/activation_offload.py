"""Offload tensors saved for backward to host memory, and fetch the tensors again during backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import StepError

# Each tensor in flight occupies device memory until its copy is complete.
_MAX_IN_FLIGHT = 4
# Tensors that backward fetches ahead.
_PREFETCH_COUNT = 2


class ActivationOffloader:
    """Copies tensors saved by blocks to the host, and fetches the tensors in reverse order during backward.

    Args:
        min_bytes: smallest tensor to offload, in bytes.
        copies_on_cpu: if True, copy CPU tensors too (for tests).
    """

    def __init__(self, *, min_bytes: int, copies_on_cpu: bool = False) -> None:
        self._min_bytes = min_bytes
        self._copies_on_cpu = copies_on_cpu
        self._streams: dict[torch.device, _CopyStreams] = {}
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffloader:
        """Return a new offloader with the same settings and without offloaded tensors."""
        copied = ActivationOffloader(min_bytes=self._min_bytes, copies_on_cpu=self._copies_on_cpu)
        memo[id(self)] = copied
        return copied

    @contextmanager
    def offload_saved_tensors(self, module: nn.Module) -> Iterator[None]:
        """Offload tensors saved in this context, except parameters, buffers and views of them."""
        kept_storages = {_storage_id(t) for t in (*module.parameters(), *module.buffers()) if not is_dtensor(t)}
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, kept_storages), _unpack):
            yield

    def _pack(self, tensor: Tensor, kept_storages: set[int]) -> Tensor | _OffloadedTensor:
        is_offloadable = tensor.device.type not in ("cpu", "meta") or self._copies_on_cpu
        if not is_offloadable or type(tensor) is not Tensor or tensor.nbytes < self._min_bytes:
            return tensor
        # A copy of an expanded tensor would be larger than its storage.
        is_expanded = tensor.nbytes > tensor.untyped_storage().nbytes()
        if is_expanded or _storage_id(tensor) in kept_storages:
            return tensor
        if tensor.device not in self._streams:
            self._streams[tensor.device] = _CopyStreams(tensor.device)
        offloaded, is_new = self._streams[tensor.device].offload(tensor)
        if is_new:
            offloaded.previous, self._last = self._last, weakref.ref(offloaded)
        return offloaded


class _OffloadedTensor:
    """A tensor in host memory.

    The original stays referenced until the copy to the host is complete, so that its memory is not reused too early.
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

    def __init__(self, copy_streams: _CopyStreams, original: Tensor, stream: Any) -> None:
        # Backward needs the previously offloaded tensor next.
        self.previous: weakref.ref[_OffloadedTensor] | None = None
        self._copy_streams = copy_streams
        self._original: Tensor | None = original
        self._version, self._was_modified = original._version, False
        self._stream = stream
        self._host, self._copied = copy_streams.copy_to_host(original, stream)
        self._fetched: tuple[Tensor, Any] | None = None

    @property
    def is_in_flight(self) -> bool:
        return self._original is not None

    def release_original(self) -> None:
        """Release the original tensor once its copy is complete.

        The device waits, not the host. Otherwise the host would run ahead and fill the device with tensors in flight.
        """
        if self._original is not None:
            self._stream.wait_event(self._copied)
            self._was_modified = self._original._version != self._version
            self._original = None

    def __del__(self) -> None:
        # The graph was dropped without a backward.
        self.release_original()

    def start_fetch(self) -> None:
        """Start the copy to the device, unless the copy was started before."""
        if self._fetched is None:
            self.release_original()
            self._fetched = self._copy_streams.copy_to_device(self._host, self._copied)

    def fetch(self) -> Tensor:
        """Return the tensor on its device, and start to fetch the previously offloaded tensors.

        Raises:
            StepError: the original was modified in place during its copy. Autograd raises here too, without offloading.
        """
        self.start_fetch()
        if self._was_modified:
            raise StepError(
                f"offload_activations: a saved tensor {list(self._host.shape)} was modified in place before backward. "
                "Modify a copy."
            )
        assert self._fetched is not None
        # A retained graph fetches again.
        (tensor, copied), self._fetched = self._fetched, None
        reference = self.previous
        for _ in range(_PREFETCH_COUNT):
            offloaded = reference() if reference is not None else None
            if offloaded is None:
                break
            offloaded.start_fetch()
            reference = offloaded.previous
        return self._copy_streams.wait_for_copy(tensor, copied)


def _unpack(packed: Tensor | _OffloadedTensor) -> Tensor:
    return packed.fetch() if isinstance(packed, _OffloadedTensor) else packed


class _CopyStreams:
    """The copy streams to and from one device. On the CPU the streams are no-ops and copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        self._device = device
        self._pins_memory = device.type != "cpu"
        self._out, self._in = self._api.Stream(), self._api.Stream()
        self._in_flight: deque[weakref.ref[_OffloadedTensor]] = deque()
        # Layers that save the same input share one host copy.
        self._offloaded: dict[Any, weakref.ref[_OffloadedTensor]] = {}

    def offload(self, tensor: Tensor) -> tuple[_OffloadedTensor, bool]:
        """Return the offloaded ``tensor``, and True if its copy is new. The copy starts after the work issued so far."""
        key = (_storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        reference = self._offloaded.get(key)
        offloaded = reference() if reference is not None else None
        # The original is alive while its copy is in flight, so the key identifies the same tensor.
        if offloaded is not None and offloaded.is_in_flight:
            return offloaded, False
        offloaded = _OffloadedTensor(self, tensor, self._api.current_stream())
        self._in_flight.append(weakref.ref(offloaded))
        self._offloaded[key] = weakref.ref(offloaded)
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            oldest = self._in_flight.popleft()()
            if oldest is not None:
                oldest.release_original()
        if len(self._offloaded) > 8 * _MAX_IN_FLIGHT:
            self._offloaded = {
                k: reference
                for k, reference in self._offloaded.items()
                if (candidate := reference()) is not None and candidate.is_in_flight
            }
        return offloaded, True

    def copy_to_host(self, tensor: Tensor, stream: Any) -> tuple[Tensor, Any]:
        """Return a host copy, and the event that marks its completion."""
        self._out.wait_stream(stream)
        with self._api.stream(self._out):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._pins_memory)
            host.copy_(tensor, non_blocking=True)
            return host, self._record_event(self._out)

    def copy_to_device(self, host: Tensor, ready: Any) -> tuple[Tensor, Any]:
        """Return a device copy, and the event that marks its completion."""
        self._in.wait_event(ready)
        with self._api.stream(self._in):
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
            return tensor, self._record_event(self._in)

    def wait_for_copy(self, tensor: Tensor, copied: Any) -> Tensor:
        """Return ``tensor`` after the current stream waits for its copy."""
        stream = self._api.current_stream()
        stream.wait_event(copied)
        if self._pins_memory:
            # The copy stream allocated the tensor and must not reuse its memory before this stream is done.
            tensor.record_stream(stream)
        return tensor

    def _record_event(self, stream: Any) -> Any:
        event = self._api.Event()
        event.record(stream)
        return event


def _storage_id(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage, also for fake tensors."""
    return int(tensor.untyped_storage()._cdata)
