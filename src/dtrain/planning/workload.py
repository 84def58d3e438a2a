"""Describe a training workload as functions that build its parts, for estimates without its devices.

``load_workload`` imports a workload by ``module:factory`` or ``file.py:factory``. ``import_target`` imports any object of the
user's code in this way, with errors in one line.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtrain.arguments import explain_fields, single_line
from dtrain.data.batch import BatchSpec
from dtrain.errors import ConfigError, DtrainError, StepError
from dtrain.shard.wrapping import Blocks
from dtrain.step.transform import Transform
from dtrain.typing import Batch, LossFn


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A model and the parts of its training loop, for ``estimate_memory`` and similar functions.

    Args:
        model: function that builds the model, on any device; or a model, whose weights are neither copied nor changed.
        loss_fn: ``(model, microbatch) -> LossSum``.
        batch: function from a number of samples to a batch; only shapes and dtypes matter.
        blocks: blocks of ``shard_model``, and of activation checkpointing.
        optimizer: function from parameters to the optimizer; ``torch.optim.AdamW`` by default.
        transforms: transforms of ``compose_step``, without ``auto_microbatch``.
        shard_args: further arguments of ``shard_model`` (``ignored_params``, ``forward_methods``, ``buffers``).
        batch_spec: description of the batch, as in ``microbatch_step``.
        batch_seq_dims: as in ``transforms.context_parallel``, for plans with ``cp``.
        buffer_seq_dims: likewise.

    Example:
        >>> import dtrain as dt
        >>> workload = dt.planning.Workload(
        ...     model=lambda: torch.nn.Linear(8, 2),
        ...     loss_fn=lambda model, batch: dt.cross_entropy(model(batch["x"]), batch["y"]),
        ...     batch=lambda n: {
        ...         "x": torch.zeros(n, 4, 8),
        ...         "y": torch.zeros(n, 4, dtype=torch.int64),
        ...     },
        ... )

    Raises:
        ConfigError: an argument that is not a function, or ``auto_microbatch`` among the transforms.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss_fn: LossFn
    batch: Callable[[int], Batch]
    blocks: Blocks = ()
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    transforms: Sequence[Transform] = ()
    shard_args: Mapping[str, Any] = field(default_factory=dict)
    batch_spec: BatchSpec | None = None
    batch_seq_dims: Mapping[str, int] = field(default_factory=dict)
    buffer_seq_dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shape in (
            ("model", "() -> Module, or a Module"),
            ("loss_fn", "(model, batch) -> LossSum"),
            ("batch", "(samples) -> batch"),
            ("optimizer", "(parameters) -> Optimizer"),
        ):
            if not callable(getattr(self, name)):
                raise ConfigError(
                    f"Workload: {name} must be a function {shape}, got {getattr(self, name)!r}. "
                    "Pass a function that builds the value, such as a lambda."
                )
        if any(getattr(transform, "name", None) == "auto_microbatch" for transform in self.transforms):
            raise ConfigError(
                "Workload: transforms must not contain auto_microbatch, because a plan tries sizes itself. Remove it."
            )


def build_on_meta(workload: Workload, context: AbstractContextManager[Any]) -> nn.Module:
    """Return the model with every parameter and buffer on the meta device; an existing model is copied without its weights.

    Args:
        workload: workload whose model function is called inside ``context``.
        context: context in which tensors take no memory.

    Raises:
        ConfigError: the function does not return a module, or the model cannot be copied.
    """
    is_model = isinstance(workload.model, nn.Module)
    with context:
        model: object = workload.model if isinstance(workload.model, nn.Module) else workload.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Workload: model must return a torch.nn.Module, got {type(model).__name__}. Return the model from the function."
        )
    tensors = {id(t): t for module in model.modules() for t in (*module._parameters.values(), *module._buffers.values())}
    on_meta = {}
    for key, tensor in tensors.items():
        if tensor is not None:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_param = isinstance(tensor, nn.Parameter)
            on_meta[key] = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_param else meta
    if is_model:
        try:
            # deepcopy takes the tensors from its memo.
            return copy.deepcopy(model, dict(on_meta))
        except Exception as error:
            raise ConfigError(
                f"Workload: this {type(model).__name__} cannot be copied ({error}). Pass a function that builds the model."
            ) from error
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = on_meta[id(tensor)]  # type: ignore[assignment]
    return model


_EXAMPLE = "as in model.py:workload or package.model:workload"


@contextmanager
def load_workload(target: str, arguments: Mapping[str, Any]) -> Iterator[Workload]:
    """Call the factory ``target`` with ``arguments`` and yield its workload; its imports work inside the context.

    Args:
        target: ``module:factory``, searched from the current folder, or ``file.py:factory``. The name may also be a
            ``Workload``.
        arguments: keyword arguments of the factory.

    Mutates: ``sys.path``, inside the context; ``sys.modules``.

    Raises:
        ConfigError: there is no such module, file or factory; the factory raises, refuses ``arguments``, or returns no
            ``Workload``.
        StepError: inside the context, any error of the workload's own functions.
    """
    with import_target("plan", target, "factory", _EXAMPLE) as imported:
        workload = _call_factory(imported, arguments)
        with summarize_user_errors(f"plan: a step of {target!r} failed", StepError):
            yield workload


def _call_factory(imported: ImportedTarget, arguments: Mapping[str, Any]) -> Workload:
    factory, source, name = imported.value, imported.source, imported.name
    if isinstance(factory, Workload) and not arguments:
        return factory
    if not callable(factory):
        problem = "is not a function" if hasattr(imported.module, name) else "does not exist"
        raise ConfigError(f"plan: {name!r} {problem} in {source!r}. Its functions are {imported.function_names()}.")
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"plan: {name!r} in {source!r} cannot be called with these arguments: {error}. Pass them by --arg name=value."
        ) from None
    with summarize_user_errors(f"plan: {name!r} in {source!r} failed", ConfigError):
        workload = factory(**arguments)
    if not isinstance(workload, Workload):
        raise ConfigError(
            f"plan: {name!r} in {source!r} must return a dt.planning.Workload, got {type(workload).__name__}. "
            "Write dt.planning.Workload(model=..., loss_fn=..., batch=...)."
        )
    return workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTarget:
    """Imported module, and the name of an object in it. ``value`` is None if the module has no such name."""

    module: ModuleType
    source: str
    name: str

    @property
    def value(self) -> Any:
        """Object with this name."""
        return getattr(self.module, self.name, None)

    def function_names(self) -> str:
        """Return the functions that the module defines, for an error."""
        module = self.module.__name__
        names = [key for key, value in vars(self.module).items() if inspect.isfunction(value) and value.__module__ == module]
        return ", ".join(sorted(names)) or "none"


@contextmanager
def import_target(caller: str, target: str, kind: str, example: str) -> Iterator[ImportedTarget]:
    """Import the module of ``target``: ``module:name``, searched from the current folder, or ``file.py:name``.

    Imports by the module work inside the context. ``caller`` begins the errors, ``kind`` is the expected kind of object, and
    ``example`` is a valid target.

    Mutates: ``sys.path``, inside the context; ``sys.modules``.

    Raises:
        ConfigError: there is no such module or file, or its import fails.
    """
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise ConfigError(f"{caller}: target must name a file or module and a {kind}, got {target!r}. Write it {example}.")
    is_file = source.endswith(".py") or os.sep in source
    before = list(sys.path)
    sys.path.insert(0, str(Path(source).resolve().parent) if is_file else os.getcwd())
    try:
        module = _import_file(caller, source) if is_file else _import_module(caller, source, example)
        yield ImportedTarget(module=module, source=source, name=name)
    finally:
        sys.path[:] = before


@contextmanager
def summarize_user_errors(prefix: str, error_class: type[DtrainError]) -> Iterator[None]:
    """Raise errors and exits of the user's code as one line with their location; errors of dtrain pass unchanged."""
    try:
        yield
    except DtrainError:
        raise
    except (Exception, SystemExit) as error:
        library = (str(Path(__file__).parent.parent), os.path.dirname(os.__file__), "<")
        files = [(frame, frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        frames = [frame for frame, file in files if not (file.startswith(library) or "site-packages" in file)]
        at = f" (in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = single_line(error)
        raise error_class(f"{prefix}: {type(error).__name__}: {text}{at}. Fix the error there.") from error


def _import_file(caller: str, source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{caller}: no such file: {source!r} (in {os.getcwd()!r}). Check the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{caller}: {source!r} is not a Python file. Name a file that ends with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
        spec.loader.exec_module(module)
    return module


def _import_module(caller: str, source: str, example: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(f"{caller}: {source!r} is neither a module's name nor a file that ends with .py. Write it {example}.")
    try:
        with summarize_user_errors(f"{caller}: {source!r} cannot be imported", ConfigError):
            return importlib.import_module(source)
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{source}.".startswith(f"{missing.name}."):
            raise ConfigError(
                f"{caller}: no module named {source!r} in {os.getcwd()!r} or the environment. Check the name."
            ) from None
        raise
