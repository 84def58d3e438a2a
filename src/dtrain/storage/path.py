"""Where files are: a path of this machine, or a place on a server, named by a URL."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.storage import local

_LIBRARIES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "oci": "ocifs",
    "sftp": "paramiko",
    "memory": "fsspec",
    "http": "aiohttp",
    "https": "aiohttp",
}
PROTOCOLS = tuple(_LIBRARIES)
"""What may come before ``://``."""

_EXTRAS = {"gs": "gcs", "az": "azure", "https": "http"}  # of the others the name is that of the protocol
_READ_ONLY_PROTOCOLS = ("http", "https")  # to read only

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RemotePath:
    """A file or folder on a server. Made by ``place``; ``/``, ``name``, ``parent`` and ``with_name`` as of a ``Path``.

    ``authority`` is the bucket or container, or of ``sftp`` the host, with user and port where given.
    """

    protocol: str
    authority: str
    parts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if strange := next((part for part in self.parts if part in ("", ".", "..") or "/" in part or "\0" in part), None):
            raise ConfigError(f"{self}: {strange!r} is no name of a file or folder")

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, parts=(*self.parts, *_split_names(name)))

    def __str__(self) -> str:
        return f"{self.protocol}://{'/'.join((self.authority, *self.parts))}"

    @property
    def name(self) -> str:
        """The last name; empty for the top of a bucket."""
        return self.parts[-1] if self.parts else ""

    @property
    def parent(self) -> RemotePath:
        """The folder that this is in; the top of a bucket is its own."""
        return replace(self, parts=self.parts[:-1])

    def with_name(self, name: str) -> RemotePath:
        """A neighbour of that name."""
        return self.parent / name

    @property
    def key(self) -> str:
        """The name that the server's library has for it."""
        if self.protocol == "sftp":
            return "/" + "/".join(self.parts)
        if self.protocol in _READ_ONLY_PROTOCOLS:
            return str(self)
        return "/" * (self.protocol == "memory") + "/".join((self.authority, *self.parts))


AnyPath = Path | RemotePath
"""Every function of this package takes either."""


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split("/") if name)


def resolve_path(text: str | AnyPath) -> AnyPath:
    """The place that ``text`` names: a URL, or a path of this machine, made absolute and free of links.

    Raises:
        ConfigError: an unknown protocol, no bucket or host, a password in the URL, or a library that is not installed.
    """
    if isinstance(text, RemotePath):
        return text
    if isinstance(text, Path):
        if re.match(rf"(?:{'|'.join(PROTOCOLS)}):/", str(text)):
            raise ConfigError(f"Path({str(text)!r}) has lost a slash of its URL; give the URL as a str")
        return local.real_path(text)
    parsed = _URL.fullmatch(text)
    if parsed is None:
        return local.real_path(text)
    protocol, authority, rest = parsed[1].lower(), parsed[2], parsed[3]
    if protocol == "file":
        return local.real_path(authority + rest)
    return _parse_remote(protocol, authority, rest)


def _parse_remote(protocol: str, authority: str, rest: str) -> RemotePath:
    if protocol not in _LIBRARIES:
        kept = ", ".join(name for name in PROTOCOLS if name not in _READ_ONLY_PROTOCOLS)
        raise ConfigError(
            f"{protocol}:// is no place to keep files; known: {kept}, or a path without ://; to read only: {', '.join(_READ_ONLY_PROTOCOLS)}"
        )
    if not authority:
        raise ConfigError(
            f"{protocol}://{rest}: names no {'host' if protocol in ('sftp', *_READ_ONLY_PROTOCOLS) else 'bucket'}"
        )
    if protocol == "sftp" and ":" in authority.rpartition("@")[0]:
        raise ConfigError(
            f"sftp://...@{authority.rpartition('@')[2]}{rest}: a password in a URL ends up in logs; use a key, an agent, or "
            "the environment variable FSSPEC_SFTP_PASSWORD"
        )
    if protocol in _READ_ONLY_PROTOCOLS and ("@" in authority or "?" in rest or "#" in rest):
        raise ConfigError(
            f"{protocol}://{authority.rpartition('@')[2]}{rest.split('?')[0]}: takes neither a user nor a query; give headers "
            "in fsspec's configuration (client_kwargs of http)"
        )
    library = _LIBRARIES[protocol]
    if importlib.util.find_spec(library) is None:
        raise missing_extra_error(f"{protocol}:// needs the package {library}", _EXTRAS.get(protocol, protocol))
    return RemotePath(protocol=protocol, authority=authority, parts=_split_names(rest))
