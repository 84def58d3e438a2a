"""The folder of a launch is a new folder, or that of the option; on several nodes the folder that node 0 has named."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.launch_dir import claim_run_dir, create_run_dir, write_launch_record
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout, OutputPlan, Target

NOW = datetime(2026, 3, 1, 11, 40, 7)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_default_run_dir_is_new_and_named_by_time(here):
    names = [create_run_dir(None, now=NOW) for _ in range(3)]
    begin = here / "runs" / "2026-03-01T11-40-07"
    assert names == [begin, begin.with_name(begin.name + "-2"), begin.with_name(begin.name + "-3")]
    assert [path.name for path in begin.iterdir()] == ["failures"]


def test_given_run_dir_loses_only_old_failures(here):
    folder = create_run_dir("mine", now=NOW)
    (folder / "failures" / "rank-00000.json").touch()
    (folder / "failures" / "rank-00000.partial").touch()
    (folder / "notes.txt").touch()
    assert create_run_dir("mine", now=NOW) == here / "mine" == folder
    os.close(claim_run_dir(folder, 0))
    assert sorted(path.name for path in folder.rglob("*")) == ["failures", "lock-0", "notes.txt"]


def test_run_dir_named_by_node_0_keeps_existing_records(here):
    folder = create_run_dir(None, now=NOW, name="2026-03-01T11-40-05-2")
    (folder / "failures" / "rank-00000.json").touch()
    assert create_run_dir(None, now=NOW, name="2026-03-01T11-40-05-2") == folder == here / "runs" / "2026-03-01T11-40-05-2"
    assert (folder / "failures" / "rank-00000.json").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_run_name_of_another_node_must_be_folder_name(here, name):
    with pytest.raises(ConfigError, match=r"^launch: the run name of node 0 must be a folder name, got .*\. "):
        create_run_dir(None, now=NOW, name=name)
    assert list(here.iterdir()) == []


REFUSED = {
    "empty": (" ", "--run-dir must not be empty. "),
    "file": ("file", r"cannot use 'file' as the run folder: .*\. Choose a folder with --run-dir"),
    "below a file": ("file/run", "cannot use 'file/run' as the run folder: Not a directory"),
    "too long": ("x" * 300, "cannot use 'x+' as the run folder: File name too long"),
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED)
def test_unusable_run_dir_is_refused(here, asked, message):
    (here / "file").touch()
    with pytest.raises(ConfigError, match=f"^launch: {message}"):
        create_run_dir(asked, now=NOW)
    assert os.listdir(here) == ["file"]


def test_second_launch_in_run_dir_is_refused_and_keeps_records(here):
    folder = create_run_dir("mine", now=NOW)
    first = claim_run_dir(folder, 0)
    (folder / "failures" / "rank-00000.json").touch()
    with pytest.raises(ConfigError, match="another launch runs in"):
        claim_run_dir(folder, 0)
    assert (folder / "failures" / "rank-00000.json").exists()
    os.close(claim_run_dir(folder, 1))  # another node's
    os.close(first)
    os.close(claim_run_dir(folder, 0))


def test_unclaimable_run_dir_is_refused(here):
    with pytest.raises(ConfigError, match=r"cannot use .*: No such file or directory\. Choose another"):
        claim_run_dir(here / "gone", 0)


STARTED_AT = datetime(2026, 3, 1, 11, 40, 7, 123456, tzinfo=UTC)


def plan_for(run_dir, **changed):
    target = Target(kind="script", name="train.py", args=("--lr", "\udcff"))
    output = OutputPlan(shown=frozenset({3, 0}))
    return LaunchPlan(**{"target": target, "layout": NodeLayout.one_node(4), "run_dir": run_dir, "output": output, **changed})


def write(plan, variables=()):
    return write_launch_record(plan, command=["dtrain", "launch", "train.py"], variables=variables, now=STARTED_AT)


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
