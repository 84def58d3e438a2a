"""Change how blocks run: recompute activations in backward, offload activations to host memory, or compile the block.

``checkpoint_activations`` and ``offload_activations`` replace the ``forward`` of blocks, before or after sharding. Module names
stay the same. FSDP2's hooks stay outside of the replaced ``forward``, so parameters are unsharded during recomputation, and
outside of the code that ``compile_blocks`` compiles.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtrain import spans
from dtrain.arguments import check_int, check_number
from dtrain.dist.dtensor import is_dtensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp2_private import is_unit
from dtrain.shard.wrapping import Blocks, select_some_blocks

KeepFn: TypeAlias = "Callable[..., CheckpointPolicy | bool]"
"""A policy of torch's selective checkpointing: ``(context, op, *args, **kwargs)`` -> True to save the output of ``op``."""

KeepPolicy: TypeAlias = "Literal['nothing', 'matmuls'] | KeepFn"
# The module attribute that stores the ``_BlockSettings``.
_SETTINGS_ATTRIBUTE = "_dtrain_activation_settings"
# Each tensor in flight occupies device memory until its copy is complete.
_MAX_IN_FLIGHT = 4
# Tensors that backward fetches ahead.
_PREFETCH_COUNT = 2


def checkpoint_activations(model: nn.Module, *, blocks: Blocks, every: int = 1, keep: KeepPolicy = "nothing") -> nn.Module:
    """Recompute the activations of blocks in backward instead of storing them; return the model.

    Gradients are bit-identical to training without checkpointing. Random numbers (dropout) repeat in the recomputation. Buffers
    that a forward changes (BatchNorm statistics) change once, because the recomputation uses copies. Any other side effect of a
    block's forward happens twice. Methods other than ``forward``, and forwards without gradients, are not changed.

    Args:
        model: plain, on the meta device, or sharded.
        blocks: modules to checkpoint, as in ``shard_model``: classes, names, or a function of (name, module).
        every: checkpoint the first block and then every ``every``-th block; 2 halves the recomputation and about half the
            saving.
        keep: tensors to store besides block inputs. ``"nothing"`` needs the least memory and about one more forward.
            ``"matmuls"`` stores outputs of matrix products, convolutions and fused attention, but not of batched products,
            which are as large as attention scores. A function ``(context, op, *args, **kwargs)`` is a policy of torch's
            selective checkpointing. Operators that draw random numbers are always recomputed, so that later draws keep their
            numbers.

    Mutates: ``model`` (attributes of the selected modules).

    Example:
        model = dt.shard.checkpoint_activations(model, blocks=(Block,), keep="matmuls")
        model = dt.shard_model(model, mesh, blocks=(Block,))

    Raises:
        ConfigError: ``blocks`` selects no module, a block is checkpointed already, or ``every`` or ``keep`` is invalid.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    caller = "checkpoint_activations"
    if keep not in ("nothing", "matmuls") and not callable(keep):
        raise ConfigError(
            f"{caller}: keep must be 'nothing', 'matmuls' or a function of (context, op, *args), got {keep!r}. "
            "Pass keep='matmuls', for example."
        )
    selected = _select_every_nth(model, blocks, every, caller, "checkpointed")
    policy = None if keep == "nothing" else partial(_recompute_random_ops, _keep_matmuls if keep == "matmuls" else keep)
    for module in selected:
        # The compiler would mistake the buffer contexts for a policy (see _compile_inner_forward). ``disable`` imports the
        # compiler, so the call is here and not in the first backward.
        _update_settings(module, checkpointed=True, policy=policy, run_eager=torch.compiler.disable(_checkpoint))
    return model


def offload_activations(model: nn.Module, *, blocks: Blocks, every: int = 1, min_bytes: int = 1 << 20) -> nn.Module:
    """Store the tensors that blocks save for backward in host memory; return the model.

    Copies overlap the computation, on separate streams and through pinned memory. Backward fetches tensors ahead. Parameters
    are not copied, because backward gathers parameters anyway. On the CPU nothing changes. With ``checkpoint_activations`` on
    the same blocks, the inputs of the blocks are offloaded.

    Args:
        model: plain, on the meta device, or sharded.
        blocks: modules to offload, as in ``shard_model``.
        every: offload the first block and then every ``every``-th block.
        min_bytes: smallest tensor to offload, in bytes; copies of smaller tensors cost more time than their memory is worth.

    Mutates: ``model`` (attributes of the selected modules).
    Host sync: none.

    Example:
        model = dt.shard.offload_activations(model, blocks=(Block,), every=2)
        model = dt.shard_model(model, mesh, blocks=(Block,))

    Raises:
        ConfigError: ``blocks`` selects no module, a block is offloaded already, or ``every`` or ``min_bytes`` is invalid.
    """
    caller = "offload_activations"
    check_int(caller, "min_bytes", min_bytes, minimum=0)
    selected = _select_every_nth(model, blocks, every, caller, "offloaded")
    # The blocks share one offloader, because backward of a block fetches tensors of the previous block.
    offloader = ActivationOffloader(min_bytes=min_bytes)
    for module in selected:
        _update_settings(module, offloaded=offloader)
    return model


def compile_blocks(
    model: nn.Module,
    *,
    blocks: Blocks,
    backend: str | Callable[..., Any] = "inductor",
    memory_budget: float | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Compile each block with ``torch.compile`` at its first run; return the model.

    Blocks of one class are compiled once. Parameter names stay the same. Under ``dtrain launch``, compiled code is cached in
    the folder of the launch for all ranks and restarted attempts, unless ``TORCHINDUCTOR_CACHE_DIR`` is set.

    Args:
        model: plain, or from ``shard_model``. Call ``checkpoint_activations`` and ``offload_activations`` before.
        blocks: modules to compile, usually the ``blocks`` of ``shard_model``: classes, names, or a function of (name, module).
        backend: backend of ``torch.compile``.
        memory_budget: 0 stores only block inputs and recomputes all activations, 1 stores the activations that make backward
            fastest (torch's default); the compiler recomputes the cheapest operators first. The backend must partition the
            graph, as ``"inductor"`` does; not with ``mode`` or ``options``.
        fullgraph: if True, raise if the graph of a block breaks.
        dynamic: if True, compile with dynamic shapes, as in ``torch.compile``. None lets torch decide, and means False for
            checkpointed blocks with buffers.
        mode: as in ``torch.compile``.
        options: as in ``torch.compile``.

    Mutates: ``model`` (attributes of the selected modules), and ``TORCHINDUCTOR_CACHE_DIR`` of this process if unset.

    Example:
        model = dt.shard.checkpoint_activations(model, blocks=(Block,))
        model = dt.shard_model(model, mesh, blocks=(Block,))
        model = dt.compile_blocks(model, blocks=(Block,))

    Raises:
        ConfigError: ``blocks`` selects no module or compiled modules, ``memory_budget`` is out of range or combined with
            ``mode`` or ``options``, or a block combines a selective policy (``keep=``) with buffers or offloading.
    """
    if memory_budget is not None:
        check_number("compile_blocks", "memory_budget", memory_budget, minimum=0, maximum=1)
        if mode is not None or options is not None:
            raise ConfigError(
                "compile_blocks: memory_budget cannot be combined with mode or options. Leave one of the arguments out."
            )
    modules = select_some_blocks(model, blocks, caller="compile_blocks")
    if any(map(_is_compiled, modules)):
        raise ConfigError("compile_blocks: blocks are compiled already. Call compile_blocks once.")
    if (folder := get_dist_info().run_dir) is not None:
        # torch reads only the environment variable, at compile time.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
    settings: dict[str, Any] = {
        "backend": backend if memory_budget is None else _backend_with_budget(backend, memory_budget),
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": dict(options) if options is not None else None,
    }
    for module in modules:
        if not _compile_inner_forward(module, settings):
            module.compile(**settings)
    # The compiler is loaded by now.
    time_compilation()
    return model


def time_compilation() -> None:
    """Measure compilation time from now on, if the compiler is loaded. Repeated calls have no effect.

    Mutates: the callbacks of the compiler. ``torch.compiler.reset()`` removes the callbacks.
    """
    if "torch._dynamo" in sys.modules:
        handler = torch._dynamo.callback.callback_handler
        if _begin_compile_span not in handler.start_callbacks:
            handler.register_start_callback(_begin_compile_span)
            handler.register_end_callback(_end_compile_span)


def _select_every_nth(model: nn.Module, blocks: Blocks, every: int, caller: str, done: str) -> list[nn.Module]:
    """Return the blocks to change. Refuse blocks that are compiled, checkpointed already or offloaded already (``done``)."""
    check_int(caller, "every", every)
    selected = select_some_blocks(model, blocks, caller=caller)[::every]
    if any(map(_is_compiled, selected)):
        raise ConfigError(f"{caller}: blocks are compiled already. Call {caller} before compile_blocks.")
    repeated = [type(module).__name__ for module in selected if getattr(_settings_of(module), done)]
    if repeated:
        raise ConfigError(
            f"{caller}: {len(repeated)} of the blocks are {done} already (first: a {repeated[0]}). Call {caller} once."
        )
    return selected


def _is_compiled(module: nn.Module) -> bool:
    """Return True if torch compiles ``module``, or its inner forward."""
    return module._compiled_call_impl is not None or _settings_of(module).compiled is not None


def _compile_inner_forward(module: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Compile the inner forward of ``module`` if Python must run around the block, else return False.

    Buffer snapshots and copies to the host run in Python around the compiled code. A block without either is compiled as a
    whole, so that the compiler knows the recomputation. The recomputation must run the same code as the forward. Shapes are
    therefore static unless ``settings`` sets ``dynamic``; automatic dynamic shapes would give the same input different code.

    Mutates: ``module`` (one attribute).

    Raises:
        ConfigError: the block also has a selective policy, which sees no operators inside compiled code.
    """
    block = _settings_of(module)
    if block.offloaded is None and not (block.checkpointed and _has_buffers(module)):
        return False
    if block.policy is not None:
        feature = "buffers" if block.offloaded is None else "offloaded activations"
        raise ConfigError(
            f"compile_blocks: a {type(module).__name__} has selective checkpointing and {feature}, "
            "which cannot be compiled together. Pass keep='nothing' to checkpoint_activations."
        )
    static_shapes = {"dynamic": False} if block.checkpointed and settings.get("dynamic") is None else {}
    _update_settings(module, compiled=_CompiledForward({**settings, **static_shapes}))
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BlockSettings:
    """Activation settings of one module.

    Args:
        own_forward: forward that was set on the instance; None uses the forward of the class, which sharding replaces.
        checkpointed: if True, store only inputs and the tensors that ``policy`` saves.
        policy: selective checkpointing policy; None saves no further tensors.
        run_eager: function that runs a block with buffers outside of the compiler.
        offloaded: destination of saved tensors; None keeps saved tensors on the device.
        compiled: compiler of the inner forward.
    """

    own_forward: Callable[..., Any] | None = None
    checkpointed: bool = False
    policy: KeepFn | None = None
    run_eager: Callable[..., Any] | None = None
    offloaded: ActivationOffloader | None = None
    compiled: _CompiledForward | None = None


class _CompiledForward:
    """A forward that is compiled at its first call. A deep copy of the module compiles its own forward."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._function: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledForward:
        return _CompiledForward(self._settings)

    def get(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._function is None:
            self._function = torch.compile(forward, **self._settings)
        return self._function


def _settings_of(module: nn.Module) -> _BlockSettings:
    settings = module.__dict__.get(_SETTINGS_ATTRIBUTE)
    return settings if isinstance(settings, _BlockSettings) else _BlockSettings(own_forward=module.__dict__.get("forward"))


def _update_settings(module: nn.Module, **changes: Any) -> None:
    setattr(module, _SETTINGS_ATTRIBUTE, dataclasses.replace(_settings_of(module), **changes))
    # A bound method, unlike a closure, follows a deep copy of the module.
    module.forward = MethodType(_replaced_forward, module)


def _replaced_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a selected module with its settings."""
    settings: _BlockSettings = module.__dict__[_SETTINGS_ATTRIBUTE]
    forward = settings.own_forward or MethodType(type(module).forward, module)
    if settings.compiled is not None:
        forward = settings.compiled.get(forward)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if settings.offloaded is None:
        return _run_block(module, settings, forward, args, kwargs)
    # The hooks surround checkpointing, so that the saved inputs of the block are offloaded too.
    with settings.offloaded.offload_saved_tensors(module):
        return _run_block(module, settings, forward, args, kwargs)


def _run_block(
    module: nn.Module, settings: _BlockSettings, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not settings.checkpointed:
        return forward(*args, **kwargs)
    if _has_buffers(module):
        assert settings.run_eager is not None
        return settings.run_eager(
            module, settings, partial(_checkpoint_contexts, module, settings.policy), forward, args, kwargs
        )
    contexts = None if settings.policy is None else partial(create_selective_checkpoint_contexts, settings.policy)
    return _checkpoint(module, settings, contexts, forward, args, kwargs)


def _checkpoint(
    module: nn.Module,
    settings: _BlockSettings,
    contexts: Callable[[], tuple[Any, Any]] | None,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    if any(is_unit(submodule) for submodule in module.modules() if submodule is not module):
        # The policy would see the operators of the all-gather, which differ in the recomputation.
        if settings.policy is not None:
            raise ConfigError(
                f"checkpoint_activations: a {type(module).__name__} with selective checkpointing contains a sharded unit. "
                "Checkpoint the inner units instead, or pass keep='nothing'."
            )
        # A recomputation must not stop in the middle of the forward of an inner unit.
        options["early_stop"] = False
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _has_buffers(module: nn.Module) -> bool:
    return any(submodule._buffers for submodule in module.modules())


def _keep_matmuls(context: object, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in _matmul_ops()


@cache
def _matmul_ops() -> frozenset[Any]:
    """Return the operators of this torch that are expensive to compute and whose outputs are as small as activations."""
    names = (
        "mm addmm convolution _scaled_mm _grouped_mm _scaled_grouped_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
    )
    return frozenset(getattr(torch.ops.aten, name).default for name in names.split() if hasattr(torch.ops.aten, name))


def _recompute_random_ops(policy: KeepFn, context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
    """Return the decision of ``policy``, but always recompute operators that draw random numbers.

    A recomputation skips a saved operator, so the next draw would get the random numbers of the skipped operator.
    """
    decision = policy(context, op, *args, **kwargs)
    is_saved = (
        decision if isinstance(decision, bool) else decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    )
    if is_saved and torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) and _uses_rng(op, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return decision


def _uses_rng(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call of a seeded operator draws random numbers. Fused attention without dropout draws none."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            probability = kwargs.get("dropout_p", args[position] if position < len(args) else argument.default_value)
            return bool(probability)
    return True


def _checkpoint_contexts(module: nn.Module, policy: KeepFn | None) -> tuple[Any, Any]:
    """Return the contexts of a block's forward and of its recomputation."""
    first, second = (nullcontext(), nullcontext()) if policy is None else create_selective_checkpoint_contexts(policy)
    buffers = _BlockBufferSnapshot(module)
    return _Contexts(buffers.record, first), _Contexts(buffers.substitute, second)


class _Contexts(ExitStack):
    """Two contexts as one, to be entered repeatedly: backward through a retained graph recomputes each time."""

    def __init__(self, make_outer: Callable[[], AbstractContextManager[Any]], inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._make_outer, self._inner = make_outer, inner

    def __enter__(self) -> _Contexts:
        with ExitStack() as stack:
            stack.enter_context(self._make_outer())
            stack.enter_context(self._inner)
            self.push(stack.pop_all())
        return self


class _BlockBufferSnapshot:
    """Values of a block's buffers before a forward that changed the buffers.

    The recomputation needs the earlier values (a power iteration starts from them) and must not change the buffers, so the
    recomputation uses copies. One changed buffer marks all buffers of its module. torch's normalizations update statistics
    without incrementing the version counter, but increment the version of the batch counter.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: list[tuple[nn.Module, str, Tensor]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Save copies of the buffers that change in this context. All buffers are copied, and unchanged copies dropped."""
        slots = [(owner, key, b) for owner in self._module.modules() for key, b in owner._buffers.items() if b is not None]
        copies = {id(buffer): (buffer._version, buffer.detach().clone()) for _, _, buffer in slots}
        yield
        changed = {id(owner) for owner, key, b in slots if owner._buffers.get(key) is not b or b._version != copies[id(b)][0]}
        self._saved = [(owner, key, copies[id(b)][1]) for owner, key, b in slots if id(owner) in changed]

    @contextmanager
    def substitute(self) -> Iterator[None]:
        """Substitute copies of the saved values for the buffers. The buffers themselves are not written."""
        current = [(owner, key, owner._buffers.get(key)) for owner, key, _ in self._saved]
        # A buffer that two modules share has one copy.
        copies = {id(value): value.clone() for _, _, value in self._saved}
        try:
            for owner, key, value in self._saved:
                owner._buffers[key] = copies[id(value)]
            yield
        finally:
            for owner, key, tensor in current:
                owner._buffers[key] = tensor


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

        def unpack(packed: Tensor | _OffloadedTensor) -> Tensor:
            return packed.fetch() if isinstance(packed, _OffloadedTensor) else packed

        with saved_tensors_hooks(lambda tensor: self._pack(tensor, kept_storages), unpack):
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


def _begin_compile_span(_: object) -> None:
    spans.begin("compile")


def _end_compile_span(_: object) -> None:
    # The span did not begin if another thread compiled first.
    spans.end("compile")


def _backend_with_budget(backend: str | Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Return ``backend`` with torch's process-wide memory budget set during each compilation."""
    compile_fn: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_graph(graph: Any, inputs: Any, **settings: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=float(budget)):
            return compile_fn(graph, inputs, **settings)

    return compile_graph
