"""Trees of plain data and tensors as JSON: exact, reversible, and refused by key path when they are neither.

JSON holds ``None``, ``bool``, ``int``, ``float``, ``str``, lists, and dicts with text keys as they are. What it cannot hold
becomes an object whose only first field is ``"$"``::

    (1, 2)              {"$": "tuple", "items": [1, 2]}
    {1: "a"}            {"$": "dict", "items": [[1, "a"]]}          also for a dict with a key "$"
    float("nan")        {"$": "float", "value": "nan"}              also "inf", "-inf"
    a tensor            {"$": "tensor", "dtype": "F32", "shape": [2, 3], "distributed": false}

A tensor's data live elsewhere, under its key: the path to it, joined by ``/`` as in a JSON pointer (RFC 6901: ``~`` and
``/`` inside a name are written ``~0`` and ``~1``).

Trees of plain values whose tensors have not been read yet, and their completion."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.checkpoint import strict_json, tree_json
from dtrain.checkpoint.layout import DTYPE_NAMES, DTYPES
from dtrain.dtensor import is_dtensor
from dtrain.errors import ConfigError, CorruptCheckpointError

TAG = "$"
_TENSOR_FIELDS = frozenset({TAG, "dtype", "shape", "distributed"})
MAX_DEPTH = 64
_MAX_DIM_SIZE = 2**48
MAX_INT_BITS = 4096  # Python refuses to print integers of more than 4,300 digits
_DICT_TYPES = (dict, OrderedDict, Counter)  # all come back as dict, which their own load_state_dict accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A tensor in a tree: dtype by its safetensors name, global shape, and whether it was a DTensor."""

    dtype: str
    shape: tuple[int, ...]
    distributed: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def ref_of(tensor: Tensor) -> TensorRef:
    """What describes a tensor of a dtype that can be stored."""
    return _make_ref(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), is_dtensor(tensor))


def join_key(path: str, key: str | int) -> str:
    """The path of an item: ``join("a", "b/c") == "a/b~1c"``."""
    token = str(key)
    if "~" in token or "/" in token:
        token = token.replace("~", "~0").replace("/", "~1")
    return f"{path}/{token}" if path else token


def unescape_key(token: str) -> str:
    """The key that one part of a path stands for: ``unescaped("b~1c") == "b/c"``."""
    return token.replace("~1", "/").replace("~0", "~")


def encode(tree: Any, path: str) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON values, and its tensors by key.

    Args:
        tree: nested dicts (keys text or integers), lists and tuples of plain values and tensors. ``OrderedDict`` and
            ``Counter`` are taken as dicts, NumPy's ``float64`` as a float.
        path: where the tree belongs; keys begin with it.

    Raises:
        ConfigError: anything else, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, path, tensors, 0), tensors


def _encode(tree: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path[:200]}...: nested more than {MAX_DEPTH} deep, or in a circle; a checkpoint holds plain trees")
    if tree is None or type(tree) in (bool, str):
        return tree
    if type(tree) is int:
        if tree.bit_length() > MAX_INT_BITS:
            raise ConfigError(f"{path}: an integer of {tree.bit_length()} bits, at most {MAX_INT_BITS} are taken")
        return tree
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {TAG: "float", "value": str(float(tree))}
    if isinstance(tree, Tensor):
        return _encode_tensor(tree, path, tensors)
    if type(tree) in (list, tuple):
        values = [_encode(item, join_key(path, at), tensors, depth + 1) for at, item in enumerate(tree)]
        return values if type(tree) is list else {TAG: "tuple", "items": values}
    if type(tree) in _DICT_TYPES:
        return _encode_dict(tree, path, tensors, depth)
    raise ConfigError(
        f"{path}: a checkpoint holds tensors and plain data (None, bool, int, float, str, list, tuple, dict), "
        f"got {type(tree).__module__}.{type(tree).__qualname__}; convert it in state_dict()"
    )


def _encode_dict(tree: dict[Any, Any], path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    bad = next((key for key in tree if type(key) not in (str, int)), None)
    if bad is not None:
        raise ConfigError(f"{path}: keys are text or integers in a checkpoint, got {type(bad).__name__} {bad!r}")
    if len({str(key) for key in tree}) != len(tree):
        raise ConfigError(f"{path}: two keys differ only in being text or an integer; rename one")
    values = {key: _encode(item, join_key(path, key), tensors, depth + 1) for key, item in tree.items()}
    if all(type(key) is str and key != TAG for key in values):
        return values
    return {TAG: "dict", "items": [[key, value] for key, value in values.items()]}


def _encode_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        raise ConfigError(
            f"{path}: cannot store a tensor of dtype {tensor.dtype}, layout {tensor.layout}, device {tensor.device}; "
            "a checkpoint holds dense real tensors that have data"
        )
    tensors[path] = tensor
    return _tensor_json(ref_of(tensor))


@lru_cache(maxsize=4096)
def _tensor_json(ref: TensorRef) -> dict[str, Any]:
    # One object for all tensors of a kind, of which nobody changes any: there are many tensors and few kinds.
    return {TAG: "tensor", "dtype": ref.dtype, "shape": list(ref.shape), "distributed": ref.distributed}


def decode(values: Any, path: str, tensor_of: Callable[[str, TensorRef], Any]) -> Any:
    """The tree that ``encode`` was given, with ``tensor_of(key, ref)`` in place of each tensor.

    Raises:
        CorruptCheckpointError: values that ``encode`` does not write.
    """
    return _decode(values, path, tensor_of, 0)


def _decode(values: Any, path: str, tensor_of: Callable[[str, TensorRef], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"values: {path[:200]}: nested more than {MAX_DEPTH} deep")
    if type(values) is list:
        return [_decode(item, join_key(path, at), tensor_of, depth + 1) for at, item in enumerate(values)]
    if type(values) is not dict:
        return values
    if TAG not in values:
        return {key: _decode(item, join_key(path, key), tensor_of, depth + 1) for key, item in values.items()}
    return _decode_tagged(values, path, tensor_of, depth)


def _decode_tagged(values: dict[str, Any], path: str, tensor_of: Callable[[str, TensorRef], Any], depth: int) -> Any:
    where, tag = f"values: {path}", values[TAG]
    if tag == "tensor":
        return tensor_of(path, _read_tensor_ref(values, where))
    if tag == "float":
        value = strict_json.read_object(values, where, (TAG, "value"))["value"]
        if value not in ("nan", "inf", "-inf"):
            raise CorruptCheckpointError(f"{where}: not a float: {strict_json.describe_value(value)}")
        return float(value)
    content = strict_json.read_object(values, where, (TAG, "items"))["items"]
    if tag == "tuple" and type(content) is list:
        return tuple(_decode(item, join_key(path, at), tensor_of, depth + 1) for at, item in enumerate(content))
    pairs = type(content) is list and all(
        type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int) for pair in content
    )
    if tag == "dict" and pairs:
        return {key: _decode(item, join_key(path, key), tensor_of, depth + 1) for key, item in content}
    raise CorruptCheckpointError(f"{where}: unknown value {strict_json.describe_value(values)}")


def _read_tensor_ref(values: dict[str, Any], where: str) -> TensorRef:
    """What an encoded tensor says about itself."""
    if values.keys() != _TENSOR_FIELDS:
        strict_json.read_object(values, where, tuple(_TENSOR_FIELDS))
    dtype, shape, distributed = values["dtype"], values["shape"], values["distributed"]
    if type(dtype) is not str or type(distributed) is not bool or dtype not in DTYPES:
        raise CorruptCheckpointError(f"{where}: not a tensor: {strict_json.describe_value(values)}")
    if type(shape) is not list or not {int}.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        strict_json.read_ints(shape, where)
    return _make_ref(dtype, tuple(shape), distributed)


@lru_cache(maxsize=4096)
def _make_ref(dtype: str, shape: tuple[int, ...], distributed: bool) -> TensorRef:
    if max(shape, default=0) > _MAX_DIM_SIZE:
        raise CorruptCheckpointError(f"values: no tensor has the shape {strict_json.describe_value(list(shape))}")
    return TensorRef(dtype=dtype, shape=shape, distributed=distributed)


def tensor_refs(values: Any, path: str) -> dict[str, TensorRef]:
    """The tensors of an encoded tree, by key."""
    found: dict[str, TensorRef] = {}
    decode(values, path, lambda key, ref: found.setdefault(key, ref))
    return found


class TensorPlaceholder(NamedTuple):
    """Stands for the tensor ``key`` in a tree."""

    key: str
    ref: TensorRef


def decode_structure(values: Any, path: str) -> Any:
    """The tree that these encoded values stand for, with a ``Leaf`` in place of each tensor.

    Raises:
        CorruptCheckpointError: values that ``plain.encode`` does not write.
    """
    return tree_json.decode(values, path, TensorPlaceholder)


def fill_tensors(tree: Any, tensor_of: Callable[[str, TensorRef], Any]) -> Any:
    """The tree with ``tensor_of(key, ref)`` in place of each ``Leaf``."""
    kind = type(tree)
    if kind is TensorPlaceholder:
        return tensor_of(*tree)
    if kind is dict:
        return {key: fill_tensors(item, tensor_of) for key, item in tree.items()}
    if kind in (list, tuple):
        return kind(fill_tensors(item, tensor_of) for item in tree)
    return tree


def strip_prefix(tree: Any, prefix: str) -> Any:
    """The tree with ``prefix`` taken from the beginning of each key that has it."""
    return fill_tensors(tree, lambda key, ref: TensorPlaceholder(key.removeprefix(prefix), ref))


def iter_placeholders(tree: Any) -> Iterator[TensorPlaceholder]:
    """The leaves of a tree."""
    kind = type(tree)
    if kind is TensorPlaceholder:
        yield tree
    elif kind is dict:
        for item in tree.values():
            yield from iter_placeholders(item)
    elif kind in (list, tuple):
        for item in tree:
            yield from iter_placeholders(item)


def keep_skipped(tree: Any, here: Any, skipped: Collection[str]) -> Any:
    """``tree`` where what belongs to the names ``skipped`` is as it is ``here``: neither taken over nor removed.

    A name is looked for among the keys of dicts, at any depth.
    """
    if type(tree) is not dict or not isinstance(here, Mapping):
        return tree
    kept = {key: keep_skipped(item, here.get(key), skipped) for key, item in tree.items() if key not in skipped}
    return {**kept, **{key: item for key, item in here.items() if key in skipped}}
