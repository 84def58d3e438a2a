"""Use the accelerator of this machine, with any backend of torch: CUDA, ROCm, XPU, or a backend from another package.

``torch.accelerator`` has the devices, current streams and counters of memory. This module has what torch offers only in the
module of a backend, such as ``torch.cuda`` or ``torch.xpu``, and tells what a backend lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import ConfigError

# Devices without streams that copy from page-locked memory. MPS has one queue and shares the memory of the host.
_NOT_ACCELERATORS = frozenset({"cpu", "meta", "mps"})


def is_accelerator(device: torch.device) -> bool:
    """Return True if ``device`` has streams, and copies from page-locked memory while the host goes on."""
    return device.type not in _NOT_ACCELERATORS


def find_accelerator() -> torch.device | None:
    """Return the accelerator that this torch is built for, without index; None if there is none.

    The machine may have no such device. ``torch.accelerator.device_count()`` counts the devices.
    """
    device = torch.accelerator.current_accelerator()
    return device if device is not None and is_accelerator(device) else None


def started_accelerator() -> str | None:
    """Return the type of the accelerator that this process has started; None if no accelerator prevents a fork."""
    device = find_accelerator()
    if device is None:
        return None
    is_initialized = backend_function(device, "is_initialized")
    return device.type if is_initialized is not None and is_initialized() else None


def backend_function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return the function ``name`` of the backend of ``device``; None if the backend does not offer it."""
    function: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    return function


def device_name(device: torch.device) -> str:
    """Return the product name of an accelerator, such as ``"NVIDIA H100 80GB HBM3"``, else the type of ``device``.

    Starts the accelerator.
    """
    get_name = backend_function(device, "get_device_name") if is_accelerator(device) else None
    return device.type if get_name is None else str(get_name(device))


def collective_backend(device: torch.device) -> str:
    """Return torch's backend for collectives on an accelerator: ``"nccl"`` on CUDA and ROCm, ``"xccl"`` on XPU.

    Raises:
        ConfigError: no package has registered a backend for the device.
    """
    from torch.distributed import get_default_backend_for_device

    try:
        return str(get_default_backend_for_device(device))
    except ValueError:
        raise ConfigError(
            f"init_dist: device must have a backend for collectives, got {device.type!r}. "
            "Import the package that registers the backend, or pass device='cpu'."
        ) from None


@cache
def counts_memory(device_type: str) -> bool:
    """Return True if the allocator of ``device_type`` counts its bytes. Starts the accelerator."""
    if torch.device(device_type).type in _NOT_ACCELERATORS:
        return False
    try:
        torch.accelerator.memory_stats(device_type)
        torch.accelerator.get_memory_info(device_type)
    # The allocator of a backend need not have counters.
    except RuntimeError:
        return False
    return True


def default_generators() -> Sequence[torch.Generator]:
    """Return the global generators of all devices of the accelerator; empty if this process has not started it."""
    if started_accelerator() is None:
        return ()
    generators: Sequence[torch.Generator] = getattr(torch.get_device_module(), "default_generators", ())
    return generators


def use_on_current_stream(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has used it, if another stream allocated it."""
    if not tensor.is_cpu and is_accelerator(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
