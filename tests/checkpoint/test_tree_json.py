"""Trees as JSON: exact both ways, refused by key path otherwise."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from dtrain.checkpoint import layout, tree_json
from dtrain.errors import ConfigError, CorruptCheckpointError

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.text("$a", max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("a$~/", max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(tree):
    values, tensors = tree_json.encode(tree, "x")
    values = layout.parse_json(json.dumps(values, allow_nan=False).encode(), "values")
    return tree_json.decode(values, "x", lambda key, ref: tensors[key])


@given(trees)
def test_tree_round_trips_exactly(tree):
    # repr distinguishes True from 1, -0.0 from 0.0, tuple from list, and shows NaN, and the order of keys
    assert repr(round_trip(tree)) == repr(tree)


def test_tensors_round_trip_by_path():
    tree = {"a/b": torch.ones(2), "a": {"b": (torch.zeros(3, dtype=torch.bfloat16),), "~": torch.tensor(1)}}
    _, tensors = tree_json.encode(tree, "extra/x")
    assert sorted(tensors) == ["extra/x/a/b/0", "extra/x/a/~0", "extra/x/a~1b"]
    back = round_trip(tree)
    assert back["a"]["b"][0] is tree["a"]["b"][0]
    assert tree_json.tensor_refs(tree_json.encode(tree, "x")[0], "x")["x/a/b/0"] == layout.TensorRef(
        dtype="BF16", shape=(3,), distributed=False
    )


def test_counters_and_ordered_dicts_keep_their_kind():
    tree = {"o": OrderedDict(b=Counter(x=3), a=torch.ones(2)), "c": Counter({5: 2}), "n": OrderedDict()}
    assert repr(round_trip(tree)) == repr(tree)
    values, tensors = tree_json.encode(tree, "x")
    filled = tree_json.fill_tensors(tree_json.decode_structure(values, "x"), lambda key, ref: tensors[key])
    assert repr(filled) == repr(tree)
    kept = tree_json.keep_skipped(filled, {"o": {"a": 7, "b": 8}}, ["a"])
    assert repr(kept["o"]) == repr(OrderedDict(b=Counter(x=3), a=7))


def test_numpy_floats_decode_as_floats():
    assert repr(round_trip({"f": np.float64(0.1)})) == "{'f': 0.1}"


class Color(IntEnum):
    RED = 1


def endless() -> list:
    tree: list = []
    tree.append(tree)
    return tree


REFUSED = {
    "object": ({"a": [object()]}, r"x/a/0: state must be .* got builtins.object"),
    "function": ({"f": len}, r"x/f: .* got builtins.builtin_function_or_method"),
    "set": ({"s": {1}}, r"x/s: .* got builtins.set"),
    "bytes": ([b""], r"x/0: .* got builtins.bytes"),
    "array": ({"n": np.zeros(1)}, r"x/n: .* got numpy.ndarray"),
    "numpy integer": ({"n": np.int64(1)}, r"x/n: .* got numpy.int64"),
    "enum": ({"e": Color.RED}, r"x/e: .* got .*Color"),
    "defaultdict": ({"d": defaultdict(int)}, r"x/d: .* got collections.defaultdict"),
    "subclass of a list": ([torch.Size([1])], r"x/0: .* got torch.Size"),
    "key": ({"k": {1.5: 0}}, r"x/k: keys must be strings or integers, got float 1.5"),
    "bool key": ({"k": {True: 0}}, r"x/k: keys must be strings or integers, got bool True"),
    "twin keys": ({"k": {1: 0, "1": 0}}, r"x/k: two keys have the same text"),
    "circle": (endless(), r"nested at most 64 deep and without cycles"),
    "huge integer": ({"i": 1 << 5000}, r"x/i: an integer must have at most 4096 bits, got 5001"),
    "complex tensor": (
        {"t": torch.zeros(1, dtype=torch.complex64)},
        r"x/t: a tensor must have a real dtype, got torch.complex64. Save torch.view_as_real\(tensor\)",
    ),
    "packed floats": (
        {"t": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        r"x/t: .* got torch.float4_e2m1fn_x2. Save its bytes, tensor.view\(torch.uint8\)",
    ),
    "jagged tensor": (
        {"t": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
        r"x/t: .* layout torch.jagged. Save tensor.values\(\) and tensor.offsets\(\)",
    ),
    "wrapper": ({"t": TwoTensor(torch.ones(2), torch.ones(2))}, r"x/t: .* got TwoTensor, which wraps other tensors"),
    "None key": ({"k": {None: 0}}, r"x/k: keys must be strings or integers, got NoneType None"),
    "sparse tensor": ({"t": torch.eye(2, device="cpu").to_sparse()}, r"x/t: .* layout torch.sparse_coo"),
    "meta tensor": ({"t": torch.empty(2, device="meta")}, r"x/t: .* device meta"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensor_is_refused_by_path():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(ConfigError, match=r"x/t: .* without a scale, got torch.quint8. Save tensor.dequantize\(\)"):
        tree_json.encode({"t": quantized}, "x")


@pytest.mark.parametrize(("tree", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_value_is_refused_by_path(tree, message):
    with pytest.raises(ConfigError, match=message):
        tree_json.encode(tree, "x")


DAMAGED = {
    "unknown tag": {"$": "pickle", "items": []},
    "tag of no text": {"$": [1], "items": []},
    "extra field": {"$": "tuple", "items": [], "more": 1},
    "tuple of no list": {"$": "tuple", "items": 3},
    "pairs": {"$": "dict", "items": [[1, 2, 3]]},
    "pairs of a Counter": {"$": "Counter", "items": {"a": 1}},
    "unknown dict": {"$": "defaultdict", "items": []},
    "pair with a list as key": {"$": "dict", "items": [[[], 2]]},
    "float": {"$": "float", "value": "0.5"},
    "float of no text": {"$": "float", "value": ["nan"]},
    "text without a kind": "$",
    "unknown kind of text": "$pickle",
    "dtype": "$tensor C64 []",
    "no dtype": "$tensor [1]",
    "no shape": "$tensor F32",
    "shape": "$tensor F32 [-1]",
    "shape of no whole number": "$tensor F32 [1.0]",
    "shape with a zero too many": "$tensor F32 [01]",
    "shape with other digits": "$tensor F32 [\u0661]",
    "shape of any length of a number": f"$tensor F32 [{'9' * 5000}]",
    "flag": "$dd tensor F32 [1]",
    "more": "$tensor F32 [1] ",
    "an escaped text without need": {"$": "str", "value": "a"},
    "an escaped text of no text": {"$": "str", "value": 1},
}


@pytest.mark.parametrize("values", DAMAGED.values(), ids=DAMAGED)
def test_invalid_encoded_values_are_refused(values):
    with pytest.raises(CorruptCheckpointError, match="values: x/0"):
        tree_json.decode([values], "x", lambda key, ref: None)


def test_deeply_nested_values_are_refused():
    values: list = []
    for _ in range(70):
        values = [values]
    with pytest.raises(CorruptCheckpointError, match="nested at most 64 deep"):
        tree_json.decode(values, "x", lambda key, ref: None)


BAD_JSON = {
    "nothing": (b"", "not valid JSON"),
    "twins": (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
    "nan": (b'{"a": NaN}', "NaN is not allowed"),
    "infinity": (b"[-Infinity]", "-Infinity is not allowed"),
    "depth": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "not text": (b'"\xff"', "not valid JSON"),
    "long integer": (b"1" * 5000, "not valid JSON"),
    "rest": (b"{} {}", "not valid JSON"),
}


@pytest.mark.parametrize(("data", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_invalid_json_is_refused(data, message):
    with pytest.raises(CorruptCheckpointError, match=f"file: .*{message}"):
        layout.parse_json(data, "file")


def test_oversized_json_is_refused(monkeypatch):
    monkeypatch.setattr(layout, "MAX_JSON_BYTES", 10)
    assert layout.parse_json(b"[1, 2, 3] ", "file") == [1, 2, 3]
    with pytest.raises(CorruptCheckpointError, match="file: JSON must be at most 10 bytes, got 11"):
        layout.parse_json(b"[1, 2, 3]  ", "file")


def test_floats_round_trip_exactly():
    tree = [0.1, 5e-324, 1.7976931348623157e308, -0.0, math.pi]
    assert [x.hex() for x in round_trip(tree)] == [x.hex() for x in tree]
