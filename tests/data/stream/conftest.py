"""Fixtures: servers on loopback with datasets, and datasets that are closed after the test."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec.config
import pytest

from dtrain import storage
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.storage import remote
from dtrain.storage.remote import disconnect
from places import servers
from places.proxy import Proxy
from places.web import web


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ShardedDataset]]:
    """``opened(url, ...)``: the dataset, with a cache of the test's own; it is closed at the end."""
    datasets = []

    def open_(url, **options):
        datasets.append(ShardedDataset(url, **{"cache": tmp_path / "cache", **options}))
        return datasets[-1]

    yield open_
    for dataset in datasets:
        dataset.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pauses between tries are short."""
    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, initial_delay_s=0.001))
    yield
    disconnect()


@pytest.fixture(scope="package")
def _s3() -> Iterator[servers.Server]:
    with servers.s3() as server:
        yield server
        disconnect()


@dataclass(frozen=True, kw_only=True)
class Served:
    """A dataset on a server: its URL, the proxy before it, and fsspec's options to get there."""

    url: str
    proxy: Proxy
    options: dict[str, str]

    def shard_requests(self, since: int = 0) -> list[str]:
        """Return the paths of shards that were read."""
        return [request.path for request in self.proxy.since(since) if request.method == "GET" and "shard." in request.path]


@pytest.fixture
def on_s3(_s3: servers.Server, short: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Served]:
    """``on_s3(folder)``: its files are on moto's server."""
    monkeypatch.setitem(fsspec.config.conf, "s3", _s3.options)

    def send(folder):
        root = storage.resolve_path(_s3.root())
        for name, _ in storage.walk_files(folder):
            storage.replace_file(root / name, (folder / name).read_bytes())
        assert _s3.proxy is not None
        return Served(url=str(root), proxy=_s3.proxy, options=_s3.options)

    return send


@pytest.fixture
def on_web(tmp_path: Path, short: None) -> Iterator[Callable[[Path], Served]]:
    """``on_web(folder)``: its files are on a web server that has ranges."""
    top = tmp_path / "served"
    top.mkdir()

    def send(folder):
        shutil.copytree(folder, top / folder.name)
        return Served(url=f"{proxy.url}/{folder.name}", proxy=proxy, options={})

    servers.needs("aiohttp", "fsspec")
    with web(top) as port, servers.proxied(port) as proxy:
        yield send


@pytest.fixture(params=["s3", "web"])
def served(request: pytest.FixtureRequest) -> Callable[[Path], Served]:
    """``served(folder)``, for every kind of server."""
    return request.getfixturevalue(f"on_{request.param}")
