"""Keep what a user has stored on the parameters of a model, and run their gradient hooks once a step.

FSDP2, tensor parallelism and ``materialize`` make new Parameter objects. Attributes (``weight._no_weight_decay = True``) and
gradient hooks move to the new objects (``ParamObjects``). FSDP2 computes with a further object, the unsharded parameter, which
shares the attributes.

torch calls a hook in each backward, with what this backward adds on this rank. That is a part of the gradient under sharding,
with several ranks or microbatches, and before the division by the weight. Only linear hooks would give the right gradient. So
``ParamHooks`` takes the hooks off the parameters during the backwards of a step, and runs the hooks on the complete gradient:

- a hook of ``register_hook`` gets the whole gradient as a plain tensor, equal on all ranks, and may return another one;
- a hook of ``register_post_accumulate_grad_hook`` gets the parameter as the optimizer has it, with its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import from_local_like, full_tensor, is_dtensor, local_slice, to_local
from dtrain.errors import ConfigError, StepError
from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn

if TYPE_CHECKING:
    import torch.distributed.fsdp
    from torch.utils.hooks import RemovableHandle

_HOOKS, _USES = "hooks", "uses"
USED_OUTSIDE = (
    "the loss, or a forward, must not compute with a sharded parameter outside of the forward of its unit{name}. Call the "
    "model itself, not a submodule of it. Compute in the forward of the block that owns the parameter, or name it in "
    "ignored_params. Add the gradient of a weight penalty to .grad in the update of a transform."
)
# The globals of the functions that register_multi_grad_hook registers. They count the gradients of one backward.
_MULTI_GRAD_HOOKS = vars(torch.autograd.graph)
# torch stores these attributes itself: the identity of a parameter in FSDP2, and the mark of a DTensor that is a parameter.
_ATTRIBUTES_OF_TORCH = frozenset({"_fsdp_orig_uid", "_is_param"})


class ParamObjects:
    """Attributes and gradient hooks of a model's parameters and buffers, by name, before a function replaces the tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # torch may also keep an object and exchange all that it holds.
        self._kept = {
            name: (
                {key: value for key, value in tensor.__dict__.items() if key not in _ATTRIBUTES_OF_TORCH}
                if has_own_attributes_only(tensor)
                else {},
                tensor._backward_hooks,
                getattr(tensor, "_post_accumulate_grad_hooks", None),
            )
            for name, tensor in _tensors_by_name(model).items()
        }

    def carry_over_(self) -> None:
        """Give the tensors of the same names the kept attributes and hooks.

        A handle of a hook still removes the hook, because the new tensor has the dictionary of the old one.

        Mutates: the model's parameters and buffers.
        """
        for name, tensor in _tensors_by_name(self._model).items():
            attributes, hooks, accumulate_hooks = self._kept.get(name, ({}, None, None))
            tensor.__dict__.update(attributes)
            if hooks and tensor._backward_hooks is not hooks:
                tensor._backward_hooks = hooks
            if accumulate_hooks and tensor._post_accumulate_grad_hooks is not accumulate_hooks:
                tensor._post_accumulate_grad_hooks = accumulate_hooks


def param_places(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]]:
    """Return each parameter with all its places: clean name, owner and key. A tied parameter has several places."""
    places: dict[int, tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]] = {}
    for name, module in modules_by_fqn(model):
        for key, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), (param, []))[1].append((f"{name}.{key}".lstrip("."), module, key))
    return list(places.values())


def extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage, first byte and last byte + 1 of a tensor. A tensor on meta has a storage, too."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, width = int(tensor.storage_offset()) * tensor.itemsize, tensor.itemsize
    return tensor.untyped_storage()._cdata, start, start + (last + 1) * width


def check_param_objects(model: nn.Module, *, whole: bool, ignored_params: Mapping[str, Tensor], ranks: int) -> None:
    """Refuse parameters that would train otherwise than in one process.

    Args:
        model: plain model.
        whole: if True, the parameters stay the user's own objects.
        ignored_params: parameters that stay whole, by name.
        ranks: number of ranks that share the parameters.

    Raises:
        ConfigError: a parameter of a class of its own, or that shares memory with another tensor of the
            model; an embedding that writes its own weight or has sparse gradients.
    """
    params, _ = parameters_by_fqn(model)
    for name, param in params.items():
        # isinstance is True for every tensor that is a parameter, so ask for the class itself.
        own_class = type(param) is not nn.Parameter and issubclass(type(param), nn.Parameter)
        if own_class and not whole and name not in ignored_params:
            raise ConfigError(
                f"shard_model: the parameter {name!r} must be a plain nn.Parameter, got {type(param).__name__}, and FSDP2 "
                "replaces the class. Set an attribute, name it in ignored_params, or use strategy='replicate'."
            )
    _check_memory(model)
    if not whole or ranks > 1:
        _check_embeddings(model)


class DataAssignments:
    """Notices ``param.data = tensor`` on sharded parameters, which torch ignores.

    The assignment exchanges the storage of the DTensor, which holds nothing. The shard is another tensor, and stays. Other
    functions that replace a shard (``model.to``, ``load_state_dict(assign=True)``) make a new object for it.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._names = [name for name, param in params.items() if is_dtensor(param)]
        # The shards, and the addresses of the storages of their DTensors.
        self._shards: list[weakref.ref[Tensor]] = []
        self._addresses: tuple[list[int], list[int]] = [], []
        self.check(params)

    def check(self, params: Mapping[str, Tensor]) -> bool:
        """Compare with the last call. Return True if a shard is another tensor since.

        Raises:
            StepError: the data of a parameter were assigned, by name.
        """
        tensors: list[Any] = [params[name] for name in self._names]
        # Every step asks, so the usual answer comes first.
        storages, ids = [param.untyped_storage()._cdata for param in tensors], [id(param._local_tensor) for param in tensors]
        if (storages, ids) == self._addresses:
            return False
        rows = zip(self._names, tensors, self._shards, storages, self._addresses[0], strict=False)
        assigned = next(
            (name for name, param, shard, now, seen in rows if shard() is param._local_tensor and now != seen), None
        )
        self._shards, self._addresses = [weakref.ref(param._local_tensor) for param in tensors], (storages, ids)
        if assigned is not None:
            raise StepError(
                f"step: `param.data = tensor` has no effect on the sharded parameter {assigned!r}, because torch stores its "
                "shard elsewhere. Write in place: param.data.copy_(tensor)."
            )
        return True


class UsesOutside:
    """Notices a loss that computes with the shard of a parameter: ``param.full_tensor()``, ``param.to_local()``.

    FSDP2 stores reduced gradients in ``.grad`` itself, so autograd reaches a shard only if the loss has used the shard. No rank
    reduces this gradient.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        # A line for each parameter that a backward of this step has reached, which ranks compare.
        self.described: dict[str, None] = {}

    def watch(self, trainable: Mapping[str, Tensor], sharded: Iterable[Tensor]) -> None:
        """Watch the parameters of ``trainable`` that are in ``sharded``, and no others. Mutates: their hooks."""
        ids = {id(param) for param in sharded}
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name, param in trainable.items():
            if id(param) in ids:
                hook = StepHook(self._note, f"{_USES} - {name}")
                # torch warns of other hooks when it pickles the parameter.
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]
                self._handles.append(param.register_hook(hook))
                # ``model.to`` keeps this dict and drops its connection with autograd, which the assignment makes again.
                param._backward_hooks = param._backward_hooks

    def _note(self, line: str, _: Tensor) -> None:
        self.described[line] = None


def raise_if_used_outside(facts: Sequence[Sequence[str]], caller: str) -> None:
    """Refuse a loss of some rank that has used the shard of a parameter.

    Args:
        facts: ``UsesOutside.described`` of each rank, among other facts.
        caller: function named in the error.

    Raises:
        StepError: the first such parameter, by name; on all ranks.
    """
    names = [line.split(" ", 2)[2] for lines in facts for line in lines if line.startswith(_USES)]
    if names:
        raise StepError(f"{caller}: {USED_OUTSIDE.format(name=f', got {names[0]!r}')}")


class StepHook(partial[Any]):
    """Hook of dtrain itself on a parameter, which runs during backward."""


class _Paused(StepHook):
    """Stands for a hook of the user during the backwards of a step. A handle removes it as it would remove the hook."""


class ParamHooks:
    """The user's hooks on the parameters of one model. ``detach`` takes the hooks off, ``restore`` puts them back.

    ``exist`` is True if a parameter had hooks at ``detach``.
    """

    def __init__(self) -> None:
        # Parameters that had hooks at ``detach``, by name.
        self._params: dict[str, Tensor] = {}
        self.exist = False
        # Dictionaries of torch, and the hooks that were in them.
        self._detached: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def detach(self, params: Mapping[str, Tensor]) -> None:
        """Take the user's hooks off ``params``. Mutates: the parameters' hooks.

        Raises:
            StepError: a hook of ``register_multi_grad_hook``, which runs within a backward only.
        """
        self.restore()
        self._params = {}
        names = names_with_hooks(params)
        for name in names:
            if any(getattr(hook, "__globals__", None) is _MULTI_GRAD_HOOKS for hook in _hooks_of(params[name])[0]):
                raise StepError(
                    f"step: the parameter {name!r} must have no hook of torch.autograd.graph.register_multi_grad_hook, because "
                    "a step runs hooks once, after all its backwards. Read all gradients in a `grad` wrapper of a transform."
                )
        for name in names:
            param = self._params[name] = params[name]
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                own = {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, StepHook)}
                if hooks and own:
                    self._detached.append((hooks, own))
                    hooks.update({key: _Paused(lambda tensor: None) for key in own})
        self.exist = bool(self._params)

    def restore(self) -> None:
        """Put the hooks back, except those whose handle was removed since. Mutates: the parameters' hooks."""
        for hooks, own in self._detached:
            hooks.update({key: hook for key, hook in own.items() if key in hooks})
        self._detached = []

    @property
    def described(self) -> list[str]:
        """Number of hooks of each parameter with hooks, as text that ranks compare."""
        counts = [(*map(len, _hooks_of(param, paused=True)), name) for name, param in self._params.items()]
        return [f"{_HOOKS} {before} {after} {name}" for before, after, name in counts]

    @torch.no_grad()
    def run_(self, params: Mapping[str, Tensor]) -> None:
        """Run the hooks of each parameter with a gradient, last parameter first, after ``restore``.

        Mutates: ``.grad``, and what the hooks mutate.
        Collective: one all-gather per axis for each sharded parameter with a hook of ``register_hook``.

        Raises:
            StepError: a hook returned something else than None or a tensor of the gradient's shape.
        """
        for name in reversed(self._params):
            param = params[name]
            before, after = _hooks_of(param)
            if before and param.grad is not None:
                _run_on_whole_gradient(name, param, before)
            if param.grad is not None:
                for hook in after:
                    hook(param)


def _run_on_whole_gradient(name: str, param: Tensor, hooks: Iterable[Callable[[Tensor], Any]]) -> None:
    assert param.grad is not None
    grad = param.grad
    sharded = is_dtensor(grad)
    if is_dtensor(grad) and to_local(grad).device.type != grad.device_mesh.device_type:
        # Offloaded gradients are on the CPU, and the ranks of a mesh exchange tensors of its device.
        grad = from_local_like(grad, to_local(grad).to(grad.device_mesh.device_type))
    whole = full_tensor(grad)
    for hook in hooks:
        result = hook(whole)
        if result is None:
            continue
        if not isinstance(result, Tensor) or result.shape != whole.shape:
            got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise StepError(
                f"microbatch_step: the hook of the parameter {name!r} must return None or a gradient of shape "
                f"{list(whole.shape)}, got {got}. Return a tensor like the argument."
            )
        whole = result.to(whole.dtype)
    if sharded:
        to_local(param.grad).copy_(local_slice(param.grad, whole))
    else:
        param.grad = whole


def names_with_hooks(params: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters with hooks of the user, by name."""
    # Every step asks, so the usual answers come first: no hook, or one hook of dtrain.
    return [
        name
        for name, param in params.items()
        if ((hooks := param._backward_hooks) and [*map(type, hooks.values())] != [StepHook] and _hooks_of(param)[0])
        or ((hooks := param._post_accumulate_grad_hooks) and [*map(type, hooks.values())] != [StepHook] and _hooks_of(param)[1])
    ]


def _hooks_of(param: Tensor, *, paused: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the user's hooks on the gradient, and the hooks after its accumulation; with ``paused`` also paused ones."""
    before, after = (
        [hook for hook in (hooks or {}).values() if not isinstance(hook, StepHook) or (paused and type(hook) is _Paused)]
        for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)
    )
    return before, after


def has_grad_hook(param: Tensor) -> bool:
    """Return True if ``param`` has a hook of the user on its gradient."""
    return bool(param._backward_hooks and _hooks_of(param)[0])


def raise_if_hooks_differ(facts: Sequence[Sequence[str]]) -> None:
    """Refuse hooks that differ between ranks, because each rank updates its part of the parameter, or its replica.

    Args:
        facts: ``ParamHooks.described`` of each rank, among other facts.

    Raises:
        StepError: the hooks of a parameter differ; on all ranks.
    """
    hooks = [[line for line in lines if line.startswith(_HOOKS)] for lines in facts]
    for rank, lines in enumerate(hooks):
        if lines != hooks[0]:
            name = next(iter(sorted(set(lines) ^ set(hooks[0])))).split(" ", 3)[3]
            raise StepError(
                f"step: the gradient hooks of the parameter {name!r} must be equal on all ranks, got other hooks on rank "
                f"{rank} than on rank 0. Register the hook on every rank, and return early inside the hook on some ranks."
            )


def raise_hooks_outside_of_step(model: nn.Module) -> NoReturn:
    """Refuse a backward of a sharded model outside of a step, which would leave out the hooks of ``register_hook``.

    Raises:
        StepError: always, with the name of the first parameter with hooks.
    """
    name = next(name for name, param in parameters_by_fqn(model)[0].items() if has_grad_hook(param))
    raise StepError(
        f"backward: the hook of the parameter {name!r} runs in a step only, because the model is sharded. Call "
        "dt.microbatch_step, or remove the hook."
    )


def check_dense(name: str, grad: Tensor, reason: str = "because ranks sum dense gradients") -> None:
    """Refuse a sparse gradient, of which torch has no norm, and which the flat tensors of a reduction cannot hold.

    Raises:
        StepError: the gradient is sparse.
    """
    if grad.layout is not torch.strided:
        raise StepError(
            f"step: the gradient of the parameter {name!r} must be dense, got {grad.layout}, {reason}. "
            "Pass sparse=False to the embedding, and use a dense optimizer such as torch.optim.AdamW."
        )


def check_no_hooks(params: Mapping[str, Tensor], caller: str) -> None:
    """Refuse hooks of a step that never has the complete gradient.

    Raises:
        ConfigError: a parameter with a hook, by name.
    """
    if names := names_with_hooks(params):
        raise ConfigError(
            f"{caller}: the parameter {names[0]!r} must have no gradient hook, because the update runs before the gradient is "
            "complete. Use dt.compose_step."
        )


@contextmanager
def without_hooks(params: Mapping[str, Tensor]) -> Iterator[None]:
    """Take the user's hooks off ``params`` in a context, for a backward that only measures."""
    hooks = ParamHooks()
    hooks.detach(params)
    try:
        yield
    finally:
        hooks.restore()


def has_own_attributes_only(tensor: Tensor) -> bool:
    """Return True if all attributes of ``tensor`` are the user's. Other tensor classes store their own data as attributes."""
    kind = type(tensor)
    return kind is Tensor or issubclass(kind, nn.Parameter) or is_dtensor(tensor)


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}


def _check_memory(model: nn.Module) -> None:
    """Refuse a parameter that overlaps with another tensor, because each tensor gets memory of its own."""
    params, _ = parameters_by_fqn(model)
    extents = sorted(
        (*extent(tensor), name, tensor)
        for name, tensor in _tensors_by_name(model).items()
        if tensor.layout == torch.strided and not hasattr(tensor, "device_mesh") and tensor.numel()
    )
    for (storage, _, end, name, tensor), (next_storage, start, _, other_name, other) in pairwise(extents):
        # Rows or columns of one tensor lie between each other without an overlap.
        dense = tensor.is_contiguous() or other.is_contiguous() or tensor.storage_offset() == other.storage_offset()
        if storage == next_storage and start < end and dense and (name in params or other_name in params):
            raise ConfigError(
                f"shard_model: {name!r} and {other_name!r} must be one Parameter or have memory of their own, got two tensors "
                "in the same memory, which sharding would separate. Tie them by assignment: b.weight = a.weight."
            )


def _check_embeddings(model: nn.Module) -> None:
    for name, module in modules_by_fqn(model):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        label = f"shard_model: the {type(module).__name__} {name!r}" if name else f"shard_model: the {type(module).__name__}"
        if module.max_norm is not None:
            raise ConfigError(
                f"{label} must not have max_norm={module.max_norm}, because each forward writes the rows of its own samples "
                "into the weight. Leave max_norm out, and normalize the looked-up rows in forward, or the weight after a step."
            )
        if module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{label} must not have sparse=True, because ranks sum dense gradients. Pass sparse=False and a dense "
                "optimizer such as torch.optim.AdamW."
            )
