"""Checkpoint the activations of blocks (recompute them in backward), or offload activations to host memory.

Both functions replace the ``forward`` of blocks, before or after sharding. Module names stay the same. FSDP2's hooks stay
outside of the replaced ``forward``, so parameters are unsharded during recomputation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.shard.activation_offload import ActivationOffloader
from dtrain.shard.fsdp2_private import is_unit
from dtrain.shard.wrapping import Blocks, select_blocks

KeepFn: TypeAlias = "Callable[..., CheckpointPolicy | bool]"
"""A policy of torch's selective checkpointing: ``(context, op, *args, **kwargs)`` -> True to save the output of ``op``."""

KeepPolicy: TypeAlias = "Literal['nothing', 'matmuls'] | KeepFn"

# The module attribute that stores the ``_BlockSettings``.
_SETTINGS_ATTRIBUTE = "_dtrain_activation_settings"


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
    selected = _select_every_nth(model, blocks, every, caller)
    _check_not_compiled(selected, caller)
    repeated = [type(module).__name__ for module in selected if _settings_of(module).checkpointed]
    if repeated:
        raise ConfigError(
            f"{caller}: {len(repeated)} of the blocks are checkpointed already (first: a {repeated[0]}). Call {caller} once."
        )
    policy = None if keep == "nothing" else partial(_recompute_random_ops, _keep_matmuls if keep == "matmuls" else keep)
    for module in selected:
        # The compiler would mistake the buffer contexts for a policy (see compile_inner_forward). ``disable`` imports the
        # compiler, so the call is here and not in the first backward.
        _update_settings(module, checkpointed=True, policy=policy, run_eager=torch.compiler.disable(_checkpoint_with_buffers))
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
    selected = _select_every_nth(model, blocks, every, caller)
    _check_not_compiled(selected, caller)
    repeated = [type(module).__name__ for module in selected if _settings_of(module).offloader is not None]
    if repeated:
        raise ConfigError(
            f"{caller}: {len(repeated)} of the blocks are offloaded already (first: a {repeated[0]}). Call {caller} once."
        )
    # The blocks share one offloader, because backward of a block fetches tensors of the previous block.
    offloader = ActivationOffloader(min_bytes=min_bytes)
    for module in selected:
        _update_settings(module, offloader=offloader)
    return model


def _select_every_nth(model: nn.Module, blocks: Blocks, every: int, caller: str) -> list[nn.Module]:
    check_int(caller, "every", every)
    selected = select_blocks(model, blocks, caller=caller)
    if not selected:
        raise ConfigError(f"{caller}: {blocks=} selects no module inside the model. Pass for example blocks=(Block,).")
    return selected[::every]


def _check_not_compiled(modules: list[nn.Module], caller: str) -> None:
    if any(map(is_compiled, modules)):
        raise ConfigError(f"{caller}: blocks are compiled already. Call {caller} before compile_blocks.")


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch compiles ``module``, or its inner forward."""
    return module._compiled_call_impl is not None or _settings_of(module).compiled is not None


def compile_inner_forward(module: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Compile the inner forward of ``module`` if Python must run around the block, else return False.

    Buffer snapshots and copies to the host run in Python around the compiled code. A block without either is compiled as a
    whole, so that the compiler knows the recomputation. The recomputation must run the same code as the forward. Shapes are
    therefore static unless ``settings`` sets ``dynamic``; automatic dynamic shapes would give the same input different code.

    Mutates: ``module`` (one attribute).

    Raises:
        ConfigError: the block also has a selective policy, which sees no operators inside compiled code.
    """
    block = _settings_of(module)
    if block.offloader is None and not (block.checkpointed and _has_buffers(module)):
        return False
    if block.policy is not None:
        feature = "buffers" if block.offloader is None else "offloaded activations"
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
        offloader: destination of saved tensors; None keeps saved tensors on the device.
        compiled: compiler of the inner forward.
    """

    own_forward: Callable[..., Any] | None = None
    checkpointed: bool = False
    policy: KeepFn | None = None
    run_eager: Callable[..., Any] | None = None
    offloader: ActivationOffloader | None = None
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
    forward = _inner_forward(module, settings)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if settings.offloader is None:
        return _run_block(module, settings, forward, args, kwargs)
    # The hooks surround checkpointing, so that the saved inputs of the block are offloaded too.
    with settings.offloader.offload_saved_tensors(module):
        return _run_block(module, settings, forward, args, kwargs)


def _inner_forward(module: nn.Module, settings: _BlockSettings) -> Callable[..., Any]:
    forward = settings.own_forward or MethodType(type(module).forward, module)
    return forward if settings.compiled is None else settings.compiled.get(forward)


def _run_block(
    module: nn.Module, settings: _BlockSettings, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not settings.checkpointed:
        return forward(*args, **kwargs)
    if _has_buffers(module):
        assert settings.run_eager is not None
        return settings.run_eager(module, settings, forward, args, kwargs)
    options: dict[str, Any] = {}
    if settings.policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, settings.policy)
    return checkpoint(forward, *args, use_reentrant=False, **options, **_early_stop_option(module, settings), **kwargs)


def _checkpoint_with_buffers(
    module: nn.Module, settings: _BlockSettings, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    contexts = partial(_checkpoint_contexts, module, settings.policy)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **_early_stop_option(module, settings), **kwargs
    )


def _has_buffers(module: nn.Module) -> bool:
    return any(submodule._buffers for submodule in module.modules())


def _early_stop_option(module: nn.Module, settings: _BlockSettings) -> dict[str, Any]:
    """Return the ``early_stop`` option. A recomputation must not stop in the middle of the forward of an inner unit."""
    if not any(is_unit(submodule) for submodule in module.modules() if submodule is not module):
        return {}
    # The policy would see the operators of the all-gather, which differ in the recomputation.
    if settings.policy is not None:
        raise ConfigError(
            f"checkpoint_activations: a {type(module).__name__} with selective checkpointing contains a sharded unit. "
            "Checkpoint the inner units instead, or pass keep='nothing'."
        )
    return {"early_stop": False}


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
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            probability = kwargs.get("dropout_p", args[at] if at < len(args) else argument.default_value)
            return bool(probability)
    return True


def _checkpoint_contexts(module: nn.Module, policy: KeepFn | None) -> tuple[Any, Any]:
    """Return the contexts of a block's forward and of its recomputation."""
    first: AbstractContextManager[Any] = nullcontext()
    second: AbstractContextManager[Any] = nullcontext()
    if policy is not None:
        first, second = create_selective_checkpoint_contexts(policy)
    buffers = _BlockBufferSnapshot(module)
    return _enter_both(buffers.record(), first), _ReenterableContext(lambda: _enter_both(buffers.substitute(), second))


@contextmanager
def _enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


class _ReenterableContext:
    """A context that can be entered repeatedly, because backward through a retained graph recomputes each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *details: Any) -> None:
        context, self._context = self._context, None
        assert context is not None
        # A recomputation ends with an exception, which must propagate.
        context.__exit__(*details)


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
