"""Mutated datasets of every format raise dtrain's own errors of one line."""

import json
import os

import numpy as np
import pytest
import torch

from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import DataError, DtrainError, ShardError
from mutations import mutate_bytes, mutate_json

SAMPLES = {
    "mds": [{"id": i, "text": "word " * i, "array": np.arange(i + 1, dtype=np.int16), "more": {"a": [i]}} for i in range(12)],
    "parquet": [{"id": i, "text": "word " * i, "tokens": list(range(i + 1))} for i in range(12)],
    "jsonl": [{"id": i, "text": "word " * i, "more": {"a": [i]}} for i in range(12)],
    "text": [{"text": "word " * i} for i in range(12)],
    "tar": [{"__key__": str(i), "txt": "word", "json": {"a": i}, "npy": np.arange(3)} for i in range(12)],
}
KINDS = [(form, None) for form in SAMPLES] + [("mds", name) for name in ("gz", "bz2", "zstd", "br", "snappy")]


def read_all(folder, cache, **options):
    """Open a dataset and read all of it. Errors are dtrain's, of one line that can be printed; returns the error."""
    try:
        dataset = ShardedDataset(folder, cache=cache, prefetch_shards=0, **options)
    except DtrainError as error:
        return checked(error)
    try:
        for index in range(min(len(dataset), 20)):
            try:
                dataset[index]
            except DtrainError as error:
                return checked(error)
        dataset.__getitems__(range(min(len(dataset), 3)))
        dataset.prefetch(torch.arange(min(len(dataset), 3)))
        dataset.fingerprint()
    except DtrainError as error:
        return checked(error)
    finally:
        dataset.close()
    return None


def checked(error):
    text = str(error)
    assert text.isprintable(), repr(text[:1000])
    assert len(text) < 3000, text[:1000]
    text.encode()
    return error


def sweep(tmp_path, form, compression, seeds):
    """Mutations of the index and of a shard, in turns. Returns the number of cases that were refused."""
    folder, cache, refused = tmp_path / "data", tmp_path / "cache", 0
    write_shards(SAMPLES[form], str(folder), format=form, compression=compression, max_shard_bytes=400, hashes=[])
    names = sorted(name for name in os.listdir(folder) if name != "index.json")
    sound = {name: (folder / name).read_bytes() for name in [*names, "index.json"]}
    for seed in seeds:
        listed = seed % 4 == 3  # without an index
        name = "index.json" if seed % 4 < 2 else names[seed // 4 % len(names)]
        mutate = mutate_json if seed % 4 == 0 else mutate_bytes
        mutation = mutate(sound[name], seed)
        try:
            (folder / name).write_bytes(mutation.data)
            if listed:
                (folder / "index.json").unlink()
            error = read_all(folder, cache)
        except Exception as error:
            raise AssertionError(f"{form}, {compression}: seed {seed}, {mutation.kind} of {name}") from error
        finally:
            for file in {name, "index.json"}:
                (folder / file).write_bytes(sound[file])
        refused += error is not None
    assert read_all(folder, cache) is None
    return refused


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore::UserWarning")  # of pillow and numpy, about strange values
@pytest.mark.parametrize(("form", "compression"), KINDS, ids=str)
def test_mutated_datasets_raise_own_errors_only(form, compression, tmp_path):
    assert sweep(tmp_path, form, compression, range(40)) > 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("form", "compression"), KINDS, ids=str)
def test_ten_thousand_mutated_datasets_raise_own_errors_only(form, compression, tmp_path):
    assert sweep(tmp_path, form, compression, range(1000, 2000)) > 200


def index_of(folder, change):
    """Return an index with a change in its first shard."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"][0])
    path.write_text(json.dumps(index))


CHANGES = [
    (lambda shard: shard["raw_data"].update(basename="a\ud800.mds"), r"is not in the dataset's folder"),
    (lambda shard: shard["raw_data"].update(basename="a" * 5000), r"is not in the dataset's folder"),
    (lambda shard: shard["raw_data"].update(hashes={"sha1": "\ud800"}), r"must be digests by algorithm"),
    (lambda shard: shard.update(samples=10**400), r"samples must be a count, got a number of 1329 bits"),
    (lambda shard: shard.update(samples=2**62), r"an impossible total of"),
    (lambda shard: shard["raw_data"].update(bytes=2**64), r"bytes must be a count, got a number of 65 bits"),
    (lambda shard: shard.update(format="\ud800"), r"format '\\ud800' is unknown"),
    (lambda shard: shard.update(version="\ud800\n"), r"version must be 2, got '\\ud800\\n'"),
    (lambda shard: shard.update(column_encodings=["ndarray:int8:" + "9" * 30] * 4), r"has .* bytes, but ndarray:int8"),
    (lambda shard: shard.update(column_names=["a\nb", "\ud800", "c", "d"], column_sizes=[7, 7, 7, 7]), r"column 'a\\nb'"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_impossible_index_is_refused_in_one_line(change, message, tmp_path):
    folder = tmp_path / "data"
    write_shards(SAMPLES["mds"], str(folder), format="mds", max_shard_bytes=400)
    index_of(folder, change)
    error = read_all(folder, tmp_path / "cache")
    assert isinstance(error, DataError)
    with pytest.raises(DataError, match=message):
        raise error


def test_unexpected_error_becomes_a_shard_error(tmp_path, monkeypatch):
    from dtrain.data.stream.formats.mds import MdsFormat

    def stumble(self, source, entry, options, **bounds):
        raise KeyError("a\nb\ud800")

    folder = tmp_path / "data"
    write_shards(SAMPLES["mds"], str(folder), format="mds", max_shard_bytes=400)
    monkeypatch.setattr(MdsFormat, "open", stumble)
    error = read_all(folder, tmp_path / "cache")
    assert isinstance(error, ShardError)
    assert "is damaged or missing: KeyError: 'a" in str(error)
