"""The record of a launch is complete or missing, and has no value of the environment."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime

import pytest

from dtrain.launch.launch_dir import write_launch_record
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout, OutputPlan, Target

NOW = datetime(2026, 3, 1, 11, 40, 7, 123456, tzinfo=UTC)


def plan_for(run_dir, **changed):
    target = Target(kind="script", name="train.py", args=("--lr", "\udcff"))
    output = OutputPlan(shown=frozenset({3, 0}))
    return LaunchPlan(**{"target": target, "layout": NodeLayout.one_node(4), "run_dir": run_dir, "output": output, **changed})


def write(plan, variables=()):
    return write_launch_record(plan, command=["dtrain", "launch", "train.py"], variables=variables, now=NOW)


def test_launch_record_holds_command_without_variable_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write(plan_for(tmp_path), {"TOKEN": "secret", "HOME": "/root"}) is None
    text = (tmp_path / "launch.json").read_text()
    record = json.loads(text)
    assert record["target"] == {"kind": "script", "name": "train.py", "args": ["--lr", "\udcff"]}
    assert record["layout"]["world_size"] == 4
    assert record["options"]["output"]["shown"] == [0, 3]
    assert (record["started_at"], record["folder"]) == ("2026-03-01T11:40:07+00:00", str(tmp_path))
    assert (record["host"], record["command"]) == (platform.node(), ["dtrain", "launch", "train.py"])
    assert record["environment"] == ["HOME", "TOKEN"]
    assert "secret" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch.json"]


def test_nodes_sharing_run_dir_write_separate_records(tmp_path):
    for node in (0, 1):
        layout = NodeLayout(nproc=2, world_size=4, base_rank=2 * node, node_rank=node, nodes=2)
        assert write(plan_for(tmp_path, layout=layout)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch-1.json", "launch.json"]


@pytest.mark.parametrize("obstacle", ["no folder", "folder in its place"])
def test_unwritable_record_returns_warning_and_leaves_no_files(tmp_path, obstacle):
    folder = tmp_path / "run"
    if obstacle == "folder in its place":
        (folder / "launch.json").mkdir(parents=True)
    warning = write(plan_for(folder))
    assert warning is not None
    assert warning.startswith(f"launch: cannot write {str(folder / 'launch.json')!r}: ")
    assert not folder.exists() or [path.name for path in folder.iterdir()] == ["launch.json"]


def test_record_is_written_when_working_directory_is_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert write(plan_for(tmp_path)) is None
    assert json.loads((tmp_path / "launch.json").read_text())["folder"] == ""
