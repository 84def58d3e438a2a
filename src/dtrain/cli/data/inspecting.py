"""``dtrain data inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.checkpoints.output import Bar, print_json, print_table, size_text
from dtrain.cli.data.errors import named
from dtrain.cli.data.showing import facts_of, file_facts, sample_text, summary
from dtrain.cli.data.values import counted, parse_choice, parse_count
from dtrain.cli.data.verifying import problem_of
from dtrain.errors import ConfigError, printable

if TYPE_CHECKING:
    from dtrain.data.stream.dataset import ShardedDataset

EXAMPLES = """
dtrain data inspect s3://bucket/train                 what it is, from its index alone
dtrain data inspect shards --head 3                   and its first samples
dtrain data inspect shards --verify --json            every digest and every sample, for programs
"""

_DAMAGED = 1
_SHOWN, _DONE = "What is shown", "What is verified"
_FORMATS = ("mds", "parquet", "jsonl", "text", "tar")


def _option(heading: str, *spellings: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


def inspect(
    url: Annotated[str, typer.Argument(metavar="URL", help="Folder of shards, here or on a server.", show_default=False)],
    form: Annotated[
        str | None, _option(_SHOWN, "--format", metavar="FORMAT", help="Of the files, where there is no index to say it.")
    ] = None,
    head: Annotated[str, _option(_SHOWN, "--head", metavar="K", help="The first K samples, too.")] = "0",
    shards: Annotated[bool, _option(_SHOWN, "--shards", help="A line for each shard, too.")] = False,
    as_json: Annotated[bool, _option(_SHOWN, "--json", help="Print one JSON object, for programs.")] = False,
    verify: Annotated[bool, _option(_DONE, "--verify", help="Compare every digest, and decode every sample.")] = False,
    trust: Annotated[
        bool, _option(_DONE, "--allow-pickle", help="Decode pickled columns, too, which runs the code in them.")
    ] = False,
) -> int:
    """Show what a dataset of shards holds, and verify it.

    Reads the index only, unless --head or --verify are given; of a folder without one, what counting its samples takes.

    Exit codes: 0 shown, and nothing is wrong; 1 it cannot be read, or --verify has found something; 2 bad usage.
    """
    with named("inspect"):
        first = parse_count("--head", head, least=0)
        options: dict[str, Any] = {"allow_pickle": True} if trust else {}
        with closing(_opened(url, parse_choice("--format", form, _FORMATS), options)) as dataset:
            facts = facts_of(dataset)
            if shards or as_json:
                facts["files"] = [file_facts(entry) for entry in dataset.entries]
            facts["head"] = [sample_text(dataset[index]) for index in range(min(first, len(dataset)))]
            facts["problems"] = _problems(dataset, options) if verify else None
    if as_json:
        print_json({"url": url, **facts})
    else:
        _print(facts)
    return _DAMAGED if facts["problems"] else 0


def _opened(url: str, form: str | None, options: dict[str, Any]) -> ShardedDataset:
    if not url:
        raise ConfigError("URL is empty; name the folder that shards are in")
    from dtrain.data.stream.dataset import ShardedDataset

    return ShardedDataset(url, format=form, **options)


def _problems(dataset: ShardedDataset, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Shards that are not what the index says, and why."""
    found = []
    with Bar("verifying", sum(entry.file.raw_size or entry.file.size for entry in dataset.entries)) as bar:
        for entry in dataset.entries:
            if (problem := problem_of(dataset.root, entry, options, bar.advance)) is not None:
                found.append({"file": entry.file.name, "problem": problem})
    return found


def _print(facts: Mapping[str, Any]) -> None:
    for line in summary(facts):
        typer.echo(printable(line))
    if facts["columns"]:
        typer.echo()
        print_table(("column", "encoding"), [(name, encoding or "-") for name, encoding in facts["columns"].items()])
    if "files" in facts:
        typer.echo()
        rows = [(file["name"], f"{file['samples']:,}", size_text(file["bytes"]), _digests(file)) for file in facts["files"]]
        print_table(("shard", "samples", "size", "digests"), rows, right=(1, 2))
    for number, sample in enumerate(facts["head"]):
        typer.echo(f"\nsample {number}")
        for name, value in sample.items():
            typer.echo(f"  {printable(name)}: {printable(value)}")
    if (problems := facts["problems"]) is not None:
        typer.echo()
        for each in problems:
            typer.echo(printable(f"{each['file']}: {each['problem']}"))
        verdict = f"{counted(len(problems), 'shard')} of {facts['shards']:,} damaged" if problems else _sound(facts)
        typer.echo(verdict)


def _sound(facts: Mapping[str, Any]) -> str:
    missing = facts["without_digests"]
    digests = f"no digests of {counted(missing, 'shard')}" if missing else "every digest compared"
    return f"ok: {digests}, every sample decoded"


def _digests(file: Mapping[str, Any]) -> str:
    return ", ".join(file["digests"]) or "-"
