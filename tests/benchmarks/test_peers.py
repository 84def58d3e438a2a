"""Rows of the table of peers at tiny sizes, and the page that is made of them."""

from __future__ import annotations

import json
import sys

import pytest

import figures
import peers
from peers import ROWS, Amount, Row, judged, measured

TINY = Amount(pairs=2, rounds=1, scale=0.0002)
SLOW = ("2 ranks", "dtrain", "no_op", "MDS")  # they start ranks or processes
EMPTY = {"value": [1.0, 1.0, 1.0], "ratio": [1.0, 1.0, 1.0]}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),  # mosaicml-streaming
]


def is_slow(row: Row) -> bool:
    return any(words in row.what for words in SLOW)


@pytest.mark.costly
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.what, marks=pytest.mark.slow if is_slow(row) else ()) for row in ROWS]
)
def test_row_measures_its_candidates_and_judges_dtrain(row):
    result = measured(row, TINY)
    if result is None:
        pytest.skip(f"needs {row.reference}, which nox -s peers installs")
    for seen in result["clocks"].values():
        assert {row.reference, "dtrain"} <= seen["candidates"].keys()
        assert set(row.candidates) == seen["candidates"].keys() | set(seen["missing"])
        assert seen["candidates"][row.reference]["ratio"][0] == 1.0
        assert seen["verdict"] in ("met", "not met", "not resolved")
    assert row.what in peers.line(row.what, result)


@pytest.mark.parametrize(
    ("unit", "at_most", "expected"),
    [("", 1.6, "met"), ("", 1.4, "not met"), ("MB", 3.0, "met"), ("MB", 2.0, "not met")],
    ids=["ratio-met", "ratio-lost", "figure-met", "figure-lost"],
)
def test_ratio_is_judged_unless_the_row_has_a_unit(unit, at_most, expected):
    row = Row(
        what="x",
        measure=lambda amount: {},
        reference="peer",
        at_most=at_most,
        unit=unit,
        candidates=("peer", "other", "dtrain"),
    )
    result = judged(row, {"dtrain": [(3.0, 3.0)], "peer": [(2.0, 2.0)]})
    assert result["candidates"]["dtrain"] == {"value": [3.0] * 3, "ratio": [1.5] * 3}
    assert (result["missing"], result["pairs"], result["verdict"]) == (["other"], 2, expected)


def test_measured_row_joins_the_rows_of_the_file(monkeypatch, tmp_path, capsys):
    out = tmp_path / "peers.json"
    first, second = ROWS[0].what, ROWS[1].what
    peers.write(out, {second: {"kept": True}})
    monkeypatch.setattr(sys, "argv", ["peers.py", "--only", first, "--pairs", "2", "--out", str(out)])
    peers.main()
    content = json.loads(out.read_text())
    assert list(content["rows"]) == [first, second]
    assert content["rows"][second] == {"kept": True}
    assert content["rows"][first]["measured"].keys() == {"at", "load"}
    assert "load" not in content["machine"]
    assert content["versions"].keys() >= {"python", "torch", "torchdata"}
    assert first in capsys.readouterr().out


def test_lost_row_and_missing_peer_are_shown():
    clock = {"candidates": {"by hand": EMPTY, "dtrain": EMPTY}, "missing": ["Fabric"], "band": [0.9, 1.1], "verdict": "not met"}
    row = {"measured": {"at": "2026-01-02 03:04", "load": 1.5}, "floor": "by hand", "reference": "by hand", "at_most": 1.1}
    row |= {"unit": "", "clocks": {"processor time": clock}}
    content = {"machine": "m", "versions": {"torch": "2"}, "rows": {ROWS[0].what: row}}
    lines = figures.peers(content).splitlines()[2:]
    assert lines[1] == f"| {ROWS[1].what} | | | | | | | not measured | |"
    assert [lines[0], *lines[len(ROWS) :]] == [
        f"| {ROWS[0].what} | processor time | by hand 1 (1 s) | Fabric not installed | 1 (1 s) | 0.900 to 1.100 | 1.1 "
        "| **not met** | 2026-01-02 03:04, load 1.5 |",
        "",
        "Measured on m; torch 2.",
    ]


def test_page_of_figures_is_what_the_files_say():
    text = figures.PAGE.read_text()
    assert figures.with_tables(text) == text
    assert all(f"benchmarks/results/{name}.json" in text for name in figures.TABLES)


def test_every_row_is_on_the_page():
    page = figures.PAGE.read_text()
    assert [row.what for row in ROWS if f"| {row.what} |" not in page] == []
