"""Compute an operation on fake tensors once for each layout of its arguments, and repeat the result for equal arguments.

The layers of a model run the same operations on tensors of the same layout. A fake tensor has no values, so the layout of a
result depends on the operation, on the layouts of the tensors and on the other arguments only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode


class _Layout(NamedTuple):
    """Layout of a tensor, without its place in the storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _NewTensor(NamedTuple):
    """Result with a storage of its own."""

    layout: _Layout


class _View(NamedTuple):
    """Result that shares the storage of the argument with this number."""

    argument: int
    offset: int
    layout: _Layout


class _Argument(NamedTuple):
    """Result that is the argument with this number, as of an operation in place."""

    argument: int


# States of an operation: not computed yet; computed, but without a description of its result.
_NEW, _UNKNOWN = object(), object()


class OperationCache:
    """Cache of the layouts of results, for one ``FakeTensorMode``."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._results: dict[Any, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``func``, computed or repeated."""
        arguments, tensors = (args, tuple(kwargs.items())), list[FakeTensor]()
        layouts = _layouts(arguments, tensors, func) if _depends_on_layouts(func) else None
        if layouts is None:
            return func(*args, **kwargs)
        key = func, torch.is_inference_mode_enabled(), layouts
        result = self._results.get(key, _NEW)
        if result is not _NEW and result is not _UNKNOWN:
            return self._repeat(result, tensors)
        out = func(*args, **kwargs)
        if result is _NEW:
            # An operation that changes the layout of an argument is computed each time.
            is_pure = _layouts(arguments, [], func) == layouts
            self._results[key] = _describe(out, tensors) if is_pure else _UNKNOWN
        return out

    def _repeat(self, result: Any, tensors: Sequence[FakeTensor]) -> Any:
        kind = type(result)
        if kind is _NewTensor:
            return FakeTensor(self._fake_mode, _empty(result.layout), result.layout.device)
        if kind is _View:
            layout, storage = result.layout, tensors[result.argument].untyped_storage()
            with torch._C._DisableTorchDispatch():
                view = torch.empty(0, dtype=layout.dtype, device="meta")
                view.set_(storage, result.offset, layout.shape, layout.stride)
            return FakeTensor(self._fake_mode, view, layout.device)
        if kind is _Argument:
            return tensors[result.argument]
        return None if result is None else kind(self._repeat(item, tensors) for item in result)


@cache
def _depends_on_layouts(func: Any) -> bool:
    """Return True if the layouts of the results follow from the arguments without the values of tensors."""
    if func.namespace not in ("aten", "fsdp") or func._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_"):
        return False
    return torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags


_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _layouts(values: Iterable[Any], tensors: list[FakeTensor], func: Any) -> tuple[Any, ...] | None:
    """Return the layouts of the tensors and all other values, and append the tensors; None if one has no layout."""
    layouts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _has_layout(value):
                return None
            tensors.append(value)
            size = value.untyped_storage().nbytes()
            layouts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, size)
        elif kind in _PLAIN:
            layouts.append(value)
        elif kind is list or kind is tuple:
            inner = _layouts(value, tensors, func)
            if inner is None:
                return None
            layouts.append(inner)
        elif kind is float or kind is bool:
            # 1, 1.0 and True are equal. The numbers of an optimizer differ from step to step.
            layouts.append((kind, None if kind is float and _is_foreach(func) else value))
        else:
            return None
    return tuple(layouts)


@cache
def _is_foreach(func: Any) -> bool:
    return bool(func._schema.name.startswith("aten::_foreach_"))


def _has_layout(tensor: FakeTensor) -> bool:
    """Return True if shape, stride, offset and dtype describe ``tensor``: without values, conjugation or negation."""
    return tensor.constant is None and tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_neg()


def _describe(out: Any, tensors: Sequence[FakeTensor]) -> Any:
    """Return ``out`` with a description in place of each tensor, ``_UNKNOWN`` if there is none."""
    if type(out) in (list, tuple):
        results = [_describe(item, tensors) for item in out]
        new = [id(item.untyped_storage()) for item, result in zip(out, results, strict=True) if type(result) is _NewTensor]
        is_known = _UNKNOWN not in results and len(set(new)) == len(new)
        return type(out)(results) if is_known else _UNKNOWN
    if out is None:
        return None
    if type(out) is not FakeTensor or not _has_layout(out):
        return _UNKNOWN
    layout, storage = _Layout(tuple(out.shape), out.stride(), out.dtype, out.fake_device), out.untyped_storage()
    sharing = [number for number, tensor in enumerate(tensors) if tensor.untyped_storage() is storage]
    if len(sharing) > 1:
        # With other arguments of the same layouts, the result would belong to one of them.
        return _UNKNOWN
    if sharing:
        is_argument = tensors[sharing[0]] is out
        return _Argument(sharing[0]) if is_argument else _View(sharing[0], int(out.storage_offset()), layout)
    is_plain = not out.storage_offset() and _empty(layout).untyped_storage().nbytes() == storage.nbytes()
    return _NewTensor(layout) if is_plain else _UNKNOWN


def _empty(layout: _Layout) -> Tensor:
    """Return a tensor of ``layout`` on the meta device."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
