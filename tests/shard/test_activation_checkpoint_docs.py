"""The options of sharding that pages name exist."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from dtrain.dist.mesh import build_mesh
from dtrain.shard.activations import checkpoint_activations, compile_blocks, offload_activations
from dtrain.shard.fsdp import CommConfig, shard_model
from dtrain.shard.unshard import describe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "memory.md").read_text()
SHARDING_PAGES = PAGE + (DOCS / "from_composer.md").read_text().split("\n## parallelism_config\n")[1].split("\n## ")[0]
FUNCTIONS = {
    function.__name__: function
    for function in (
        build_mesh,
        checkpoint_activations,
        CommConfig,
        compile_blocks,
        describe,
        offload_activations,
        shard_model,
    )
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return cells[2:]


def calls(text: str) -> list[tuple[str, list[str]]]:
    """Calls of public functions in some text: name, and the arguments that it names."""
    matches = re.findall(r"(?:dt\.)?(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text)
    return [(name, re.findall(r"(\w+)=", re.sub(r"\([^()]*\)", "", inside))) for name, inside in matches if name in FUNCTIONS]


@pytest.mark.parametrize(("name", "arguments"), calls(SHARDING_PAGES), ids=lambda value: str(value))
def test_documented_calls_use_existing_arguments(name, arguments):
    assert set(arguments) <= set(inspect.signature(FUNCTIONS[name]).parameters)


def test_documented_strategies_exist():
    strategies = re.findall(r"'(\w+)'", str(inspect.signature(shard_model).parameters["strategy"].annotation))
    named = set(re.findall(r"is `\"(\w+)\"`", PAGE)) | set(re.findall(r"strategy=\"(\w+)\"", PAGE))
    assert named
    assert named <= set(strategies)


def test_comm_config_table_matches_fields_and_defaults():
    table = [(name.strip("`"), default.strip("`")) for name, default, _ in rows("Waiting for the network, or holding more")]
    fields = dataclasses.fields(CommConfig)
    assert table == [(f.name, f'"{f.default}"' if isinstance(f.default, str) else str(f.default)) for f in fields]


def test_documented_remedies_follow_the_oom_error_order():
    order = [cell for cell, *_ in rows("The order")]
    steps = ["auto_microbatch", "shard_grad_op", "full_shard", "checkpoint_activations", "offload", "smaller model"]
    places = [next(place for place, cell in enumerate(order) if step in cell) for step in steps]
    assert places == sorted(places)
