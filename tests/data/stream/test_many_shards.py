"""Costs of a dataset with very many shards: bytes per shard, and the processes that read the index."""

import json
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.data.sample_order import BlockShuffle, shuffle_quality
from dtrain.data.stream import shard_index
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.errors import DataError
from dtrain.testing.fault_injection import inject_fault
from mutations import flip_bits
from places.shards import written

SAMPLES = 4  # of a shard
FORMATS = {"mds": {"column_names": ["a"], "column_encodings": ["int"], "column_sizes": [8]}, "jsonl": {}, "tar": {}}
MiB = 2**20


def entry(number: int, form: str, packed: bool) -> dict[str, object]:
    def info(suffix: str) -> dict[str, object]:
        digests = {"sha1": f"{number * 7919:040x}", "xxh64": f"{number * 104729:016x}"}
        return {"basename": f"shard.{number:07}.{form}{suffix}", "bytes": 60 + number, "hashes": digests}

    compression = {"compression": "zstd:3", "zip_data": info(".zstd")} if packed else {"compression": None, "zip_data": None}
    return {**FORMATS[form], **compression, "format": form, "raw_data": info(""), "samples": SAMPLES, "version": 2}


def make_index(folder: Path, count: int, form: str = "mds", *, packed: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / "index.json", "w") as file:
        file.write('{"shards": [')
        for number in range(count):
            file.write((", " if number else "") + json.dumps(entry(number, form, packed), sort_keys=True))
        file.write('], "version": 2}')


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the maximum of bytes of Python and NumPy above the bytes before ``run``. Mapped files are not counted."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    """Count the calls of a function."""
    calls: list[object] = []
    original = getattr(module, name)

    def call(*args: object, **options: object) -> object:
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(module, name, call)
    return calls


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index is large enough to be shared."""
    monkeypatch.setattr(shard_index, "_SHARED_INDEX_BYTES", 0)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("count", "form", "packed"),
    [
        pytest.param(20_000, "mds", False, id="20,000"),
        *(pytest.param(20_000, form, True, id=f"20,000 {form} zstd") for form in FORMATS),
        *(
            pytest.param(1_000_000, form, packed, marks=pytest.mark.slow, id=f"1,000,000 {form}{' zstd' if packed else ''}")
            for form, packed in (("mds", False), ("mds", True), ("jsonl", False), ("tar", True))
        ),
    ],
)
def test_costs_of_a_shard_are_bounded(tmp_path, opened, monkeypatch, count, form, packed):
    make_index(tmp_path / "small", 1, form, packed=packed)
    opened(tmp_path / "small")  # imports the modules of the format
    make_index(tmp_path / "data", count, form, packed=packed)
    built = counted(monkeypatch, shard_index, "read_index")
    datasets: list[ShardedDataset] = []

    def open_again() -> None:
        datasets.append(opened(tmp_path / "data"))

    first = peak_bytes(open_again)
    # The text, and at most as much again: the entries are not in memory at the same time.
    assert first <= 8 * MiB + 2 * (tmp_path / "data" / "index.json").stat().st_size
    # The other processes of the node.
    assert peak_bytes(open_again) <= MiB
    assert len(built) == 1
    (table,) = (tmp_path / "cache").glob("*.shards")
    assert table.stat().st_size <= MiB + (140 if packed else 90) * count

    one, other = datasets
    assert (
        one.entries[count - 1]
        == other.entries[count - 1]
        == shard_index.read_index(json.dumps({"version": 2, "shards": [entry(count - 1, form, packed)]}).encode())[0]
    )
    assert (len(other), other.shard_sizes[count // 2]) == (SAMPLES * count, SAMPLES)
    assert one.fingerprint() == other.fingerprint()
    # The order of an epoch, a resume in the middle, and the next epoch.
    order = other.order(0, shuffle=True)
    assert peak_bytes(lambda: order.indices(0, 0, 1000)) <= MiB + 90 * count
    half = order.size // 2
    assert order.indices(0, half, half + 50).equal(other.order(0, shuffle=True).indices(0, half - 50, half + 100)[50:100])
    assert peak_bytes(lambda: other.prefetch(order.indices(1, 0, 1000))) <= MiB + 90 * count


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_quality_of_a_shuffle_does_not_depend_on_the_number_of_shards(tmp_path, opened, count):
    make_index(tmp_path / "data", count)
    dataset = opened(tmp_path / "data")
    options = BlockShuffle(block_size=4, streams=8)
    quality = shuffle_quality(dataset.order(3, options), dataset.shard_sizes, batch_size=256)
    assert quality.displacement == pytest.approx(1, abs=0.05)
    assert abs(quality.adjacent_correlation) < 0.05
    # A batch has 32 samples of each stream, from three windows of 16 samples at most.
    assert quality.shards_per_batch >= 8 * 2 * 4 / 256


def test_threads_that_open_at_once_build_one_table(tmp_path, shared, monkeypatch):
    folder = written(tmp_path / "data", limit=4000)
    built = counted(monkeypatch, shard_index, "read_index")
    sizes, barrier = [], threading.Barrier(4)

    def open_dataset() -> None:
        barrier.wait()
        dataset = ShardedDataset(folder, cache=tmp_path / "cache")
        sizes.append((len(dataset), dataset[99]["id"]))
        dataset.close()

    threads = [threading.Thread(target=open_dataset) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [(100, 99)] * 4
    assert len(built) == 1


def test_new_index_is_read_again(tmp_path, shared, opened):
    folder = written(tmp_path / "data", limit=4000)
    first = opened(folder)
    for file in folder.iterdir():
        file.unlink()
    written(folder, 50, limit=4000)
    assert (len(first), len(opened(folder))) == (100, 50)


def damage(path: Path) -> None:
    flip_bits(path, -200)


@pytest.mark.parametrize("harm", [damage, lambda path: path.write_bytes(b"dtrain"), Path.unlink], ids=["bit", "short", "none"])
def test_damaged_table_is_built_again(tmp_path, shared, opened, harm):
    folder = written(tmp_path / "data", limit=4000)
    expected = list(opened(folder).entries)
    (table,) = (tmp_path / "cache").glob("*.shards")
    harm(table)
    assert list(opened(folder).entries) == expected
    assert list(opened(folder).entries) == expected


def test_full_disk_leaves_no_file_and_the_index_is_read(tmp_path, shared, opened):
    folder = written(tmp_path / "data", limit=4000)
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="dtrain.storage.local.os.write", error=full) as fault:
        dataset = opened(folder)
    assert fault.fired
    assert dataset[99]["id"] == 99
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_cache_that_cannot_be_made_is_not_needed_for_local_shards(tmp_path, shared):
    folder = written(tmp_path / "data", limit=4000)
    (tmp_path / "file").write_bytes(b"")
    dataset = ShardedDataset(folder, cache=tmp_path / "file" / "cache")
    assert dataset[99]["id"] == 99


@pytest.fixture
def not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.data.stream.sharded_dataset._MAX_PICKLED_SHARDS", 0)


def test_pickled_dataset_finds_the_table_of_many_shards(tmp_path, shared, opened, not_pickled):
    folder = written(tmp_path / "data", limit=4000)
    dataset = opened(folder)
    content = pickle.dumps(dataset)
    assert len(content) < 2000
    copy = pickle.loads(content)
    assert list(copy.entries) == list(dataset.entries)
    assert copy[99]["id"] == 99
    copy.close()


def test_pickled_dataset_of_other_shards_is_refused(tmp_path, shared, opened, not_pickled):
    folder = written(tmp_path / "data", limit=4000)
    content = pickle.dumps(opened(folder))
    for file in folder.iterdir():
        file.unlink()
    written(folder, 50, limit=4000)
    with pytest.raises(DataError, match=r"the shards have changed since the dataset was opened\. Start the job again"):
        pickle.loads(content)


def test_index_on_a_server_is_downloaded_once(on_s3, tmp_path, shared, opened):
    place = on_s3(written(tmp_path / "data", limit=4000))
    first = opened(place.url)
    before = len(place.proxy.requests)
    second = opened(place.url)
    requests = place.proxy.since(before)
    assert [request.method for request in requests if "index.json" in request.path] == ["HEAD"]
    assert list(first.entries) == list(second.entries)


def test_requests_of_many_shards_are_forgotten(tmp_path, opened, monkeypatch):
    make_index(tmp_path / "data", 20_000, packed=True)
    clock = [0.0]
    monkeypatch.setattr("dtrain.data.stream.sharded_dataset.time.monotonic", lambda: clock[0])
    dataset = opened(tmp_path / "data")
    monkeypatch.setattr(dataset._prefetcher, "request", lambda numbers: None)
    order = dataset.order(0, shuffle=True)
    for start in range(0, order.size, 1000):
        clock[0] += 1
        dataset.prefetch(order.indices(0, start, start + 1000))
    assert len(dataset._recent_requests.times) < 6000
