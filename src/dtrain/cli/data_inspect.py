"""Define ``dtrain data inspect``: show the facts and samples of a dataset, and verify its shards against the index."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json, print_table, single_line
from dtrain.cli.parameters import choice, integer, option
from dtrain.errors import ConfigError, DataError, escape_unprintable
from dtrain.storage import AnyPath, Buffer, LockableFile, real_path

if TYPE_CHECKING:
    from dtrain.data.stream.formats.shard_format import ShardEntry
    from dtrain.data.stream.sharded_dataset import ShardedDataset


_MAX_VALUE_CHARS = 100  # characters
_MAX_ARRAY_ITEMS = 8


def dataset_facts(dataset: ShardedDataset) -> dict[str, Any]:
    """Return the facts of a dataset's index as plain data, with stable names."""
    entries = dataset.entries
    files = [entry.file for entry in entries]
    raw = [file.raw_size for file in files]
    names, encodings = (entries[0].details.get(f"column_{field}") for field in ("names", "encodings"))
    return {
        "path": str(storage.resolve_path(dataset.path)),
        "indexed": storage.exists(dataset.root / "index.json"),
        "formats": _unique(entry.format for entry in entries),
        "shards": len(entries),
        "samples": sum(dataset.shard_sizes),
        "smallest": min(dataset.shard_sizes),
        "largest": max(dataset.shard_sizes),
        "bytes": sum(file.size for file in files),
        "raw_bytes": None if None in raw else sum(size for size in raw if size is not None),
        "compressions": _unique(file.compression for file in files if file.compression),
        "digests": _unique(name for file in files for name in (*file.digests, *file.raw_digests)),
        "without_digests": sum(not (file.digests or file.raw_digests) for file in files),
        "columns": dict(zip(map(str, names), map(str, encodings), strict=False))
        if isinstance(names, list) and isinstance(encodings, list)
        else {},
    }


def shard_facts(entry: ShardEntry) -> dict[str, Any]:
    """Return the index's facts of one shard."""
    file = entry.file
    return {
        "name": file.name,
        "format": entry.format,
        "samples": entry.samples,
        "bytes": file.size,
        "raw_bytes": file.raw_size,
        "compression": file.compression,
        "digests": _unique((*file.digests, *file.raw_digests)),
    }


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def format_dataset_facts(facts: Mapping[str, Any]) -> list[str]:
    """Format the facts of a dataset as text."""
    index = "" if facts["indexed"] else ", without an index"
    lines = [f"{facts['path']}: {', '.join(facts['formats']) or 'nothing'} in {format_count(facts['shards'], 'shard')}{index}"]
    raw = facts["raw_bytes"]
    size = format_bytes(facts["bytes"])
    if facts["compressions"]:
        size += f" ({', '.join(facts['compressions'])}{'' if raw is None else f'; {format_bytes(raw)} raw'})"
    each = f", {facts['smallest']:,} to {facts['largest']:,} per shard" if facts["shards"] > 1 else ""
    lines.append(f"samples  {facts['samples']:,}{each}")
    lines.append(f"size     {size}")
    missing = facts["without_digests"]
    some = f", none of {format_count(missing, 'shard')}" if 0 < missing < facts["shards"] else ""
    lines.append(f"digests  {(', '.join(facts['digests']) or 'none') + some}")
    return lines


def format_sample(sample: Any) -> dict[str, str]:
    """Format the values of a sample by column."""
    return {
        str(name): format_sample_value(value)
        for name, value in (sample if isinstance(sample, Mapping) else {"": sample}).items()
    }


def format_sample_value(value: Any) -> str:
    """Format a value in one short line: its type and shape if it is not plain, and its beginning."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        flat = value.reshape(-1)[: _MAX_ARRAY_ITEMS + 1].tolist()
        more = " ..." if len(flat) > _MAX_ARRAY_ITEMS else ""
        return f"{value.dtype} {list(shape)}: {' '.join(_truncate(str(item)) for item in flat[:_MAX_ARRAY_ITEMS])}{more}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{format_count(len(value), 'byte')}: {_truncate(repr(bytes(value[:_MAX_VALUE_CHARS])))}"
    # Images of Pillow have a size and a mode.
    if hasattr(value, "size") and hasattr(value, "mode"):
        return f"image {value.mode} {value.size[0]} x {value.size[1]}"
    return _truncate(escape_unprintable(repr(value)))


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 4] + " ..."


def find_shard_problem(
    root: AnyPath, entry: ShardEntry, options: Mapping[str, Any], advance: Callable[[int], None]
) -> str | None:
    """Return the first problem of a shard; None without a problem.

    Args:
        root: folder of the dataset.
        entry: the shard's entry in the index.
        options: options of the format.
        advance: function that is called with the number of raw bytes of each read.

    Raises:
        ConfigError: a package is missing, or a column would run code.
        OSError: there is no space for a copy of the shard.
    """
    from dtrain.data.stream.shard_store import download

    place: AnyPath = root / entry.file.name
    if isinstance(root, Path):
        place = real_path(root / entry.file.name)
        if not place.is_relative_to(real_path(root)):
            return "is a link out of the dataset's folder"
    with tempfile.TemporaryDirectory(prefix="dtrain-inspect-") as folder, LockableFile(Path(folder) / "raw", "new") as copy:
        # A local shard without compression is read in place. Other shards are copied, one at a time.
        in_place = entry.file.compression is None and isinstance(place, Path)

        def write(data: Buffer) -> None:
            advance(memoryview(data).nbytes)
            if not in_place:
                copy.write(data)

        try:
            # The raw bytes are compared with their size and digests.
            download(place, entry.file, write, clear=copy.truncate)
            if isinstance(place, Path) and in_place:
                with LockableFile(place) as stored:
                    _decode_samples(stored.map_memory(), entry, options)
            else:
                _decode_samples(copy.map_memory(), entry, options)
        except DataError as error:
            return single_line(error).replace(f"{place}: ", "").removeprefix(f"{entry.file.name}: ")
    return None


def _decode_samples(raw: memoryview, entry: ShardEntry, options: Mapping[str, Any]) -> None:
    from dtrain.data.stream.formats.shard_format import get_format
    from dtrain.data.stream.shard_store import MemorySource

    shard = get_format(entry.format).open(MemorySource(raw), entry, options)
    try:
        for row in range(len(shard)):
            try:
                shard[row]
            # The class of the error depends on the bytes.
            except Exception as error:
                raise DataError(
                    f"sample {row} cannot be decoded: {type(error).__name__}: {single_line(error)}. "
                    "Write the shard again, or leave the sample out."
                ) from error
    finally:
        shard.close()


FORMATS = ("mds", "parquet", "jsonl", "text", "tar")
_show, _verification = (partial(option, "data: inspect", heading) for heading in ("Output", "Verification"))


def inspect(
    url: Annotated[str, typer.Argument(metavar="URL", help="Folder of shards, here or on a server.", show_default=False)],
    form: Annotated[
        str | None, _show("--format FORMAT", "Format of the files, if there is no index.", choice(*FORMATS))
    ] = None,
    head: Annotated[int, _show("--head K", "Also show the first K samples.", integer(0))] = 0,
    shards: Annotated[bool, _show("--shards", "Also show a line for each shard.")] = False,
    as_json: Annotated[bool, _show("--json", "Print one JSON object, for programs.")] = False,
    verify: Annotated[bool, _verification("--verify", "Compare every digest, and decode every sample.")] = False,
    trust: Annotated[bool, _verification("--allow-pickle", "Also decode pickled columns, which can run code.")] = False,
) -> int:
    """Show the facts of a dataset of shards, and verify the dataset.

    The command reads only the index, unless --head or --verify is set. Without an index, it reads as much as counting the
    samples needs.

    Exit codes: 0 shown without a problem; 1 the dataset cannot be read, or --verify found a problem; 2 bad usage.

    Examples:
        dtrain data inspect s3://bucket/train                 facts, from the index alone
        dtrain data inspect shards --head 3                   and the first samples
        dtrain data inspect shards --verify --json            every digest and every sample, for programs
    """
    with prefix_errors("data: inspect", DataError):
        if not url:
            raise ConfigError("URL must not be empty. Name the folder of shards.")
        from dtrain.data.stream.sharded_dataset import ShardedDataset

        options: dict[str, Any] = {"allow_pickle": True} if trust else {}
        with closing(ShardedDataset(url, format=form, **options)) as dataset:
            facts = dataset_facts(dataset)
            if shards or as_json:
                facts["files"] = [shard_facts(entry) for entry in dataset.entries]
            facts["head"] = [format_sample(dataset[index]) for index in range(min(head, len(dataset)))]
            facts["problems"] = None
            if verify:
                size = sum(entry.file.raw_size or entry.file.size for entry in dataset.entries)
                with ByteProgressBar("verifying", size) as bar:
                    found = [
                        (entry.file.name, find_shard_problem(dataset.root, entry, options, bar.advance))
                        for entry in dataset.entries
                    ]
                facts["problems"] = [{"file": name, "problem": problem} for name, problem in found if problem is not None]
    if as_json:
        print_json({"url": url, **facts})
    else:
        _print_facts(facts)
    return 1 if facts["problems"] else 0


def _print_facts(facts: Mapping[str, Any]) -> None:
    for line in format_dataset_facts(facts):
        typer.echo(escape_unprintable(line))
    if facts["columns"]:
        typer.echo()
        print_table(("column", "encoding"), [(name, encoding or "-") for name, encoding in facts["columns"].items()])
    if "files" in facts:
        typer.echo()
        rows = [
            (file["name"], f"{file['samples']:,}", format_bytes(file["bytes"]), ", ".join(file["digests"]) or "-")
            for file in facts["files"]
        ]
        print_table(("shard", "samples", "size", "digests"), rows, right=(1, 2))
    for number, sample in enumerate(facts["head"]):
        typer.echo(f"\nsample {number}")
        for name, value in sample.items():
            typer.echo(f"  {escape_unprintable(name)}: {escape_unprintable(value)}")
    if (problems := facts["problems"]) is not None:
        typer.echo()
        for problem in problems:
            typer.echo(escape_unprintable(f"{problem['file']}: {problem['problem']}"))
        missing = facts["without_digests"]
        digests = f"no digests of {format_count(missing, 'shard')}" if missing else "every digest compared"
        damaged = f"{format_count(len(problems), 'shard')} of {facts['shards']:,} damaged"
        typer.echo(damaged if problems else f"ok: {digests}, every sample decoded")
