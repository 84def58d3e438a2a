"""Change a script from outside: one dtype, equal random numbers for all samples, another clock, no GPU.

``OneDtype``, ``EvenRandom`` and ``keep_on_cpu`` act on torch, because a script may create tensors, cast them and draw random
numbers wherever it likes.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from dtrain.data.batch import _map_leaves
from dtrain.dist.rng import derive_seed
from dtrain.prove.run_config import Dtype
from dtrain.prove.script_values import is_of_script

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
# These functions read the bits of a tensor or of foreign memory in another dtype.
_REINTERPRETS = {Tensor.view, torch.frombuffer}
_ADDITIONS = {Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__, torch.add}
_MAX_ROUNDINGS = 8
# These modules store and send tensors in the dtype that they name.
_UNCHANGED = (
    "dtrain.checkpoint",
    "dtrain.storage",
    "dtrain.dist",
    "dtrain.prove",
    "dtrain.step.normalization",
    "safetensors",
    "torch._utils",
    "torch._weights_only_unpickler",
    "torch.amp",
    "torch.distributed",
    "torch.serialization",
)


class OneDtype(TorchFunctionMode):
    """Replace every floating-point dtype that a script names by one dtype. Events of lower precision are counted.

    Args:
        dtype: dtype of the run.
        on_low: called with the name of a function of torch that was to use fewer bits than float32.
    """

    def __init__(self, dtype: torch.dtype, on_low: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self._dtype, self._on_low = dtype, on_low

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            if not _called_from_unchanged():
                if func in (Tensor.half, Tensor.bfloat16):
                    self._on_low(torch.float16 if func is Tensor.half else torch.bfloat16)
                return args[0].to(self._dtype)
        elif func not in _REINTERPRETS and self._names_dtype(args, kwargs) and not _called_from_unchanged():
            args = tuple(self._replace(value) for value in args)
            kwargs = {name: self._replace(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _names_dtype(self, args: Any, kwargs: Any) -> bool:
        return any(type(value) is torch.dtype and value in _FLOATS for value in (*args, *kwargs.values()))

    def _replace(self, value: Any) -> Any:
        if type(value) is not torch.dtype or value not in _FLOATS:
            return value
        if value.itemsize < 4:
            self._on_low(value)
        return self._dtype


def _called_from_unchanged() -> bool:
    frame: FrameType | None = sys._getframe(2)
    # Another mode passes on the calls of the script.
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_UNCHANGED)


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return ``batch`` with floating-point tensors in ``dtype``; a batch without them is returned unchanged."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype else leaf

    return _map_leaves(batch, cast, lambda tensors: tensors.apply(cast))


def use_one_dtype(name: Dtype, on_low: Callable[[torch.dtype], None]) -> torch.dtype | None:
    """Compute everything in one dtype from now on, and return the dtype; None if the script keeps its dtypes.

    Mutates: torch's default dtype, autocast, FSDP2's policy, and torch's functions in this thread.
    """
    if name == "as written":
        return None
    dtype = _DTYPES[name]
    torch.set_default_dtype(dtype)
    set_default = torch.set_default_dtype
    torch.set_default_dtype = lambda value: set_default(dtype if value in _FLOATS else value)

    enter = torch.autocast.__init__

    @functools.wraps(enter)
    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enabled", True):
            on_low(kwargs.get("dtype") or torch.bfloat16)
        enter(self, *args, **{**kwargs, "enabled": False})

    torch.autocast.__init__ = disabled  # type: ignore[method-assign]
    _replace_mixed_precision(dtype, on_low)
    enter_for_good(OneDtype(dtype, on_low))
    return dtype


def enter_for_good(mode: TorchFunctionMode) -> None:
    """Enter a mode until the process ends, also for what a backward calls.

    torch runs a backward without the modes through which it was called. But activation checkpointing runs forwards there.

    Mutates: the function of ``torch.autograd`` that runs a backward.
    """
    mode.__enter__()
    run = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if mode in _get_current_function_mode_stack() else mode:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_with_mode


def _replace_mixed_precision(dtype: torch.dtype, on_low: Callable[[torch.dtype], None]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    init = MixedPrecisionPolicy.__init__

    def with_one_dtype(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.param_dtype is not None and self.param_dtype.itemsize < 4:
            on_low(self.param_dtype)
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, dtype)

    MixedPrecisionPolicy.__init__ = with_one_dtype  # type: ignore[method-assign]


class LowSums(TorchFunctionMode):
    """Follow in float64 the sums that a script keeps in one number of low precision, such as the loss of an epoch.

    Args:
        on_lost: called with the sum, the sum in float64 and the number of terms, if the error is more than 8 roundings of the
            sum of the terms' sizes, as few terms have.
    """

    def __init__(self, on_lost: Callable[[Tensor, float, int], None]) -> None:
        super().__init__()
        self._on_lost = on_lost
        # Value, sum, sum of sizes and number of terms. A value that the script sets anew begins a sum.
        self._sums: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ADDITIONS or kwargs or not _is_low_number(args[0]):
            return func(*args, **(kwargs or {}))
        first, term = float(args[0]), float(args[1])
        value, total, size, terms = self._sums.get(args[0], (None, 0.0, 0.0, 0))
        if value != first:
            total, size, terms = first, abs(first), 0
        result = func(*args)
        if _is_low_number(result):
            total, size, terms = total + term, size + abs(term), terms + 1
            self._sums[result] = float(result), total, size, terms
            if abs(float(result) - total) > _MAX_ROUNDINGS * torch.finfo(result.dtype).eps / 2 * size:
                self._on_lost(result, total, terms)
        return result


def _is_low_number(value: Any) -> bool:
    return type(value) is Tensor and value.numel() == 1 and value.is_floating_point() and value.dtype.itemsize < 4


class EvenRandom:
    """Random numbers of a forward that are equal for all its samples, so that they do not depend on the layout.

    Dropout is off, because the shape of its mask depends on the padding of a microbatch. Each draw of a tensor with one row per
    sample draws one row, and repeats the row. All forwards of a step begin with one seed. The same holds for noise that the
    loop draws for a batch between the loader and the step. Draws of other shapes, and draws with a generator of the script, do
    not change.

    Args:
        on_draw: called at each draw from the global generator in a forward, with "noise" or "dropout".
        active: if False, draws are only observed.
    """

    def __init__(self, on_draw: Callable[[str], None], *, active: bool) -> None:
        self._on_draw, self._active = on_draw, active
        self._samples: int | None = None
        self._last: int | None = None
        self._saved: Tensor | None = None
        self._batch, self._step, self._number = 0, 0, 0
        for name in ("rand", "randn", "randint"):
            setattr(torch, name, self._sized(getattr(torch, name), skip=2 if name == "randint" else 0))
        for name in ("rand_like", "randn_like", "randint_like", "bernoulli"):
            setattr(torch, name, self._like(getattr(torch, name), in_place=False))
        for name in ("bernoulli_", "uniform_", "normal_", "random_", "exponential_"):
            setattr(Tensor, name, self._like(getattr(Tensor, name), in_place=True))
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            setattr(F, name, self._dropout(getattr(F, name)))
        F.scaled_dot_product_attention = self._attention(F.scaled_dot_product_attention)

    def batch_loaded(self, step: int, samples: int) -> None:
        """Begin the part of the loop that has a batch of ``samples``."""
        self._batch, self._step, self._number = samples, step, 0

    def begin(self, step: int, samples: int) -> None:
        """Begin a forward over ``samples``. Mutates: torch's global generator, until ``end``, if active."""
        self._samples = self._last = samples
        if self._active and self._saved is None:
            self._saved = torch.get_rng_state()
            torch.manual_seed(derive_seed("prove", step))

    def end(self) -> None:
        """End the forward, and restore torch's global generator."""
        self._samples = None
        if self._saved is not None:
            torch.set_rng_state(self._saved)
            self._saved = None

    def _samples_of_forward(self) -> int | None:
        """Return the samples of the running forward, also while backward computes a part of it again; None outside of both."""
        is_backward = torch._C._current_graph_task_id() != -1
        return self._last if self._samples is None and is_backward else self._samples

    def _has_rows(self, shape: Any, kwargs: Any) -> bool:
        """Return True if a draw of ``shape`` has rows for samples. Observes the draw."""
        if kwargs.get("generator") is not None:
            return False
        samples = self._samples_of_forward()
        if samples is None:
            # Between two forwards only a draw for the whole batch is noise of samples.
            of_batch = bool(self._batch and len(shape) and shape[0] == self._batch)
            if of_batch:
                self._on_draw("noise")
            return of_batch and self._active
        self._on_draw("noise")
        return bool(self._active and len(shape) and samples and shape[0] % samples == 0 and shape[0])

    @contextmanager
    def _row_generator(self) -> Iterator[None]:
        """Draw from a generator of the row.

        In a forward its seed is one draw of the global generator, which advances by one draw of any shape. Between forwards the
        global generators of the ranks differ, and the seed is that of the step and the number of the draw.
        """
        saved, samples = (self._samples, self._last, self._batch), self._samples_of_forward()
        self._samples, self._last, self._batch = None, None, 0
        if samples is None:
            self._number += 1
            seed = derive_seed("prove batch", self._step, self._number)
        else:
            seed = int(_randint(0, 2**62, (1,), device="cpu").item())
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(state)
            self._samples, self._last, self._batch = saved

    def _sized(self, draw: Any, skip: int) -> Any:
        @functools.wraps(draw)
        def sized(*args: Any, **kwargs: Any) -> Any:
            bounds = [value for value in args[:skip] if isinstance(value, int)]
            rest = args[len(bounds) :]
            shape = kwargs.get("size", rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
            if not self._has_rows(shape, kwargs):
                return draw(*args, **kwargs)
            with self._row_generator():
                options = {name: value for name, value in kwargs.items() if name != "size"}
                row = draw(*bounds, (1, *shape[1:]), **options)
            return row.repeat(shape[0], *[1] * (len(shape) - 1))

        return sized

    def _like(self, draw: Any, *, in_place: bool) -> Any:
        @functools.wraps(draw)
        def like(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._has_rows(tensor.shape, kwargs):
                return draw(tensor, *args, **kwargs)
            with self._row_generator():
                row = draw(tensor[:1].clone(), *args, **kwargs)
            return tensor.copy_(row.expand_as(tensor)) if in_place else row.repeat(len(tensor), *[1] * (tensor.ndim - 1))

        return like

    def _dropout(self, drop: Any) -> Any:
        @functools.wraps(drop)
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if not training or not p or self._samples_of_forward() is None:
                return drop(input, p, training, inplace)
            self._on_draw("dropout")
            return input if self._active else drop(input, p, training, inplace)

        return dropout

    def _attention(self, attend: Any) -> Any:
        @functools.wraps(attend)
        def attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
        ) -> Any:
            if dropout_p and self._samples_of_forward() is not None:
                self._on_draw("dropout")
                dropout_p = 0.0 if self._active else dropout_p
            return attend(query, key, value, attn_mask, dropout_p, *args, **kwargs)

        return attention


_randint = torch.randint


def observe_recompute(on_checkpoint: Callable[[], None], *, active: bool) -> None:
    """Call ``on_checkpoint`` at each checkpointed function; if not ``active``, run functions once and keep their activations.

    Mutates: ``torch.utils.checkpoint``.
    """
    options = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
    checkpoint = torch.utils.checkpoint.checkpoint

    @functools.wraps(checkpoint)
    def observed(function: Any, *args: Any, **kwargs: Any) -> Any:
        on_checkpoint()
        if active:
            return checkpoint(function, *args, **kwargs)
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    replace_checkpoint(observed)


def replace_checkpoint(function: Callable[..., Any]) -> None:
    """Put a function in the place of ``torch.utils.checkpoint.checkpoint``, also where it has been imported."""
    from dtrain.shard import activations

    torch.utils.checkpoint.checkpoint = function
    activations.checkpoint = function  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

        checkpoint_wrapper.torch_utils_checkpoint = function


def compile_nothing() -> None:
    """Let compiled modules and functions run as written, from now on.

    Compilation takes longer than a run, and changes rounding. A compiled module keeps its wrapper, which adds a prefix to the
    names in its state dict.

    Mutates: ``torch.compile``.
    """
    compile_ = torch.compile

    @functools.wraps(compile_)
    def wrapped_only(*args: Any, **kwargs: Any) -> Any:
        # The first call imports the compiler, which takes seconds.
        torch.compiler.set_stance("force_eager")
        return compile_(*args, **kwargs)

    torch.compile = wrapped_only


class FrozenStatistics:
    """Batch norm that normalizes with its initial statistics, and still updates its running statistics.

    The statistics of a batch depend on the layout. A script that averages them over ranks (``buffers="mean"``) says that it
    knows.
    """

    def __init__(self) -> None:
        norm = nn.modules.batchnorm._BatchNorm
        forward = norm.forward
        initial: dict[int, tuple[Tensor, Tensor]] = {}

        def frozen(module: Any, input: Tensor) -> Tensor:
            if module.running_mean is None:
                return forward(module, input)
            mean, var = initial.setdefault(id(module), (module.running_mean.clone(), module.running_var.clone()))
            if module.training:
                with torch.no_grad():
                    forward(module, input.detach())
            return F.batch_norm(input, mean.clone(), var.clone(), module.weight, module.bias, False, 0.0, module.eps)

        norm.forward = frozen  # type: ignore[method-assign, assignment]


_CLOCKS = {"time": 1, "perf_counter": 1, "monotonic": 1, "time_ns": 10**9, "perf_counter_ns": 10**9, "monotonic_ns": 10**9}
# Seconds by which each call of a clock advances it. A time that is printed with two digits must change.
_CLOCK_STEP = 0.25
_MORE_MEMORY = 64 << 20  # bytes


def vary_machine(script: str) -> object:
    """Advance the clocks that a script reads, reverse its listings of folders, and return memory for the caller to hold.

    Numbers about time and memory then differ from those of an equal run. Libraries read the true time, because they wait by it.

    Mutates: functions of ``time``, ``os``, ``glob`` and ``pathlib``.
    """
    calls = 0

    def advance(read: Any, unit: int) -> Any:
        @functools.wraps(read)
        def advanced() -> Any:
            nonlocal calls
            if is_of_script(sys._getframe(1).f_code.co_filename, script):
                calls += 1
                return read() + type(read())(calls * _CLOCK_STEP * unit)
            return read()

        return advanced

    def reverse(listing: Any) -> Any:
        @functools.wraps(listing)
        def reversed_listing(*args: Any, **kwargs: Any) -> Any:
            names = listing(*args, **kwargs)
            return names[::-1] if is_of_script(sys._getframe(1).f_code.co_filename, script) else names

        return reversed_listing

    for name, unit in _CLOCKS.items():
        setattr(time, name, advance(getattr(time, name), unit))
    os.listdir, glob.glob = reverse(os.listdir), reverse(glob.glob)
    for name in ("iterdir", "glob", "rglob"):
        # These return iterators.
        function = getattr(Path, name)
        setattr(Path, name, reverse(functools.wraps(function)(lambda *args, _list=function: list(_list(*args)))))
    # Pages of zeros take no memory.
    return b"1" * _MORE_MEMORY


_CPU = torch.device("cpu")
# Functions of ``torch.cuda`` that need a GPU, and what they return here.
_WITHOUT_GPU = {"set_device": None, "synchronize": None, "reset_peak_memory_stats": None, "current_device": 0}


def keep_on_cpu(script: str, on_gpu: Callable[[], None]) -> None:
    """Replace each GPU by the CPU, from now on. ``on_gpu`` is called each time that ``script`` names one, itself or by torch.

    Mutates: torch's functions in this thread, and functions and classes of ``torch.cuda``, ``torch.amp`` and
    ``torch.distributed``.
    """

    def gpu_named() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (module := str(frame.f_globals.get("__name__"))).startswith(("torch.", "dtrain.prove.")):
            if module == "torch.distributed.distributed_c10d":
                # A process group of gloo lists its devices, among them a GPU.
                return
            frame = frame.f_back
        if frame is not None and is_of_script(frame.f_code.co_filename, script):
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

    enter_for_good(_CpuMode(cpu_for, gpu_named))
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
