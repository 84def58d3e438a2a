"""Files on a web server, with and without range requests and listings."""

import os
from dataclasses import replace

import pytest

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.storage import remote
from dtrain.storage.remote import disconnect
from places.proxy import Fault
from places.servers import needs, proxied
from places.web import web

CONTENT = os.urandom(300_000)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    needs("aiohttp", "fsspec")
    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, initial_delay_s=0.001))
    monkeypatch.setattr(remote, "_READ_REQUEST_BYTES", 100_000)
    yield
    disconnect()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "files"
    (folder / "data set").mkdir(parents=True)
    (folder / "data set/a b.bin").write_bytes(CONTENT)
    (folder / "data set/empty.bin").write_bytes(b"")
    return folder


@pytest.fixture
def served(folder):
    with web(folder) as port, proxied(port) as proxy:
        yield proxy


def test_file_is_read_by_ranges(served):
    path = storage.resolve_path(f"{served.url}/data set/a b.bin")
    with storage.FileReader(path) as file:
        assert (file.size, file.ranges) == (len(CONTENT), True)
        out = bytearray(1000)
        assert file.read_into(250_000, memoryview(out)) == 1000
        assert out == CONTENT[250_000:251_000]
    assert served.requests[-1].headers["Range"] == "bytes=250000-250999"
    assert storage.read_file(path, limit=2**30) == CONTENT


def test_empty_file_is_read(served):
    assert storage.read_file(storage.resolve_path(f"{served.url}/data set/empty.bin"), limit=9) == b""


def test_quoted_url_names_the_same_file(served):
    assert storage.file_size(storage.resolve_path(f"{served.url}/data%20set/a%20b.bin")) == len(CONTENT)


def test_folder_is_listed(served):
    path = storage.resolve_path(f"{served.url}/data set")
    assert storage.list_names(path) == ["a b.bin", "empty.bin"]
    assert list(storage.walk_files(path)) == [("a b.bin", len(CONTENT)), ("empty.bin", 0)]


def test_missing_file_and_folder_are_refused(served):
    path = storage.resolve_path(f"{served.url}/nothing")
    assert storage.file_size(path) is None
    with pytest.raises(FileNotFoundError):
        storage.read_file(path, limit=9)
    with pytest.raises(FileNotFoundError, match="No such file"):
        storage.list_names(path)


@pytest.mark.parametrize("kind", [503, "unsent", "reset", "truncated"])
def test_transient_fault_is_retried(kind, served):
    with served.doing(Fault(kind=kind, matches=lambda r: r.headers.get("Range", "").endswith("-199999"), times=2, after=1000)):
        assert storage.read_file(storage.resolve_path(f"{served.url}/data set/a b.bin"), limit=2**30) == CONTENT


def test_server_without_ranges_gives_whole_files_only(folder):
    with web(folder, ranges=False) as port:
        path = storage.resolve_path(f"http://127.0.0.1:{port}/data set/a b.bin")
        assert storage.read_file(path, limit=2**30) == CONTENT
        with storage.FileReader(path) as file:
            assert not file.ranges
            with pytest.raises(OSError, match="the server sends whole files only, no ranges"):
                file.read_into(10, memoryview(bytearray(10)))


def test_forbidden_listing_raises_server_error(folder):
    with web(folder, listing=False) as port, pytest.raises(OSError, match="Forbidden"):
        storage.list_names(storage.resolve_path(f"http://127.0.0.1:{port}/data set"))


@pytest.mark.parametrize(
    "write",
    [storage.write_file, storage.create_file, storage.replace_file, lambda path, data: storage.remove_file(path)],
    ids=["write", "create", "replace", "remove"],
)
def test_writes_are_refused(write, served):
    with pytest.raises(ConfigError, match=r"^path must be writable, got http://.*/new. Write to a folder"):
        write(storage.resolve_path(f"{served.url}/new"), b"x")


@pytest.mark.parametrize("url", ["http://me:secret@host/x", "https://host/x?key=secret"])
def test_secrets_in_a_url_are_refused(url):
    with pytest.raises(ConfigError, match=r"://host/x: URL must have neither a user nor a query") as caught:
        storage.resolve_path(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_missing_library_error_names_the_extra(protocol, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf'^{protocol}:// needs the package aiohttp: pip install "dtrain\[http\]"$'):
        storage.resolve_path(f"{protocol}://host/x")
