"""What was run is written down whole or not at all, and no value of the environment with it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata

import pytest

import dtrain
from dtrain.launch.plan import LaunchPlan, Layout, OutputPlan, Target
from dtrain.launch.record import git_commit, versions, write_record

NOW = datetime(2026, 3, 1, 11, 40, 7, 123456, tzinfo=UTC)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def plan_for(run_dir, **changed):
    target = Target(kind="script", name="train.py", args=("--lr", "\udcff"))
    output = OutputPlan(shown=frozenset({3, 0}))
    return LaunchPlan(**{"target": target, "layout": Layout.one_node(4), "run_dir": run_dir, "output": output, **changed})


def write(plan, variables=()):
    return write_record(plan, command=["dtrain", "launch", "train.py"], variables=variables, now=NOW)


def test_record_says_what_was_run_and_keeps_values_of_variables_out(tmp_path, monkeypatch):
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


def test_nodes_that_share_a_folder_write_a_record_each(tmp_path):
    for node in (0, 1):
        layout = Layout(nproc=2, world_size=4, base_rank=2 * node, node_rank=node, nodes=2)
        assert write(plan_for(tmp_path, layout=layout)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch-1.json", "launch.json"]


@pytest.mark.parametrize("obstacle", ["no folder", "folder in its place"])
def test_record_that_cannot_be_written_is_a_line_of_warning_and_leaves_nothing(tmp_path, obstacle):
    folder = tmp_path / "run"
    if obstacle == "folder in its place":
        (folder / "launch.json").mkdir(parents=True)
    warning = write(plan_for(folder))
    assert warning is not None
    assert warning.startswith(f"launch: cannot write {str(folder / 'launch.json')!r}: ")
    assert not folder.exists() or [path.name for path in folder.iterdir()] == ["launch.json"]


def test_record_is_written_from_a_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert write(plan_for(tmp_path)) is None
    assert json.loads((tmp_path / "launch.json").read_text())["folder"] == ""


def test_versions_are_those_installed_and_cost_no_import():
    seen = versions()
    assert seen == {"dtrain": dtrain.__version__, "python": platform.python_version(), "torch": metadata.version("torch")}
    code = "import sys; from dtrain.launch.record import versions; versions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90).stdout == "False\n"


def git_folder(root, head):
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text(head)
    return root / ".git"


def test_commit_of_a_branch_is_found_from_a_folder_below(tmp_path):
    git = git_folder(tmp_path, "ref: refs/heads/topic/a\n")
    (git / "refs" / "heads" / "topic").mkdir(parents=True)
    (git / "refs" / "heads" / "topic" / "a").write_text(f"{COMMIT}\n")
    (tmp_path / "below").mkdir()
    assert git_commit(tmp_path / "below") == COMMIT


def test_commit_that_is_packed_or_checked_out_by_itself_is_found(tmp_path):
    git = git_folder(tmp_path, "ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'1' * 40} refs/heads/not/main\n{COMMIT} refs/heads/main\n")
    assert git_commit(tmp_path) == COMMIT
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert git_commit(tmp_path) == COMMIT


def test_commit_of_a_further_work_tree_is_found(tmp_path):
    (tmp_path / "first").mkdir()
    git = git_folder(tmp_path / "first", "ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"{COMMIT} refs/heads/topic\n")
    (git / "worktrees" / "second").mkdir(parents=True)
    (git / "worktrees" / "second" / "HEAD").write_text("ref: refs/heads/topic\n")
    (git / "worktrees" / "second" / "commondir").write_text("../..\n")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / ".git").write_text(f"gitdir: {git / 'worktrees' / 'second'}\n")
    assert git_commit(tmp_path / "second") == COMMIT


@pytest.mark.parametrize("head", ["ref: refs/heads/main\n", "not a hash\n", "\udcff", ""])
def test_commit_that_cannot_be_told_is_none(tmp_path, head):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(head.encode(errors="surrogateescape"))
    assert git_commit(tmp_path) is None
