import copy
from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dtrain.data.batch import (
    FailedBatch,
    batch_spec,
    count_samples,
    count_samples_and_tokens,
    select_samples,
    split_batch,
    to_device,
)
from dtrain.dist.collective_replay import OpObserver
from dtrain.errors import ConfigError

Pair = namedtuple("Pair", "x y")


def rows(n: int) -> torch.Tensor:
    return torch.arange(n * 3).reshape(n, 3)


KINDS = {
    "tensor": rows(5),
    "dict": {"x": rows(5), "y": torch.arange(5)},
    "nested": {"x": {"a": rows(5)}, "ids": ["a", "b", "c", "d", "e"], "scale": 2.0},
    "tuple": (rows(5), torch.arange(5)),
    "list": [rows(5), torch.arange(5)],
    "namedtuple": Pair(rows(5), torch.arange(5)),
    "tensordict": TensorDict({"x": rows(5), "y": torch.arange(5)}, batch_size=[5]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_concatenated_split_equals_the_batch(kind):
    batch = KINDS[kind]
    parts = split_batch(batch, 2)
    assert [count_samples(piece) for piece in parts] == [2, 2, 1]
    assert all(type(piece) is type(batch) for piece in parts)

    def leaves(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict | TensorDict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else []

    for whole, *pieces in zip(leaves(batch), *map(leaves, parts), strict=True):
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_pick_of_all_samples_in_order_equals_the_batch(kind):
    batch = KINDS[kind]
    picked = select_samples(batch, torch.arange(5))
    assert type(picked) is type(batch)
    assert str(picked) == str(batch)


def test_pick_returns_samples_in_the_requested_order():
    picked = select_samples(KINDS["nested"], torch.tensor([4, 0]))
    assert picked["x"]["a"].tolist() == [[12, 13, 14], [0, 1, 2]]
    assert (picked["ids"], picked["scale"]) == (["e", "a"], 2.0)
    assert select_samples(KINDS["tensordict"], torch.tensor([4, 0]))["y"].tolist() == [4, 0]


def test_pick_uses_the_batch_axis_of_the_spec():
    batch = {"ids": torch.arange(12).reshape(3, 4), "label": torch.arange(4), "name": "whole"}
    picked = select_samples(batch, torch.tensor([3, 1]), SPEC)
    assert (picked["ids"].tolist(), picked["label"].tolist()) == ([[3, 1], [7, 5], [11, 9]], [3, 1])
    assert picked["name"] == "whole"
    of_tensordict = select_samples(
        TensorDict({"ids": batch["ids"], "label": batch["label"]}, batch_size=[]), torch.tensor([3]), SPEC
    )
    assert (of_tensordict["ids"].shape, of_tensordict["label"].tolist()) == ((3, 1), [3])


def test_split_divides_per_sample_sequences_and_copies_other_values():
    parts = split_batch(KINDS["nested"], 2)
    assert [piece["ids"] for piece in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert [piece["scale"] for piece in parts] == [2.0, 2.0, 2.0]


@dataclass(slots=True)
class Boxes:
    corners: Any


UNCUT = {
    "an array": np.ones(5),
    "a record of tensors": Boxes(torch.ones(5)),
    "a record of records": Boxes([Boxes(np.ones((2, 4)))]),
    "an object": SimpleNamespace(weight=torch.ones(5)),
    "a deque": deque("abcde"),
    "two arrays": [np.ones(5), np.ones(5)],
}


@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("cut", [lambda batch: split_batch(batch, 2), lambda batch: select_samples(batch, torch.tensor([1]))])
def test_values_that_may_have_rows_are_refused_if_they_cannot_be_cut(kind, cut):
    name = type(UNCUT[kind]).__name__
    with pytest.raises(
        ConfigError, match=rf"batch\['y'\]\['e'\] must be a tensor to be split with the 5 samples, got {name}\."
    ):
        cut({"x": rows(5), "y": {"e": UNCUT[kind]}})


def test_values_without_rows_are_shared():
    others = {"scale": 2.0, "name": "abcde", "size": (32, 32), "none": None, "box": Boxes(1.0), "fn": rows, "one": np.ones(())}
    parts = split_batch({"x": rows(5), **others}, 2)
    assert [{key: part[key] for key in others} for part in parts] == [others] * 3
    # One microbatch has all rows.
    assert len(split_batch({"x": rows(5), "e": UNCUT["an array"]}, 5)) == 1


@pytest.mark.parametrize("kind", ["tensor", "dict", "tuple", "list"])
def test_flat_batch_is_split_with_one_call_per_tensor(kind):
    calls = []
    with OpObserver(lambda func, args, kwargs: calls.append(str(func))):
        assert len(split_batch(KINDS[kind], 2)) == 3
    assert calls == ["aten.split_with_sizes.default"] * (1 if kind == "tensor" else 2)


def test_split_returns_views():
    batch = {"x": rows(4)}
    split_batch(batch, 2)[1]["x"][0, 0] = -1
    assert batch["x"][2, 0] == -1


def test_tensordict_parts_keep_a_batch_size():
    assert [tuple(piece.batch_size) for piece in split_batch(KINDS["tensordict"], 2)] == [(2,), (2,), (1,)]


def test_empty_batch_has_no_parts():
    assert split_batch({"x": rows(0)}, 2) == []


def test_to_device_does_not_copy_tensors_on_the_device():
    batch = {"x": rows(2), "name": "n"}
    moved = to_device(batch, torch.device("cpu"))
    assert moved["x"] is batch["x"]
    assert moved["name"] == "n"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": rows(4), "y": rows(5)}, r"batch\['x'\]\[4, 3\], batch\['y'\]\[5, 3\]"),
        ("text", "found no tensor to split in a str"),
        ({"scale": torch.tensor(1.0)}, "found no tensor to split in a dict"),
    ],
)
def test_count_samples_refuses_invalid_batches(batch, message):
    with pytest.raises(ConfigError, match=message):
        count_samples(batch)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_split_refuses_an_invalid_microbatch_size(size):
    with pytest.raises(ConfigError, match="split_batch: microbatch_size must be an integer of at least 1, got"):
        split_batch({"x": rows(4)}, size)


SPEC = batch_spec({"ids": "seq batch", "label": "batch"})


def test_spec_supports_any_batch_axis():
    batch = {"ids": torch.arange(12).reshape(3, 4), "label": torch.arange(4), "mask": torch.ones(7)}
    assert count_samples_and_tokens(batch, SPEC) == (4, 12)
    parts = split_batch(batch, 3, batch_spec=SPEC)
    assert [piece["label"].tolist() for piece in parts] == [[0, 1, 2], [3]]
    assert torch.equal(torch.cat([piece["ids"] for piece in parts], dim=1), batch["ids"])
    assert all(piece["mask"] is batch["mask"] for piece in parts)


def test_spec_works_on_a_tensordict():
    batch = TensorDict({"ids": torch.zeros(3, 4), "label": torch.zeros(4)}, batch_size=[])
    assert count_samples_and_tokens(batch, SPEC) == (4, 12)
    assert [piece["ids"].shape for piece in split_batch(batch, 3, batch_spec=SPEC)] == [(3, 3), (3, 1)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.zeros(3, 4)}, "has no 'label', only .*ids"),
        ({"ids": torch.zeros(3), "label": torch.zeros(4)}, r"'ids' must be \[seq, batch\], got shape \(3,\)"),
        ({"ids": torch.zeros(3, 4), "label": torch.zeros(5)}, "axis 'batch' is 4 in 'ids' but 5 in 'label'"),
        (torch.zeros(3), "needs a mapping of tensors, got a Tensor"),
    ],
)
def test_spec_count_error_describes_the_mismatch(batch, message):
    with pytest.raises(ConfigError, match=message):
        count_samples_and_tokens(batch, SPEC)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"x": "seq dim"}, "no tensor has an axis called 'batch'"),
        ({"x": "batch batch"}, "axes must be different names"),
        ({"x": "batch 3d"}, "axes must be different names"),
    ],
)
def test_spec_refuses_invalid_axes(axes, message):
    with pytest.raises(ConfigError, match=message):
        batch_spec(axes)


def test_failed_batch_names_its_error_when_it_is_used_as_a_tensor():
    failed = FailedBatch(ValueError("row 3 is damaged"))
    with pytest.raises(AttributeError, match="this batch has no 'tolist', because it failed: row 3 is damaged") as caught:
        failed.tolist()
    assert caught.value.__cause__ is failed.error
    assert not hasattr(failed, "to")
    assert copy.copy(failed).error is failed.error
