"""The README's loop runs as it stands: in an empty namespace, then again to resume."""

import math
import re
from pathlib import Path

import pytest
import torch

import dtrain as dt

README = (Path(__file__).parents[1] / "README.md").read_text()
(LOOP,) = re.findall(r"```python\n(.*?)```", README, re.S)


def test_readme_loop_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert 'loader.until("3ep")' in LOOP
    torch.manual_seed(0)
    exec(LOOP.replace('until("3ep")', 'until("1ep")'), {})
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps("ckpt")] == [64]
    exec(LOOP, {})
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps("ckpt")] == [64, 128, 192]
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [int(step) for step, _ in printed] == [64, 128, 192]
    first, *_, last = (float(loss) for _, loss in printed)
    assert last < first < 0.5 < math.log(4)  # the loss of a guess


def test_readme_loop_has_about_fourteen_lines():
    assert len(LOOP.split("with dt.init_dist() as dist:\n")[1].splitlines()) + 1 <= 15


@pytest.mark.slow
def test_readme_loop_agrees_in_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    report = dt.prove.prove("loop.py", timeout_s=600.0)
    assert report.passed, report.text()
    # The README shows some of its lines.
    shown = re.search(r"```console\n(.*?)```", README, re.S)
    assert shown is not None
    names = [re.split(r"  +", line)[0] for line in shown[1].splitlines()[1:]]
    assert set(names) <= {row.name for row in report.rows}
