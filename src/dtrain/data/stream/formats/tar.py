"""``TarFormat``: read and write tar archives in WebDataset's layout.

A sample is a run of members whose names are equal up to the first dot. The rest of a name is the column. Nothing is unpacked to
a disk: opening an archive reads the headers of its members. Equal samples give equal archives."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.data.stream.formats.shard_format import (
    ByteSource,
    ByteSourceFile,
    Sample,
    Shard,
    ShardEntry,
    ShardFormat,
    ShardWriter,
    check_sample,
    check_sample_bytes,
    decode_image,
    image_bytes,
    import_pillow,
    name_column,
    to_numpy,
    unpickle,
)
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

if TYPE_CHECKING:
    from dtrain.data.stream.open_shards import ByteLRU

KEY_COLUMN = "__key__"
_MEMBER_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_BLOCK = 512

TarMembers = list[tuple[str, int, int]]
"""Members of one sample: column, start and end of the bytes."""


def _index_samples(source: ByteSource, name: str) -> list[tuple[str, TarMembers]]:
    """Return the keys in the archive's order, each with its members.

    Raises:
        DataError: the file is not a tar archive, is truncated or damaged, or a sample has two members of one name.
    """
    samples: list[tuple[str, TarMembers]] = []
    try:
        with tarfile.open(fileobj=ByteSourceFile(source), mode="r:", encoding="utf-8") as archive:
            for member in archive:
                _add_member(samples, member, source.size, name)
                # Without this, tarfile keeps all members in memory.
                archive.members = []  # type: ignore[attr-defined]
            end = archive.offset
    except tarfile.TarError as error:
        if source.size == 0:
            return []
        raise DataError(f"{name}: is not a tar archive, or truncated: {error}") from error
    rest = bytes(source.read(end, min(source.size, end + _BLOCK)))
    if rest.strip(b"\0"):
        raise DataError(f"{name}: is damaged at byte {end}, which must be the header of a member.")
    return samples


def _add_member(samples: list[tuple[str, TarMembers]], member: tarfile.TarInfo, size: int, name: str) -> None:
    # A negative size would move tarfile backwards, into an endless loop.
    if member.size < 0:
        raise DataError(f"{name}: member {member.name!r} has an impossible size of {member.size} bytes.")
    match = _MEMBER_NAME.fullmatch(member.name)
    if not member.isreg() or match is None or member.name.startswith("__"):
        return
    if member.issparse() or member.offset_data + member.size > size:
        raise DataError(f"{name}: member {member.name!r} is sparse, or ends after the archive.")
    key, column = match[1], match[2].lower()
    if not samples or samples[-1][0] != key:
        samples.append((key, []))
    members = samples[-1][1]
    if any(column == existing for existing, _, _ in members):
        raise DataError(f"{name}: member {member.name!r} occurs twice in its sample.")
    members.append((column, member.offset_data, member.offset_data + member.size))


_DECODERS: Mapping[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), lambda view: str(view, "utf-8")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), lambda view: int(bytes(view))),
    **dict.fromkeys(("json", "jsn"), lambda view: json.loads(str(view, "utf-8"))),
    "npy": lambda view: np.load(io.BytesIO(view), allow_pickle=False),
    "npz": lambda view: dict(np.load(io.BytesIO(view), allow_pickle=False)),
    **dict.fromkeys(("pkl", "pickle", "pyd"), unpickle),
}
PICKLE_SUFFIXES = ("pkl", "pickle", "pyd")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "webp", "bmp", "tif", "tiff")


def member_kind(column: str) -> str:
    """Return the suffix after the last dot, which determines the decoder."""
    return column.rpartition(".")[2]


class TarShard(Shard):
    """Samples of one archive, as mappings from column to decoded member, and ``__key__``."""

    def __init__(self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        super().__init__(source, max_sample_bytes)
        self._samples = _index_samples(source, entry.file.name)
        self._columns = options.get("columns")
        self._images = options.get("images", False)
        if options.get("allow_pickle") is not True:
            for key, members in self._samples:
                for column, _, _ in members:
                    if member_kind(column) in PICKLE_SUFFIXES and self._wants(column):
                        raise ConfigError(
                            f"{entry.file.name}: member {key}.{column} is pickled, and unpickling runs code from the file. "
                            "Leave it out with columns, or trust the data with allow_pickle=True."
                        )

    def _wants(self, column: str) -> bool:
        return self._columns is None or column in self._columns

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, row: int, source: ByteSource) -> dict[str, Any]:
        """Read the members of a sample; see ``Shard.read``."""
        key, members = self._samples[row]
        sample: dict[str, Any] = {KEY_COLUMN: key}
        byte_count = 0
        for column, begin, end in members:
            if self._wants(column):
                check_sample_bytes(byte_count + end - begin, self._max_sample_bytes)
                view = memoryview(source.read(begin, end))
                byte_count += max(end - begin, self._decoded_bytes(column, view))
                check_sample_bytes(byte_count, self._max_sample_bytes)
                sample[column] = self._decode(column, view, end - begin)
        return sample

    def _decoded_bytes(self, column: str, view: memoryview) -> int:
        """Return the size of a decoded member that may grow when decoded; 0 for other members."""
        kind = member_kind(column)
        if self._images and kind in IMAGE_SUFFIXES:
            return image_bytes(view)
        if kind == "npz":
            with zipfile.ZipFile(io.BytesIO(view)) as archive:
                return sum(member.file_size for member in archive.infolist())
        return 0

    def _decode(self, column: str, view: memoryview, size: int) -> Any:
        if len(view) != size:
            raise ValueError(f"{column} must have {size} bytes, got {len(view)}")
        kind = member_kind(column)
        if self._images and kind in IMAGE_SUFFIXES:
            return decode_image(view)
        return _DECODERS.get(kind, bytes)(view)


class TarFormat(ShardFormat):
    """Tar; see the module.

    The suffix after the last dot determines the decoder: ``json``, ``txt``, ``cls``, ``npy`` and their synonyms. All other
    members are bytes.

    Options: ``columns`` (names of the columns to read), ``images`` (if True, pillow decodes images), and ``allow_pickle``.
    """

    name = "tar"
    suffixes = (".tar",)
    options = ("columns", "images", "allow_pickle")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Check the options; see ``ShardFormat.check``."""
        super().check(entry, options)
        if options.get("images"):
            import_pillow()

    def open_unchecked(
        self, source: ByteSource, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int, decoded: ByteLRU | None
    ) -> TarShard:
        """Open a shard from the headers of all members."""
        return TarShard(source, entry, options, max_sample_bytes)

    def count(self, source: ByteSource) -> tuple[int, dict[str, Plain]]:
        """Count the samples; see ``ShardFormat.count``. Reads the headers of all members."""
        return len(_index_samples(source, "file")), {}

    def writer(self, first: Sample, columns: Mapping[str, str] | None, details: dict[str, Plain]) -> TarWriter:
        """Make the writer; see ``ShardFormat.writer``."""
        return TarWriter(details)


TAR = TarFormat()


class TarWriter(ShardWriter):
    """Writer of tar archives; see ``ShardWriter``."""

    suffix = ".tar"
    shard_bytes = 1024

    def __init__(self, settings: dict[str, Plain]) -> None:
        super().__init__(settings)
        self._last_key: str | None = None

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """Encode the members of a sample."""
        check_sample(sample, number)
        key = sample.get(KEY_COLUMN, f"{number:09}")
        if not isinstance(key, str) or not _is_valid_key(key):
            raise ConfigError(
                f"sample {number}: {KEY_COLUMN} must be a file name without a dot in its last part, got {key!r}. "
                "Write the key as '000042' or 'folder/000042', for example."
            )
        if key == self._last_key:
            raise ConfigError(f"sample {number}: {KEY_COLUMN}={key!r} must differ from the previous sample. Use unique keys.")
        self._last_key = key
        columns = [name for name in sample if name != KEY_COLUMN]
        if not columns:
            raise ConfigError(
                f"sample {number}: must have a column besides {KEY_COLUMN}. Add a column such as 'txt' to each sample."
            )
        return b"".join(_encode_member(f"{key}.{name}", _encode_value(name, sample[name], number)) for name in columns)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """Encode the archive, which ends with two empty blocks."""
        return super().pack(encoded) + bytes(self.shard_bytes)


def _is_valid_key(key: str) -> bool:
    parts = key.split("/")
    return (
        "." not in parts[-1]
        and "\0" not in key
        and not key.startswith("__")
        and all(name not in ("", ".", "..") for name in parts)
    )


def _encode_member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    return head + data + bytes(-len(data) % 512)


def _encode_value(name: str, value: Any, number: int) -> bytes:
    if not name or name != name.lower() or "/" in name or "\0" in name:
        raise ConfigError(
            f"sample {number}, column {name!r}: must be a file suffix in lower case without /. "
            "Name the column 'txt', 'jpg' or 'json', for example."
        )
    kind, value = member_kind(name), to_numpy(value)
    if kind in PICKLE_SUFFIXES:
        raise ConfigError(
            f"sample {number}, column {name!r}: a reader would unpickle it, which runs code. Name it .json or .npy."
        )
    if kind in _ENCODERS:
        with name_column(name, number):
            expected, description, encode = _ENCODERS[kind]
            if not isinstance(value, expected):
                raise TypeError(f"must be {description}, got {type(value).__name__}")
            return encode(value)
    if not isinstance(value, bytes):
        names = ", ".join(_ENCODERS)
        raise ConfigError(
            f"sample {number}, column {name!r}: {type(value).__name__} has no encoding of that name. Pass bytes, or use {names}"
        )
    return value


def _save(save: Callable[..., None], *args: Any, **arrays: Any) -> bytes:
    out = io.BytesIO()
    save(out, *args, allow_pickle=False, **arrays)
    return out.getvalue()


# The type of values, its name in errors, and the encoder, by suffix.
_ENCODERS: Mapping[str, tuple[Any, str, Callable[[Any], bytes]]] = {
    "json": (object, "", lambda value: json.dumps(value, allow_nan=False).encode()),
    "txt": (str, "a str", lambda value: value.encode()),
    "cls": (int | np.integer, "an int", lambda value: str(int(value)).encode()),
    "npy": (np.ndarray, "an array", lambda value: _save(np.save, value)),
    "npz": (object, "", lambda value: _save(np.savez, **{name: np.asarray(array) for name, array in value.items()})),
}
