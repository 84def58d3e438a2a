"""Tar archives as WebDataset has them: a sample is members in a row whose names differ in what comes after the first dot.

Nothing is unpacked to a disk. The archive's headers are read once, when it is opened.

Writes archives as WebDataset reads them. Column names are what comes after the dot; equal samples give equal archives."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.data.stream.formats import images, unsafe_pickle
from dtrain.data.stream.formats.shard_format import (
    MAX_SAMPLE_BYTES,
    ByteSource,
    ByteSourceFile,
    ColumnErrors,
    Sample,
    ShardEntry,
    check_options,
    check_sample,
    check_sample_bytes,
    to_numpy,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

KEY_COLUMN = "__key__"
_MEMBER_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_BLOCK = 512

TarMembers = list[tuple[str, int, int]]
"""Of one sample: what comes after the dot, and where its bytes begin and end."""


def _index_samples(source: ByteSource, name: str) -> list[tuple[str, TarMembers]]:
    """The keys in the archive's order, each with its members.

    Raises:
        DataError: no tar archive, a truncated or damaged one, or two members of one name in a sample.
    """
    samples: list[tuple[str, TarMembers]] = []
    try:
        with tarfile.open(fileobj=ByteSourceFile(source), mode="r:", encoding="utf-8") as archive:
            for member in archive:
                _add_member(samples, member, source.size, name)
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            end = archive.offset
    except tarfile.TarError as error:
        if source.size == 0:
            return []
        raise DataError(f"{name}: is no tar archive, or truncated: {error}") from error
    rest = bytes(source.read(end, min(source.size, end + _BLOCK)))
    if rest.strip(b"\0"):
        raise DataError(f"{name}: is damaged at byte {end}, where the header of a member should be")
    return samples


def _add_member(samples: list[tuple[str, TarMembers]], member: tarfile.TarInfo, size: int, name: str) -> None:
    if member.size < 0:  # to go on would mean to go back, and to meet it again
        raise DataError(f"{name}: member {member.name!r} has {member.size} bytes, which cannot be")
    found = _MEMBER_NAME.fullmatch(member.name)
    if not member.isreg() or found is None or member.name.startswith("__"):
        return
    if member.issparse() or member.offset_data + member.size > size:
        raise DataError(f"{name}: member {member.name!r} is sparse, or ends after the archive does")
    key, column = found[1], found[2].lower()
    if not samples or samples[-1][0] != key:
        samples.append((key, []))
    members = samples[-1][1]
    if any(column == other for other, _, _ in members):
        raise DataError(f"{name}: member {member.name!r} is in its sample twice")
    members.append((column, member.offset_data, member.offset_data + member.size))


def _decode_text(view: memoryview) -> str:
    return str(view, "utf-8")


def _decode_npz(view: memoryview) -> dict[str, Any]:
    with np.load(io.BytesIO(view), allow_pickle=False) as arrays:
        return dict(arrays)


_DECODERS: Mapping[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _decode_text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), lambda view: int(bytes(view))),
    **dict.fromkeys(("json", "jsn"), lambda view: json.loads(str(view, "utf-8"))),
    "npy": lambda view: np.load(io.BytesIO(view), allow_pickle=False),
    "npz": _decode_npz,
    **dict.fromkeys(("pkl", "pickle", "pyd"), unsafe_pickle.loads),
}
PICKLE_SUFFIXES = ("pkl", "pickle", "pyd")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "webp", "bmp", "tif", "tiff")


def member_kind(column: str) -> str:
    """What tells how a member is decoded: what comes after the last dot."""
    return column.rpartition(".")[2]


class TarShard:
    """The samples of one archive: mappings of what comes after the dot to the decoded member, and ``__key__``."""

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        self._source: ByteSource | None = source
        self._max_sample_bytes = max_sample_bytes
        self._samples = _index_samples(source, entry.file.name)
        self._columns = options.get("columns")
        self._images = options.get("images", False)
        if options.get("allow_pickle") is not True:
            for key, members in self._samples:
                for column, _, _ in members:
                    if member_kind(column) in PICKLE_SUFFIXES and self._wants(column):
                        raise ConfigError(
                            f"{entry.file.name}: member {key}.{column} is pickled, and reading it runs what the file says; "
                            "leave it out with columns, or trust the data with allow_pickle=True"
                        )

    def _wants(self, column: str) -> bool:
        return self._columns is None or column in self._columns

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        if not 0 <= row < len(self) or self._source is None:
            raise IndexError(f"row {row} of {len(self)}, {'closed' if self._source is None else 'open'}")
        key, members = self._samples[row]
        sample: dict[str, Any] = {KEY_COLUMN: key}
        taken = 0
        for column, begin, end in members:
            if self._wants(column):
                check_sample_bytes(taken + end - begin, self._max_sample_bytes)
                view = memoryview(self._source.read(begin, end))
                taken += max(end - begin, self._decoded_bytes(column, view))
                check_sample_bytes(taken, self._max_sample_bytes)
                sample[column] = self._decode(column, view, end - begin)
        return sample

    def _decoded_bytes(self, column: str, view: memoryview) -> int:
        """The bytes of a decoded member that may be many more than those that it comes from; 0 for others."""
        kind = member_kind(column)
        if self._images and kind in IMAGE_SUFFIXES:
            return images.decoded_bytes(view)
        if kind == "npz":
            with zipfile.ZipFile(io.BytesIO(view)) as archive:
                return sum(member.file_size for member in archive.infolist())
        return 0

    def _decode(self, column: str, view: memoryview, size: int) -> Any:
        if len(view) != size:
            raise ValueError(f"{column} has {len(view)} bytes of {size}")
        kind = member_kind(column)
        if self._images and kind in IMAGE_SUFFIXES:
            return images.decode_image(view)
        return _DECODERS.get(kind, bytes)(view)

    def close(self) -> None:
        """Let go of the source."""
        self._source = None


class TarFormat:
    """The format; see the module.

    What comes after the last dot says how a member is decoded: ``json``, ``txt``, ``cls``, ``npy`` and their other names; all
    others are bytes.

    Options: ``columns`` (others are left out), ``images`` (whether images are decoded, by pillow), and ``allow_pickle``.
    """

    name = "tar"
    suffixes = (".tar",)
    supports_ranges = False
    options = ("columns", "images", "allow_pickle")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        if options.get("images"):
            images.check_pillow()

    def open(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> TarShard:
        """See ``Format.open``. Reads the headers of all members."""
        self.check(entry, options)
        shard = TarShard(source, entry, options, max_sample_bytes)
        if len(shard) != entry.samples:
            raise DataError(
                f"{entry.file.name}: has {len(shard)} samples, its index says {entry.samples}; it is truncated, or changed"
            )
        return shard

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the headers of all members."""
        return len(_index_samples(source, "file")), {}


TAR = TarFormat()


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
        check_sample(sample, number)
        key = sample.get(KEY_COLUMN, f"{number:09}")
        if not isinstance(key, str) or not _is_valid_key(key):
            raise ConfigError(
                f"sample {number}: {KEY_COLUMN}={key!r} is no name of files; it has no dot in its last part, and no empty one"
            )
        if key == self._last_key:
            raise ConfigError(f"sample {number}: {KEY_COLUMN}={key!r} is that of the sample before; the two would become one")
        self._last_key = key
        columns = [name for name in sample if name != KEY_COLUMN]
        if not columns:
            raise ConfigError(f"sample {number}: has no column besides {KEY_COLUMN}")
        return b"".join(_encode_member(f"{key}.{name}", _encode_value(name, sample[name], number)) for name in columns)

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The archive, which two empty blocks end."""
        return b"".join([*encoded, bytes(1024)])


def _is_valid_key(key: str) -> bool:
    parts = key.split("/")
    return (
        "." not in parts[-1]
        and "\0" not in key
        and not key.startswith("__")
        and all(part not in ("", ".", "..") for part in parts)
    )


def _encode_member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    return head + data + bytes(-len(data) % 512)


def _encode_value(name: str, value: Any, number: int) -> bytes:
    if not name or name != name.lower() or "/" in name or "\0" in name:
        raise ConfigError(f"sample {number}, column {name!r}: is no name after a dot, which is in small letters and without /")
    kind, value = member_kind(name), to_numpy(value)
    if kind in PICKLE_SUFFIXES:
        raise ConfigError(
            f"sample {number}, column {name!r}: would be read as a pickle, which runs code; name it .json or .npy"
        )
    if kind in _ENCODERS:
        with ColumnErrors(name, number):
            return _ENCODERS[kind](value)
    if not isinstance(value, bytes):
        known = ", ".join(_ENCODERS)
        raise ConfigError(
            f"sample {number}, column {name!r}: {type(value).__name__} has no encoding by that name; "
            f"{known} have, others are bytes"
        )
    return value


def _encode_npy(value: Any) -> bytes:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"array wanted, got {type(value).__name__}")
    out = io.BytesIO()
    np.save(out, value, allow_pickle=False)
    return out.getvalue()


def _encode_npz(value: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **{name: np.asarray(array) for name, array in value.items()})
    return out.getvalue()


def _encode_int(value: Any) -> bytes:
    if not isinstance(value, int | np.integer):
        raise TypeError(f"int wanted, got {type(value).__name__}")
    return str(int(value)).encode()


def _encode_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"str wanted, got {type(value).__name__}")
    return value.encode()


_ENCODERS: Mapping[str, Callable[[Any], bytes]] = {
    "json": lambda value: json.dumps(value, allow_nan=False).encode(),
    "txt": _encode_text,
    "cls": _encode_int,
    "npy": _encode_npy,
    "npz": _encode_npz,
}
