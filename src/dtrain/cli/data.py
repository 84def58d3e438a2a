"""Define ``dtrain data``, with the commands write and inspect."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count, single_line
from dtrain.cli.data_inputs import INPUT_KINDS, DataInput, find_inputs, read_samples
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json, print_table
from dtrain.cli.parameters import choice, command_group, integer, option, size
from dtrain.errors import ConfigError, DataError, escape_unprintable
from dtrain.storage import AnyPath, Buffer, LockableFile, real_path

if TYPE_CHECKING:
    from dtrain.data.stream.formats.shard_format import ShardEntry
    from dtrain.data.stream.sharded_dataset import ShardedDataset
    from dtrain.data.token_stream import Tokenizer, TokenWindows


FORMATS = ("mds", "parquet", "jsonl", "text", "tar")
_COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")
_MAX_VALUE_CHARS = 100  # characters
_MAX_ARRAY_ITEMS = 8
_input, _tokens, _output = (
    partial(option, "data: write", heading) for heading in ("Input", "Tokens for language models", "Output")
)


def parse_names(command: str, name: str, text: str) -> tuple[str, ...]:
    """Parse names separated by commas; ``none`` means no name. A type of ``option``.

    Raises:
        ConfigError: a name is empty or repeated.
    """
    if text.strip() == "none":
        return ()
    names = tuple(word.strip() for word in text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"{command}: {name} must be different names with commas between, or none, got {text!r}. Name each once."
        )
    return names


def write(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Files, folders, 'patterns*' or URLs of them.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new folder, here or on a server.")],
    kind: Annotated[
        str | None,
        _input("--from KIND", f"{', '.join(INPUT_KINDS)}.  [default: inferred from the names]", choice(*INPUT_KINDS)),
    ] = None,
    columns: Annotated[
        list[str] | None, _input("--columns NAMES", "Only these columns; with encodings as in text,label:int; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None, _tokens("--tokenizer NAME", "bytes, a tokenizer.json or its folder, or a name on the Hub.")
    ] = None,
    concat: Annotated[
        int | None, _tokens("--concat N", "Tokens per window: documents are joined and split every N tokens.", integer(2))
    ] = None,
    end: Annotated[
        str | None, _tokens("--end TOKEN", "Token after each document.  [default: the tokenizer's own, none for bytes]")
    ] = None,
    text: Annotated[str, _tokens("--text COLUMN", "Column with the text of documents.  [default: text]")] = "text",
    form: Annotated[
        str, _output("--format FORMAT", "mds, parquet, jsonl, text or tar.  [default: mds]", choice(*FORMATS))
    ] = "mds",
    compression: Annotated[
        str | None, _output("--compression NAME", f"{', '.join(_COMPRESSIONS)}, with a level as in zstd:7.")
    ] = None,
    hashes: Annotated[
        Any, _output("--hash NAMES", "Digests of each shard: xxh64, sha256, ..., or none.  [default: xxh64]", parse_names)
    ] = ("xxh64",),
    max_shard_size: Annotated[
        int, _output("--max-shard-size SIZE", "Size limit of a shard before compression.  [default: 64MiB]", size)
    ] = 64 * 2**20,
    lengths: Annotated[
        str | None,
        _output("--lengths COLUMN", "Store each sample's length, for balanced batches: a number, or the length of a list."),
    ] = None,
    as_json: Annotated[bool, _output("--json", "Print one JSON object, for programs.")] = False,
) -> int:
    """Write samples as shards, for ShardedDataset.

    The columns are the columns of the first sample. The index is written last, and a failed or interrupted command removes its
    files. OUT must be empty. Memory does not grow with the data.

    Exit codes: 0 written; 1 a source cannot be read or OUT cannot be written; 2 bad usage.

    Examples:
        dtrain data write train.jsonl s3://bucket/train                              every line a sample
        dtrain data write 'corpus/*.txt' shards --from documents --tokenizer bytes --concat 2049
        dtrain data write table.csv shards --columns text,label:int --compression zstd
        dtrain data write ids.jsonl shards --lengths input_ids                       for batches balanced by tokens
    """
    with prefix_errors("data: write", DataError):
        options = {"format": form, "compression": compression, "hashes": hashes, "max_shard_bytes": max_shard_size}
        options["lengths"] = lengths
        selected = parse_columns(columns or ())
        loaded = _load_tokenizer(tokenizer, concat, end, text, selected, form)
        if loaded is not None and lengths is not None:
            raise ConfigError(
                "--lengths and --tokenizer exclude each other, because all windows have N tokens. Leave --lengths out."
            )
        if not out:
            raise ConfigError("OUT must not be empty. Name the new folder or URL.")
        folder = storage.resolve_path(out)
        if storage.file_size(folder) is not None:
            raise ConfigError(f"OUT {out!r} is a file. Name a new folder or URL.")
        if storage.exists(folder / "index.json"):
            raise ConfigError(f"OUT {out!r} has a dataset already. Name another folder, or remove the dataset first.")
        result = _write_shards(find_inputs(sources, kind), folder, selected, loaded, concat or 0, text, options)
    if as_json:
        print_json(result)
        return 0
    counts = f"{format_count(result['samples'], 'sample')} in {format_count(result['shards'], 'shard')}"
    line = f"{result['path']}: {counts}, {format_bytes(result['bytes'])}"
    if loaded is not None:
        inputs = f"{format_count(result['documents'], 'document')}, {format_count(result['tokens'], 'token')}"
        line += f"; of {inputs}, the last {result['left_out']} are in no window"
    typer.echo(escape_unprintable(line))
    return 0


def _load_tokenizer(
    name: str | None, size: int | None, end: str | None, column: str, selected: Mapping[str, Any], form: str
) -> Tokenizer | None:
    if (name is None) != (size is None):
        present, missing = ("--tokenizer", "--concat N") if size is None else ("--concat", "--tokenizer NAME")
        raise ConfigError(f"{present} needs {missing}, too. For windows of bytes, pass --tokenizer bytes --concat 2049.")
    if name is None or size is None:
        if end is not None or column != "text":
            raise ConfigError("--end and --text need a tokenizer. Pass --tokenizer NAME --concat N, too.")
        return None
    if form == "text":
        raise ConfigError("--format text has lines of text, but no tokens. Use mds, parquet, jsonl or tar.")
    if selected:
        raise ConfigError("--columns and --tokenizer exclude each other, because windows have one column, tokens. Use --text.")
    from dtrain.data.token_stream import load_tokenizer

    return load_tokenizer(name, eos_token=end)


def _write_shards(
    inputs: Sequence[DataInput],
    out: AnyPath,
    selected: Mapping[str, str | None],
    tokenizer: Tokenizer | None,
    window_size: int,
    text_column: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    from dtrain.data.stream.write_shards import write_shards

    form, counts = options["format"], {}
    as_bytes = tokenizer is not None and tokenizer.name == "bytes"
    with ByteProgressBar("writing", sum(data_input.bytes for data_input in inputs) or None) as bar:
        samples: Iterator[Mapping[str, Any]] = chain.from_iterable(
            read_samples(data_input, bar.advance, as_bytes=as_bytes) for data_input in inputs
        )
        if tokenizer is None:
            samples = select_columns(samples, selected)
            if any(selected.values()):
                samples, options["columns"] = infer_encodings(samples, selected, form)
            result = write_shards(samples, out, **options)
        else:
            from dtrain.data.token_stream import TokenWindows

            windows = TokenWindows(iter_texts(samples, text_column), tokenizer, window_size)
            if form == "mds":
                options["columns"] = {"tokens": f"ndarray:{tokenizer.dtype}:{window_size}"}
            result = write_shards(_encode_windows(windows, form), out, **options)
            counts = {"documents": windows.documents, "tokens": windows.tokens, "left_out": windows.leftover_tokens}
    sizes = {"samples": result.samples, "shards": result.shards, "bytes": result.stored_bytes, "raw_bytes": result.raw_bytes}
    return {"path": str(out), "format": result.format, **sizes, **counts}


def _encode_windows(windows: TokenWindows, form: str) -> Iterator[Mapping[str, Any]]:
    """Convert windows to the values of the format."""
    for window in windows:
        tokens = window["tokens"]
        yield {"tokens.npy": tokens} if form == "tar" else {"tokens": tokens.tolist()} if form == "jsonl" else window


def parse_columns(texts: Sequence[str]) -> dict[str, str | None]:
    """Parse columns and their optional encodings: ``NAME`` or ``NAME:ENCODING``, separated by commas.

    >>> parse_columns(["text,label:int", "mask:ndarray:uint8:4,4,place"])
    {'text': None, 'label': 'int', 'mask': 'ndarray:uint8:4,4', 'place': None}

    Raises:
        ConfigError: a name is empty or repeated.
    """
    columns: dict[str, str | None] = {}
    for text in texts:
        # A comma before a number belongs to a shape.
        for piece in re.split(r",(?![0-9]+(?:,|$))", text):
            name, colon, encoding = (part.strip() for part in piece.partition(":"))
            if not name or (colon and not encoding) or name in columns:
                raise ConfigError(
                    f"--columns must be NAME or NAME:ENCODING with commas between, got {text!r}. Name each column once."
                )
            columns[name] = encoding or None
    return columns


def select_columns(samples: Iterable[Mapping[str, Any]], selected: Mapping[str, str | None]) -> Iterator[Mapping[str, Any]]:
    """Yield the samples with the chosen columns only, or with all columns if none is chosen.

    If the encoding of a column is a number, text is parsed as a number, because CSV contains only text.

    Raises:
        DataError: a sample lacks a column, or has text that is not a number.
    """
    patterns: tuple[tuple[str, Callable[[str], Any]], ...] = (
        (r"u?int\d*|str_int", int),
        (r"float\d*|double|str_float", float),
    )
    readers = {
        name: next((read for pattern, read in patterns if re.fullmatch(pattern, encoding or "")), None)
        for name, encoding in selected.items()
    }
    for number, sample in enumerate(samples):
        yield {name: _read_value(sample, name, readers[name], number) for name in selected} if selected else sample


def _read_value(sample: Mapping[str, Any], name: str, read: Callable[[str], Any] | None, number: int) -> Any:
    if name not in sample:
        raise DataError(f"sample {number} has no column {name!r}. Its columns are {', '.join(map(str, sample))}.")
    value = sample[name]
    if read is None or not isinstance(value, str):
        return value
    try:
        return read(value)
    except ValueError:
        raise DataError(
            f"sample {number}: column {name!r} holds {value!r}, which is not {read.__name__}. "
            "Choose another column, or convert its values before the import."
        ) from None


def iter_texts(samples: Iterable[Mapping[str, Any]], column: str) -> Iterator[str | bytes]:
    """Yield the text of each sample.

    Raises:
        DataError: a sample lacks the column, or the column has no text.
    """
    for number, sample in enumerate(samples):
        text = _read_value(sample, column, None, number)
        if not isinstance(text, str | bytes):
            raise DataError(f"sample {number}: column {column!r} must hold text, got {type(text).__name__}. Use --text.")
        yield text


def infer_encodings(
    samples: Iterator[Mapping[str, Any]], selected: Mapping[str, str | None], form: str
) -> tuple[Iterator[Mapping[str, Any]], dict[str, str] | None]:
    """Return the samples and the encodings of their columns; missing MDS encodings are inferred from the first sample.

    Raises:
        ConfigError: the format needs a type for every column, and some columns have none.
    """
    if form not in ("mds", "parquet"):
        # The types only determine how text is parsed.
        return samples, None
    known = {name: encoding for name, encoding in selected.items() if encoding is not None}
    if len(known) == len(selected) or (first := next(samples, None)) is None:
        return samples, known
    if form != "mds":
        missing = next(name for name in selected if name not in known)
        raise ConfigError(f"--columns: {form} needs types for all columns or for none, but {missing!r} has no type. Add types.")
    from dtrain.data.stream.formats.mds import infer_encoding

    encodings = {name: known[name] if name in known else infer_encoding(first[name]) for name in selected}
    return chain([first], samples), encodings


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


def dataset_facts(dataset: ShardedDataset) -> dict[str, Any]:
    """Return the facts of a dataset's index as plain data, with stable names."""
    from dtrain.data.stream.shard_index import LENGTHS_NAME

    entries = dataset.entries
    files = [entry.file for entry in entries]
    lengths = dataset.sample_lengths().parts if storage.exists(dataset.root / LENGTHS_NAME) else None
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
        "lengths": None
        if lengths is None
        else {"smallest": int(lengths.min()), "largest": int(lengths.max()), "total": int(lengths.sum())},
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
    if (lengths := facts["lengths"]) is not None:
        lines.append(f"lengths  {lengths['smallest']:,} to {lengths['largest']:,}, {lengths['total']:,} in all")
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


app = command_group("Write and inspect datasets of shards.", write=write, inspect=inspect)
