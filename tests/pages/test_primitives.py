"""docs/primitives.md is that of the docstrings, and has every exported name."""

from __future__ import annotations

import inspect
import re

import pytest

import dtrain as dt
import public
from pages import primitives
from pages.fences import DOCS


@pytest.fixture(scope="module")
def text() -> str:
    return primitives.page()


def test_generated_page_is_up_to_date(text):
    assert primitives.PAGE.read_text() == text, "run python tests/written.py"


def test_every_exported_name_is_on_the_page(text):
    assert [name for name in primitives.exported() if f"`{name.removeprefix('dt.')}`" not in text] == []
    assert [
        name for name, value in primitives.exported().items() if inspect.isfunction(value) and primitives.home(value) is None
    ] == []


def test_every_function_summary_states_its_result():
    silent = [
        name for name, value in primitives.exported().items() if inspect.isfunction(value) and not primitives.summary(value)
    ]
    assert silent == []


def test_linked_detail_pages_exist():
    assert [more for _, more in primitives.TASKS.values() if not (DOCS / more).exists()] == []


def test_table_rows_have_a_complete_set_of_columns(text):
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 7), line


def test_contract_is_parsed_from_docstring_headings():
    def writes_(x: int) -> None:
        """Return the result for ``x``.

        Args:
            x: a number.

        Mutates: ``x``, in
            place. Collective: none. Host sync: one.

        Raises:
            ConfigError: ``x`` is
                wrong.
            StepError: another.
        """

    said = primitives.contract(writes_)
    assert (said["Mutates"], said["Collective"], said["Host sync"]) == ("`x`, in place.", "none.", "one.")
    assert primitives.raised(writes_) == ["ConfigError", "StepError"]
    assert (
        primitives.row("dt.writes_", writes_)
        == "| `writes_` | Return the result for `x` | `x`, in place |  | one | `ConfigError`, `StepError` |"
    )
    assert primitives.brief("none; it is agreed. And more.") == "none; it is agreed"
    assert primitives.brief("two of JSON.") == "two of JSON"
    assert not re.search(rf"\b(?:{primitives._HEADS}): ", primitives.summary(dt.set_lr_)), "a heading on the first line"


def test_table_entries_match_docstrings():
    assert primitives.raised(dt.build_mesh) == ["ConfigError", "DistError"]
    assert "one all-reduce" in primitives.contract(dt.reduce_metrics)["Collective"]


STRATEGIES = {"full_shard", "shard_grad_op", "hybrid_shard", "replicate"}


def test_every_name_in_the_table_exists_in_its_namespace():
    table = (DOCS / "names.md").read_text()
    door, wrong, count = "dt", [], 0
    for row in table.split("\n|")[3:]:
        head, cell = row.split("|")[:2]
        door = next(iter(re.findall(r"`(dt[.\w]*)`", head)), door)
        names = set(re.findall(r"`([A-Za-z_]+)`", cell)) - STRATEGIES
        count += len(names)
        wrong += [f"{door}.{name}" for name in names if not public.is_public(f"{door}.{name}")]
    assert wrong == []
    assert count > 100
