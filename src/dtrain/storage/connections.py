"""``Connections``: the connections of this process to servers, made on first use. ``store_of`` returns the store of a path.

``CONNECTIONS`` is the only state of ``storage``. A path is a value, which cannot own a connection, and a connection for each
request would cost a handshake, a search for credentials and, for SFTP, a login. A connection depends only on the path and on
fsspec's configuration, so a request cannot tell who has made its connection.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from dtrain.errors import ConfigError
from dtrain.storage.object_stores import AzStore, GsStore, MemoryStore, OciStore, S3Store
from dtrain.storage.path import RemotePath
from dtrain.storage.sftp_store import SftpStore, known_hosts_policy
from dtrain.storage.store import Store
from dtrain.storage.web_store import HttpStore

_STORES: dict[str, type[Store]] = {
    "s3": S3Store,
    "gs": GsStore,
    "az": AzStore,
    "oci": OciStore,
    "sftp": SftpStore,
    "memory": MemoryStore,
    "http": HttpStore,
    "https": HttpStore,
}


class Connections:
    """Stores by protocol and server, each with the options of fsspec's configuration that made it."""

    def __init__(self) -> None:
        # Reentrant, because the garbage collector may use a store during a connect.
        self._lock = threading.RLock()
        self._stores: dict[str, tuple[dict[str, Any], Store]] = {}
        self._inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def store_of(self, path: RemotePath) -> Store:
        """Return the connected store of ``path``."""
        name, options = f"{path.protocol}://{path.authority}", _configured_options(path.protocol)
        with self._lock:
            connected_with, store = self._stores.get(name, (None, None))
            if store is None or connected_with != options:
                store = _connect(path, options)
                self._stores[name] = (options, store)
            return store

    def close(self) -> None:
        """Close all connections. The next use connects again."""
        with self._lock:
            while self._stores:
                self._stores.popitem()[1][1].close()

    def _reset_after_fork(self) -> None:
        """Forget the parent's connections in a forked child. They are kept, since closing them would wait for its threads."""
        self._inherited.append(self._stores)
        self._stores, self._lock = {}, threading.RLock()
        if (asyn := sys.modules.get("fsspec.asyn")) is not None:
            # Another thread of the parent may have held the lock at the fork.
            asyn.reset_lock()


CONNECTIONS = Connections()


def store_of(path: RemotePath) -> Store:
    """Return the connected store of ``path``.

    Credentials and options come from fsspec: the environment variables of each library, and fsspec's own configuration
    (``FSSPEC_S3_ENDPOINT_URL=...`` or a file in ``~/.config/fsspec``). If the configuration has changed since the last request,
    a new connection replaces the old connection.

    Raises:
        ConfigError: the library refuses the options or finds no credentials.
        OSError: the server cannot be reached, or refuses.
    """
    return CONNECTIONS.store_of(path)


def disconnect() -> None:
    """Close all connections of this process. The next use connects again."""
    CONNECTIONS.close()


def _configured_options(protocol: str) -> dict[str, Any]:
    """Return the options of a protocol in fsspec's configuration."""
    import fsspec
    from fsspec.config import apply_config

    options: dict[str, Any] = apply_config(fsspec.get_filesystem_class(protocol), {})
    return options


def _connect(path: RemotePath, configured: dict[str, Any]) -> Store:
    """Connect with our default options, which the configuration overrides by name."""
    import fsspec

    kind = _STORES[path.protocol]
    options = {**kind.options, **configured}
    for name, value in kind.options.items():
        if isinstance(value, dict):
            options[name] = {**value, **options[name]}
    if path.protocol == "sftp":
        options = {"host_key_policy": known_hosts_policy(), **options, **_sftp_address(path.authority)}
    try:
        return kind(fsspec.get_filesystem_class(path.protocol)(**options, skip_instance_cache=True))
    except OSError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path.protocol}://: {str(error).splitlines()[0]}. Set options in the environment or in fsspec's configuration."
        ) from error


def _sftp_address(authority: str) -> dict[str, Any]:
    user, _, host = authority.rpartition("@")
    name, _, port = host.partition(":")
    return {"host": name, **({"username": user} if user else {}), **({"port": int(port)} if port else {})}
