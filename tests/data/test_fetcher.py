"""Samples to batches: default batches, errors of samples that do not fit, transforms, and skipped samples."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import TensorDataset, default_collate

import dtrain as dt
from dtrain.data.batch import list_tensors
from dtrain.data.dataset import ColumnDataset
from dtrain.data.fetcher import collate
from samples import Numbers, Troubled, build, fail


def test_mappings_of_tensors_become_a_tensordict():
    batch = collate(
        [
            {"x": torch.ones(2) * number, "y": number, "z": np.ones(3), "more": {"w": torch.tensor(number)}}
            for number in range(3)
        ]
    )
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([3])
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["y"].tolist() == [0, 1, 2]
    assert batch["z"].dtype == torch.float64
    assert batch["more", "w"].tolist() == [0, 1, 2]


def test_mappings_with_strings_stay_mappings():
    batch = collate([{"x": torch.zeros(2), "name": f"sample {number}"} for number in range(2)])
    assert type(batch) is dict
    assert batch["name"] == ["sample 0", "sample 1"]
    assert batch["x"].shape == (2, 2)


VALUES = {
    "float32": lambda number: torch.full((2, 3), float(number)),
    "float16": lambda number: torch.tensor(number, dtype=torch.float16),
    "scalars": lambda number: torch.tensor(number),
    "bool tensors": lambda number: torch.tensor([number > 1]),
    "complex": lambda number: torch.tensor([complex(number, 1)]),
    "views": lambda number: torch.arange(12).view(3, 4).t()[number],
    "int": lambda number: number,
    "float": lambda number: number / 2,
    "bool": lambda number: number > 1,
    "array": lambda number: np.full(2, number, np.float32),
    "NumPy scalar": np.int16,
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_mappings_are_stacked_as_by_torch(name, kind):
    samples = [kind(x=VALUES[name](number), more=kind(y=VALUES[name](2 - number))) for number in range(3)]
    batch, expected = collate(samples), default_collate(samples)
    assert isinstance(batch, TensorDict)
    for stacked, wanted in ((batch["x"], expected["x"]), (batch["more", "y"], expected["more"]["y"])):
        assert (stacked.dtype, stacked.shape, stacked.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())
        assert stacked.is_contiguous()


def test_gradients_pass_through_stacked_values():
    weight = torch.ones((), requires_grad=True)
    assert collate([{"x": weight * number} for number in range(3)])["x"].sum().backward() is None
    assert weight.grad.item() == 3


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.zeros(1), {"x": 1}], "samples must have one type, got Tensor and dict in one batch"),
        ([{"x": 1}, {"x": 1, "y": 2}], "only some samples of a batch have 'y'. Give all samples the same keys"),
        ([{"x": 1, "y": 2}, {"x": 1}], "only some samples of a batch have 'y'. Give all samples the same keys"),
        ([{"a": {"x": 1}}, {"a": {"x": 1, "z": 1}}], "only some samples of a batch have 'a'.'z'"),
        ([{"x": torch.zeros(2)}, {"x": 1}], r"'x' is \(2,\) and int in one batch"),
        ([{"a": {"x": 1}}, {"a": {"z": 1}}], "only some samples of a batch have 'a'.'x'"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], r"'x' is \(2,\) and \(3,\) in one batch. Pad or cut to one shape"),
        (
            [TensorDict({"x": torch.zeros(n)}, batch_size=[n]) for n in (2, 3)],
            r"'x' is \(2,\) and \(3,\) in one batch. Pad or cut",
        ),
        ([{"x": np.zeros(2)}, {"x": 1}], r"'x' is \(2,\) and int in one batch"),
        ([torch.zeros(2), torch.zeros(3)], "cannot stack samples of type Tensor .*. Pass collate="),
        ([object(), object()], "cannot stack samples of type object .*. Pass collate="),
    ],
)
def test_samples_with_incompatible_shapes_are_refused(samples, message):
    with pytest.raises(dt.errors.DataError, match=message) as caught:
        collate(samples)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [torch.arange(10), TensorDict({"x": torch.arange(10)}, batch_size=[10])], ids=["tensor", "dict"]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_and_tensordicts_are_indexed_by_a_tensor(data, workers):
    batches = list(build(data, num_workers=workers).until("1ep"))
    assert [type(batch) for batch in batches] == [type(data)] * 3
    values = torch.cat([batch if isinstance(batch, torch.Tensor) else batch["x"] for batch in batches])
    assert values.tolist() == list(range(10))


X, Y = torch.randn(10, 3), torch.arange(10)
COLUMNS = {
    "TensorDataset": TensorDataset(X, Y),
    "tuple": (X, Y),
    "tuple with an array": (X.numpy(), Y),
    "array": X.numpy(),
    "array of scalars": Y.to(torch.int16).numpy(),
    "read-only array": np.broadcast_to(np.float32(1.5), (10, 2)),
    "reversed array": X.numpy()[::-1],
    "dict": {"x": X, "y": Y},
    "dict with an array": {"x": X.numpy(), "y": Y},
}


def by_sample(samples):
    """Collate; torch would warn of read-only arrays."""
    return collate([sample.copy() if isinstance(sample, np.ndarray) else sample for sample in samples])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", COLUMNS)
def test_batches_of_columns_equal_collated_samples(name, rank):
    read, collated = (
        list(build(COLUMNS[name], rank=rank, ranks=3, shuffle=True, collate=given).until("2ep")) for given in (None, by_sample)
    )
    for batch, expected in zip(read, collated, strict=True):
        assert type(batch) is type(expected)
        leaves, others = list_tensors(batch), list_tensors(expected)
        assert [(leaf.dtype, leaf.tolist()) for leaf in leaves] == [(leaf.dtype, leaf.tolist()) for leaf in others]
    assert not any(leaf.data_ptr() in (X.data_ptr(), Y.data_ptr()) for batch in read for leaf in list_tensors(batch))


def test_batches_of_columns_read_no_single_sample(monkeypatch):
    monkeypatch.setattr(ColumnDataset, "__getitem__", fail)
    assert sorted(torch.cat([y for _, y in build(TensorDataset(X, Y)).until("1ep")]).tolist()) == list(range(10))


def test_subclass_of_tensordataset_is_read_by_its_own_method():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    assert torch.cat([y for _, y in build(Doubled(X, Y)).until("1ep")]).tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("data", [np.array(["a", "b", "c", "d"]), np.array([{}, {}, {}, {}])], ids=["text", "objects"])
def test_arrays_that_are_no_numbers_are_read_by_sample(data):
    assert [len(batch) for batch in build(data, collate=list).until("1ep")] == [4]


def test_transform_receives_rows_of_an_array_as_arrays():
    kinds = set()
    list(build(X.numpy(), transform=lambda sample, _: kinds.add(type(sample)) or sample).until("1ep"))
    assert kinds == {np.ndarray}


def test_unreadable_sample_does_not_change_the_random_numbers_of_the_others():
    whole, damaged = (
        torch.cat(list(build(data, transform=noisy, on_error="skip").until("2ep"))).tolist()
        for data in (Numbers(10), Troubled(10, 5, fail))
    )
    assert damaged == [value for value in whole if int(value) != 5]


def test_custom_collate_receives_single_samples_of_a_tensor():
    assert [len(batch) for batch in build(torch.arange(6), collate=lambda samples: samples).until("1ep")] == [4, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_samples_are_skipped_and_listed(workers):
    loader = build(Troubled(10, 5, fail), on_error="skip", num_workers=workers)
    assert [batch.tolist() for batch in loader.until("1ep")] == [[0, 1, 2, 3], [4, 6, 7], [8, 9]]
    assert loader.skipped.count == 1
    assert loader.skipped.samples == [(5, "ValueError: cannot be decoded: no such codec")]


def test_batch_of_only_unreadable_samples_is_empty():
    loader = build(Troubled(10, 5, fail), rank=1, ranks=4, on_error="skip")
    assert [batch.tolist() for batch in loader.until("1ep")] == [[1], [], [9]]


def test_first_batch_of_only_unreadable_samples_is_refused():
    loader = build(Troubled(10, 0, fail), ranks=4, on_error="skip")
    with pytest.raises(
        dt.errors.DataError, match="none of the 1 samples of the first batch could be read: sample 0: ValueError"
    ):
        next(loader.until("1ep"))


def test_only_the_first_thousand_unreadable_samples_are_listed():
    loader = build(Troubled(10, 5, fail))
    loader.skipped.add([(index, "bad") for index in range(700)])
    loader.skipped.add([(index, "bad") for index in range(700)])
    assert (loader.skipped.count, len(loader.skipped.samples)) == (1400, 1000)


def noisy(sample, generator):
    return sample + torch.rand((), generator=generator)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"rank": 1, "ranks": 2}, {"global_batch_size": 3}], ids=str)
def test_transform_randomness_depends_on_sample_and_epoch_only(options):
    def values(**options):
        batches = torch.cat(list(build(Numbers(12), transform=noisy, shuffle=True, **options).until("2ep")))
        return {round(float(value), 6) for value in batches}

    assert values(**options) <= values()
    assert len(values()) == 24


def test_pad_repeats_the_first_samples_of_the_epoch():
    assert [batch.tolist() for batch in build(Numbers(6), last_batch="pad").until("1ep")] == [[0, 1, 2, 3], [4, 5, 0, 1]]
    assert [batch.tolist() for batch in build(Numbers(3), last_batch="pad", global_batch_size=8).until("1ep")] == [
        [0, 1, 2, 0, 1, 2, 0, 1]
    ]
    assert [len(batch) for batch in build(Numbers(6), last_batch="pad", rank=1, ranks=3).until("1ep")] == [1, 1]


@pytest.mark.parametrize("last_batch", ["short", "drop", "pad"])
def test_one_epoch_has_every_sample_exactly_once(last_batch):
    loader = build(Numbers(10), last_batch=last_batch)
    assert sorted(torch.cat(list(loader.one_epoch())).tolist()) == list(range(10))


def test_skip_omits_a_range_of_samples():
    loader = build(Numbers(10))
    loader.skip(3)
    assert [batch.tolist() for batch in loader.until("2ep")] == [[3, 4, 5, 6], [7, 8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (loader.position.batches, loader.position.total) == (5, 17)


def test_skip_in_the_loop_body_continues_after_the_range():
    loader, seen = build(Numbers(20), num_workers=1), []
    for batch in loader.until("1ep"):
        seen.append(batch.tolist())
        if len(seen) == 2:
            loader.skip(6)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [14, 15, 16, 17], [18, 19]]


def test_skip_crosses_epochs():
    loader = build(Numbers(10))
    loader.skip(23)
    assert (loader.position.epoch, loader.position.samples) == (2, 3)


@pytest.mark.parametrize("samples", [-1, 1.5, True, "3"])
def test_skip_refuses_invalid_counts(samples):
    with pytest.raises(dt.errors.ConfigError, match="samples must be an integer of at least 0"):
        build(Numbers(10)).skip(samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "the saved position has format version 2, this release reads 1"),
        ({"version": None}, "format version None"),
        ({"samples": "3"}, "'samples' of the saved position must be an integer, got '3'"),
        ({"data": 7}, "the dataset differs from the dataset of the checkpoint"),
    ],
)
def test_load_state_dict_refuses_invalid_states(change, message):
    state = build(Numbers(10)).state_dict()
    with pytest.raises(dt.errors.CheckpointMismatchError, match=message):
        build(Numbers(10)).load_state_dict({**state, **change})
