"""Read what a script holds: its frames, its variables and generators, and its models (``ScriptModels``)."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dtrain.dist.dtensor import to_local
from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.prove.run_log import DIGEST_BYTES, digest, flatten
from dtrain.step.compose import Step

_PACKAGE = Path(__file__).resolve().parents[1]
# Part of the change of an average that is rounding.
_ON_WAY = 1e-6
# Limits of the search for variables: depth of containers, number of values, elements of a tensor.
_DEPTH = 3
_MAX_VALUES = 400
_MAX_ELEMENTS = 1 << 16
_PARALLEL = (DistributedDataParallel, FullyShardedDataParallel)
_LIBRARIES = (
    "torch",
    "dtrain",
    "numpy",
    "builtins",
    "tensordict",
    "pathlib",
    "argparse",
    "transformers",
    "accelerate",
    "torchdata",
    "collections",
    "functools",
)


@lru_cache(maxsize=4096)
def is_of_script(file: str, script: str) -> bool:
    """Return True for the script and modules in its folder, but not for packages that are installed there."""
    path, folder = Path(os.path.realpath(file)), Path(os.path.realpath(script)).parent
    is_installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_PACKAGE)
    return path.is_relative_to(folder) and not is_installed


def script_frames(frame: FrameType | None, script: str) -> list[FrameType]:
    """Return the frames of the script, and of modules in its folder, that called the current function."""
    return [caller for caller, _ in traceback.walk_stack(frame) if is_of_script(caller.f_code.co_filename, script)]


def script_line(script: str) -> str:
    """Return the line of the script that called the current function, as in ``"loop.py:31"``; "" if no line did."""
    frame = next(iter(script_frames(sys._getframe(1), script)), None)
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def script_variables(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the values of the frames' variables: name, type, digest, the number if it is one, and if it has a weight's shape.

    Variables that only ``for`` assigns are left out: after a resume a loop may count from another number.
    """
    owned = _owned_by(models)
    for file, name, path, value in _script_leaves(frames, owned):
        yield _row(path, value, owned) | {"line": _assignments(file).lines.get(name, "")}


def script_closures(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the values in the closures of the frames' functions, and of the transforms of their steps, as rows of variables."""
    owned, seen = _owned_by(models), set[int]()
    functions = [function for frame in frames for value in list(frame.f_locals.values()) for function in _functions(value)]
    for function in dict.fromkeys(functions):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # A function that the script has not defined yet has an empty cell.
            with contextlib.suppress(ValueError):
                for path, value in _leaves(name, cell.cell_contents, 0, seen, owned):
                    row = _row(f"{path} of {function.__qualname__.split('.')[0]}", value, owned)
                    yield row | {"of_closure": True}


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, Step):
        for transform in value.transforms:
            yield from _functions([transform.init, transform.loss, transform.grad, transform.grad_step, transform.update])
    elif isinstance(value, list):
        for part in value[:_MAX_VALUES]:
            yield from _functions(part)
    elif isinstance(value, FunctionType) and value.__closure__ and value.__module__.split(".")[0] not in _LIBRARIES:
        yield value


def copies_of_weights(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of the frames' variables that have the shape of a parameter and are none, such as averages."""
    owned = _owned_by(models)
    tensors = {path: value for _, _, path, value in _script_leaves(frames, owned) if isinstance(value, Tensor)}
    return {path: tensor for path, tensor in tensors.items() if tuple(tensor.shape) in owned.shapes}


def _script_leaves(frames: Sequence[FrameType], owned: _Owned) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the file, the variable, the path and the value of the numbers, tensors and generators of the frames."""
    seen = set[int]()
    leaves = (
        (frame.f_code.co_filename, name, path, leaf)
        for frame in frames
        for name, value in list(frame.f_locals.items())
        if not name.startswith("__") and name not in _assignments(frame.f_code.co_filename).counters
        for path, leaf in _leaves(name, value, 0, seen, owned)
    )
    return islice(leaves, _MAX_VALUES)


class _Assignments(NamedTuple):
    """Names that only ``for`` loops of a file assign, and the line that assigns each name last, as in ``"loop.py:31"``."""

    counters: frozenset[str] = frozenset()
    lines: Mapping[str, str] = MappingProxyType({})


@lru_cache(maxsize=64)
def _assignments(file: str) -> _Assignments:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return _Assignments()
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor)]
    of_loops = [name for target in loops for name in ast.walk(target) if isinstance(name, ast.Name)]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    others = {node.id for node in assigned if not any(node is name for name in of_loops)}
    lines = {node.id: f"{os.path.basename(file)}:{node.lineno}" for node in sorted(assigned, key=lambda node: node.lineno)}
    return _Assignments(frozenset(name.id for name in of_loops) - others, lines)


def model_values(models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield numbers that modules of the script keep as plain attributes, such as the layers to drop in a step."""
    owned = _owned_by(models)
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if type(module).__module__.split(".")[0] in _LIBRARIES:
                continue
            for key, value in vars(module).items():
                if key.startswith("_") or key == "training":
                    continue
                path = f"model{number or ''}.{name + '.' if name else ''}{key}"
                if type(value) in (list, tuple) or isinstance(value, bool | int | float):
                    for place, leaf in _leaves(path, value, _DEPTH, set(), owned):
                        yield _row(place, leaf, owned) | {"of_model": True}


def global_generators() -> Iterator[dict[str, Any]]:
    """Yield the states of the global generators of Python and NumPy, as rows of variables."""
    yield {"name": "of Python", "type": "generator", "digest": _digest_text(random.getstate()), "is_global": True}
    state = np.random.get_state(legacy=False)["state"]
    words = hashlib.blake2b(state["key"].tobytes(), digest_size=DIGEST_BYTES).hexdigest()
    yield {"name": "of NumPy", "type": "generator", "digest": f"{words}/{state['pos']}", "is_global": True}


def scaler_values(scalers: Iterable[torch.amp.GradScaler]) -> Iterator[dict[str, Any]]:
    """Yield the loss scale of each scaler, and the number of steps since the scale changed, as rows of variables."""
    for number, scaler in enumerate(scalers):
        state, name = scaler.state_dict(), f"loss scaler {number + 1}" if number else "the loss scaler"
        for key, label in (("scale", "the scale"), ("_growth_tracker", "the steps without an overflow")):
            # A scaler that is off has no state.
            if key in state:
                row = {"name": f"{label} of {name}", "type": "number", "digest": repr(state[key]), "value": float(state[key])}
                yield {**row, "weights": False, "scaler": True}


def _digest_text(value: object) -> str:
    """Return a digest that is equal in all processes. That of ``hash`` depends on the process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """Objects of the models of a script by ``id``, with the shapes of parameters and the addresses of tensors."""

    modules: frozenset[int]
    parameters: frozenset[int]
    shapes: frozenset[tuple[int, ...]]
    addresses: frozenset[int]


def _owned_by(models: Sequence[nn.Module]) -> _Owned:
    parameters = [param for model in models for param in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    return _Owned(
        modules=frozenset(id(module) for model in models for module in model.modules()),
        parameters=frozenset(map(id, parameters)),
        shapes=frozenset(tuple(param.shape) for param in parameters),
        addresses=frozenset(map(_address, (*parameters, *buffers))),
    )


def _address(tensor: Tensor) -> int:
    return to_local(tensor.detach()).data_ptr()


def _row(path: str, value: Any, owned: _Owned) -> dict[str, Any]:
    """Return the row of a number, a tensor or a generator."""
    number, weights = None, False
    if isinstance(value, bool | int | float):
        kind, content, number = "number", repr(value), float(value)
    elif isinstance(value, Tensor):
        kind, content, weights = "tensor", digest(flatten(to_local(value))), tuple(value.shape) in owned.shapes
    elif isinstance(value, torch.Generator):
        kind, content = "generator", digest(flatten(value.get_state()))
    else:
        kind = "generator"
        content = _digest_text(value.getstate()) if isinstance(value, random.Random) else str(value.bit_generator.state)
    return {"name": path, "type": kind, "digest": content, "value": number, "weights": weights}


def _leaves(path: str, value: Any, depth: int, seen: set[int], owned: _Owned) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, tensors and generators in a value by path, without those of the models."""
    if isinstance(value, bool | int | float):
        yield path, value
        return
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    items: list[tuple[str, Any]] = []
    if isinstance(value, Tensor):
        # A larger tensor that is not a parameter is data of the script.
        small = value.numel() <= _MAX_ELEMENTS or tuple(value.shape) in owned.shapes
        # A tensor of a state dict is the memory of a parameter or buffer.
        if small and not value.is_meta and not isinstance(value, nn.Parameter) and _address(value) not in owned.addresses:
            yield path, value
    elif isinstance(value, torch.Generator | random.Random | np.random.Generator):
        yield path, value
    elif isinstance(value, nn.Module):
        if id(value) not in owned.modules:
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                if not tensor.is_meta and id(tensor) not in owned.parameters:
                    yield f"{path}.{name}", tensor
    elif isinstance(value, Mapping):
        # The optimizer has the numbers of its groups of parameters.
        params = value.get("params")
        if isinstance(params, list) and any(isinstance(item, nn.Parameter) for item in params):
            return
        items = [(f"[{key!r}]", item) for key, item in list(value.items())[:_MAX_VALUES] if isinstance(key, str | int)]
    elif type(value) in (list, tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)] if len(value) <= _MAX_VALUES else []
    elif _is_of_script(value):
        items = [(f".{key}", item) for key, item in vars(value).items()]
    # An ``early_stop``.
    elif type(value).__module__.startswith("dtrain.monitors") and hasattr(value, "state_dict"):
        items = [(f".{key}", item) for key, item in value.state_dict().items()]
    for suffix, item in items:
        yield from _leaves(path + suffix, item, depth + 1, seen, owned)


def _is_of_script(value: Any) -> bool:
    """Return True for an instance of a class that the script, or a module of its folder, defines."""
    library = type(value).__module__.split(".")[0] in _LIBRARIES
    return not library and hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__name__ != "module"


class ScriptModels:
    """Models of one rank, in the order in which they were seen. Names in further models begin with the class of the model.

    Args:
        dtype: dtype of the run, to which models are converted; None keeps their dtypes.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.modules: list[nn.Module] = []
        # The process ends without freeing them: DDP may wait for a thread of gloo, which waits for Python's lock.
        self._wrappers: dict[int, nn.Module] = {}
        self._dtype = dtype

    def add(self, model: nn.Module) -> None:
        """Remember a model, unless its parameters are those of a known model. Mutates: the dtype of its parameters."""
        inner = unwrap_module(model)
        self._wrappers.setdefault(id(model), model)
        if any(inner is other for other in self.modules):
            return
        earlier = {id(param) for other in self.modules for param in other.parameters()}
        own = {id(param) for param in inner.parameters()}
        if self.modules and own and own <= earlier:
            return
        # A module of this model was seen first.
        self.modules = [other for other in self.modules if not any(module is other for module in inner.modules())]
        self.modules.append(inner)
        if self._dtype is not None and any(p.is_floating_point() and p.dtype != self._dtype for p in inner.parameters()):
            inner.to(self._dtype)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all models by name."""
        return {prefix + name: param for prefix, model in self._named() for name, param in parameters_by_fqn(model)[0].items()}

    def buffers(self, *, persistent_only: bool = False) -> dict[str, Tensor]:
        """Return the buffers of all models by name."""
        return {
            prefix + name: buffer
            for prefix, model in self._named()
            for name, buffer in buffers_by_fqn(model, persistent_only=persistent_only).items()
        }

    def ties(self) -> list[str]:
        """Return the tied parameters, as ``"head.weight = embed.weight"``."""
        return [
            f"{prefix}{name} = {prefix}{first}"
            for prefix, model in self._named()
            for name, first in parameters_by_fqn(model)[1].items()
        ]

    def parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of one of the models by name; none for another module."""
        return next(
            (
                {prefix + name: param for name, param in parameters_by_fqn(inner)[0].items()}
                for prefix, inner in self._named()
                if inner is unwrap_module(model)
            ),
            {},
        )

    def trained_by(self, optimizer: Any) -> list[nn.Module]:
        """Return the models of which an optimizer has a parameter."""
        own = params_of(optimizer)
        return [model for model in self.modules if any(id(param) in own for param in model.parameters())]

    def share_gradients(self, models: Sequence[nn.Module]) -> bool:
        """Return True if one of the models is in a wrapper, or sharded, so that its ranks may reduce gradients."""
        wrapped = [unwrap_module(wrapper) for wrapper in self._wrappers.values() if isinstance(wrapper, _PARALLEL)]
        return any(
            any(model is inner for inner in wrapped) or any(isinstance(module, FSDPModule) for module in model.modules())
            for model in models
        )

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a module of a known model; None for another module."""
        for prefix, model in self._named():
            for name, candidate in modules_by_fqn(model):
                if candidate is module:
                    return prefix + name
        return None

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        earlier = Counter[str]()
        for number, model in enumerate(self.modules):
            kind = type(model).__name__.removeprefix("FSDP") if number else ""
            earlier[kind] += 1
            # A second model of the class must not hide the first.
            yield f"{kind}{earlier[kind] if earlier[kind] > 1 else ''}{'.' if number else ''}", model


def modes_of(models: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return the names of the modules in evaluation mode, and of the parameters that do not train.

    Ranks may have seen other models before, so names have the number of the model among ``models`` instead of its class.
    """
    evaluating, frozen = list[str](), list[str]()
    for number, model in enumerate(models):
        prefix = f"model {number + 1}: " if number else ""
        evaluating += [prefix + (name or "model") for name, module in modules_by_fqn(model) if not module.training]
        frozen += [prefix + name for name, param in parameters_by_fqn(model)[0].items() if not param.requires_grad]
    return {"evaluating": evaluating, "frozen": frozen}


def params_of(optimizer: Any) -> set[int]:
    """Return the identities of the parameters of an optimizer."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def signature_of(optimizer: Any) -> str:
    """Return the class of an optimizer and a digest of the shapes of its parameters, equal on all ranks and after a resume."""
    shapes = [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
    return f"{type(optimizer).__name__}/{hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()}"


def moves_toward(before: Tensor, after: Tensor, target: Tensor) -> bool:
    """Return True if ``after`` lies on the way from ``before`` to ``target``, as an average does that moves by a share."""
    way, moved = (flatten(tensor) - flatten(before) for tensor in (target, after))
    share = float(moved @ way / (way @ way)) if way.any() else 0.0
    is_on_way = torch.linalg.vector_norm(moved - share * way) <= _ON_WAY * torch.linalg.vector_norm(moved)
    # Any two numbers have a share, and a copy moves by all of the way.
    return len(way) > 2 and 0 < share < 1 - _ON_WAY and bool(is_on_way)
