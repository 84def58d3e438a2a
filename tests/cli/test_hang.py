"""``dtrain hang``: what it shows, and how it refuses; what it asks is in tests/launch/hang/test_query.py."""

from __future__ import annotations

import pytest

from dtrain import launch_protocol
from dtrain.cli.main import _invoke


def test_hang_command_shows_recorded_stacks(tmp_path, capsys):
    path = launch_protocol.stacks_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('Thread 0x01 (most recent call first):\n  File "/home/me/loop.py", line 12 in train\n')
    assert _invoke(["hang", str(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("dtrain: launch: asked: rank 0 of 1 ")
    assert second == "  rank 0: /home/me/loop.py:12 in train"
    assert third.startswith("  as of ")


@pytest.mark.parametrize(
    ("below", "says"),
    [
        pytest.param("gone", "dtrain: hang: path must be an existing folder, got ", id="no-folder"),
        pytest.param("", "dtrain: hang: '{folder}' has no records of ranks", id="nothing-there"),
    ],
)
def test_refused_hang_command_prints_one_line_and_exits_2(tmp_path, capsys, below, says):
    assert _invoke(["hang", str(tmp_path / below)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says.format(folder=tmp_path))
