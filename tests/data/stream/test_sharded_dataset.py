"""``ShardedDataset`` on folders of this machine."""

import gc
import gzip
import json
import os
import pickle
import signal
import warnings
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from dtrain.data.loader import build_loader
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError, ShardError
from dtrain.testing import inject_fault
from mutations import flip_bits
from places.shards import ids, samples, written


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "data")


def test_sample_is_read_by_its_index(folder, opened):
    dataset = opened(folder)
    assert len(dataset) == 100
    assert sum(dataset.shard_sizes) == 100
    assert len(dataset.shard_sizes) > 5
    assert [dataset[index] for index in range(100)] == list(samples(100))


def test_samples_are_returned_in_the_requested_order(folder, opened):
    wanted = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    wanted += [5, 5]
    assert ids(opened(folder).__getitems__(wanted)) == wanted
    assert opened(folder).__getitems__([]) == []


def test_local_files_are_read_in_place(folder, opened, tmp_path):
    dataset = opened(folder)
    dataset.prefetch(torch.arange(100))
    assert ids(dataset.__getitems__(range(100))) == list(range(100))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("index", [-1, 100, 10**12])
def test_index_out_of_range_is_refused(index, folder, opened):
    dataset = opened(folder)
    with pytest.raises(IndexError, match=r"(index|indices) must be in 0 to 99, got"):
        dataset[index]
    with pytest.raises(IndexError, match=r"(index|indices) must be in 0 to 99, got"):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize("compression", ["zstd", "gz", "br", "bz2", "snappy"])
def test_compressed_shards_are_decompressed_into_the_cache(compression, tmp_path, opened):
    folder = written(tmp_path / "data", compression=compression, hashes=["sha1", "xxh3_64"])
    dataset = opened(folder)
    assert ids(dataset.__getitems__(range(100))) == list(range(100))
    assert len([name for name in os.listdir(tmp_path / "cache") if len(name) == 32]) == len(dataset.shard_sizes)


def test_decompressed_copy_of_another_reader_is_read_in_place(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz", limit=None)
    shard = json.loads((folder / "index.json").read_text())["shards"][0]
    raw = gzip.decompress((folder / shard["zip_data"]["basename"]).read_bytes())
    (folder / shard["raw_data"]["basename"]).write_bytes(raw)
    assert ids(opened(folder).__getitems__(range(100))) == list(range(100))
    assert not (tmp_path / "cache").exists()


def test_number_of_open_shards_is_bounded(folder, opened):
    dataset = opened(folder, max_open_shards=2)
    before = len(os.listdir("/proc/self/fd"))
    assert ids(dataset[index] for index in range(100)) == list(range(100))
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_pickled_copy_reads_the_same(folder, opened):
    dataset = opened(folder)
    dataset[3]
    copy = pickle.loads(pickle.dumps(dataset))
    assert ids(copy[index] for index in range(100)) == list(range(100))
    copy.close()


def test_closed_dataset_opens_again(folder, opened):
    dataset = opened(folder)
    dataset.close()
    dataset.close()
    assert dataset[7]["id"] == 7


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_read_every_sample_once(context, tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz")
    dataset = opened(folder, cache_bytes=8000)
    assert dataset[0]["id"] == 0  # the parent has a shard open
    loader = DataLoader(dataset, batch_size=7, num_workers=2, collate_fn=ids, multiprocessing_context=context)
    assert [index for batch in loader for index in batch] == list(range(100))


def test_fingerprint_depends_on_the_data_only(folder, opened, tmp_path):
    mine = opened(folder).fingerprint()
    assert mine == opened(written(tmp_path / "copy")).fingerprint()
    assert (mine["format"], mine["samples"]) == ("mds", 100)
    others = [written(tmp_path / "more", 101), written(tmp_path / "larger", size=101), written(tmp_path / "cut", limit=1000)]
    assert all(opened(other).fingerprint()["digest"] != mine["digest"] for other in others)


def test_order_shuffles_blocks_of_shards(folder, opened):
    dataset = opened(folder)
    assert dataset.order(0, False).indices(0, 0, 100).tolist() == list(range(100))
    shuffled = dataset.order(0, True).indices(0, 0, 100).tolist()
    assert sorted(shuffled) == list(range(100))
    assert shuffled != list(range(100))


LISTED = [
    ("jsonl", {}),
    ("jsonl", {"compression": "zstd"}),
    ("jsonl", {"compression": "gz"}),
    ("parquet", {}),
    ("tar", {}),
]


@pytest.mark.parametrize(("format", "options"), LISTED, ids=["-".join([kind, *o.values()]) for kind, o in LISTED])
def test_folder_without_index_counts_its_samples_once(format, options, tmp_path, opened, monkeypatch):
    folder = tmp_path / "data"
    column = "txt" if format == "tar" else "text"
    limit = 20_000 if format == "tar" else 300
    write_shards(
        ({column: f"line {index}"} for index in range(50)), str(folder), format=format, max_shard_bytes=limit, **options
    )
    count = len(json.loads((folder / "index.json").read_text())["shards"])
    os.remove(folder / "index.json")
    (folder / "_SUCCESS").touch()
    dataset = opened(folder)
    assert len(dataset.shard_sizes) == count > 1
    assert len(dataset) == 50
    assert "line 31" in str(dataset[31])
    unpacked = [name for name in os.listdir(tmp_path / "cache") if len(name) == 32]
    assert len(unpacked) == (count if options else 0), "unpacked to be counted, and not again to be read"
    with monkeypatch.context() as patched:
        patched.delattr("dtrain.data.stream.shard_index._count_samples")
        assert opened(folder).shard_sizes == dataset.shard_sizes
    os.remove(next(folder.glob("*.*")))
    assert len(opened(folder)) < 50


def test_single_file_is_a_dataset(tmp_path, opened):
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\n")
    (tmp_path / "other.txt").write_text("three\n")
    assert [sample["text"] for sample in opened(path)] == ["one", "two"]
    assert len(opened(tmp_path)) == 3


def test_format_option_selects_one_of_several_formats(tmp_path, opened):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ConfigError, match=r"has files of several formats \(jsonl, text\). Choose one with format=\.$"):
        opened(tmp_path)
    assert opened(tmp_path, format="jsonl")[0] == {"x": 1}


def broken(folder, what):
    """Return the second shard of the dataset, and damage it."""
    index = json.loads((folder / "index.json").read_text())
    shard = index["shards"][1]
    path = folder / (shard["zip_data"] or shard["raw_data"])["basename"]
    if what == "missing":
        path.unlink()
    elif what == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "changed":
        flip_bits(path, -1)
    return path


WRONG = [
    ("missing", r"{path}: is missing, but the index has it\. Restore"),
    ("truncated", r"{path}: has \d+ bytes, the index has \d+$"),
    ("changed", r"{path}: xxh64 is [0-9a-f]{{16}}, the index has [0-9a-f]{{16}}$"),
]


@pytest.mark.parametrize("compression", [None, "gz"], ids=["raw", "gz"])
@pytest.mark.parametrize(("what", "message"), WRONG, ids=[what for what, _ in WRONG])
def test_damaged_shard_is_named(what, message, compression, tmp_path, opened):
    path = broken(written(tmp_path / "data", compression=compression), what)
    dataset = opened(tmp_path / "data")
    assert dataset[0]["id"] == 0
    first = dataset.shard_sizes[0]
    for _ in range(2):
        with pytest.raises(ShardError, match=message.format(path=path)) as caught:
            dataset[first]
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=message.format(path=path)):
        dataset.__getitems__([0, first])
    assert dataset[first + dataset.shard_sizes[1]]["id"] == first + dataset.shard_sizes[1]


def test_verify_false_skips_digests_of_local_files(tmp_path, opened):
    broken(written(tmp_path / "data"), "changed")
    dataset = opened(tmp_path / "data", verify=False)
    assert dataset[dataset.shard_sizes[0]]["id"] == dataset.shard_sizes[0]


def test_raw_digest_is_checked_after_decompression(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"sha1": "0" * 40}
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r": unpacked sha1 is [0-9a-f]{40}, the index has 0{40}$"):
        opened(folder)[0]


def test_undecodable_sample_is_named(tmp_path, opened):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"x": 1}\n{"x": \n{"x": 3}\n')
    dataset = opened(path)
    with pytest.raises(DataError, match=rf"^{path}: sample 1 cannot be decoded: JSONDecodeError: Expecting value"):
        dataset[1]
    assert dataset[2] == {"x": 3}


def test_sample_with_damaged_sizes_is_named(tmp_path, opened):
    folder = written(tmp_path / "data", limit=None)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[int.from_bytes(content[8:12], "little")] ^= 1  # the second sample's first size
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: sample 1 cannot be decoded: ValueError: it has \d+ bytes, but its values"):
        opened(folder, verify=False)[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_skips_bad_samples_but_not_a_missing_shard(workers, tmp_path, opened):
    folder = tmp_path / "data"
    write_shards(({"x": index} for index in range(9)), str(folder), format="jsonl", max_shard_bytes=30, hashes=())
    first, second = sorted(folder.glob("*.jsonl"))[:2]
    first.write_text(first.read_text().replace('"x": 1', '"x"= 1').replace('"x":1', '"x"=1'))
    dataset = opened(folder)
    options = {"global_batch_size": 2, "seed": 0, "shuffle": False, "num_workers": workers, "on_error": "skip"}
    loader = build_loader(dataset, **options)
    assert sum(len(batch) for batch in loader.until("1ep")) == 8
    assert [index for index, _ in loader.skipped.samples] == [1]
    second.unlink()
    dataset.close()
    with pytest.raises(DataError, match=rf"{second}: is missing"):
        list(build_loader(dataset, **options).until("1ep"))


def index_with(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_unknown_digest_is_refused(folder, opened):
    index_with(folder, lambda index: index["shards"][2]["raw_data"]["hashes"].update(crc99="00"))
    with pytest.raises(ConfigError, match=r"hash 'crc99' is unknown. Use one of xxh"):
        opened(folder)


def test_invalid_index_is_named(folder, opened):
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match=rf"^{folder}/index.json: is not JSON"):
        opened(folder)


BAD = [
    ("", {}, r"path must not be empty. Pass the folder"),
    ("nothing", {}, r"nothing: the folder does not exist. Correct the path"),
    ("empty", {}, r"empty: has no index.json and no file of a known format. Check the URL\.$"),
    ("data", {"format": "mdz"}, r"format 'mdz' is unknown. Use one of mds"),
    ("data", {"format": "tar"}, r"data: the index has shards of format mds, not tar. Leave out format\.$"),
    ("data", {"colums": ["id"]}, r"format mds has no option 'colums'. Use one of columns"),
    ("data", {"cache": "memory://cache"}, r"cache must be a folder of this machine, got memory://cache. Pass a local path"),
    ("data", {"cache_bytes": 0}, r"cache_bytes must be an integer of at least 1, got 0\.$"),
    ("data", {"prefetch_shards": -1}, r"prefetch_shards must be an integer of at least 0, got -1\.$"),
    ("data", {"max_open_shards": 1.5}, r"max_open_shards must be an integer of at least 1, got 1.5\.$"),
    ("data", {"download": "half"}, r"download must be 'whole' or 'ranged', got 'half'\.$"),
    ("packed", {"download": "ranged"}, r"is compressed \(gz\), without range reads. Use download='whole'\.$"),
    ("packed", {"cache_bytes": 99}, r"has \d+ bytes, more than cache_bytes=99. Raise cache_bytes\.$"),
    ("blank", {}, r"blank: has no samples in 1 shard. Check the path\.$"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD, ids=[f"{name}-{'-'.join(o)}" for name, o, _ in BAD])
def test_invalid_arguments_are_refused(name, options, message, folder, tmp_path, opened):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank/a.jsonl").touch()
    written(tmp_path / "packed", compression="gz")
    with pytest.raises(ConfigError, match=message) as caught:
        opened(tmp_path / name if name else "", **options)
    assert "\n" not in str(caught.value)


def test_default_cache_belongs_to_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = written(tmp_path / "data", compression="gz")
    dataset = ShardedDataset(folder)
    assert dataset[0]["id"] == 0
    (mine,) = tmp_path.glob("dtrain-cache-*/*")
    assert mine.parent.stat().st_mode & 0o777 == 0o700
    assert len(list(mine.iterdir())) == 2  # the shard and the lock
    dataset.close()


def test_cache_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = ShardedDataset(written(tmp_path / "data", compression="gz"))
    os.symlink(tmp_path / "elsewhere", tmp_path / f"dtrain-cache-{os.getuid()}")
    with pytest.raises(ConfigError, match="must be a folder of this user"):
        dataset[0]


def test_files_of_another_user_in_the_cache_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = written(tmp_path / "data", compression="gz", limit=None)
    mine = ShardedDataset(folder)
    mine[0]
    mine.close()
    (tmp_path / f"dtrain-cache-{os.getuid()}").rename(tmp_path / "theirs")
    (tmp_path / f"dtrain-cache-{os.getuid()}").symlink_to(tmp_path / "theirs")
    dataset = ShardedDataset(folder)
    with pytest.raises(ConfigError, match="must be a folder of this user"):
        dataset[0]
    dataset.close()
    (folder / "index.json").unlink()
    with pytest.raises(ConfigError, match="must be a folder of this user"):
        ShardedDataset(folder)


def test_unwritable_cache_is_not_needed_for_files_in_place(tmp_path, opened):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    denied = PermissionError(13, "Permission denied")
    with inject_fault("raise", at="dtrain.storage.local.os.makedirs", error=denied):
        assert opened(tmp_path)[0] == {"x": 1}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_changed_file_of_equal_size_is_read_again(name, tmp_path, opened):
    path = tmp_path / name
    for time, text in enumerate([b'{"x":1}\n{"x":2}\n', b'{"x":3}\n{"x":4}\n', b'{"x":3}\n\n\n\n\n\n\n\n\n']):
        path.write_bytes(gzip.compress(text, 0, mtime=0) if name.endswith("gz") else text)
        os.utime(path, (time, time))
        dataset = opened(tmp_path)
        assert [dataset[index] for index in range(len(dataset))] == [json.loads(line) for line in text.split()]
        dataset.close()


def test_cached_file_of_wrong_size_is_fetched_again(tmp_path, opened):
    dataset = opened(written(tmp_path / "data", compression="gz"))
    assert dataset[0]["id"] == 0
    dataset.close()
    (cached,) = (tmp_path / "cache").glob("?" * 32)
    cached.write_bytes(cached.read_bytes()[:-1])  # as after a loss of power
    assert dataset[1]["id"] == 1


def flipped(path, byte):
    """Flip one bit of a file, and leave its times as they are."""
    about, content = path.stat(), bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def filled(folder, cache, opened):
    """The files of a cache that has every shard of the dataset."""
    dataset = opened(folder)
    assert ids(dataset.__getitems__(range(100))) == list(range(100))
    dataset.close()
    return sorted(cache.glob("?" * 32))


def test_damaged_cached_shard_is_fetched_again(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz", hashes=["xxh64"])
    cached = filled(folder, tmp_path / "cache", opened)
    sound = [path.read_bytes() for path in cached]
    for number, path in enumerate(cached):
        flipped(path, len(sound[number]) - 1 - 97 * number % 1000)
    dataset = opened(folder)
    assert [dataset[index] for index in range(100)] == list(samples(100))
    assert [path.read_bytes() for path in cached] == sound


def test_verify_false_trusts_the_cache(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz", hashes=["xxh64"])
    (first, *_) = filled(folder, tmp_path / "cache", opened)
    flipped(first, first.stat().st_size - 1)
    dataset = opened(folder, verify=False)
    assert [dataset[index] for index in range(100)] != list(samples(100))


def test_damaged_shard_in_use_is_read_from_its_source(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz", hashes=["xxh64"], limit=None)
    other, mine = opened(folder), opened(folder)
    mine._store.cache.space_timeout_s = 0.01
    assert other[0]["id"] == 0
    (cached,) = (tmp_path / "cache").glob("?" * 32)
    flipped(cached, cached.stat().st_size - 1)
    with pytest.warns(UserWarning, match="or have a damaged copy open"):
        assert [mine[index] for index in range(100)] == list(samples(100))


def test_many_processes_replace_one_damaged_shard(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz", hashes=["xxh64"])
    for path in filled(folder, tmp_path / "cache", opened):
        flipped(path, path.stat().st_size - 1)
    loaders = [DataLoader(opened(folder), batch_size=25, num_workers=2, collate_fn=list) for _ in range(2)]
    for batches in zip(*loaders, strict=True):  # four processes, and each shard is opened by two or more
        assert batches[0] == batches[1]
    dataset = opened(folder)
    assert [dataset[index] for index in range(100)] == list(samples(100))


def test_dataset_is_freed_with_its_last_reference(folder):
    dataset = ShardedDataset(folder)
    dataset[0]
    seen = weakref.ref(dataset)
    gc.disable()  # it runs in any thread, also in a fetching thread, which cannot wait for itself
    try:
        del dataset
        assert seen() is None
    finally:
        gc.enable()


def test_full_disk_is_named(tmp_path, opened):
    dataset = opened(written(tmp_path / "data", compression="gz"))
    error = OSError(28, "No space left on device")
    with (
        inject_fault("raise", at="dtrain.storage.local.os.write", error=error),
        pytest.raises(DataError, match=rf"^{tmp_path}/cache: cannot store shard.00000.mds.gz: No space left on .* Free space"),
    ):
        dataset[0]
    assert dataset[0]["id"] == 0


def largest(folder):
    index = json.loads((folder / "index.json").read_text())
    return max(shard["raw_data"]["bytes"] for shard in index["shards"])


def test_idle_forked_child_keeps_no_shard_in_the_cache(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz")
    dataset = opened(folder, cache_bytes=largest(folder))
    assert dataset[0]["id"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        assert ids(dataset[index] for index in range(100)) == list(range(100))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_shard_is_read_into_memory_when_the_cache_is_full(tmp_path, opened):
    folder = written(tmp_path / "data", compression="gz")
    limit = largest(folder)
    first, second = opened(folder, cache_bytes=limit), opened(folder, cache_bytes=limit)
    second._store.cache.space_timeout_s = 0.01
    assert first[0]["id"] == 0  # and keeps it open
    with pytest.warns(UserWarning, match=rf"^{folder}: other processes use all {limit} bytes of the cache"):
        assert ids(second[index] for index in range(100)) == list(range(100))
    assert len([name for name in os.listdir(tmp_path / "cache") if len(name) == 32]) == 1
    assert first[1]["id"] == 1
