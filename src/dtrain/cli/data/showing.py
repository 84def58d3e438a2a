"""What a dataset is, as plain facts, and samples as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain import storage
from dtrain.cli.checkpoints.output import size_text
from dtrain.cli.data.values import counted
from dtrain.errors import printable

if TYPE_CHECKING:
    from dtrain.data.stream.dataset import ShardedDataset
    from dtrain.data.stream.formats import ShardEntry

_WIDE = 100  # characters of a value that are shown
_SOME = 8  # numbers of an array


def facts_of(dataset: ShardedDataset) -> dict[str, Any]:
    """What the index says: plain data with names that stay."""
    entries = dataset.entries
    files = [entry.file for entry in entries]
    raw = [file.raw_size for file in files]
    return {
        "path": str(storage.place(dataset.url)),
        "indexed": storage.exists(dataset.root / "index.json"),
        "formats": _different(entry.format for entry in entries),
        "shards": len(entries),
        "samples": sum(dataset.blocks),
        "smallest": min(dataset.blocks),
        "largest": max(dataset.blocks),
        "bytes": sum(file.size for file in files),
        "raw_bytes": None if None in raw else sum(size for size in raw if size is not None),
        "compressions": _different(file.compression for file in files if file.compression),
        "digests": _different(name for file in files for name in (*file.digests, *file.raw_digests)),
        "without_digests": sum(not (file.digests or file.raw_digests) for file in files),
        "columns": _columns(entries[0]),
    }


def file_facts(entry: ShardEntry) -> dict[str, Any]:
    """What the index says of one shard."""
    file = entry.file
    return {
        "name": file.name,
        "format": entry.format,
        "samples": entry.samples,
        "bytes": file.size,
        "raw_bytes": file.raw_size,
        "compression": file.compression,
        "digests": _different((*file.digests, *file.raw_digests)),
    }


def _different(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def _columns(entry: ShardEntry) -> dict[str, str | None]:
    """The columns of a shard, as far as the index names them."""
    names, encodings = (entry.details.get(f"column_{what}") for what in ("names", "encodings"))
    if not isinstance(names, list) or not isinstance(encodings, list):
        return {}
    return {str(name): str(encoding) for name, encoding in zip(names, encodings, strict=False)}


def summary(facts: Mapping[str, Any]) -> list[str]:
    """The facts for people."""
    index = "" if facts["indexed"] else ", without an index"
    lines = [f"{facts['path']}: {', '.join(facts['formats']) or 'nothing'} in {counted(facts['shards'], 'shard')}{index}"]
    raw = facts["raw_bytes"]
    size = size_text(facts["bytes"])
    if facts["compressions"]:
        size += f" ({', '.join(facts['compressions'])}{'' if raw is None else f'; {size_text(raw)} raw'})"
    each = f", {facts['smallest']:,} to {facts['largest']:,} per shard" if facts["shards"] > 1 else ""
    lines.append(f"samples  {facts['samples']:,}{each}")
    lines.append(f"size     {size}")
    missing = facts["without_digests"]
    some = f", none of {counted(missing, 'shard')}" if 0 < missing < facts["shards"] else ""
    lines.append(f"digests  {(', '.join(facts['digests']) or 'none') + some}")
    return lines


def sample_text(sample: Any) -> dict[str, str]:
    """The values of a sample, by column."""
    return {str(name): value_text(value) for name, value in (sample if isinstance(sample, Mapping) else {"": sample}).items()}


def value_text(value: Any) -> str:
    """A value in one short line: what it is, where that is not plain, and its beginning."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        flat = value.reshape(-1)[: _SOME + 1].tolist()
        more = " ..." if len(flat) > _SOME else ""
        return f"{value.dtype} {list(shape)}: {' '.join(_cut(str(each)) for each in flat[:_SOME])}{more}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{counted(len(value), 'byte')}: {_cut(repr(bytes(value[:_WIDE])))}"
    if hasattr(value, "size") and hasattr(value, "mode"):  # an image of Pillow's
        return f"image {value.mode} {value.size[0]} x {value.size[1]}"
    return _cut(printable(repr(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 4] + " ..."
