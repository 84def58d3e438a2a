"""Datasets of other libraries: Hugging Face's, and MosaicML's with an order and a state of its own."""

import contextlib
import tempfile
from itertools import chain

import datasets
import pytest
import torch
from tensordict import TensorDict

import dtrain as dt
from places.mosaicml import MDSWriter, StreamingDataset, released
from samples import build


def hugging_face(size: int = 10) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"id": list(range(size)), "x": [[float(number)] * 3 for number in range(size)]})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hugging_face_dataset_gives_tensordicts(workers):
    batches = list(build(hugging_face(), num_workers=workers).until("1ep"))
    assert all(isinstance(batch, TensorDict) for batch in batches)
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(10))
    assert batches[0]["x"].shape == (4, 3)


def test_hugging_face_dataset_keeps_a_set_format():
    batch = next(build(hugging_face().with_format("numpy", columns=["x"])).until(1))
    assert list(batch.keys()) == ["x"]


def test_hugging_face_resume_refuses_a_different_dataset():
    state = build(hugging_face()).state_dict()
    other = hugging_face().rename_column("x", "y")
    with pytest.raises(dt.errors.CheckpointMismatchError, match="the dataset differs from the dataset of the checkpoint"):
        build(other).load_state_dict(state)


def test_hugging_face_stream_resumes_at_its_position():
    stream = hugging_face(23).to_iterable_dataset(num_shards=3)
    whole = [batch["id"].tolist() for batch in build(stream).until("2ep")]
    first = build(hugging_face(23).to_iterable_dataset(num_shards=3), num_workers=1)
    head = [batch["id"].tolist() for batch in first.until(3)]
    parts = []
    for rank in range(2):
        second = build(hugging_face(23).to_iterable_dataset(num_shards=3), rank, 2)
        second.load_state_dict(first.state_dict())
        parts.append([batch["id"].tolist() for batch in second.until("2ep")])
    assert head + [one + two for one, two in zip(*parts, strict=True)] == whole
    assert sorted(chain.from_iterable(whole)) == sorted([*range(23)] * 2)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a StreamingDataset leaves its locks
    with MDSWriter(out=str(tmp_path / "mds"), columns={"id": "int", "x": "ndarray:float32:2"}, size_limit=512) as out:
        for number in range(48):
            out.write({"id": number, "x": torch.full((2,), float(number)).numpy()})
    with released():
        yield str(tmp_path / "mds")


def mosaic(shards: str, batch_size: int, **options) -> StreamingDataset:
    return StreamingDataset(local=shards, batch_size=batch_size, num_canonical_nodes=1, shuffle=True, shuffle_seed=3, **options)


def ids_of(batches) -> list[int]:
    return list(chain.from_iterable(batch["id"].tolist() for batch in batches))


@pytest.mark.costly
@pytest.mark.parametrize("workers", [0, 2])
def test_a_streaming_dataset_keeps_its_order_and_its_state(shards, workers):
    dataset = mosaic(shards, 4)
    plain = [sample["id"] for _ in range(2) for sample in dataset]
    first = build(mosaic(shards, 4), num_workers=workers)
    head = ids_of(first.until(5))
    state = first.state_dict()
    second = build(mosaic(shards, 4), num_workers=workers)
    second.load_state_dict(state)
    assert head + ids_of(second.until("2ep")) == plain


def test_a_streaming_dataset_resumes_at_the_start_of_an_epoch(shards):
    dataset = mosaic(shards, 4)
    plain = [sample["id"] for _ in range(2) for sample in dataset]
    first = build(mosaic(shards, 4))
    head = ids_of(first.until("1ep"))
    second = build(mosaic(shards, 4))
    second.load_state_dict(first.state_dict())
    assert head + ids_of(second.until("2ep")) == plain


@pytest.mark.costly
@pytest.mark.parametrize("workers", [0, 1])
def test_streaming_dataset_repeats_the_batch_of_an_interrupted_step(shards, workers):
    dataset = mosaic(shards, 4)
    plain = [sample["id"] for _ in range(2) for sample in dataset]
    model, left, seen = torch.nn.Linear(2, 1), [0, 0, 5, 11, 12, 12, 23], []

    def mean(model, batch):
        if len(seen) in left:
            left.remove(len(seen))
            raise KeyboardInterrupt
        return model(batch["x"]).square().mean()

    step = dt.compose_step(dt.mean_loss(mean, weight=lambda batch: len(batch["id"])))
    state, loader = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0)), build(mosaic(shards, 4), num_workers=workers)
    while len(seen) < 24:
        with contextlib.suppress(KeyboardInterrupt):
            for batch in loader.until("2ep"):
                state, _ = step(state, batch)
                seen.append(batch["id"].tolist())
    assert not left
    assert list(chain.from_iterable(seen)) == plain


def test_streaming_dataset_with_a_different_batch_size_is_refused(shards):
    with pytest.raises(
        dt.errors.ConfigError,
        match="must have batch_size=8, so that 1 ranks make global_batch_size=8, got batch_size=4",
    ):
        build(mosaic(shards, 4), global_batch_size=8)
