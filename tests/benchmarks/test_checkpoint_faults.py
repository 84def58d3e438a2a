"""The program that makes the full set of faults: it continues an interrupted run, and prints its results."""

from __future__ import annotations

import pytest

from checkpoint_faults import ROWS, Progress, Report, Row, go_on, read, table, write


def drawn(seed: int, k: int) -> list[dict]:
    """Return three faults, and in draw 5 a forbidden outcome."""
    return [{"fault": "a", "came": "refused", "wrong": "was not" * (k == 5), "numbers": {"seconds": k}}] * 3


def ask(fn, *args):
    return fn(*args)


ROW = Row(title="a row", draw=drawn, count=12)


def test_interrupted_row_continues_from_its_file(tmp_path):
    path = tmp_path / "faults.json"
    report = read(path, 3)
    progress = report.rows.setdefault("kills", Progress())
    draws = go_on(ROW, progress, seed=3, count=None, ask=ask)
    next(draws)
    next(draws)
    write(path, report)
    report = read(path, None)
    assert (report.seed, report.rows["kills"].next, report.rows["kills"].done) == (3, 2, False)
    for _ in go_on(ROW, report.rows["kills"], seed=3, count=None, ask=ask):
        pass
    assert (report.rows["kills"].next, report.rows["kills"].done, report.rows["kills"].tally.count) == (4, True, 12)
    assert [name.name for name in tmp_path.iterdir()] == ["faults.json"]


def test_report_of_a_different_seed_is_refused(tmp_path):
    write(tmp_path / "faults.json", Report(seed=3))
    with pytest.raises(SystemExit, match="is of seed 3, not 4"):
        read(tmp_path / "faults.json", 4)


def test_finite_row_is_done_after_its_last_draw():
    progress = Progress()
    row = Row(title="a row", draw=drawn, draws=lambda: 2)
    assert len(list(go_on(row, Progress(), seed=0, count=3, ask=ask))) == 1
    list(go_on(row, progress, seed=0, count=3, ask=ask))
    assert not progress.done
    assert len(list(go_on(row, progress, seed=0, count=None, ask=ask))) == 1
    assert progress.done


def test_failing_draw_counts_as_wrong():
    def broken(seed: int, k: int) -> list[dict]:
        raise RuntimeError("no more processes")

    progress = Progress()
    list(go_on(Row(title="a row", draw=broken, count=1), progress, seed=0, count=None, ask=ask))
    assert progress.tally.wrong == ["seed 0, draw 0: a draw: no more processes"]


def test_table_shows_counts_and_the_error_bound():
    report = Report(seed=0, rows={"kills": Progress(first_day="2026-01-01", last_day="2026-01-01")})
    list(go_on(ROW, report.rows["kills"], seed=0, count=None, ask=ask))
    head, _, line = table(report)
    assert head.count("|") == line.count("|")
    assert "| 12 | 0 | 0.25 | 12 refused | seconds 3 |" in line
    list(go_on(ROW, report.rows["kills"], seed=0, count=18, ask=ask))
    assert "| 18 | 3 | - | 18 refused | seconds 5 |" in list(table(report))[2]


def test_fault_table_has_all_rows():
    assert list(ROWS) == ["kills", "operations", "flips", "files", "malicious", "writers", "chains"]
    assert (ROWS["kills"].count, ROWS["flips"].count, ROWS["writers"].count) == (2000, 100_000, 200)
