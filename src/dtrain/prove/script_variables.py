"""Find what a script keeps besides model, optimizer and loader: averages, counters, generators (``script_variables``).

A checkpoint that lacks such a value is found, because the value differs after a resume.
"""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import to_local
from dtrain.prove.run_log import digest, flatten

_DEPTH = 3
_MAX_VALUES = 400
_MAX_ELEMENTS = 1 << 16
_LIBRARIES = (
    "torch",
    "dtrain",
    "numpy",
    "builtins",
    "tensordict",
    "pathlib",
    "argparse",
    "transformers",
    "collections",
    "functools",
)


def script_frames(frame: FrameType | None, script: str) -> list[FrameType]:
    """Return the frames of the script, and of modules in its folder, that called the current function."""
    folder = os.path.dirname(os.path.realpath(script)) + os.sep
    found = []
    while frame is not None:
        if os.path.realpath(frame.f_code.co_filename).startswith(folder):
            found.append(frame)
        frame = frame.f_back
    return found


def script_variables(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the values of the frames' variables: name, type, digest, and the number if it is one.

    Variables that only ``for`` assigns are left out: after a resume a loop may count from another number.
    """
    seen: set[int] = set()
    known = _know(models)
    count = 0
    for frame in frames:
        for name, value in list(frame.f_locals.items()):
            if name.startswith("__") or name in _counters(frame.f_code.co_filename):
                continue
            for path, type_name, content, number in _values(name, value, 0, seen, known):
                count += 1
                if count > _MAX_VALUES:
                    return
                yield {
                    "name": path,
                    "type": type_name,
                    "digest": content,
                    "value": number,
                    "weights": type_name == "tensor" and number is not None and value_shape(number) in known.shapes,
                }


@lru_cache(maxsize=64)
def _counters(file: str) -> frozenset[str]:
    """Return the names that ``for`` loops of a file assign, and nothing else does."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor)]
    of_loops = [name for target in loops for name in ast.walk(target) if isinstance(name, ast.Name)]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    others = {node.id for node in assigned if not any(node is name for name in of_loops)}
    return frozenset(name.id for name in of_loops) - others


def model_values(models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield numbers that modules of the script keep as plain attributes, such as the layers to drop in a step."""
    known = _know(models)
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if type(module).__module__.split(".")[0] in _LIBRARIES:
                continue
            for key, value in vars(module).items():
                if key.startswith("_") or key == "training":
                    continue
                path = f"model{number or ''}.{name + '.' if name else ''}{key}"
                if type(value) in (list, tuple) or isinstance(value, bool | int | float):
                    for each, type_name, content, numeric in _values(path, value, _DEPTH, set(), known):
                        yield {
                            "name": each,
                            "type": type_name,
                            "digest": content,
                            "value": numeric,
                            "weights": False,
                            "of_model": True,
                        }


def value_shape(text: str) -> tuple[int, ...]:
    """Return the shape that ``_values`` gives for a tensor, as text."""
    return tuple(int(size) for size in text.split("x")) if text else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What belongs to the models of a script: objects by ``id``, shapes of parameters, and addresses of tensors."""

    modules: frozenset[int]
    parameters: frozenset[int]
    shapes: frozenset[tuple[int, ...]]
    addresses: frozenset[int]


def _know(models: Sequence[nn.Module]) -> _Known:
    parameters = [param for model in models for param in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    return _Known(
        modules=frozenset(id(module) for model in models for module in model.modules()),
        parameters=frozenset(map(id, parameters)),
        shapes=frozenset(tuple(param.shape) for param in parameters),
        addresses=frozenset(map(_address, (*parameters, *buffers))),
    )


def _address(tensor: Tensor) -> int:
    return to_local(tensor.detach()).data_ptr()


def _values(path: str, value: Any, depth: int, seen: set[int], known: _Known) -> Iterator[tuple[str, str, str, Any]]:
    if isinstance(value, bool | int | float):
        yield path, "number", repr(value), float(value)
        return
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        # A larger tensor that is not a parameter is data of the script.
        small = value.numel() <= _MAX_ELEMENTS or tuple(value.shape) in known.shapes
        # A tensor of a state dict is the memory of a parameter or buffer.
        if small and not value.is_meta and not isinstance(value, nn.Parameter) and _address(value) not in known.addresses:
            yield path, "tensor", digest(flatten(to_local(value))), "x".join(map(str, value.shape))
    elif isinstance(value, torch.Generator):
        yield path, "generator", digest(flatten(value.get_state())), None
    elif isinstance(value, random.Random):
        yield path, "generator", str(hash(value.getstate())), None
    elif isinstance(value, np.random.Generator):
        yield path, "generator", str(value.bit_generator.state), None
    elif isinstance(value, nn.Module):
        if id(value) not in known.modules:
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                if not tensor.is_meta and id(tensor) not in known.parameters:
                    yield f"{path}.{name}", "tensor", digest(flatten(to_local(tensor))), "x".join(map(str, tensor.shape))
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:_MAX_VALUES]:
            if isinstance(key, str | int):
                yield from _values(f"{path}[{key!r}]", item, depth + 1, seen, known)
    elif type(value) in (list, tuple) and len(value) <= _MAX_VALUES:
        for index, item in enumerate(value):
            yield from _values(f"{path}[{index}]", item, depth + 1, seen, known)
    elif _is_of_script(value):
        for key, item in vars(value).items():
            yield from _values(f"{path}.{key}", item, depth + 1, seen, known)
    elif _is_early_stop(value):
        for key, item in value.state_dict().items():
            yield from _values(f"{path}.{key}", item, depth + 1, seen, known)


def _is_of_script(value: Any) -> bool:
    """Return True for an instance of a class that the script, or a module of its folder, defines."""
    library = type(value).__module__.split(".")[0] in _LIBRARIES
    return not library and hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__name__ != "module"


def _is_early_stop(value: Any) -> bool:
    return type(value).__module__.startswith("dtrain.monitors") and hasattr(value, "state_dict")
