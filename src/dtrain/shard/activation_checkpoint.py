"""Activations: what a block keeps from its forward for its backward, what it computes again, and what it sends to the host.

Both functions here change a model before (or after) it is sharded. They replace the ``forward`` of the blocks, not the blocks,
so that names stay those of the plain model and the hooks of sharding stay outside: parameters are whole when a block computes
again.
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
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtrain.errors import ConfigError
from dtrain.shard.activation_offload import ActivationOffloader
from dtrain.shard.wrapping import Blocks, select_blocks

KeepFn: TypeAlias = "Callable[..., CheckpointPolicy | bool]"
"""``(context, op, *args, **kwargs)`` -> whether the output of ``op`` is kept: a policy of torch's selective checkpointing."""

KeepPolicy: TypeAlias = "Literal['nothing', 'matmuls'] | KeepFn"

_SETTINGS_ATTRIBUTE = "_dtrain_activations"  # the attribute of a module that says what its forward keeps


def checkpoint_activations(model: nn.Module, *, blocks: Blocks, every: int = 1, keep: KeepPolicy = "nothing") -> nn.Module:
    """Have blocks forget their activations, and compute them again when backward needs them; return the model.

    Gradients are bit for bit those without it. Random numbers (dropout) are drawn again alike. Buffers that a forward changes
    (BatchNorm's statistics) change once: computing again works on copies of what they were. Any other side effect of a
    block's forward happens twice. Methods other than ``forward`` are not touched, nor is a forward without gradients.

    Args:
        model: plain, on the meta device, or sharded.
        blocks: which modules, as in ``shard_model``: classes, names, or a function of (name, module). Each keeps its inputs.
        every: only the first of them, and then every so many: 2 halves what is computed again, and saves about half as much.
        keep: what a block keeps besides its inputs. ``"nothing"``: the least memory, about one more forward in time;
            ``"matmuls"``: the outputs of matrix products, convolutions and fused attention (not of batched products, which
            are as large as attention scores), so that only what is cheap is computed again; or a function
            ``(context, op, *args, **kwargs)``, a policy of torch's selective checkpointing. An operator that draws random
            numbers is computed again whatever the policy says: skipping it would give others its numbers.

    Mutates: ``model`` (attributes of the chosen modules).

    Raises:
        ConfigError: blocks that pick nothing, or are checkpointed already; another ``every`` or ``keep``.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    where = "checkpoint_activations"
    if keep not in ("nothing", "matmuls") and not callable(keep):
        raise ConfigError(f"{where}: keep must be 'nothing', 'matmuls' or a function of (context, op, *args), got {keep!r}")
    chosen = _select_every_nth(model, blocks, every, where)
    _check_not_compiled(chosen, where)
    again = [type(module).__name__ for module in chosen if _settings_of(module).checkpointed]
    if again:
        raise ConfigError(f"{where}: {len(again)} of these blocks are checkpointed already (first: a {again[0]}); call it once")
    policy = None if keep == "nothing" else partial(_recompute_random_ops, _keep_matmuls if keep == "matmuls" else keep)
    for module in chosen:
        # The compiler would take the contexts for a policy; see compile_inner_forward. Made here, as it imports the compiler, which
        # torch's own checkpointing does in the first backward.
        _update_settings(module, checkpointed=True, policy=policy, eagerly=torch.compiler.disable(_checkpoint_with_buffers))
    return model


def offload_activations(model: nn.Module, *, blocks: Blocks, every: int = 1, min_bytes: int = 1 << 20) -> nn.Module:
    """Have blocks keep what they save for backward in host memory instead of the device's; return the model.

    Copies run beside the computation, on streams of their own, through pinned memory; backward fetches a tensor while it
    works on the ones after it. Parameters are not copied: they are whole again in backward anyway. On the CPU, where there is
    one memory, nothing changes. With ``checkpoint_activations`` on the same blocks it is their inputs that move.

    Args:
        model: plain, on the meta device, or sharded.
        blocks: which modules, as in ``shard_model``.
        every: only the first of them, and then every so many.
        min_bytes: smaller tensors stay: a copy of less costs more than its memory is worth.

    Mutates: ``model`` (attributes of the chosen modules).
    Host sync: none.

    Raises:
        ConfigError: blocks that pick nothing, or are offloaded already; another ``every`` or ``min_bytes``.
    """
    where = "offload_activations"
    if type(min_bytes) is not int or min_bytes < 0:
        raise ConfigError(f"{where}: min_bytes must be a whole number of at least 0, got {min_bytes!r}")
    chosen = _select_every_nth(model, blocks, every, where)
    _check_not_compiled(chosen, where)
    again = [type(module).__name__ for module in chosen if _settings_of(module).offloader is not None]
    if again:
        raise ConfigError(f"{where}: {len(again)} of these blocks are offloaded already (first: a {again[0]}); call it once")
    shelf = ActivationOffloader(min_bytes=min_bytes)  # one for all: a block's backward fetches for the block before it
    for module in chosen:
        _update_settings(module, shelf=shelf)
    return model


def _select_every_nth(model: nn.Module, blocks: Blocks, every: int, caller: str) -> list[nn.Module]:
    if type(every) is not int or every < 1:
        raise ConfigError(f"{caller}: every must be a whole number of at least 1, got {every!r}")
    found = select_blocks(model, blocks, caller=caller)
    if not found:
        raise ConfigError(f"{caller}: {blocks=} picks no module inside the model; e.g. blocks=(Block,)")
    return found[::every]


def _check_not_compiled(chosen: list[nn.Module], caller: str) -> None:
    if any(map(is_compiled, chosen)):
        raise ConfigError(f"{caller}: these blocks are compiled already; call it before compile_blocks")


def is_compiled(module: nn.Module) -> bool:
    """Whether torch compiles ``module``, or what is inside its replaced forward."""
    return module._compiled_call_impl is not None or _settings_of(module).compiled is not None


def compile_inner_forward(module: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Compile what ``module`` computes, but not what it keeps of that, if the compiler must not see it; False: it may.

    Buffers that change, and copies to the host, are done by Python around the block. A block without either is compiled as a
    whole: the compiler then knows what is computed again. Computing again must come to the code that ran before, so sizes that
    change are compiled one by one unless ``settings`` say otherwise: torch's way, to make them variables the second time, would
    give the same input other code.

    Mutates: ``module`` (one attribute).

    Raises:
        ConfigError: a block that needs it and keeps some operators: inside compiled code a policy sees none.
    """
    how = _settings_of(module)
    if how.offloader is None and not (how.checkpointed and _has_buffers(module)):
        return False
    if how.policy is not None:
        raise ConfigError(
            f"compile_blocks: a {type(module).__name__} has {'buffers' if how.offloader is None else 'its activations offloaded'}, "
            "so it can be compiled under checkpoint_activations only with keep='nothing'"
        )
    fixed = {"dynamic": False} if how.checkpointed and settings.get("dynamic") is None else {}
    _update_settings(module, compiled=_CompiledForward({**settings, **fixed}))
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BlockSettings:
    """What a module's forward keeps.

    Args:
        own_forward: a forward that was set on the module itself; None for that of its class, which sharding replaces.
        checkpointed: it keeps its inputs, and what ``policy`` says.
        policy: of selective checkpointing; None keeps nothing else.
        run_eager: runs a block with buffers where the compiler does not look.
        offloader: where saved tensors go; None leaves them.
        compiled: compiles what the module computes.
    """

    own_forward: Callable[..., Any] | None = None
    checkpointed: bool = False
    policy: KeepFn | None = None
    run_eager: Callable[..., Any] | None = None
    offloader: ActivationOffloader | None = None
    compiled: _CompiledForward | None = None


class _CompiledForward:
    """A module's own forward, compiled when it is first asked for. The copy of a module compiles that of the copy."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._function: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledForward:
        return _CompiledForward(self._settings)

    def get(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        if self._function is None:
            self._function = torch.compile(plain, **self._settings)
        return self._function


def _settings_of(module: nn.Module) -> _BlockSettings:
    found = module.__dict__.get(_SETTINGS_ATTRIBUTE)
    return found if isinstance(found, _BlockSettings) else _BlockSettings(own_forward=module.__dict__.get("forward"))


def _update_settings(module: nn.Module, **changes: Any) -> None:
    setattr(module, _SETTINGS_ATTRIBUTE, dataclasses.replace(_settings_of(module), **changes))
    # A bound method, not a closure: a deep copy of the module then runs its own forward, not that of the original.
    module.forward = MethodType(_replaced_forward, module)


def _replaced_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the ``forward`` of a module that was chosen."""
    how: _BlockSettings = module.__dict__[_SETTINGS_ATTRIBUTE]
    plain = _inner_forward(module, how)
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    if how.offloader is None:
        return _run_block(module, how, plain, args, kwargs)
    with how.offloader.offload_saved_tensors(
        module
    ):  # around checkpointing, which saves the block's inputs through these hooks
        return _run_block(module, how, plain, args, kwargs)


def _inner_forward(module: nn.Module, how: _BlockSettings) -> Callable[..., Any]:
    plain = how.own_forward or MethodType(type(module).forward, module)
    return plain if how.compiled is None else how.compiled.get(plain)


def _run_block(
    module: nn.Module, how: _BlockSettings, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not how.checkpointed:
        return plain(*args, **kwargs)
    if _has_buffers(module):
        assert how.run_eager is not None
        return how.run_eager(module, how, plain, args, kwargs)
    options: dict[str, Any] = {}
    if how.policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, how.policy)
    return checkpoint(plain, *args, use_reentrant=False, **options, **_early_stop_option(module, how), **kwargs)


def _checkpoint_with_buffers(
    module: nn.Module, how: _BlockSettings, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    contexts = partial(_checkpoint_contexts, module, how.policy)
    return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **_early_stop_option(module, how), **kwargs)


def _has_buffers(module: nn.Module) -> bool:
    return any(each._buffers for each in module.modules())


def _early_stop_option(module: nn.Module, how: _BlockSettings) -> dict[str, Any]:
    """Whether computing again may end when it has what it needs: not in the middle of the forward of a unit inside."""
    if not any(isinstance(each, FSDPModule) for each in module.modules() if each is not module):
        return {}
    if how.policy is not None:  # it would see the operators of gathering, which are not the same the second time
        raise ConfigError(
            f"checkpoint_activations: a {type(module).__name__} that keeps some operators has a unit of sharding inside it; "
            "checkpoint those units instead, or pass keep='nothing'"
        )
    return {"early_stop": False}


# Which operators are kept


def _keep_matmuls(context: object, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in _matmul_ops()


@cache
def _matmul_ops() -> frozenset[Any]:
    """Operators whose outputs are dear to compute and no larger than an activation, as far as this torch has them."""
    names = (
        "mm addmm convolution _scaled_mm _grouped_mm _scaled_grouped_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
    )
    return frozenset(getattr(torch.ops.aten, name).default for name in names.split() if hasattr(torch.ops.aten, name))


def _recompute_random_ops(policy: KeepFn, context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
    """``policy``, but what drew random numbers is never kept: computing again skips it, and the next draw would get them."""
    wanted = policy(context, op, *args, **kwargs)
    kept = wanted if isinstance(wanted, bool) else wanted in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    if kept and torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) and _uses_rng(op, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return wanted


def _uses_rng(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a seeded operator draws; fused attention does not without dropout."""
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", args[at] if at < len(args) else argument.default_value)
            return bool(given)
    return True


# Buffers


def _checkpoint_contexts(module: nn.Module, policy: KeepFn | None) -> tuple[Any, Any]:
    """Contexts of a block's forward and of its second run."""
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if policy is not None:
        first, again = create_selective_checkpoint_contexts(policy)
    before = _BlockBufferSnapshot(module)
    return _enter_both(before.record(), first), _ReenterableContext(lambda: _enter_both(before.substitute(), again))


@contextmanager
def _enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


class _ReenterableContext:
    """A context that may be entered more than once, one after another: backward of a kept graph computes again each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *details: Any) -> None:
        inside, self._context = self._context, None
        assert inside is not None
        inside.__exit__(*details)  # it does not swallow what came: a recomputation ends by an exception


class _BlockBufferSnapshot:
    """What the buffers of a block were before a forward that changed them.

    Computing again must see those values (a power iteration starts from them), and must leave the buffers alone. So it gets
    copies in their place. A module with one changed buffer counts as a whole, as torch's normalisations change their
    statistics past the counter of versions, but count batches within its sight.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: list[tuple[nn.Module, str, Tensor]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep copies of the buffers that change inside. They are made of all of them, and dropped on leaving."""
        slots = [(owner, key, b) for owner in self._module.modules() for key, b in owner._buffers.items() if b is not None]
        copies = {id(buffer): (buffer._version, buffer.detach().clone()) for _, _, buffer in slots}
        yield
        changed = {id(owner) for owner, key, b in slots if owner._buffers.get(key) is not b or b._version != copies[id(b)][0]}
        self._saved = [(owner, key, copies[id(b)][1]) for owner, key, b in slots if id(owner) in changed]

    @contextmanager
    def substitute(self) -> Iterator[None]:
        """The kept values in the place of the buffers; the buffers themselves are not written."""
        now = [(owner, key, owner._buffers.get(key)) for owner, key, _ in self._saved]
        copies = {id(value): value.clone() for _, _, value in self._saved}  # one buffer in two places stays one
        try:
            for owner, key, value in self._saved:
                owner._buffers[key] = copies[id(value)]
            yield
        finally:
            for owner, key, tensor in now:
                owner._buffers[key] = tensor
