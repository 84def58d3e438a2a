"""``dtrain prove`` finds the seeded bugs of ``tests/prove/bugs``, names causes, and does not object to repaired scripts."""

import re
from contextlib import chdir
from pathlib import Path

import pytest

import dtrain as dt
from prove.bugs.index import CAUSES, ROWS, SeededBug

QUICK = (
    "shuffle_without_epoch.py",
    "sampler_without_rank.py",
    "optimizer_not_saved.py",
    "eval_counts_twice.py",
    "export_drops_buffer.py",
    "router_counts_twice.py",
    "documents_leak.py",
    "local_count.py",
)
"""Rows that run at every change, one for each comparison: one run, ranks, a resume, an evaluation, an export, recomputation.

In the last but one, ranks share a batch. The last one is a loop by hand whose cause the losses of the ranks show.

``test_prove.py`` has a bug of microbatches, and one of precision.
"""

# Of 30 bugs, at least 28 must be detected, and 26 named.
FOUND_SHARE, NAMED_SHARE = 28 / 30, 26 / 30


def prove(row: SeededBug, folder: Path, *, fixed: bool, ranks: tuple[int, ...] = (2, 3)) -> dict:
    """Prove a script in ``folder``, and return the answer."""
    folder.mkdir(parents=True)
    with chdir(folder):
        report = dt.prove.prove(row.path, [*row.arguments, *["--fixed"] * fixed], world_sizes=ranks, timeout_s=600.0)
    return report.as_dict() | {"text": report.text()}


def causes(answer: dict) -> list[str]:
    return [finding["cause"] for finding in answer["findings"]]


def by_file(*files: str):
    return [pytest.param(row, id=row.file.removesuffix(".py")) for row in ROWS if row.file in files or not files]


def test_each_script_has_one_row():
    scripts = {path.name for path in ROWS[0].path.parent.glob("*.py")} - {"index.py", "sequence_parts.py"}
    assert sorted(row.file for row in ROWS) == sorted(scripts)
    assert len(ROWS) >= 53


def test_each_cause_is_explained_and_seeded():
    assert {row.cause for row in ROWS} == set(CAUSES)
    assert {name for row in ROWS for name in row.also} <= set(CAUSES)


@pytest.mark.parametrize("row", by_file())
def test_script_names_a_thread_and_has_one_switch(row):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", row.thread)
    text = row.path.read_text(encoding="utf-8")
    assert text.count('FIXED = "--fixed" in sys.argv') == 1
    assert "``--fixed``" in text.split('"""')[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", by_file(*QUICK))
def test_bug_is_found_and_named(row, tmp_path):
    answer = prove(row, tmp_path / "bug", fixed=False, ranks=(2,))
    assert not answer["passed"]
    assert causes(answer)[0] in {row.cause, *row.also}


@pytest.mark.slow
def test_enough_bugs_are_found_and_named(tmp_path, capsys):
    answers = {row.file: prove(row, tmp_path / row.file, fixed=False) for row in ROWS}
    failing = [row.file for row in ROWS if not answers[row.file]["passed"]]
    named = [row.file for row in ROWS if {row.cause, *row.also} & set(causes(answers[row.file])[:1])]
    with capsys.disabled():
        print(f"\n{len(failing)} of {len(ROWS)} seeded bugs are found, and the first cause of {len(named)} is the true one")
        for row in ROWS:
            print(f"  {row.file:32} {row.cause:30} {', '.join(causes(answers[row.file])) or '-'}")
    assert len(failing) >= FOUND_SHARE * len(ROWS), sorted({row.file for row in ROWS} - set(failing))
    assert len(named) >= NAMED_SHARE * len(ROWS), sorted({row.file for row in ROWS} - set(named))


@pytest.mark.slow
@pytest.mark.parametrize("row", by_file())
def test_each_repaired_script_agrees_with_itself(row, tmp_path):
    answer = prove(row, tmp_path / "fixed", fixed=True)
    assert answer["passed"], answer["text"]


HELD_OUT = sorted(path for path in (Path(__file__).parent / "held_out").glob("*.py") if path.stem != "index")
"""Bugs that were written after the tool, and for which nothing in the tool was changed."""


@pytest.mark.slow
@pytest.mark.parametrize("script", HELD_OUT, ids=lambda path: path.stem)
def test_bug_that_was_held_out_is_found(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(script, timeout_s=600.0)
    with capsys.disabled():
        print(f"\n  {script.stem:32} {', '.join(finding.cause.code for finding in report.findings) or '-'}")
    assert report.findings
    fixed = dt.prove.prove(script, ["--fixed"], timeout_s=600.0)
    assert fixed.passed, fixed.text()
