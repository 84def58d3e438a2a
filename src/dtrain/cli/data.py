"""``dtrain data write``.

The group of commands, and which commands are in it."""

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

_READ_HEADING, _TOKENS_HEADING, _WRITE_HEADING = "What is read", "Tokens for language models", "What is written"
_COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")


def _option(heading: str, *spellings: str, help: str, metavar: str) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


def write(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Files, folders, 'patterns*' or URLs of them.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new folder, here or on a server.")],
    kind: Annotated[
        str | None,
        _option(_READ_HEADING, "--from", metavar="KIND", help=f"{', '.join(INPUT_KINDS)}; seen from the names if left out."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        _option(
            _READ_HEADING,
            "--columns",
            metavar="NAMES",
            help="Only these; with encodings as in text,label:int; may be repeated.",
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
            _TOKENS_HEADING, "--concat", metavar="N", help="Tokens in a window: documents one after the other, cut every N."
        ),
    ] = None,
    end: Annotated[
        str | None,
        _option(
            _TOKENS_HEADING, "--end", metavar="TOKEN", help="Put after each document; none of bytes, else the tokenizer's own."
        ),
    ] = None,
    text: Annotated[
        str, _option(_TOKENS_HEADING, "--text", metavar="COLUMN", help="Where the documents' text is; text if left out.")
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
        str, _option(_WRITE_HEADING, "--size-limit", metavar="SIZE", help="Of a shard before compression; 64MiB if left out.")
    ] = "64MiB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.", rich_help_panel=_WRITE_HEADING)
    ] = False,
) -> int:
    """Write samples as shards, for ShardedDataset.

    Columns are those of the first sample. The index is written last, and what fails or is interrupted is removed again; an OUT
    that is not empty is refused. Memory does not grow with the data.

    Exit codes: 0 written; 1 a source cannot be read or OUT not be written; 2 bad usage.
    """
    with prefix_data_errors("write"):
        options = {
            "format": parse_choice("--format", form, ("mds", "parquet", "jsonl", "text", "tar")),
            "compression": compression,
            "hashes": parse_names("--hash", hashes),
            "size_limit": parse_size("--size-limit", size_limit),
        }
        chosen = parse_columns("--columns", columns or ())
        tokens = _parse_token_options(tokenizer, concat, end, text, chosen, form)
        place = _check_new_folder(out)
        inputs = find_inputs(sources, parse_choice("--from", kind, INPUT_KINDS))
        done = _write_shards(inputs, place, chosen, tokens, options)
    print_json(done) if as_json else typer.echo(escape_unprintable(_format_result(done)))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenOptions:
    """How documents become windows."""

    tokenizer: Tokenizer
    size: int
    column: str

    @property
    def accepts_bytes(self) -> bool:
        """Whether text need not be text."""
        return self.tokenizer.name == "bytes"

    def windows(self, samples: Iterable[Mapping[str, Any]]) -> TokenWindows:
        from dtrain.data.packing.tokenizer import TokenWindows

        return TokenWindows(iter_texts(samples, self.column), self.tokenizer, self.size)


def _parse_token_options(
    name: str | None, concat: str | None, end: str | None, column: str, chosen: Mapping[str, Any], form: str
) -> _TokenOptions | None:
    if (name is None) != (concat is None):
        given, missing = ("--tokenizer", "--concat N") if concat is None else ("--concat", "--tokenizer NAME")
        raise ConfigError(f"{given} needs {missing}, too; --tokenizer bytes --concat 2049 makes windows of bytes")
    if name is None or concat is None:
        if end is not None or column != "text":
            raise ConfigError("--end and --text are about tokens; give --tokenizer NAME --concat N, too")
        return None
    if form == "text":
        raise ConfigError("--format text has lines of text, no tokens; take mds, parquet, jsonl or tar")
    if chosen:
        raise ConfigError("--columns and --tokenizer exclude each other: windows have the one column tokens; see --text")
    size = parse_data_count("--concat", concat, minimum=2)
    from dtrain.data.packing.tokenizer import load_tokenizer

    return _TokenOptions(tokenizer=load_tokenizer(name, eos_token=end), size=size, column=column)


def _check_new_folder(out: str) -> AnyPath:
    if not out:
        raise ConfigError("OUT is empty; name the new folder or URL")
    place = storage.resolve_path(out)
    if storage.file_size(place) is not None:
        raise ConfigError(f"OUT {out!r} is a file; name a folder or URL that is not there yet")
    if storage.exists(place / "index.json"):
        raise ConfigError(f"OUT {out!r} has a dataset already; name another folder, or remove it first")
    return place


def _write_shards(
    inputs: Sequence[DataInput],
    out: AnyPath,
    chosen: Mapping[str, str | None],
    tokens: _TokenOptions | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    from dtrain.data.stream.write_shards import write_shards

    with ByteProgressBar("writing", sum(given.bytes for given in inputs) or None) as bar:
        samples: Iterator[Mapping[str, Any]] = chain.from_iterable(
            read_samples(given, bar.advance, as_bytes=tokens is not None and tokens.accepts_bytes) for given in inputs
        )
        windows = None if tokens is None else tokens.windows(samples)
        samples = select_columns(samples, chosen) if windows is None else _encode_windows(windows, options["format"])
        if tokens is not None and options["format"] == "mds":
            options = {**options, "columns": {"tokens": f"ndarray:{tokens.tokenizer.dtype}:{tokens.size}"}}
        elif any(chosen.values()):
            samples, options["columns"] = infer_encodings(samples, chosen, options["format"])
        done = write_shards(samples, out, **options)
    counts = (
        {}
        if windows is None
        else {"documents": windows.documents, "tokens": windows.tokens, "left_out": windows.leftover_tokens}
    )
    sizes = {"samples": done.samples, "shards": done.shards, "bytes": done.stored_bytes, "encode_raw": done.raw_bytes}
    return {"path": str(out), "format": done.format, **sizes, **counts}


def _encode_windows(windows: TokenWindows, form: str) -> Iterator[Mapping[str, Any]]:
    """Windows as the format has a place for them."""
    for window in windows:
        tokens = window["tokens"]
        yield {"tokens.npy": tokens} if form == "tar" else {"tokens": tokens.tolist()} if form == "jsonl" else window


def _format_result(done: Mapping[str, Any]) -> str:
    what = f"{format_count(done['samples'], 'sample')} in {format_count(done['shards'], 'shard')}"
    line = f"{done['path']}: {what}, {format_bytes(done['bytes'])}"
    if "tokens" not in done:
        return line
    read = f"{format_count(done['documents'], 'document')}, {format_count(done['tokens'], 'token')}"
    return f"{line}; of {read}, the last {done['left_out']} are in no window"


app = typer.Typer()


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> int:
    """Write datasets of shards, and show them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


app.command("write", cls=GroupedCommand, epilog=WRITE_EXAMPLES)(write)
app.command("inspect", cls=GroupedCommand, epilog=INSPECT_EXAMPLES)(inspect)
