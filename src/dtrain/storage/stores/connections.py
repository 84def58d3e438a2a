"""Connect to the store of a path. Connections stay open for the lifetime of the process."""

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
    """Connections of one process; a fork makes its own.

    Args:
        lock: reentrant, because the garbage collector may use a store during a connect.
    """

    pid: int
    stores: dict[str, tuple[dict[str, Any], Store]]
    inherited: list[dict[str, tuple[dict[str, Any], Store]]]
    lock: threading.RLock


_CONNECTIONS = _Connections(os.getpid(), {}, [], threading.RLock())


def store_of(path: RemotePath) -> Store:
    """Return the connected store of ``path``.

    Credentials and options come from fsspec: the environment variables of each library, and fsspec's own configuration
    (``FSSPEC_S3_ENDPOINT_URL=...`` or a file in ``~/.config/fsspec``). If the configuration has changed since the last request,
    a new connection replaces the old connection.

    Raises:
        ConfigError: the library refuses the options or finds no credentials.
        OSError: the server cannot be reached, or refuses.
    """
    if _CONNECTIONS.pid != os.getpid():
        _reset_after_fork()
    name = f"{path.protocol}://{path.authority}"
    options = _configured_options(path.protocol)
    with _CONNECTIONS.lock:
        connected_with, store = _CONNECTIONS.stores.get(name, (None, None))
        if store is None or connected_with != options:
            store = _connect_sftp(path, options) if path.protocol == "sftp" else _connect(path, options)
            _CONNECTIONS.stores[name] = (options, store)
        return store


def _reset_after_fork() -> None:
    """Reset the connections in a fork. The parent's connections are kept, because closing them would wait for its threads."""
    _CONNECTIONS.inherited.append(_CONNECTIONS.stores)
    _CONNECTIONS.pid, _CONNECTIONS.stores, _CONNECTIONS.lock = os.getpid(), {}, threading.RLock()
    if (asyn := sys.modules.get("fsspec.asyn")) is not None:
        # Another thread of the parent may have held the lock at the fork.
        asyn.reset_lock()


def disconnect() -> None:
    """Close all connections. The next use connects with the current options. Mutates: this process's connections."""
    with _CONNECTIONS.lock:
        while _CONNECTIONS.stores:
            _CONNECTIONS.stores.popitem()[1][1].close()


def _configured_options(protocol: str) -> dict[str, Any]:
    """Return the options of a protocol in fsspec's configuration."""
    import fsspec
    from fsspec.config import apply_config

    options: dict[str, Any] = apply_config(fsspec.get_filesystem_class(protocol), {})
    return options


def _connect(path: RemotePath, configured: dict[str, Any]) -> Store:
    module = importlib.import_module(f"dtrain.storage.stores.{_STORES[path.protocol][0]}")
    store: Store = getattr(module, _STORES[path.protocol][1])(_make_file_system(path.protocol, module.OPTIONS, configured))
    return store


def _connect_sftp(path: RemotePath, configured: dict[str, Any]) -> Store:
    from dtrain.storage.stores import sftp

    user, _, host = path.authority.rpartition("@")
    name, _, port = host.partition(":")
    address: dict[str, Any] = {"host": name}
    if user:
        address["username"] = user
    if port:
        address["port"] = int(port)
    return sftp.SftpStore(_make_file_system("sftp", sftp.make_options(), configured, **address))


def _make_file_system(protocol: str, defaults: dict[str, Any], configured: dict[str, Any], **address: Any) -> Any:
    """Create fsspec's file system with our defaults, which the user's configuration overrides by name."""
    import fsspec

    kind = fsspec.get_filesystem_class(protocol)
    options = {**defaults, **configured, **address}
    for name, value in defaults.items():
        if isinstance(value, dict):
            options[name] = {**value, **options[name]}
    try:
        return kind(**options, skip_instance_cache=True)
    except OSError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{protocol}://: {str(error).splitlines()[0]}. Set options in the environment or in fsspec's configuration."
        ) from error
