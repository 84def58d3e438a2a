"""Define ``dtrain data``, with the command write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.cli.command_classes import GroupedCommand
from dtrain.cli.data_inputs import INPUT_KINDS, DataInput, find_inputs, read_samples
from dtrain.cli.data_inspect import INSPECT_EXAMPLES as INSPECT_EXAMPLES
from dtrain.cli.data_inspect import inspect
from dtrain.cli.data_options import (
    format_count,
    infer_encodings,
    iter_texts,
    parse_choice,
    parse_columns,
    parse_data_count,
    parse_names,
    parse_size,
    prefix_data_errors,
    select_columns,
)
from dtrain.cli.output import ByteProgressBar, format_bytes, print_json
from dtrain.errors import ConfigError, escape_unprintable
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.data.packing.tokenizer import Tokenizer, TokenWindows


WRITE_EXAMPLES = """
dtrain data write train.jsonl s3://bucket/train                              every line a sample
dtrain data write 'corpus/*.txt' shards --from documents --tokenizer bytes --concat 2049
dtrain data write table.csv shards --columns text,label:int --compression zstd
"""

_READ_HEADING, _TOKENS_HEADING, _WRITE_HEADING = "Input", "Tokens for language models", "Output"
_COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")


def _option(heading: str, *spellings: str, help: str, metavar: str) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


def write(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Files, folders, 'patterns*' or URLs of them.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new folder, here or on a server.")],
    kind: Annotated[
        str | None,
        _option(_READ_HEADING, "--from", metavar="KIND", help=f"{', '.join(INPUT_KINDS)}; inferred from the names by default."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        _option(
            _READ_HEADING,
            "--columns",
            metavar="NAMES",
            help="Only these columns; with encodings as in text,label:int; may be repeated.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(
            _TOKENS_HEADING, "--tokenizer", metavar="NAME", help="bytes, a tokenizer.json or its folder, or a name on the Hub."
        ),
    ] = None,
    concat: Annotated[
        str | None,
        _option(
            _TOKENS_HEADING, "--concat", metavar="N", help="Tokens per window: documents are joined and split every N tokens."
        ),
    ] = None,
    end: Annotated[
        str | None,
        _option(
            _TOKENS_HEADING,
            "--end",
            metavar="TOKEN",
            help="Token after each document; by default the tokenizer's own, none for bytes.",
        ),
    ] = None,
    text: Annotated[
        str, _option(_TOKENS_HEADING, "--text", metavar="COLUMN", help="Column with the text of documents; default text.")
    ] = "text",
    form: Annotated[
        str, _option(_WRITE_HEADING, "--format", metavar="FORMAT", help="mds (default), parquet, jsonl, text or tar.")
    ] = "mds",
    compression: Annotated[
        str | None,
        _option(
            _WRITE_HEADING, "--compression", metavar="NAME", help=f"{', '.join(_COMPRESSIONS)}, with a level as in zstd:7."
        ),
    ] = None,
    hashes: Annotated[
        str,
        _option(
            _WRITE_HEADING, "--hash", metavar="NAMES", help="Digests of each shard: xxh64 (default), sha256, ..., or none."
        ),
    ] = "xxh64",
    size_limit: Annotated[
        str,
        _option(
            _WRITE_HEADING, "--size-limit", metavar="SIZE", help="Size limit of a shard before compression; default 64MiB."
        ),
    ] = "64MiB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.", rich_help_panel=_WRITE_HEADING)
    ] = False,
) -> int:
    """Write samples as shards, for ShardedDataset.

    The columns are the columns of the first sample. The index is written last, and a failed or interrupted command removes its
    files. OUT must be empty. Memory does not grow with the data.

    Exit codes: 0 written; 1 a source cannot be read or OUT cannot be written; 2 bad usage.
    """
    with prefix_data_errors("write"):
        options = {
            "format": parse_choice("--format", form, ("mds", "parquet", "jsonl", "text", "tar")),
            "compression": compression,
            "hashes": parse_names("--hash", hashes),
            "size_limit": parse_size("--size-limit", size_limit),
        }
        selected = parse_columns("--columns", columns or ())
        tokens = _parse_token_options(tokenizer, concat, end, text, selected, form)
        folder = _check_new_folder(out)
        inputs = find_inputs(sources, parse_choice("--from", kind, INPUT_KINDS))
        result = _write_shards(inputs, folder, selected, tokens, options)
    print_json(result) if as_json else typer.echo(escape_unprintable(_format_result(result)))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenOptions:
    """Tokenizer, window size and text column for writing token windows."""

    tokenizer: Tokenizer
    size: int
    column: str

    @property
    def accepts_bytes(self) -> bool:
        """True if the column may hold bytes."""
        return self.tokenizer.name == "bytes"

    def windows(self, samples: Iterable[Mapping[str, Any]]) -> TokenWindows:
        from dtrain.data.packing.tokenizer import TokenWindows

        return TokenWindows(iter_texts(samples, self.column), self.tokenizer, self.size)


def _parse_token_options(
    name: str | None, concat: str | None, end: str | None, column: str, selected: Mapping[str, Any], form: str
) -> _TokenOptions | None:
    if (name is None) != (concat is None):
        present, missing = ("--tokenizer", "--concat N") if concat is None else ("--concat", "--tokenizer NAME")
        raise ConfigError(f"{present} needs {missing}, too. For windows of bytes, pass --tokenizer bytes --concat 2049.")
    if name is None or concat is None:
        if end is not None or column != "text":
            raise ConfigError("--end and --text need a tokenizer. Pass --tokenizer NAME --concat N, too.")
        return None
    if form == "text":
        raise ConfigError("--format text has lines of text, but no tokens. Use mds, parquet, jsonl or tar.")
    if selected:
        raise ConfigError("--columns and --tokenizer exclude each other, because windows have one column, tokens. Use --text.")
    size = parse_data_count("--concat", concat, minimum=2)
    from dtrain.data.packing.tokenizer import load_tokenizer

    return _TokenOptions(tokenizer=load_tokenizer(name, eos_token=end), size=size, column=column)


def _check_new_folder(out: str) -> AnyPath:
    if not out:
        raise ConfigError("OUT must not be empty. Name the new folder or URL.")
    folder = storage.resolve_path(out)
    if storage.file_size(folder) is not None:
        raise ConfigError(f"OUT {out!r} is a file. Name a new folder or URL.")
    if storage.exists(folder / "index.json"):
        raise ConfigError(f"OUT {out!r} has a dataset already. Name another folder, or remove the dataset first.")
    return folder


def _write_shards(
    inputs: Sequence[DataInput],
    out: AnyPath,
    selected: Mapping[str, str | None],
    tokens: _TokenOptions | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    from dtrain.data.stream.write_shards import write_shards

    with ByteProgressBar("writing", sum(data_input.bytes for data_input in inputs) or None) as bar:
        samples: Iterator[Mapping[str, Any]] = chain.from_iterable(
            read_samples(data_input, bar.advance, as_bytes=tokens is not None and tokens.accepts_bytes) for data_input in inputs
        )
        windows = None if tokens is None else tokens.windows(samples)
        samples = select_columns(samples, selected) if windows is None else _encode_windows(windows, options["format"])
        if tokens is not None and options["format"] == "mds":
            options = {**options, "columns": {"tokens": f"ndarray:{tokens.tokenizer.dtype}:{tokens.size}"}}
        elif any(selected.values()):
            samples, options["columns"] = infer_encodings(samples, selected, options["format"])
        result = write_shards(samples, out, **options)
    counts = (
        {}
        if windows is None
        else {"documents": windows.documents, "tokens": windows.tokens, "left_out": windows.leftover_tokens}
    )
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


app = typer.Typer()


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> int:
    """Write and inspect datasets of shards."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


app.command("write", cls=GroupedCommand, epilog=WRITE_EXAMPLES)(write)
app.command("inspect", cls=GroupedCommand, epilog=INSPECT_EXAMPLES)(inspect)
