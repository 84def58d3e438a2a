"""``ShardedDataset`` on S3 (moto) and on a web server, over HTTP on loopback, with networks that fail."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.errors import ConfigError, DataError
from mutations import flip_bits
from places.proxy import Fault
from places.shards import Watch, ids, samples, written
from places.web import web

LONG_S = 300


def wait_for(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def is_shard(request):
    return request.method == "GET" and "shard." in request.path


@pytest.fixture
def data(tmp_path):
    return written(tmp_path / "data", limit=4000)


def test_whole_shards_are_downloaded_once(served, data, opened):
    place = served(data)
    dataset = opened(place.url)
    before = len(place.proxy.requests)
    for _ in range(2):
        assert ids(dataset.__getitems__(range(100))) == list(range(100))
        dataset.close()
    paths = [request.path for request in place.proxy.since(before) if is_shard(request) and not first_byte(request)]
    assert len(paths) == len(set(paths)) == len(dataset.shard_sizes)


def first_byte(request):
    """Return True for the request that reads a file's size from a web server."""
    return request.headers.get("Range") == "bytes=0-0"


def test_ranged_download_requests_only_sample_bytes(served, data, opened, tmp_path):
    place = served(data)
    dataset = opened(place.url, download="ranged")
    before = len(place.proxy.requests)
    assert ids(dataset.__getitems__([3, 70, 4])) == [3, 70, 4]
    ranges = [r.headers["Range"].removeprefix("bytes=").split("-") for r in place.proxy.since(before) if is_shard(r)]
    read = sum(int(last) + 1 - int(first) for first, last in ranges)
    assert 300 < read < 1200  # three samples of 108 bytes; of two shards the counts and tables
    assert not (tmp_path / "cache").exists()


@pytest.mark.costly
@pytest.mark.parametrize("kind", [503, pytest.param("unsent", marks=pytest.mark.slow), "reset", "truncated"])
@pytest.mark.parametrize("download", ["whole", pytest.param("ranged", marks=pytest.mark.slow)])
def test_transient_fault_is_retried(kind, download, served, data, opened):
    place = served(data)
    dataset = opened(place.url, download=download)
    with place.proxy.doing(Fault(kind=kind, matches=is_shard, times=5, after=50)):
        assert ids(dataset.__getitems__(range(100))) == list(range(100))


WRONG = [
    ("missing", r"{url}/{name}: is missing, but the index has it\. Restore"),
    ("truncated", r"{url}/{name}: has \d+ bytes, the index has \d+$"),
    ("changed", r"{url}/{name}: xxh64 is [0-9a-f]{{16}}, the index has [0-9a-f]{{16}}$"),
]


def test_damaged_cached_shard_is_fetched_again(served, tmp_path, opened):
    there = served(written(tmp_path / "data", hashes=["xxh64"]))
    dataset = opened(there.url, prefetch_shards=0)
    assert [dataset[index] for index in range(100)] == list(samples(100))
    dataset.close()
    cached = sorted((tmp_path / "cache").glob("?" * 32))
    flip_bits(cached[2], -1)
    requests = len(there.shard_requests())
    again = opened(there.url, prefetch_shards=0)
    assert [again[index] for index in range(100)] == list(samples(100))
    assert len({*there.shard_requests()[requests:]}) == 1


@pytest.mark.parametrize("compression", [None, pytest.param("zstd", marks=pytest.mark.slow)], ids=["raw", "zstd"])
@pytest.mark.parametrize(("what", "message"), WRONG, ids=[what for what, _ in WRONG])
def test_damaged_shard_is_named(what, message, compression, served, tmp_path, opened):
    folder = written(tmp_path / "data", compression=compression, limit=6000)
    shard = json.loads((folder / "index.json").read_text())["shards"][1]
    path = folder / (shard["zip_data"] or shard["raw_data"])["basename"]
    content = path.read_bytes()
    path.unlink()
    if what != "missing":
        path.write_bytes(content[:-1] if what == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    place = served(folder)
    dataset = opened(place.url)
    before = len(place.proxy.requests)
    with pytest.raises(DataError, match=message.format(url=place.url, name=path.name)) as caught:
        dataset[dataset.shard_sizes[0]]
    assert "\n" not in str(caught.value)
    if what == "changed":
        fetched = [r.path for r in place.proxy.since(before) if is_shard(r) and not first_byte(r)]
        assert len(fetched) == 2, "once more, and not again"
    assert dataset[0]["id"] == 0
    assert not list((tmp_path / "cache").glob("*.part"))


def test_failing_server_is_named(served, data, opened):
    place = served(data)
    dataset = opened(place.url)
    fault = Fault(kind=503, matches=lambda r: "shard." in r.path, times=99)
    with (
        place.proxy.doing(fault),
        pytest.raises(
            DataError,
            match=rf"^{place.url}/shard.*: cannot be read: .*\(tried 7 times\)\. Check the permissions and the disk\.$",
        ),
    ):
        dataset[0]
    assert dataset[0]["id"] == 0


@pytest.mark.parametrize("name", ["nothing", pytest.param("empty/deep", marks=pytest.mark.slow)])
def test_url_without_data_is_refused(name, served, data, opened):
    place = served(data)
    with pytest.raises(ConfigError, match=rf"^{place.url}/{name}: has no index.json(, and no files are listed| and no file)"):
        opened(f"{place.url}/{name}")


@pytest.mark.parametrize("format", ["parquet", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_samples_of_a_folder_without_index_are_counted(format, served, tmp_path, opened):
    from dtrain.data.stream.write_shards import write_shards

    write_shards(({"text": f"line {index}"} for index in range(50)), str(tmp_path / "data"), format=format, max_shard_bytes=600)
    os.remove(tmp_path / "data/index.json")
    place = served(tmp_path / "data")
    dataset = opened(place.url)
    assert len(dataset) == 50
    assert [sample["text"] for sample in dataset.__getitems__(range(50))] == [f"line {index}" for index in range(50)]
    before = len(place.proxy.requests)
    assert len(opened(place.url)) == 50
    assert place.shard_requests(before) == [] or all(first_byte(r) for r in place.proxy.since(before) if is_shard(r))


def test_prefetch_downloads_shards(on_s3, data, opened):
    place = on_s3(data)
    dataset = opened(place.url)
    before = len(place.proxy.requests)
    dataset.prefetch(torch.arange(40))
    wanted = len({index for index, end in enumerate(dataset.entries.bounds[1:]) if end - dataset.shard_sizes[index] < 40})
    wait_for(lambda: len(list(dataset._settings.cache_folder.glob("?" * 32))) == wanted)
    assert len(place.shard_requests(before)) == wanted
    assert ids(dataset.__getitems__(range(40))) == list(range(40))
    assert len(place.shard_requests(before)) == wanted


def test_close_stops_the_prefetch(on_s3, data, opened, tmp_path):
    import threading

    place = on_s3(data)
    dataset = opened(place.url)
    with place.proxy.doing(Fault(kind="slow", matches=is_shard, times=99, after=0.2)):
        dataset.prefetch(torch.arange(100))
        wait_for(lambda: place.proxy.faults[0].fired)
        dataset.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dtrain-ahead"]
    assert not list((tmp_path / "cache").glob("*.part"))


def test_server_without_range_support_downloads_whole_shards(data, opened, short):
    with web(data, ranges=False) as port:
        url = f"http://127.0.0.1:{port}"
        assert ids(opened(url).__getitems__(range(100))) == list(range(100))
        with pytest.raises(DataError, match=r"the server has no range requests. Use download='whole'\.$"):
            opened(url, download="ranged")[0]


def test_special_characters_in_names_are_read(tmp_path, opened, short):
    names = [f"a{mark}b.jsonl" for mark in " #&+:;=?@ü"]
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps(name))
    with web(folder) as port:
        dataset = opened(f"http://127.0.0.1:{port}")
        assert sorted(dataset.__getitems__(range(len(dataset)))) == sorted(names)


def test_server_without_directory_listing_requires_an_index(data, opened, short):
    (data / "index.json").unlink()
    with web(data, listing=False) as port, pytest.raises(DataError, match=r"cannot be read: .*Forbidden"):
        opened(f"http://127.0.0.1:{port}")


def test_loader_workers_fork_during_a_prefetch(on_s3, data, opened):
    place = on_s3(data)
    dataset = opened(place.url, cache_bytes=8000)
    with place.proxy.doing(Fault(kind="slow", matches=is_shard, times=99, after=0.05)):
        dataset.prefetch(torch.arange(100))
        loader = DataLoader(dataset, batch_size=7, num_workers=2, collate_fn=ids)
        assert [index for batch in loader for index in batch] == list(range(100))


PROGRAM = """
import itertools, json, sys
import fsspec.config
from dtrain.data.stream.sharded_dataset import ShardedDataset
fsspec.config.conf["s3"] = json.loads(sys.argv[1])
dataset = ShardedDataset(sys.argv[2], cache=sys.argv[3], cache_bytes=int(sys.argv[4]))
print("started", flush=True)
for epoch in itertools.count():
    order = dataset.order(epoch, True).indices(0, 0, len(dataset))
    for batch in order.split(16):
        dataset.prefetch(batch)
        dataset.__getitems__(batch.tolist())
"""


def program(place, cache, limit=10**9):
    """A process that reads for ever."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(place.options), place.url, str(cache), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.costly
def test_killed_download_is_finished_by_another_process(on_s3, tmp_path, opened):
    place = on_s3(written(tmp_path / "data", limit=None))
    with place.proxy.doing(Fault(kind="slow", matches=is_shard, after=600)), program(place, tmp_path / "cache") as process:
        try:
            assert process.stdout.readline() == "started\n"
            wait_for(lambda: place.proxy.faults[0].fired)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(LONG_S)
    assert len(list((tmp_path / "cache").glob("*.part"))) == 1
    assert ids(opened(place.url).__getitems__(range(100))) == list(range(100))
    assert not list((tmp_path / "cache").glob("*.part"))


def read_share(url, cache, options, limit, world):
    """A rank's part of an epoch in a shuffled order, sample by sample and by batches, with read-ahead."""
    import fsspec.config

    from dtrain.dist.init import get_dist_info
    from dtrain.storage import remote
    from dtrain.storage.remote import disconnect
    from dtrain.storage.remote_store import RetryPolicy

    fsspec.config.conf["s3"], remote.RETRY = options, RetryPolicy(initial_delay_s=0.01)
    dataset = ShardedDataset(url, cache=cache, cache_bytes=limit, prefetch_shards=2)
    mine = dataset.order(0, True).indices(0, 0, len(dataset))[get_dist_info().rank :: world]
    share = []
    for batch in mine.split(16):
        dataset.prefetch(batch)
        share += ids(dataset.__getitems__(batch.tolist()))
    dataset.close()
    disconnect()
    return share


@pytest.mark.costly
@pytest.mark.parametrize("compression", [None, pytest.param("zstd", marks=pytest.mark.slow)], ids=["raw", "zstd"])
def test_four_processes_share_a_small_cache_on_a_bad_network(compression, on_s3, tmp_path, ranks):
    count, limit = 600, 60_000
    place = on_s3(written(tmp_path / "data", count, size=1000, limit=10_000, compression=compression))
    hit = Counter()

    def is_due(request):
        due = is_shard(request) and hit[request.path] < 4  # no shard is hit more often than it is tried again
        hit[request.path] += due
        return due

    faults = [Fault(kind=kind, matches=is_due, times=8, after=500) for kind in (503, "truncated", "reset")]
    place.proxy.faults += faults
    try:
        with Watch(tmp_path / "cache") as watch:
            parts = ranks(4).run(read_share, place.url, str(tmp_path / "cache"), place.options, limit, 4)
    finally:
        for fault in faults:
            place.proxy.faults.remove(fault)
    assert sorted(index for share in parts for index in share) == list(range(count))
    assert all(fault.fired for fault in faults)
    assert watch.looks > 20
    assert 30_000 < watch.most <= limit
    assert not list((tmp_path / "cache").glob("*.part"))


@pytest.mark.slow
def test_killed_readers_do_not_affect_other_readers(on_s3, tmp_path, opened):
    count, limit = 300, 60_000
    place = on_s3(written(tmp_path / "data", count, size=1000, limit=10_000, compression="zstd"))
    cache, draw = tmp_path / "cache", random.Random(0)
    with Watch(cache) as watch:
        for _ in range(4):
            with program(place, cache, limit) as one, program(place, cache, limit) as other:
                for process in (one, other):
                    assert process.stdout.readline() == "started\n"
                time.sleep(draw.random())
                for process in (one, other):
                    assert process.poll() is None
                    process.send_signal(signal.SIGKILL)
                    process.wait(LONG_S)
        dataset = opened(place.url, cache_bytes=limit)
        assert ids(
            sample for batch in torch.arange(count).split(50) for sample in dataset.__getitems__(batch.tolist())
        ) == list(range(count))
    assert 30_000 < watch.most <= limit
    assert not list(cache.glob("*.part"))
