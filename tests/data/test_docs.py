"""docs/data.md: every name is one of the package, and the tables have every format and option."""

import inspect
import re
from pathlib import Path

import pytest

import dtrain as dt
import public
from dtrain.data.loader import build_loader
from dtrain.data.stream.formats.compression import COMPRESSIONS
from dtrain.data.stream.formats.shard_format import FORMAT_NAMES, get_format
from dtrain.data.stream.sharded_dataset import ShardedDataset

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


def section(title: str) -> str:
    return PAGE[PAGE.index(f"\n## {title}\n") :].split("\n## ", 2)[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in ``text``, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if number not in heads and not line.startswith("|---")
    ]


def test_every_name_on_the_page_is_public():
    assert public.unknown_in(PAGE) == set()


def test_every_format_and_compression_is_in_the_table():
    shards = section("Shards")
    files = rows(shards)[: len(FORMAT_NAMES)]
    suffixes = {suffix for form in map(get_format, FORMAT_NAMES) for suffix in form.suffixes}
    assert {suffix for row in files for suffix in re.findall(r"`(\.\w+)`", row[1])} == suffixes
    assert {form.supports_ranges for form in map(get_format, FORMAT_NAMES)} == {row[3].startswith("yes") for row in files}
    assert set(re.findall(r"\w+", files[0][4].removeprefix("of files: "))) == set(COMPRESSIONS)


def test_dtrain_options_in_the_mosaicml_table_exist():
    options = set(inspect.signature(ShardedDataset).parameters) | set(inspect.signature(build_loader).parameters)
    options |= set(inspect.signature(dt.data.BlockShuffle).parameters) | set(inspect.signature(dt.data.mix).parameters)
    ours = " ".join(row[1] for row in rows(section("From MosaicML's StreamingDataset")))
    assert set(re.findall(r"\b(\w+)=", ours)) <= options | {"allow_pickle"}


def test_mosaicml_options_in_the_table_exist_in_mosaicml():
    pytest.importorskip("places.mosaicml")  # lets their package be imported without torchvision
    from streaming.base import StreamingDataset

    theirs = set(inspect.signature(StreamingDataset.__init__).parameters)
    table = " ".join(row[0] for row in rows(section("From MosaicML's StreamingDataset")))
    named = set(re.findall(r"`(\w+)(?=[`=])", table))
    not_options = {"StreamingDataLoader", "streams", "split"}
    assert named - not_options <= theirs
    assert theirs - {"self", "stream_name", "stream_config"} <= named | not_options
