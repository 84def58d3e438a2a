"""Pieces: in order, none left out, none too large."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dtrain.checkpoint.index import shard_kind
from dtrain.checkpoint.layout import DTYPES, TensorRef
from dtrain.checkpoint.plan import full_region, group_by_size
from dtrain.checkpoint.weights import (
    TensorFiles,
    batch_regions,
    nbytes,
    open_safetensors,
    read_batch,
    rename_tensors,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
REFS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.builds(TensorRef, dtype=st.sampled_from(["F32", "I64", "U8"]), shape=SHAPES, distributed=st.just(False)),
    max_size=6,
)


@given(refs=REFS, limit=st.integers(1, 200))
def test_batch_regions_yields_every_row_within_limit(refs, limit):
    rows = {name: [] for name in refs}
    order = []
    for batch in batch_regions(refs, refs, limit=limit):
        size = 0
        for name, region in batch.items():
            order.append(name)
            assert region.size[1:] == refs[name].shape[1:]
            assert not any(region.offset[1:])
            rows[name] += range(region.offset[0], region.offset[0] + region.size[0]) if region.size else [0]
            size += prod(region.size) * DTYPES[refs[name].dtype].itemsize
        one_row = len(batch) == 1 and (not region.size or region.size[0] == 1)
        assert size <= limit or one_row
    assert list(dict.fromkeys(order)) == list(refs)
    assert order == sorted(order, key=list(refs).index)
    assert rows == {name: list(range(ref.shape[0])) if ref.shape else [0] for name, ref in refs.items()}


GROUPS = {
    "all fit": ((3, 3, 4), [["0", "1", "2"]]),
    "one more than fits": ((3, 3, 5), [["0", "1"], ["2"]]),
    "larger than a group may be": ((1, 30, 1), [["0"], ["1"], ["2"]]),
    "empty ones": ((0, 10, 0), [["0", "1", "2"]]),
    "none": ((), []),
}


@pytest.mark.parametrize(("sizes", "expected"), GROUPS.values(), ids=GROUPS)
def test_group_by_size_fills_groups_in_order(sizes, expected):
    assert list(group_by_size({str(number): size for number, size in enumerate(sizes)}, limit=10)) == expected


@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_read_batch_returns_stored_values_for_any_limit(tmp_path, limit):
    tensors = {
        "a": torch.randn(7, 3),
        "b": torch.randn(2, 3, 4).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(5),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    stored = open_safetensors(tmp_path / "x.safetensors")
    pieces = {name: [] for name in tensors}
    for batch in batch_regions(stored.refs, tensors, limit=limit):
        for name, tensor in read_batch(stored, batch).items():
            pieces[name].append(tensor)
    for name, tensor in tensors.items():
        together = torch.cat(pieces[name]) if tensor.dim() else pieces[name][0]
        assert together.dtype == tensor.dtype
        assert torch.equal(together, tensor), name
        assert nbytes(stored.refs[name]) == tensor.nbytes


def test_read_batch_cast_equals_tensor_to_dtype(tmp_path):
    tensor = torch.randn(50, 3)
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    stored = open_safetensors(tmp_path / "x.safetensors")
    pieces = [read_batch(stored, batch, {"a": "BF16"})["a"] for batch in batch_regions(stored.refs, ["a"], limit=100)]
    assert len(pieces) > 1
    assert torch.equal(torch.cat(pieces), tensor.to(torch.bfloat16))


@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_read_batch_joins_columns_of_several_files(tmp_path, limit):
    """As tensor parallelism stores them."""
    whole = torch.randn(7, 6)
    halves = []
    for index, columns in enumerate((whole[:, :4], whole[:, 4:])):
        save_file({"x": columns.contiguous()}, tmp_path / f"{index}.safetensors")
        halves.append(open_safetensors(tmp_path / f"{index}.safetensors"))
    boxes = []
    for file, half in enumerate(halves):
        (shard,) = half.find_shards({"x": full_region(half.refs["x"].shape)})["x"]
        boxes.append(shard._replace(file=file, kind=shard_kind("F32", (7, 6), (0, 4 * file), shard.kind.size)))
    ref = TensorRef(dtype="F32", shape=(7, 6), distributed=True)
    stored = TensorFiles(
        content_hash="",
        refs={"x": ref},
        keys={"x": "x"},
        find_shards=lambda regions: {"x": boxes},
        open_file=lambda number: halves[number].open_file(0),
    )
    pieces = [read_batch(stored, batch)["x"] for batch in batch_regions(stored.refs, ["x"], limit=limit)]
    assert len(pieces) == {1: 7, 60: 4, 10_000: 1}[limit]
    assert torch.equal(torch.cat(pieces), whole)


def test_tied_names_are_read_once(tmp_path):
    save_file({"a": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    stored = rename_tensors(open_safetensors(tmp_path / "x.safetensors"), {"first": "a", "second": "a", "b": "b"})
    (batch,) = batch_regions(stored.refs, stored.refs)
    tensors = read_batch(stored, batch)
    assert torch.equal(tensors["first"], torch.arange(6.0))
    assert tensors["second"].data_ptr() == tensors["first"].data_ptr()
    assert torch.equal(tensors["b"], torch.ones(2))
