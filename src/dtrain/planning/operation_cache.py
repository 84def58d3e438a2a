"""Compute an operation on fake tensors once for each layout of its arguments, and repeat the result for equal arguments.

The layers of a model run the same operations on tensors of the same layout. A fake tensor has no values, so the layout of a
result depends on the operation, on the layouts of the tensors and on the other arguments only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.monitors.flops import operation_flops


class _TensorLayout(NamedTuple):
    """Layout of a tensor, without its place in the storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _NewTensor(NamedTuple):
    """Result with a storage of its own."""

    layout: _TensorLayout


class _View(NamedTuple):
    """Result that shares the storage of the argument with this number."""

    argument: int
    offset: int
    layout: _TensorLayout


class _Argument(NamedTuple):
    """Result that is the argument with this number, as of an operation in place."""

    argument: int


# State of an operation that was computed, but without a description of its result.
_UNKNOWN = object()


class OperationCache:
    """Cache of the layouts of results, for operations inside ``fake_mode``. Several simulations may share a cache."""

    def __init__(self) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._results: dict[Any, Any] = {}
        # Attributes of a new fake tensor by device.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
        """Return the result of ``func``, computed or repeated, and its floating-point operations."""
        if not _depends_on_layouts(func):
            return self._compute(func, args, kwargs)
        tensors = list[FakeTensor]()
        arguments = args, tuple(kwargs.items())
        layouts = _layouts(arguments, tensors, func)
        if layouts is None:
            return self._compute(func, args, kwargs)
        key = func, torch.is_inference_mode_enabled(), torch.get_default_dtype(), layouts
        result = self._results.get(key)
        if result is None:
            out, flops = self._compute(func, args, kwargs)
            # An operation that changes the layout of an argument is computed each time.
            is_pure = _layouts(arguments, [], func) == layouts
            self._results[key] = _describe_result(out, tensors) if is_pure else _UNKNOWN, flops
            return out, flops
        description, flops = result
        if description is _UNKNOWN:
            return self._compute(func, args, kwargs)
        return self._repeat(description, tensors), flops

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
        out = func(*args, **kwargs)
        return out, operation_flops(func, args, kwargs, out)

    def _repeat(self, result: Any, tensors: Sequence[FakeTensor]) -> Any:
        kind = type(result)
        if kind is _NewTensor:
            return self._fake_tensor(_empty(result.layout), result.layout.device)
        if kind is _View:
            layout, storage = result.layout, tensors[result.argument].untyped_storage()
            with torch._C._DisableTorchDispatch():
                view = torch.empty(0, dtype=layout.dtype, device="meta")
                view.set_(storage, result.offset, layout.shape, layout.stride)
            return self._fake_tensor(view, layout.device)
        if kind is _Argument:
            return tensors[result.argument]
        return None if result is None else kind(self._repeat(item, tensors) for item in result)

    def _fake_tensor(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on ``device`` with the layout and storage of ``meta``.

        The constructor of ``FakeTensor`` takes most of the time of a repeated result. So the first tensor on each device gives
        its attributes to all later ones.
        """
        attributes = self._attributes.get(device)
        if attributes is None:
            tensor = FakeTensor(self.fake_mode, meta, device)
            self._attributes[device] = dict(vars(tensor))
            return tensor
        tensor = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        vars(tensor).update(attributes)
        return tensor


PLAIN_TENSORS = frozenset({Tensor, FakeTensor})
"""Types of tensors whose operations a mode sees. A DTensor or similar unpacks itself, and its inner operations come back."""


class CachedOperations(TorchDispatchMode):
    """Context in which tensors are fake, and operations on them are computed once."""

    def __init__(self, operations: OperationCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would wrap ``__torch_dispatch__``, at a cost for each operation, and it is never compiled."""
        return False

    def __enter__(self) -> Self:
        self._operations.fake_mode.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._operations.fake_mode.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operations.run(func, args, kwargs or {})[0] if PLAIN_TENSORS.issuperset(types) else NotImplemented


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
        elif kind in _ON_META and value.is_meta and _returns_new_tensors(func):
            # The fake mode would make a fake tensor of the argument each time.
            layouts += (kind, value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
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


_ON_META = frozenset({Tensor, nn.Parameter})


@cache
def _returns_new_tensors(func: Any) -> bool:
    """Return True if ``func`` changes no argument, and no result shares memory with an argument."""
    return all(value.alias_info is None for value in (*func._schema.arguments, *func._schema.returns))


@cache
def _is_foreach(func: Any) -> bool:
    return bool(func._schema.name.startswith("aten::_foreach_"))


def _has_layout(tensor: FakeTensor) -> bool:
    """Return True if shape, stride, offset and dtype describe ``tensor``: without values, conjugation or negation."""
    return tensor.constant is None and tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_neg()


def _describe_result(out: Any, tensors: Sequence[FakeTensor]) -> Any:
    """Return ``out`` with a description in place of each tensor, ``_UNKNOWN`` if there is none."""
    if type(out) in (list, tuple):
        results = [_describe_result(item, tensors) for item in out]
        new = [id(item.untyped_storage()) for item, result in zip(out, results, strict=True) if type(result) is _NewTensor]
        is_known = _UNKNOWN not in results and len(set(new)) == len(new)
        return type(out)(results) if is_known else _UNKNOWN
    if out is None:
        return None
    if type(out) is not FakeTensor or not _has_layout(out):
        return _UNKNOWN
    layout, storage = _TensorLayout(tuple(out.shape), out.stride(), out.dtype, out.fake_device), out.untyped_storage()
    sharing = [number for number, tensor in enumerate(tensors) if tensor.untyped_storage() is storage]
    if len(sharing) > 1:
        # With other arguments of the same layouts, the result would belong to one of them.
        return _UNKNOWN
    if sharing:
        is_argument = tensors[sharing[0]] is out
        return _Argument(sharing[0]) if is_argument else _View(sharing[0], int(out.storage_offset()), layout)
    is_plain = not out.storage_offset() and _empty(layout).untyped_storage().nbytes() == storage.nbytes()
    return _NewTensor(layout) if is_plain else _UNKNOWN


def _empty(layout: _TensorLayout) -> Tensor:
    """Return a tensor of ``layout`` on the meta device."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
