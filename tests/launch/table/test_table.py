"""Every row of the truth table, on dtrain: exit code, message and its length, survivors, and leftovers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import LONG_S
from table.rows import ROWS, STALE_NAMES, STALE_VALUES, Row
from table.running import Running, Seen, besides_tracebacks, dtrain, start, why_no_mounts

STARTS = {"preloaded": ("--preload", "json"), "plain": ("--no-preload",)}
SETTLE_S = 30.0  # for a launcher that was killed: its guardian has to end the rest
AT_ONCE = 2  # rows: most of a row is waiting

Came = dict[str, tuple[Running, Seen]]


def run_row(row: Row, folder: Path, n: int) -> Came:
    """Run a row in every way at the same time: with both ways of starting ranks, and with each as the one it is about."""
    if row.mounts and (refusal := why_no_mounts()):
        pytest.skip(f"needs a mount of its own: {refusal}")
    culprits = range(n) if row.each else [n - 1]
    running: dict[str, Running] = {}
    seen: Came = {}
    with row.world() as variables:
        try:
            for how, extra in STARTS.items():
                for culprit in culprits:
                    name = f"{how}-{culprit}"
                    running[name] = start(row, dtrain, folder / name, n=n, culprit=culprit, extra=extra, variables=variables)
            began = {name: job.act() for name, job in running.items()}
            settle_s = SETTLE_S if row.code < 0 else 0.0
            for name, job in running.items():
                seen[name] = (job, job.finish(began[name], within_s=LONG_S, settle_s=settle_s))
        finally:
            for job in running.values():
                job.end()
    return seen


def check(row: Row, job: Running, seen: Seen) -> list[str]:
    """List the differences from the row."""
    said = "\n".join(seen.lines)
    fewest, most = row.lines
    unfinished = [f"{name}-{rank}" for name in row.finished for rank in range(job.n)]
    wrong = {
        f"exit code {seen.code} and not {row.code}": seen.code != row.code,
        f"{len(seen.lines)} lines and not {fewest} to {most}": not fewest <= len(seen.lines) <= most,
        f"does not say {row.says!r}": re.search(row.says.replace("{culprit}", str(job.culprit)), said, re.M) is None,
        f"survivors {seen.survivors}": bool(seen.survivors),
        f"temporary files {seen.left}": bool(seen.left),
        "a rank did not finish": not all((job.job.folder / name).exists() for name in unfinished),
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


@pytest.fixture(scope="module")
def came(request, tmp_path_factory) -> Iterator[Callable[[Row, int], Came]]:
    """Return the results of a row. All selected rows run from the first call on, a few at a time."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == ROW_TEST]
    asked = [item.callspec.params for item in items if item.get_closest_marker("skip") is None]
    running: dict[tuple[str, int], Future[Came]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row, n in ((params["row"], params["n"]) for params in asked):
            running[row.name, n] = pool.submit(run_row, row, tmp_path_factory.mktemp("row"), n)
        yield lambda row, n: running[row.name, n].result()
        pool.shutdown(cancel_futures=True)  # after a failure with -x


@pytest.mark.sample(16)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_result_matches_table(row, n, came):
    for name, (job, seen) in came(row, n).items():
        assert check(row, job, seen) == [], f"{name}: {seen.err}"


ROW_TEST = test_row_result_matches_table.__name__


@pytest.mark.slow
@pytest.mark.parametrize("kind", STALE_VALUES)
@pytest.mark.parametrize("name", STALE_NAMES)
def test_single_stale_variable_has_no_effect(name, kind, tmp_path):
    (like,) = (row for row in ROWS if row.name == f"variables of another launch: {kind}")
    row = Row(name=like.name, code=like.code, lines=like.lines, source=like.source, env={name: STALE_VALUES[kind]})
    for job, seen in run_row(row, tmp_path, 2).values():
        assert check(row, job, seen) == [], seen.err


def test_names_of_rows_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_traceback_lines_of_program_are_not_counted():
    text = """a notice
[rank 1] Traceback (most recent call last):
[rank 1]   File "x.py", line 1, in <module>
[rank 1]     fail()
[rank 1] ValueError: why
Traceback (most recent call last):
  File "launcher.py", line 1, in <module>
AttributeError: own
dtrain: launch: rank 1 of 2 failed"""
    lines = text.splitlines()
    assert besides_tracebacks(text, "x.py") == [lines[0], *lines[5:]]


def test_wrong_launcher_fails_every_column(tmp_path):
    def bad(row, n):
        left = "setsid sh -c 'touch $TMPDIR/file; exec sleep 600' &"  # the file is there once the group of the rank is left
        return ["bash", "-c", f"{left} until [ -e $TMPDIR/file ]; do sleep 0.01; done; echo a >&2; echo b >&2; exit 3", "bash"]

    row = Row(name="all wrong", code=2, lines=(1, 1), says="why", finished=("done",))
    job = start(row, bad, tmp_path / "job", n=1, culprit=0, variables={})
    wrong = check(row, job, job.finish(job.act(), within_s=LONG_S, settle_s=0.0))
    assert [what.split()[0] for what in wrong] == ["exit", "2", "does", "survivors", "temporary", "a"]
    assert not job.job.processes()
