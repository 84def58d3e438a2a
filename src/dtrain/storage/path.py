"""Parse file locations: paths of this machine, and URLs of files on servers (``RemotePath``)."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.packages import missing_extra_error
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
"""Protocols before ``://``."""

# The extra of any other protocol has the name of the protocol.
_EXTRAS = {"gs": "gcs", "az": "azure", "https": "http"}
_READ_ONLY_PROTOCOLS = ("http", "https")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RemotePath:
    """Path of a file or folder on a server, made by ``resolve_path``, with some attributes of ``Path``.

    ``authority`` is the bucket or container; for ``sftp`` the host, with user and port if given.
    """

    protocol: str
    authority: str
    parts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if invalid := next((name for name in self.parts if name in ("", ".", "..") or "/" in name or "\0" in name), None):
            raise ConfigError(
                f"{self}: parts must be names of files or folders, got {invalid!r}. Remove empty parts, '.', '..' and slashes."
            )

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, parts=(*self.parts, *_split_names(name)))

    def __str__(self) -> str:
        return f"{self.protocol}://{'/'.join((self.authority, *self.parts))}"

    @property
    def name(self) -> str:
        """Last part; empty for the top of a bucket."""
        return self.parts[-1] if self.parts else ""

    @property
    def parent(self) -> RemotePath:
        """Parent folder; the top of a bucket is its own parent."""
        return replace(self, parts=self.parts[:-1])

    def with_name(self, name: str) -> RemotePath:
        """Return the path with another last part."""
        return self.parent / name

    @property
    def key(self) -> str:
        """Key of the path for the library of the protocol."""
        if self.protocol == "sftp":
            return "/" + "/".join(self.parts)
        if self.protocol in _READ_ONLY_PROTOCOLS:
            return str(self)
        return "/" * (self.protocol == "memory") + "/".join((self.authority, *self.parts))


AnyPath = Path | RemotePath
"""Path that every function of this package accepts."""


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split("/") if name)


def resolve_path(text: str | AnyPath) -> AnyPath:
    """Parse a URL, or a path of this machine, which is made absolute and free of links.

    Raises:
        ConfigError: an unknown protocol, no bucket or host, a password in the URL, or a library that is not installed.
    """
    if isinstance(text, RemotePath):
        return text
    if isinstance(text, Path):
        if re.match(rf"(?:{'|'.join(PROTOCOLS)}):/", str(text)):
            raise ConfigError(f"path must be a URL as a str, got Path({str(text)!r}), which has lost a slash. Pass a str.")
        return local.real_path(text)
    parsed = _URL.fullmatch(text)
    if parsed is None:
        return local.real_path(text)
    protocol, authority, rest = parsed[1].lower(), parsed[2], parsed[3]
    if protocol == "file":
        return local.real_path(authority + rest)
    if protocol not in _LIBRARIES:
        writable = ", ".join(name for name in PROTOCOLS if name not in _READ_ONLY_PROTOCOLS)
        raise ConfigError(
            f"protocol must be one of {writable}, or {', '.join(_READ_ONLY_PROTOCOLS)} for reading, got {protocol}://. "
            "Pass a URL of these, or a path without ://."
        )
    if not authority:
        kind = "host" if protocol in ("sftp", *_READ_ONLY_PROTOCOLS) else "bucket"
        raise ConfigError(f"{protocol}://{rest}: URL must name a {kind}. Add the name to the URL.")
    if protocol == "sftp" and ":" in authority.rpartition("@")[0]:
        raise ConfigError(
            f"sftp://...@{authority.rpartition('@')[2]}{rest}: URL must not have a password, which would appear in logs. Use a "
            "key, an agent, or the environment variable FSSPEC_SFTP_PASSWORD."
        )
    if protocol in _READ_ONLY_PROTOCOLS and ("@" in authority or "?" in rest or "#" in rest):
        raise ConfigError(
            f"{protocol}://{authority.rpartition('@')[2]}{rest.split('?')[0]}: URL must have neither a user nor a query. Set "
            "headers in fsspec's configuration (client_kwargs of http)."
        )
    library = _LIBRARIES[protocol]
    if importlib.util.find_spec(library) is None:
        raise missing_extra_error(f"{protocol}:// needs the package {library}", _EXTRAS.get(protocol, protocol))
    return RemotePath(protocol=protocol, authority=authority, parts=_split_names(rest))
