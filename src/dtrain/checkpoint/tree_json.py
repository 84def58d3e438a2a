"""Encode trees of plain data and tensors as JSON, and decode them exactly.

``None``, ``bool``, ``int``, ``float``, ``str``, lists, and dicts with string keys are written as JSON writes them. A tensor
becomes a text that begins with ``$``, because there are many, and every other value an object whose first field is ``"$"``::

    a tensor            "$tensor F32 [2, 3]"                        "$dtensor F32 [2, 3]" if the tensor was a DTensor
    "$1"                {"$": "str", "value": "$1"}                 also for any other string that begins with "$"
    (1, 2)              {"$": "tuple", "items": [1, 2]}
    {1: "a"}            {"$": "dict", "items": [[1, "a"]]}          also for a dict with a key "$"
    Counter(a=1)        {"$": "Counter", "items": [["a", 1]]}       also OrderedDict
    float("nan")        {"$": "float", "value": "nan"}              also "inf", "-inf"
    PER_RANK            {"$": "per_rank"}                           the value is in the values of each rank
    SameAs("a")         {"$": "same", "key": "a"}                   the object is stored under another key

The data of a tensor are stored elsewhere under a key: the path of the tensor, joined by ``/`` as in a JSON pointer
(RFC 6901: ``~`` and ``/`` inside a name are written ``~0`` and ``~1``).

``decode_structure`` returns a tree with placeholders for tensors; ``fill_tensors`` replaces the placeholders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dtrain.checkpoint import layout
from dtrain.checkpoint.layout import DTYPE_NAMES, DTYPES, OBJECTS, STATES, TensorRef
from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import ConfigError, CorruptCheckpointError
from dtrain.run_objects import DICT_TYPES

TAG = "$"
_DIM = "(?:0|[1-9][0-9]{0,17})"
_TENSOR_TEXT = re.compile(rf"\$(d?)tensor (\w+) \[((?:{_DIM}(?:, {_DIM})*)?)\]", re.ASCII)
_DICT_KINDS = {kind.__name__: kind for kind in DICT_TYPES}
MAX_DEPTH = 64
_MAX_DIM_SIZE = 2**48
# Python refuses to print integers of more than 4,300 digits.
MAX_INT_BITS = 4096


class _Marker(Enum):
    PER_RANK = "per_rank"


PER_RANK: Final = _Marker.PER_RANK
"""Value of the run that stands for a value of each rank."""


class SameAs(NamedTuple):
    """Value that stands for the value of another key of its section."""

    key: str


def ref_of(tensor: Tensor) -> TensorRef:
    """Describe a tensor of a dtype that can be stored."""
    return TensorRef(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), distributed=is_dtensor(tensor))


def join_key(path: str, key: str | int) -> str:
    """Append a key to a path: ``join_key("a", "b/c") == "a/b~1c"``."""
    token = str(key)
    if "~" in token or "/" in token:
        token = token.replace("~", "~0").replace("/", "~1")
    return f"{path}/{token}" if path else token


def state_prefix(name: str) -> str:
    """Return the prefix of the keys of a state in a checkpoint; a single unnamed state has none."""
    return f"{join_key(STATES, name)}/" if name else ""


def unescape_key(token: str) -> str:
    """Return the key that one part of a path encodes: ``unescape_key("b~1c") == "b/c"``."""
    return token.replace("~1", "/").replace("~0", "~")


def _readable(path: str) -> str:
    """Return a path as a message shows it: ``objects/stateful~1note`` is the object ``stateful/note``."""
    return unescape_key(path.removeprefix(f"{OBJECTS}/"))


def encode(tree: Any, path: str) -> tuple[Any, dict[str, Tensor]]:
    """Encode a tree as JSON values, and collect its tensors by key.

    Args:
        tree: nested dicts (keys are strings or integers), lists and tuples of plain values and tensors.
            Of the subclasses of dict ``OrderedDict`` and ``Counter``. NumPy's ``float64`` is encoded as a float.
        path: prefix of the keys.

    Raises:
        ConfigError: a value of another type, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, path, tensors, 0), tensors


def _encode(tree: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"{_readable(path)[:200]}...: state must be nested at most {MAX_DEPTH} deep and without cycles. "
            "Flatten it in state_dict()."
        )
    if tree is None or type(tree) is bool:
        return tree
    if type(tree) is str:
        return {TAG: "str", "value": tree} if tree.startswith(TAG) else tree
    if type(tree) is int:
        if tree.bit_length() > MAX_INT_BITS:
            raise ConfigError(
                f"{_readable(path)}: an integer must have at most {MAX_INT_BITS} bits, got {tree.bit_length()}. "
                "Save the integer as text."
            )
        return tree
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {TAG: "float", "value": str(float(tree))}
    if isinstance(tree, Tensor):
        if (problem := storage_problem(tree)) is not None:
            raise ConfigError(f"{_readable(path)}: a tensor must {problem[0]}. Save {problem[1]} instead.")
        tensors[path] = tree
        return _tensor_text(tree.dtype, tuple(tree.shape), is_dtensor(tree))
    if type(tree) in (list, tuple):
        values = [_encode(item, join_key(path, index), tensors, depth + 1) for index, item in enumerate(tree)]
        return values if type(tree) is list else {TAG: "tuple", "items": values}
    if type(tree) in DICT_TYPES:
        return _encode_dict(tree, path, tensors, depth)
    if isinstance(tree, _Marker):
        return {TAG: tree.value}
    if isinstance(tree, SameAs):
        return {TAG: "same", "key": tree.key}
    raise ConfigError(
        f"{_readable(path)}: state must be tensors and plain data (None, bool, int, float, str, list, tuple, dict), "
        f"got {type(tree).__module__}.{type(tree).__qualname__}. Convert it in state_dict()."
    )


def _encode_dict(tree: dict[Any, Any], path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    for key in tree:
        # A key may be None.
        if type(key) not in (str, int):
            raise ConfigError(
                f"{_readable(path)}: keys must be strings or integers, got {type(key).__name__} {key!r}. "
                "Convert the keys with str() before the save."
            )
    if len({str(key) for key in tree}) != len(tree):
        raise ConfigError(
            f"{_readable(path)}: two keys have the same text, one as string and one as integer. Rename one of them."
        )
    values = {key: _encode(item, join_key(path, key), tensors, depth + 1) for key, item in tree.items()}
    if type(tree) is dict and all(type(key) is str and key != TAG for key in values):
        return values
    return {TAG: type(tree).__name__, "items": [[key, value] for key, value in values.items()]}


def storage_problem(tensor: Tensor) -> tuple[str, str] | None:
    """Return the reason why a tensor cannot be stored, and what to save instead; None if it can be stored."""
    if tensor.layout is not torch.strided:
        remedy = "tensor.values() and tensor.offsets()" if tensor.is_nested else "tensor.to_dense()"
        return f"be dense, got layout {tensor.layout}", remedy
    if tensor.is_nested:
        return "have one shape, got a nested tensor", "the list tensor.unbind()"
    if tensor.is_meta:
        return "have data, got device meta", "it after materialize"
    if tensor.is_quantized:
        return f"have a dtype without a scale, got {tensor.dtype}", "tensor.dequantize(), or tensor.int_repr() and the scale"
    if tensor.is_complex() and tensor.dtype not in DTYPE_NAMES:
        return f"have a real dtype, got {tensor.dtype}", "torch.view_as_real(tensor)"
    if tensor.dtype not in DTYPE_NAMES:
        return f"have a dtype of a safetensors file, got {tensor.dtype}", "its bytes, tensor.view(torch.uint8)"
    # A subclass with a dispatch of its own may keep its values elsewhere.
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_dtensor(tensor):
        return f"have memory of its own, got {type(tensor).__name__}, which wraps other tensors", "a dict of these tensors"
    return None


# There are many tensors and few kinds of them.
@lru_cache(maxsize=4096)
def _tensor_text(dtype: torch.dtype, shape: tuple[int, ...], distributed: bool) -> str:
    return f"{TAG}{'d' * distributed}tensor {DTYPE_NAMES[dtype]} {list(shape)}"


def decode(values: Any, path: str, tensor_of: Callable[[str, TensorRef], Any], depth: int = 0) -> Any:
    """Decode values of ``encode``, with ``tensor_of(key, ref)`` in place of each tensor.

    Raises:
        CorruptCheckpointError: values that ``encode`` does not write.
    """
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"values: {path[:200]}: must be nested at most {MAX_DEPTH} deep")
    if type(values) is str:
        if not values.startswith(TAG):
            return values
        if (ref := _parse_ref(values)) is None:
            raise CorruptCheckpointError(f"values: {path}: must be an encoded tensor, got {layout.describe_value(values)}")
        return tensor_of(path, ref)
    if type(values) is list:
        return [decode(item, join_key(path, index), tensor_of, depth + 1) for index, item in enumerate(values)]
    if type(values) is not dict:
        return values
    if TAG not in values:
        return {key: decode(item, join_key(path, key), tensor_of, depth + 1) for key, item in values.items()}
    match values:
        case {"$": "str", "value": str(text)} if len(values) == 2 and text.startswith(TAG):
            return text
        case {"$": "float", "value": "nan" | "inf" | "-inf" as text} if len(values) == 2:
            return float(text)
        case {"$": "per_rank"} if len(values) == 1:
            return PER_RANK
        case {"$": "same", "key": str(key)} if len(values) == 2:
            return SameAs(key)
        case {"$": "tuple", "items": list(items)} if len(values) == 2:
            return tuple(decode(item, join_key(path, index), tensor_of, depth + 1) for index, item in enumerate(items))
        case {"$": str(kind), "items": list(items)} if kind in _DICT_KINDS and len(values) == 2 and all(map(_is_pair, items)):
            content = {key: decode(item, join_key(path, key), tensor_of, depth + 1) for key, item in items}
            return content if kind == "dict" else _DICT_KINDS[kind](content)
    raise CorruptCheckpointError(f"values: {path}: must be an encoded value, got {layout.describe_value(values)}")


def _is_pair(item: Any) -> bool:
    """Return True for a key of a dict with its value."""
    return type(item) is list and len(item) == 2 and type(item[0]) in (str, int)


# There are many tensors and few kinds of them.
@lru_cache(maxsize=4096)
def _parse_ref(text: str) -> TensorRef | None:
    match = _TENSOR_TEXT.fullmatch(text)
    if match is None or match[2] not in DTYPES:
        return None
    shape = tuple(map(int, match[3].split(", "))) if match[3] else ()
    if max(shape, default=0) > _MAX_DIM_SIZE:
        raise CorruptCheckpointError(
            f"values: tensor dims must be at most {_MAX_DIM_SIZE}, got shape {layout.describe_value(list(shape))}"
        )
    return TensorRef(dtype=match[2], shape=shape, distributed=bool(match[1]))


def tensor_refs(values: Any, path: str) -> dict[str, TensorRef]:
    """Return the tensors of an encoded tree, by key."""
    refs: dict[str, TensorRef] = {}
    decode(values, path, refs.setdefault)
    return refs


class TensorPlaceholder(NamedTuple):
    """Placeholder for the tensor ``key`` in a tree."""

    key: str
    ref: TensorRef


def decode_structure(values: Any, path: str) -> Any:
    """Decode a tree, with a ``TensorPlaceholder`` in place of each tensor.

    Raises:
        CorruptCheckpointError: values that ``encode`` does not write.
    """
    return decode(values, path, TensorPlaceholder)


def fill_tensors(tree: Any, tensor_of: Callable[[str, TensorRef], Any]) -> Any:
    """Replace each ``TensorPlaceholder`` of a tree by ``tensor_of(key, ref)``."""
    kind = type(tree)
    if kind is TensorPlaceholder:
        return tensor_of(*tree)
    if kind in DICT_TYPES:
        return kind({key: fill_tensors(item, tensor_of) for key, item in tree.items()})
    if kind in (list, tuple):
        return kind(fill_tensors(item, tensor_of) for item in tree)
    return tree


def list_placeholders(tree: Any) -> list[TensorPlaceholder]:
    """Return the placeholders of a tree."""
    placeholders: list[TensorPlaceholder] = []
    fill_tensors(tree, lambda key, ref: placeholders.append(TensorPlaceholder(key, ref)))
    return placeholders


def keep_skipped(tree: Any, current: Any, skipped: Collection[str]) -> Any:
    """Return ``tree`` with the values of ``current`` for the names ``skipped``.

    Names are compared with the keys of dicts, at any depth.
    """
    if type(tree) not in DICT_TYPES or not isinstance(current, Mapping):
        return tree
    loaded = {key: keep_skipped(item, current.get(key), skipped) for key, item in tree.items() if key not in skipped}
    return type(tree)({**loaded, **{key: item for key, item in current.items() if key in skipped}})
