"""Define ``dtrain data``, with the command write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count
from dtrain.cli.data_inputs import INPUT_KINDS, DataInput, find_inputs, read_samples
from dtrain.cli.data_inspect import FORMATS, inspect
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json
from dtrain.cli.parameters import choice, command_group, integer, option, size
from dtrain.errors import ConfigError, DataError, escape_unprintable
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.data.token_stream import Tokenizer, TokenWindows


_COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")


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
    """
    with prefix_errors("data: write", DataError):
        options = {"format": form, "compression": compression, "hashes": hashes, "max_shard_bytes": max_shard_size}
        selected = parse_columns("--columns", columns or ())
        loaded = _load_tokenizer(tokenizer, concat, end, text, selected, form)
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


def _format_result(result: Mapping[str, Any]) -> str:
    counts = f"{format_count(result['samples'], 'sample')} in {format_count(result['shards'], 'shard')}"
    line = f"{result['path']}: {counts}, {format_bytes(result['bytes'])}"
    if "tokens" not in result:
        return line
    inputs = f"{format_count(result['documents'], 'document')}, {format_count(result['tokens'], 'token')}"
    return f"{line}; of {inputs}, the last {result['left_out']} are in no window"


def parse_columns(option: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Parse columns and their optional encodings: ``NAME`` or ``NAME:ENCODING``, separated by commas.

    >>> parse_columns("--columns", ["text,label:int", "mask:ndarray:uint8:4,4,place"])
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
                    f"{option} must be NAME or NAME:ENCODING with commas between, got {text!r}. Name each column once."
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


app = command_group("Write and inspect datasets of shards.", write=write, inspect=inspect)
