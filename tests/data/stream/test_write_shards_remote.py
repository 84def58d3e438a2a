"""Writing of datasets to a server."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec.config
import pytest

from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError
from dtrain.storage import list_names, read_file, remote, resolve_path
from dtrain.storage.remote import disconnect
from places import servers
from places.proxy import Fault, Request

SAMPLES = [{"n": number, "pad": bytes(4000)} for number in range(5)]


@pytest.fixture(scope="module")
def s3() -> Iterator[servers.Server]:
    with servers.s3() as server:
        disconnect()  # earlier connections have another name and key
        yield server
        disconnect()


@pytest.fixture
def url(s3: servers.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, initial_delay_s=0.001))
    return s3.root()


def puts(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and request.path.split("?")[0].endswith(name)


def test_dataset_on_a_server_equals_a_local_dataset(url: str, tmp_path: Path) -> None:
    for out in (url, tmp_path / "local"):
        write_shards(SAMPLES, out, format="mds", max_shard_bytes=5000, compression="gz")
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert list_names(resolve_path(url)) == names
    assert len(names) == 6
    assert [read_file(resolve_path(url) / name, limit=2**20) for name in names] == [
        (tmp_path / "local" / name).read_bytes() for name in names
    ]
    with pytest.raises(ConfigError, match="has a dataset already"):
        write_shards(SAMPLES, url, format="mds")


def test_transient_faults_are_retried(s3: servers.Server, url: str) -> None:
    with (
        s3.proxy.doing(Fault(kind=503, matches=puts(".mds"), times=2)),
        s3.proxy.doing(Fault(kind="lost", matches=puts("index.json"))),
    ):
        write_shards(SAMPLES, url, format="mds", max_shard_bytes=5000)
    assert list_names(resolve_path(url)) == ["index.json", *(f"shard.{number:05}.mds" for number in range(5))]


@pytest.mark.parametrize("name", ["shard.00003.mds", "index.json"])
def test_refused_file_leaves_no_dataset(name: str, s3: servers.Server, url: str) -> None:
    with (
        s3.proxy.doing(Fault(kind=403, matches=puts(name), times=10**6)),
        pytest.raises(DataError, match="cannot be written"),
    ):
        write_shards(SAMPLES, url, format="mds", max_shard_bytes=5000)
    with pytest.raises(FileNotFoundError):
        list_names(resolve_path(url))
