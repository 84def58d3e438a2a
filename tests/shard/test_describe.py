"""describe: one row per unit; bytes that add up; a plain model too."""

import pytest
import torch
from torch import nn

from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.shard.unshard import describe
from shard.models import CASES, inputs, make


def described(name: str, strategy: str) -> str:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = make(name, torch.float32)
    net.register_buffer("table", torch.zeros(5))
    precision = Precision(param="bf16", reduce="fp32")
    return describe(shard_model(net, mesh, strategy=strategy, precision=precision, **CASES[name].options))


def table(text: str) -> dict[str, list[str]]:
    head, *rows = [[cell for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[1:]]
    assert [cell.strip() for cell in head][:4] == ["unit", "class", "tensors", "parameters"]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_describe_lists_units_bytes_dtypes_and_placements(ranks):
    text = ranks(4).run(described, "left out", "hybrid_shard")[0]
    assert text.splitlines()[0] == "hybrid_shard over 4 ranks (dp_replicate=2, dp_shard=2), accumulate=local, buffers=broadcast"
    rows = table(text)
    place = "copied over dp_replicate=2, cut on dim 0 over dp_shard=2"
    assert rows["model"] == ["Scaled", "1", "24", "96 B", "48 B", "float32", "bfloat16", "float32", place]
    assert rows["block"] == ["Block", "2", "60", "240 B", "120 B", "float32", "bfloat16", "float32", place]
    assert rows["ignored"] == ["4", "68", "272 B", "272 B", "float32", "float32", "float32", "whole"]
    assert rows["buffers"][:5] == ["1", "5", "20 B", "20 B", "float32"]
    assert rows["total"] == ["8", "157", "628 B", "460 B"]


def described_twice(name: str) -> bool:
    net = shard_model(make(name), build_mesh(), strategy="replicate", **CASES[name].options)
    before = describe(net)
    net(inputs())
    return describe(net) == before


@pytest.mark.parametrize("name", ["left out", "called twice"])
def test_describe_is_unchanged_after_a_forward(ranks, name):
    assert ranks(2).run(described_twice, name) == [True, True]


def test_tied_unit_row_names_all_its_modules(ranks):
    assert "first.0 + last.1" in table(ranks(2).run(described, "tied across blocks", "full_shard")[0])


@pytest.mark.parametrize(
    ("strategy", "place"), [("full_shard", "cut on dim 0 over dp_all=2"), ("replicate", "copied over dp_all=2")]
)
def test_placement_column_matches_the_strategy(ranks, strategy, place):
    rows = table(ranks(2).run(described, "called twice", strategy)[0])
    assert {row[-1] for name, row in rows.items() if name.startswith("blocks")} == {place}


def test_plain_meta_model_is_described_in_one_row():
    with torch.device("meta"):
        rows = table(describe(nn.Linear(1024, 1024)))
    assert rows["model"] == ["Linear", "2", "1,049,600", "4 MiB", "4 MiB", "float32", "float32", "-", "whole"]
