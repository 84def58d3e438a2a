"""The page about the truth table has the rows of the table, and states dtrain's result in the words of the rows."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from table.failures import FAULTS
from table.rows import ROWS, Row

PAGE = Path(__file__).parents[3] / "docs" / "truth-table.md"
CELL = re.compile(r"(-?\d+), (\d+), (\d+), \d+\.\d s")


def printed(heading: str = "what happens") -> dict[str, list[str]]:
    """The cells of each row of a table on the page, by its name."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[begin + 2 :]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: cells for name, *cells in rows}


def agrees(row: Row, cell: str) -> bool:
    """Return True if a cell of dtrain agrees with the row."""
    match = CELL.fullmatch(cell)
    if match is None:
        return False
    code, lines, left = (int(text) for text in match.groups())
    fewest, most = row.lines
    return code == row.code and fewest <= lines <= most and left == 0


def test_page_has_some_of_the_rows_in_their_order():
    cells = printed()
    assert list(cells) == [row.name for row in ROWS if row.name in cells]


def test_page_cells_agree_with_rows_for_dtrain():
    cells = printed()
    assert [row.name for row in ROWS if row.name in cells and not agrees(row, cells[row.name][0])] == []


def test_differing_cell_is_detected():
    (row,) = (row for row in ROWS if row.name == "one rank exits with 3")
    assert agrees(row, "3, 1, 0, 0.5 s")
    wrong = ["1, 1, 0, 0.5 s", "3, 13, 0, 0.5 s", "3, 0, 0, 0.5 s", "3, 1, 2, 0.5 s", "did not end in 45 s"]
    assert [cell for cell in wrong if agrees(row, cell)] == []


def test_page_has_the_faults_and_no_innocent_rank():
    cells = printed("fault")
    assert list(cells) == [fault.name for fault in FAULTS]
    for texts in cells.values():
        for innocent, said, _ in (text.split(", ", 2) for text in texts):
            named, reports = said.split(" of ")
            assert (innocent, named) == ("0", reports)
