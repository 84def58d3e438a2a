"""Run a script that names a GPU on the CPU (``keep_on_cpu``), so that a proof needs no GPU and float64 is not slow."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
# Functions of ``torch.cuda`` that need a GPU, and what they return here.
_WITHOUT_GPU = {"set_device": None, "synchronize": None, "reset_peak_memory_stats": None, "current_device": 0}


def keep_on_cpu(on_gpu: Callable[[], None]) -> None:
    """Replace each GPU by the CPU, from now on. ``on_gpu`` is called each time that code outside of torch and dtrain names one.

    Mutates: torch's functions in this thread, and functions and classes of ``torch.cuda``, ``torch.amp`` and
    ``torch.distributed``.
    """

    def gpu_named() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "dtrain.prove.")):
            frame = frame.f_back
        if frame is not None and not str(frame.f_globals.get("__name__")).startswith("dtrain."):
            on_gpu()

    def cpu_for(value: Any) -> Any:
        if type(value) is torch.device and value.type == "cuda":
            gpu_named()
            return _CPU
        if type(value) is str and (value == "nccl" or (value.partition(":")[0] in ("cuda", "cpu") and "cuda" in value)):
            gpu_named()
            return "gloo" if "nccl" in value else "cpu"
        return value

    def with_cpu(function: Any, **changes: Any) -> Any:
        @functools.wraps(function)
        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            given = {name: cpu_for(value) for name, value in kwargs.items()}
            return function(*map(cpu_for, args), **given | {name: changes[name] for name in changes if name in given})

        return on_cpu

    def without_gpu(result: Any) -> Any:
        def answered(*args: Any, **kwargs: Any) -> Any:
            gpu_named()
            return result

        return answered

    autocast, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    @functools.wraps(autocast)
    def cast_on_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        # The default dtype is that of the device.
        dtype = torch.float16 if dtype is None and device_type == "cuda" else dtype
        given = dict(zip(("enabled", "cache_enabled"), args, strict=False))
        autocast(self, cpu_for(device_type), dtype=dtype, **given, **kwargs)

    @functools.wraps(scaler)
    def scaled_on_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, cpu_for(device), *args, **kwargs)

    _CpuMode(cpu_for, gpu_named).__enter__()  # type: ignore[no-untyped-call]
    for name, result in _WITHOUT_GPU.items():
        setattr(torch.cuda, name, without_gpu(result))
    dist.init_process_group = with_cpu(dist.init_process_group, device_id=None)
    dist.new_group = with_cpu(dist.new_group)
    dist.init_device_mesh = device_mesh.init_device_mesh = with_cpu(device_mesh.init_device_mesh)
    DistributedDataParallel.__init__ = with_cpu(  # type: ignore[method-assign]
        DistributedDataParallel.__init__, device_ids=None, output_device=None
    )
    torch.autocast.__init__ = cast_on_cpu  # type: ignore[method-assign]
    torch.amp.GradScaler.__init__ = scaled_on_cpu  # type: ignore[method-assign]


class _CpuMode(TorchFunctionMode):
    """Replace the GPUs in the arguments of torch's functions; a number is a device where torch takes a device."""

    def __init__(self, cpu_for: Callable[[Any], Any], on_gpu: Callable[[], None]) -> None:
        super().__init__()
        self._cpu_for, self._on_gpu = cpu_for, on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda or func is Tensor.pin_memory:
            self._on_gpu()
            return args[0]
        # ``Module.to`` parses its arguments first.
        place = 1 if func is Tensor.to else 0 if getattr(func, "__name__", "") == "_parse_to" else None
        if place is not None and len(args) > place and type(args[place]) is int:
            self._on_gpu()
            args = (*args[:place], _CPU, *args[place + 1 :])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda")}
        if any(type(value) in (str, torch.device) for value in (*args, *kwargs.values())):
            args, kwargs = tuple(map(self._cpu_for, args)), {name: self._cpu_for(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)
