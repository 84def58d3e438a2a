"""Tar archives as WebDataset has them: a sample is members in a row whose names differ in what comes after the first dot.

Nothing is unpacked to a disk. The archive's headers are read once, when it is opened.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dtrain.data.stream.formats import images, pickled
from dtrain.data.stream.formats.base import MAX_SAMPLE_BYTES, ShardEntry, Source, check_options, check_sample_bytes
from dtrain.data.stream.formats.source_file import SourceFile
from dtrain.errors import ConfigError, DataError
from dtrain.types import Plain

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_BLOCK = 512

Members = list[tuple[str, int, int]]
"""Of one sample: what comes after the dot, and where its bytes begin and end."""


def _samples(source: Source, name: str) -> list[tuple[str, Members]]:
    """The keys in the archive's order, each with its members.

    Raises:
        DataError: no tar archive, a truncated or damaged one, or two members of one name in a sample.
    """
    samples: list[tuple[str, Members]] = []
    try:
        with tarfile.open(fileobj=SourceFile(source), mode="r:", encoding="utf-8") as archive:
            for member in archive:
                _add(samples, member, source.size, name)
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


def _add(samples: list[tuple[str, Members]], member: tarfile.TarInfo, size: int, name: str) -> None:
    if member.size < 0:  # to go on would mean to go back, and to meet it again
        raise DataError(f"{name}: member {member.name!r} has {member.size} bytes, which cannot be")
    found = _NAME.fullmatch(member.name)
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


def _text(view: memoryview) -> str:
    return str(view, "utf-8")


def _npz(view: memoryview) -> dict[str, Any]:
    with np.load(io.BytesIO(view), allow_pickle=False) as arrays:
        return dict(arrays)


_DECODERS: Mapping[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), lambda view: int(bytes(view))),
    **dict.fromkeys(("json", "jsn"), lambda view: json.loads(str(view, "utf-8"))),
    "npy": lambda view: np.load(io.BytesIO(view), allow_pickle=False),
    "npz": _npz,
    **dict.fromkeys(("pkl", "pickle", "pyd"), pickled.loads),
}
PICKLED = ("pkl", "pickle", "pyd")
IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "webp", "bmp", "tif", "tiff")


def kind_of(column: str) -> str:
    """What tells how a member is decoded: what comes after the last dot."""
    return column.rpartition(".")[2]


class TarShard:
    """The samples of one archive: mappings of what comes after the dot to the decoded member, and ``__key__``."""

    def __init__(self, source: Source, entry: ShardEntry, options: Mapping[str, Any], max_sample_bytes: int) -> None:
        self._source: Source | None = source
        self._most = max_sample_bytes
        self._samples = _samples(source, entry.file.name)
        self._columns = options.get("columns")
        self._images = options.get("images", False)
        if options.get("allow_pickle") is not True:
            for key, members in self._samples:
                for column, _, _ in members:
                    if kind_of(column) in PICKLED and self._wants(column):
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
        sample: dict[str, Any] = {KEY: key}
        taken = 0
        for column, begin, end in members:
            if self._wants(column):
                check_sample_bytes(taken + end - begin, self._most)
                view = memoryview(self._source.read(begin, end))
                taken += max(end - begin, self._announced(column, view))
                check_sample_bytes(taken, self._most)
                sample[column] = self._decode(column, view, end - begin)
        return sample

    def _announced(self, column: str, view: memoryview) -> int:
        """The bytes of a decoded member that may be many more than those that it comes from; 0 for others."""
        kind = kind_of(column)
        if self._images and kind in IMAGES:
            return images.announced(view)
        if kind == "npz":
            with zipfile.ZipFile(io.BytesIO(view)) as archive:
                return sum(member.file_size for member in archive.infolist())
        return 0

    def _decode(self, column: str, view: memoryview, size: int) -> Any:
        if len(view) != size:
            raise ValueError(f"{column} has {len(view)} bytes of {size}")
        kind = kind_of(column)
        if self._images and kind in IMAGES:
            return images.opened(view)
        return _DECODERS.get(kind, bytes)(view)

    def close(self) -> None:
        """Let go of the source."""
        self._source = None


class Tar:
    """The format; see the module.

    What comes after the last dot says how a member is decoded: ``json``, ``txt``, ``cls``, ``npy`` and their other names; all
    others are bytes.

    Options: ``columns`` (others are left out), ``images`` (whether images are decoded, by pillow), and ``allow_pickle``.
    """

    name = "tar"
    suffixes = (".tar",)
    ranged = False
    options = ("columns", "images", "allow_pickle")

    def check(self, entry: ShardEntry, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be opened; see ``Format.check``."""
        check_options(self, options)
        if options.get("images"):
            images.check_pillow()

    def open(
        self, source: Source, entry: ShardEntry, options: Mapping[str, Any], *, max_sample_bytes: int = MAX_SAMPLE_BYTES
    ) -> TarShard:
        """See ``Format.open``. Reads the headers of all members."""
        self.check(entry, options)
        shard = TarShard(source, entry, options, max_sample_bytes)
        if len(shard) != entry.samples:
            raise DataError(
                f"{entry.file.name}: has {len(shard)} samples, its index says {entry.samples}; it is truncated, or changed"
            )
        return shard

    def count(self, source: Source) -> tuple[int, dict[str, Plain]]:
        """See ``Format.count``. Reads the headers of all members."""
        return len(_samples(source, "file")), {}


TAR = Tar()
