"""Writes archives as WebDataset reads them. Column names are what comes after the dot; equal samples give equal archives."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.data.stream.formats.samples import Naming, Sample, check_mapping, plain
from dtrain.data.stream.formats.tar import KEY, PICKLED, kind_of
from dtrain.errors import ConfigError
from dtrain.types import Plain


class TarWriter:
    """See ``Writer``."""

    suffix = ".tar"
    sample_bytes = 0
    shard_bytes = 1024

    def __init__(self, settings: dict[str, Plain]) -> None:
        self.details = settings
        self._last_key: str | None = None

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """The sample's members, one after the other."""
        check_mapping(sample, number)
        key = sample.get(KEY, f"{number:09}")
        if not isinstance(key, str) or not _is_key(key):
            raise ConfigError(
                f"sample {number}: {KEY}={key!r} is no name of files; it has no dot in its last part, and no empty one"
            )
        if key == self._last_key:
            raise ConfigError(f"sample {number}: {KEY}={key!r} is that of the sample before; the two would become one")
        self._last_key = key
        columns = [name for name in sample if name != KEY]
        if not columns:
            raise ConfigError(f"sample {number}: has no column besides {KEY}")
        return b"".join(_member(f"{key}.{name}", _tar_value(name, sample[name], number)) for name in columns)

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The archive, which two empty blocks end."""
        return b"".join([*encoded, bytes(1024)])


def _is_key(key: str) -> bool:
    parts = key.split("/")
    return (
        "." not in parts[-1]
        and "\0" not in key
        and not key.startswith("__")
        and all(part not in ("", ".", "..") for part in parts)
    )


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    return head + data + bytes(-len(data) % 512)


def _tar_value(name: str, value: Any, number: int) -> bytes:
    if not name or name != name.lower() or "/" in name or "\0" in name:
        raise ConfigError(f"sample {number}, column {name!r}: is no name after a dot, which is in small letters and without /")
    kind, value = kind_of(name), plain(value)
    if kind in PICKLED:
        raise ConfigError(
            f"sample {number}, column {name!r}: would be read as a pickle, which runs code; name it .json or .npy"
        )
    if kind in _TAR_VALUES:
        with Naming(name, number):
            return _TAR_VALUES[kind](value)
    if not isinstance(value, bytes):
        known = ", ".join(_TAR_VALUES)
        raise ConfigError(
            f"sample {number}, column {name!r}: {type(value).__name__} has no encoding by that name; "
            f"{known} have, others are bytes"
        )
    return value


def _npy(value: Any) -> bytes:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"array wanted, got {type(value).__name__}")
    out = io.BytesIO()
    np.save(out, value, allow_pickle=False)
    return out.getvalue()


def _npz(value: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **{name: np.asarray(array) for name, array in value.items()})
    return out.getvalue()


def _digits(value: Any) -> bytes:
    if not isinstance(value, int | np.integer):
        raise TypeError(f"int wanted, got {type(value).__name__}")
    return str(int(value)).encode()


def _utf8(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"str wanted, got {type(value).__name__}")
    return value.encode()


_TAR_VALUES: Mapping[str, Callable[[Any], bytes]] = {
    "json": lambda value: json.dumps(value, allow_nan=False).encode(),
    "txt": _utf8,
    "cls": _digits,
    "npy": _npy,
    "npz": _npz,
}
