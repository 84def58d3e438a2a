"""``dtrain prove`` on pairs of scripts by authors who did not know it: what it said once still holds, and may get better."""

import sys
from contextlib import chdir

import pytest

import dtrain as dt
from prove.held_out.index import FOLDER, PAIRS


def test_each_folder_is_a_pair_whose_diff_makes_a_script():
    assert sorted(pair.name for pair in PAIRS) == sorted(path.name for path in FOLDER.iterdir() if (path / "twin.py").is_file())
    for pair in PAIRS:
        text = pair.text_of_bug()
        assert text != pair.twin.read_text(encoding="utf-8")
        compile(text, pair.name, "exec")


@pytest.mark.parametrize(("authors", "figures"), [("ab", (40, 32, 26, 20, 6)), ("c", (28, 26, 22, 19, 4))])
def test_figures_of_the_page(authors, figures):
    pairs = [pair for pair in PAIRS if pair.name[0] in authors]
    visible = [pair for pair in pairs if pair.visible]
    found = [pair for pair in visible if pair.found]
    right, objections = sum(pair.right for pair in found), sum(pair.objection != "" for pair in pairs)
    assert (len(pairs), len(visible), len(found), right, objections) == figures


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_pair_is_judged_as_before_or_better(pair, tmp_path):
    script = tmp_path / "bug.py"
    script.write_text(pair.text_of_bug(), encoding="utf-8")
    reports = []
    for path in (script, pair.twin):
        with chdir(tmp_path):
            reports.append(dt.prove.prove(path, timeout_s=900.0))
    causes = [", ".join(finding.cause.code for finding in report.findings) or "-" for report in reports]
    sys.__stdout__.write(f"{pair.name:24} bug: {causes[0]}; twin: {causes[1]}\n")
    assert not (pair.found and reports[0].passed), reports[0].text()
    if pair.right or pair.now:
        assert reports[0].findings[0].cause.code == (pair.now or pair.first), reports[0].text()
    if not pair.objection or pair.mended:
        assert reports[1].passed, reports[1].text()
