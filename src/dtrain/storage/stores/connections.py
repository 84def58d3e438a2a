"""Which store a place is in. Connections are kept by this process for as long as it lives."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from dtrain.errors import ConfigError
from dtrain.storage.path import RemotePath
from dtrain.storage.stores.base import Store

_STORES = {
    "s3": ("s3", "S3Store"),
    "gs": ("gs", "GsStore"),
    "az": ("az", "AzStore"),
    "oci": ("oci", "OciStore"),
    "memory": ("memory", "MemoryStore"),
    "http": ("http", "HttpStore"),
    "https": ("http", "HttpStore"),
}


@dataclass(slots=True)
class _Connections:
    """Of one process; a child that inherits them by a fork makes its own."""

    pid: int
    stores: dict[str, Store]
    inherited: list[dict[str, Store]]
    lock: threading.RLock  # the garbage collector may let somebody use a store in the middle of connecting


_CONNECTIONS = _Connections(os.getpid(), {}, [], threading.RLock())


def store_of(path: RemotePath) -> Store:
    """The store that ``path`` is in, connected.

    Credentials and options are fsspec's: what each library takes from the environment, and fsspec's own configuration
    (``FSSPEC_S3_ENDPOINT_URL=...`` or a file in ``~/.config/fsspec``).

    Raises:
        ConfigError: the library does not take the options or finds no credentials.
        OSError: the server cannot be reached, or refuses.
    """
    if _CONNECTIONS.pid != os.getpid():
        _reset_after_fork()
    name = f"{path.protocol}://{path.authority}"
    with _CONNECTIONS.lock:
        if name not in _CONNECTIONS.stores:
            _CONNECTIONS.stores[name] = _connect_sftp(path) if path.protocol == "sftp" else _connect(path)
        return _CONNECTIONS.stores[name]


def _reset_after_fork() -> None:
    """In a child of a fork. The parent's connections are kept aside: their ends would wait for a thread that is not here."""
    _CONNECTIONS.inherited.append(_CONNECTIONS.stores)
    _CONNECTIONS.pid, _CONNECTIONS.stores, _CONNECTIONS.lock = os.getpid(), {}, threading.RLock()
    if (asyn := sys.modules.get("fsspec.asyn")) is not None:
        asyn.reset_lock()  # another thread of the parent may have held it at the fork


def disconnect() -> None:
    """Close all connections; the next use makes new ones, by the options of then. Mutates: this process's connections."""
    with _CONNECTIONS.lock:
        while _CONNECTIONS.stores:
            _CONNECTIONS.stores.popitem()[1].close()


def _connect(path: RemotePath) -> Store:
    module = importlib.import_module(f"dtrain.storage.stores.{_STORES[path.protocol][0]}")
    store: Store = getattr(module, _STORES[path.protocol][1])(_make_file_system(path.protocol, module.OPTIONS))
    return store


def _connect_sftp(path: RemotePath) -> Store:
    from dtrain.storage.stores import sftp

    user, _, host = path.authority.rpartition("@")
    name, _, port = host.partition(":")
    there: dict[str, Any] = {"host": name}
    if user:
        there["username"] = user
    if port:
        there["port"] = int(port)
    return sftp.SftpStore(_make_file_system("sftp", sftp.make_options(), **there))


def _make_file_system(protocol: str, defaults: dict[str, Any], **there: Any) -> Any:
    """fsspec's, made with our defaults under the user's configuration, which win by name."""
    import fsspec
    from fsspec.config import apply_config

    kind = fsspec.get_filesystem_class(protocol)
    options = {**defaults, **apply_config(kind, {}), **there}
    for name, value in defaults.items():
        if isinstance(value, dict):
            options[name] = {**value, **options[name]}
    try:
        return kind(**options, skip_instance_cache=True)
    except OSError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{protocol}://: {str(error).splitlines()[0]}; options come from the environment and fsspec's configuration"
        ) from error
