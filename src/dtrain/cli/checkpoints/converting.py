"""``dtrain checkpoints convert``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from dtrain.cli.checkpoints.output import Bar, named, print_json, size_text
from dtrain.cli.checkpoints.places import AsJson
from dtrain.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A step or root, HF or DCP folder, .safetensors, .pt.")],
    out: Annotated[str, typer.Argument(metavar="DST", help="The new folder, or .safetensors file.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, dtrain, dcp or safetensors.")],
    source_format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="dtrain, hf, dcp or pt; seen from the files if left out.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Read dcp and pt, which run the code in them.")] = False,
    cast: Annotated[str | None, typer.Option("--cast", metavar="DTYPE", help="fp32, bf16 or fp16.")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Of one file, for hf.")] = "5GB",
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="Becomes config.json, for hf.")] = None,
    tie: Annotated[
        list[str] | None, typer.Option("--tie", metavar="ALIAS=NAME", help="One tensor of two names; may be repeated.")
    ] = None,
    state: Annotated[str | None, typer.Option("--state", metavar="NAME", help="Of a step with several states.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Dict of the weights in dcp or pt.")] = None,
    step: Annotated[int, typer.Option("--step", metavar="N", help="Of the new step, for dtrain.")] = 0,
    buffers: Annotated[
        list[str] | None, typer.Option("--buffers", metavar="PATTERN", help="Names of buffers, for dtrain; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the weights of a checkpoint in another format.

    Parameters and persistent buffers; in pieces, so that memory does not grow with the checkpoint. DST must not exist, and
    appears when all of it is on the disk. What dcp and pt files hold runs when they are read: they need --trust, and a process
    of its own copies their tensors beside DST first.

    Exit codes: 0 converted; 1 SRC cannot be read or DST not be written; 2 bad usage.
    """
    from dtrain.checkpoint.convert.convert import convert_checkpoint

    chosen: Any = {"to": to, "source_format": source_format}
    with named("convert"), Bar("converting") as bar:
        if not source or not out:
            raise ConfigError("convert: a path is empty; name the checkpoint and the new folder")
        done = convert_checkpoint(
            source,
            out,
            **chosen,
            trust=trust,
            cast=cast,
            tie=_pairs(tie or []),
            state=state,
            key=key,
            max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
            config=config,
            step=step,
            buffers=tuple(buffers or ()),
            begun=bar.expect,
            wrote=bar.advance,
        )
    if as_json:
        print_json({"path": str(done.path), "tensors": done.tensors, "bytes": done.bytes})
    else:
        typer.echo(f"{done.path}: {done.tensors} tensors, {size_text(done.bytes)}")
    return 0


def parse_size(option: str, text: str) -> int:
    """A number of bytes, with or without a unit.

    >>> parse_size("--size", "5GB"), parse_size("--size", "1.5 MiB"), parse_size("--size", "100")
    (5000000000, 1572864, 100)

    Raises:
        ConfigError: none.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(f"checkpoints: convert: {option} must be a size as in 5GB or 512MiB, got {text!r}")
    return size


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        alias, equals, name = text.partition("=")
        if not (alias and equals and name):
            raise ConfigError(f"checkpoints: convert: --tie takes ALIAS=NAME, got {text!r}")
        pairs[alias] = name
    return pairs
