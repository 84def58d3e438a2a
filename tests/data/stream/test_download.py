"""Downloads are verified against the index, and fetched once more if they are wrong."""

import gzip
import hashlib
import os
from dataclasses import replace

import pytest

from dtrain.data.stream.formats.shard_format import ShardFile
from dtrain.data.stream.shard_store import DownloadStoppedError, download
from dtrain.errors import DataError
from dtrain.testing import inject_fault

RAW = os.urandom(50_000)
PACKED = gzip.compress(RAW)


def sha1(data):
    return {"sha1": hashlib.sha1(data).hexdigest()}


def file_of(*, compressed=False):
    if compressed:
        sizes = {"size": len(PACKED), "raw_size": len(RAW), "compression": "gz"}
        return ShardFile(name="file", **sizes, digests=sha1(PACKED), raw_digests=sha1(RAW))
    return ShardFile(name="file", size=len(RAW), raw_size=len(RAW), digests=sha1(RAW), raw_digests=sha1(RAW))


class Out:
    """Destination of the bytes, which calls a function before a second fetch."""

    def __init__(self, before_second=lambda: None):
        self.content = bytearray()
        self.cleared = 0
        self._before_second = before_second

    def write(self, data):
        self.content.extend(data)

    def clear(self):
        self.cleared += 1
        self.content.clear()
        self._before_second()


def fetch(path, file, out, **options):
    download(path, file, out.write, clear=out.clear, **options)
    return bytes(out.content)


@pytest.mark.parametrize("compressed", [False, True], ids=["raw", "gz"])
def test_download_returns_the_raw_bytes(compressed, tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.data.stream.shard_store._CHUNK_BYTES", 7000)
    (tmp_path / "file").write_bytes(PACKED if compressed else RAW)
    out = Out()
    assert fetch(tmp_path / "file", file_of(compressed=compressed), out) == RAW
    assert out.cleared == 0


@pytest.mark.parametrize("compressed", [False, True], ids=["raw", "gz"])
@pytest.mark.parametrize("what", ["changed", "cut", "longer", "other"])
def test_wrong_bytes_are_downloaded_once_more(what, compressed, tmp_path):
    right = PACKED if compressed else RAW
    wrong = {
        "changed": right[:20_000] + b"wrong" + right[20_005:],
        "cut": right[:-1],
        "longer": right + b"x",
        "other": b"x" * len(right),
    }[what]
    path = tmp_path / "file"
    path.write_bytes(wrong)
    out = Out(lambda: path.write_bytes(right) and None)
    assert fetch(path, file_of(compressed=compressed), out) == RAW
    assert out.cleared == 1
    path.write_bytes(wrong)
    again = Out()
    with pytest.raises(DataError, match=rf"^{path}: (has \d+ bytes|sha1 is \w+), the index has \w+$"):
        fetch(path, file_of(compressed=compressed), again)
    assert again.cleared == 1


def test_wrong_raw_bytes_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(PACKED)
    file = file_of(compressed=True)
    with pytest.raises(DataError, match=rf"^{path}: unpacked sha1 is \w+, the index has 00$"):
        fetch(path, replace(file, raw_digests={"sha1": "00"}), Out())
    with pytest.raises(DataError, match=rf"^{path}: has 50000 unpacked bytes, the index has 50001$"):
        fetch(path, replace(file, raw_size=50_001), Out())
    with pytest.raises(DataError, match=rf"^{path}: gz: decompresses to more than 49999 bytes"):
        fetch(path, replace(file, raw_size=49_999), Out())


def test_missing_file_is_not_retried(tmp_path):
    out = Out()
    with pytest.raises(DataError, match=rf"^{tmp_path}/file: is missing, but the index has it\. Restore"):
        fetch(tmp_path / "file", file_of(), out)
    assert out.cleared == 0


def test_failing_disk_is_named(tmp_path):
    (tmp_path / "file").write_bytes(RAW)
    with (
        inject_fault("raise", at="dtrain.storage.local.os.preadv"),
        pytest.raises(DataError, match=rf"^{tmp_path}/file: cannot be read: "),
    ):
        fetch(tmp_path / "file", file_of(), Out())


def test_download_stops_between_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.data.stream.shard_store._CHUNK_BYTES", 7000)
    (tmp_path / "file").write_bytes(RAW)
    out = Out()
    with pytest.raises(DownloadStoppedError):
        fetch(tmp_path / "file", file_of(), out, stopped=lambda: len(out.content) >= 14_000)
    assert len(out.content) == 14_000
