"""Only regular files inside the folder are read: no links out of the folder, no pipes, no devices."""

import gzip
import json
import os
import socket

import pytest

from dtrain.errors import ConfigError, DataError, ShardError
from places.shards import samples, written


def lines(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"x": text}) + "\n" for text in texts))
    return path


def everything(dataset):
    return [dataset[index] for index in range(len(dataset))]


def test_link_outside_a_folder_without_index_is_refused(tmp_path, opened):
    secret = lines(tmp_path / "secret.jsonl", "password")
    lines(tmp_path / "data" / "a.jsonl", "fine")
    (tmp_path / "data" / "b.jsonl").symlink_to(secret)
    with pytest.raises(DataError, match=rf"^{tmp_path}/data/b.jsonl: is a link to {secret}, out of the dataset's folder. Pass"):
        opened(tmp_path / "data")
    assert everything(opened(tmp_path / "data", follow_links=True)) == [{"x": "fine"}, {"x": "password"}]


@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("what", ["file", "folder", "index", "unpacked"])
def test_link_outside_a_folder_with_index_is_refused(what, compression, tmp_path, opened):
    outside = written(tmp_path / "outside", compression=compression, hashes=[])
    folder = tmp_path / "data"
    index = json.loads((outside / "index.json").read_text())
    if what == "folder":
        folder.mkdir()
        (folder / "sub").symlink_to(outside)
        for shard in index["shards"]:
            for data in filter(None, (shard["raw_data"], shard["zip_data"])):
                data["basename"] = "sub/" + data["basename"]
        (folder / "index.json").write_text(json.dumps(index))
    else:
        written(folder, compression=compression, hashes=[])
        first = index["shards"][0]
        stored = (first["zip_data"] if compression and what != "unpacked" else first["raw_data"])["basename"]
        name = "index.json" if what == "index" else stored
        target = outside / name
        if what == "unpacked" and compression:
            target = tmp_path / "raw"
            target.write_bytes(gzip.decompress((outside / first["zip_data"]["basename"]).read_bytes()))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    with pytest.raises(DataError, match=r"is a link to .*, out of the dataset's folder. Pass follow_links=True"):
        opened(folder)[0]
    assert everything(opened(folder, follow_links=True)) == list(samples(100))


def test_links_inside_the_folder_are_followed(tmp_path, opened):
    lines(tmp_path / "data" / "v3" / "a.jsonl", "fine")
    (tmp_path / "data" / "b.jsonl").symlink_to("v3/a.jsonl")
    (tmp_path / "link").symlink_to("data")
    assert everything(opened(tmp_path / "link")) == [{"x": "fine"}] * 2
    (tmp_path / "named.jsonl").symlink_to("data/v3/a.jsonl")
    assert everything(opened(tmp_path / "named.jsonl")) == [{"x": "fine"}]  # the user has named it


def put(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


@pytest.mark.parametrize("follow_links", [False, True])
@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "loop"])
def test_irregular_file_is_refused_without_waiting(kind, compression, follow_links, tmp_path, opened, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    folder = written(tmp_path / "data", compression=compression)
    first = json.loads((folder / "index.json").read_text())["shards"][0]
    path = folder / (first["zip_data"] or first["raw_data"])["basename"]
    path.unlink()
    put(kind, path.relative_to(tmp_path))
    with pytest.raises(ShardError, match=r"not a regular file|is a link to|symbolic links|No such device|has 0 bytes"):
        opened(folder, follow_links=follow_links)[0]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop", "file outside"])
def test_foreign_files_in_the_cache_are_removed(kind, tmp_path, opened, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path / "data", compression="gz", hashes=[])
    first = opened(folder)
    assert everything(first) == list(samples(100))
    first.close()
    outside = tmp_path / "outside"
    for path in (tmp_path / "cache").glob("?" * 32):
        path.replace(outside) if kind == "file outside" else path.unlink()
        path.symlink_to(outside) if kind == "file outside" else put(kind, path.relative_to(tmp_path))
    before = outside.read_bytes() if outside.exists() else b""
    assert everything(opened(folder)) == list(samples(100))
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "cache").glob("?" * 32))
    assert before == (outside.read_bytes() if outside.exists() else b"")


def test_folder_of_links_and_pipes_has_no_data(tmp_path, opened):
    folder = tmp_path / "data"
    folder.mkdir()
    os.mkfifo(folder / "a.jsonl")
    with pytest.raises(ConfigError, match="no file of a known format"):
        opened(folder)
