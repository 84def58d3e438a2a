"""Run the gradient hooks of parameters once a step, on the gradient of the mean loss over the global batch (``ParamHooks``).

torch calls a hook in each backward, with what this backward adds on this rank. That is a part of the gradient under sharding,
with several ranks or microbatches, and before the division by the weight. Only linear hooks would give the right gradient. So
the hooks are taken off the parameters during the backwards of a step, and run after the gradient is complete:

- a hook of ``register_hook`` gets the whole gradient as a plain tensor, equal on all ranks, and may return another one;
- a hook of ``register_post_accumulate_grad_hook`` gets the parameter as the optimizer has it, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import from_local_like, full_tensor, is_dtensor, local_slice, to_local
from dtrain.errors import ConfigError, StepError
from dtrain.fqn import parameters_by_fqn

_HOOKS = "hooks"


class StepHook(partial[Any]):
    """Hook of dtrain itself on a parameter, which runs during backward."""


class _Paused(StepHook):
    """Stands for a hook of the user during the backwards of a step. A handle removes it as it would remove the hook."""


def _do_nothing(tensor: Tensor) -> None:
    pass


class ParamHooks:
    """The user's hooks on the parameters of one model. ``detach`` takes the hooks off, ``restore`` puts them back."""

    def __init__(self) -> None:
        # Parameters with hooks, by name.
        self._params: dict[str, Tensor] = {}
        # Dictionaries of torch, and the hooks that were in them.
        self._detached: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def detach(self, params: Mapping[str, Tensor]) -> None:
        """Take the user's hooks off ``params``. Mutates: the parameters' hooks."""
        self.restore()
        self._params = {name: params[name] for name in names_with_hooks(params)}
        for param in self._params.values():
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                own = {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, StepHook)}
                if hooks and own:
                    self._detached.append((hooks, own))
                    hooks.update({key: _Paused(_do_nothing) for key in own})

    def restore(self) -> None:
        """Put the hooks back, except those whose handle was removed since. Mutates: the parameters' hooks."""
        for hooks, own in self._detached:
            hooks.update({key: hook for key, hook in own.items() if key in hooks})
        self._detached.clear()

    @property
    def described(self) -> list[str]:
        """Number of hooks of each parameter with hooks, as text that ranks compare."""
        counts = [(*map(len, _hooks_of(param, paused=True)), name) for name, param in self._params.items()]
        return [f"{_HOOKS} {before} {after} {name}" for before, after, name in counts]

    @property
    def exist(self) -> bool:
        """True if a parameter had hooks at ``detach``."""
        return bool(self._params)

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
    # Every step asks, so the usual answers come first: no hook, or one hook of a BucketReducer.
    return [
        name
        for name, param in params.items()
        if (param._backward_hooks and _hooks_of(param)[0])
        or (
            (hooks := param._post_accumulate_grad_hooks)
            and not (len(hooks) == 1 and type(next(iter(hooks.values()))) is StepHook)
            and _hooks_of(param)[1]
        )
    ]


def _hooks_of(param: Tensor, *, paused: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the user's hooks on the gradient, and the hooks after its accumulation; with ``paused`` also paused ones."""
    before, after = (
        [hook for hook in (hooks or {}).values() if not isinstance(hook, StepHook) or (paused and type(hook) is _Paused)]
        for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)
    )
    return before, after


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
    name = next(name for name, param in parameters_by_fqn(model)[0].items() if param._backward_hooks)
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
