"""``Workload``: what is trained, as functions that build it, so that it can be planned where its devices are not.

``module:factory`` and ``file.py:factory``: a workload by its name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError, StepError
from dtrain.planning.import_target import ImportedTarget, import_target, summarize_user_errors
from dtrain.shard.wrapping import Blocks
from dtrain.transform import Transform
from dtrain.typing import Batch, LossFn


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A model with what its loop does to it, the parts as a loop has them.

    >>> import dtrain as dt
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 2),
    ...     loss_fn=lambda model, batch: dt.token_cross_entropy(model(batch["x"]), batch["y"]),
    ...     batch=lambda n: {"x": torch.zeros(n, 4, 8), "y": torch.zeros(n, 4, dtype=torch.int64)},
    ... )

    Args:
        model: makes the model, on any device; or a model, whose weights are neither copied nor changed.
        loss_fn: as for ``compose_step``.
        batch: makes a batch of that many samples; its values do not matter, its shapes and dtypes do.
        blocks: as for ``shard_model``, and for activation checkpointing.
        optimizer: makes the optimizer, from parameters; ``torch.optim.AdamW`` by default.
        transforms: as for ``compose_step``, without ``auto_microbatch``.
        shard_args: further arguments of ``shard_model`` (``leave_out``, ``methods``, ``buffers``).
        step_args: further arguments of ``microbatch_step`` (``batch_spec``, ``weight_fn``).

    Raises:
        ConfigError: something else in place of a function, or ``auto_microbatch`` among the transforms.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss_fn: LossFn
    batch: Callable[[int], Batch]
    blocks: Blocks = ()
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adamw
    transforms: Sequence[Transform] = ()
    shard_args: Mapping[str, Any] = field(default_factory=dict)
    step_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shape in (
            ("model", "() -> Module, or a Module"),
            ("loss_fn", "(model, batch) -> LossSum"),
            ("batch", "(samples) -> batch"),
            ("optimizer", "(parameters) -> Optimizer"),
        ):
            if not callable(getattr(self, name)):
                raise ConfigError(f"Workload: {name} must be a function {shape}, got {getattr(self, name)!r}")
        if any(getattr(transform, "name", None) == "auto_microbatch" for transform in self.transforms):
            raise ConfigError("Workload: a plan tries sizes itself; leave auto_microbatch out of transforms")


def build_on_meta(workload: Workload, context: AbstractContextManager[Any]) -> nn.Module:
    """The model with every parameter and buffer on the meta device; a given one is copied, without its weights.

    Args:
        workload: a function in it is called inside ``context``.
        context: a context in which tensors take no memory.

    Raises:
        ConfigError: the function returns something else, or the model cannot be copied.
    """
    given = isinstance(workload.model, nn.Module)
    with context:
        model: object = workload.model if isinstance(workload.model, nn.Module) else workload.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Workload: model must return a torch.nn.Module, got {type(model).__name__}")
    tensors = {id(t): t for module in model.modules() for t in (*module._parameters.values(), *module._buffers.values())}
    empty = {key: _to_meta(tensor) for key, tensor in tensors.items() if tensor is not None}
    if given:
        try:
            return copy.deepcopy(model, dict(empty))  # what the memo knows is taken from there
        except Exception as error:
            raise ConfigError(
                f"Workload: this {type(model).__name__} cannot be copied ({error}); pass a function that makes it"
            ) from error
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = empty[id(tensor)]  # type: ignore[assignment]
    return model


def _to_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


_EXAMPLE = "as in model.py:workload or package.model:workload"


@contextmanager
def load_workload(target: str, arguments: Mapping[str, Any]) -> Iterator[Workload]:
    """What the factory named ``target`` returns for ``arguments``; its imports work while the block runs.

    Args:
        target: ``module:factory``, found from the current folder on, or ``file.py:factory``. A ``Workload`` in place of a
            factory is taken as it is.
        arguments: for the factory, by name.

    Mutates: ``sys.path``, for the time of the block; ``sys.modules``.

    Raises:
        ConfigError: no such module, file or factory; one that raises, does not take ``arguments``, or returns something else.
        StepError: in the block, whatever the workload's own functions raise.
    """
    with import_target("plan", target, "factory", _EXAMPLE) as found:
        workload = _call_factory(found, arguments)
        with summarize_user_errors(f"plan: a step of {target!r} failed", StepError):
            yield workload


def _call_factory(found: ImportedTarget, arguments: Mapping[str, Any]) -> Workload:
    factory, place, name = found.value, found.source, found.name
    if isinstance(factory, Workload) and not arguments:
        return factory
    if not callable(factory):
        what = "is no function" if hasattr(found.module, name) else "is not there"
        raise ConfigError(f"plan: {name!r} {what} in {place!r}; its functions are {found.function_names()}")
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"plan: {name!r} in {place!r} cannot be called so: {error}; give its arguments by --arg name=value"
        ) from None
    with summarize_user_errors(f"plan: {name!r} in {place!r} failed", ConfigError):
        workload = factory(**arguments)
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"plan: {name!r} in {place!r} must return a dt.planning.Workload, got {type(workload).__name__}; "
            "as in dt.planning.Workload(model=..., loss_fn=..., batch=...)"
        )
    return workload
