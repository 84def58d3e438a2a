"""Errors of the file system that meet a save or a load. Every operation in turn: ``faults/test_operations.py``."""

import os
from pathlib import Path

import pytest

from checkpoint.states import WatchedOs, digest, names, plain_state, train, watching
from dtrain import storage
from dtrain.checkpoint import data_file
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointError


def saves(root: Path, *, steps: int = 2):
    """A run that has committed steps 1 and 2, gone back to 1, and is about to save 2 again: both renames."""
    state = train(plain_state(), 1)
    for _ in range(steps):
        save_sharded(root, state)
        last, state = state, train(state, 1)
    del last
    state = load_sharded(root / "step-00000001", plain_state())
    return train(state, 1)


def test_save_syncs_written_files_before_rename(tmp_path):
    state = saves(tmp_path)
    save_sharded(tmp_path, train(state, 1))  # holds the lock from here on
    state = load_sharded(tmp_path / "step-00000001", plain_state())
    with watching() as watched:
        save_sharded(tmp_path, train(state, 1))
    calls = watched.calls
    renames = [index for index, name in enumerate(calls) if name == "rename"]
    syncs = [index for index, name in enumerate(calls) if name == "fsync"]
    writes = [index for index, name in enumerate(calls) if name in ("write", "pwritev")]
    assert len(renames) == 2, "the superseded step aside, the new one in its place"
    before = [index for index in syncs if index < min(renames)]
    assert len(before) >= 5, "data, index, folder, manifest, folder"
    assert [index for index in writes if index > before[-1]] == [], "nothing is written after the last of them"
    assert max(syncs) > max(renames), "then the root"


def test_full_disk_commits_no_step(tmp_path):
    class Full(WatchedOs):
        def __getattr__(self, name: str):
            if name == "pwritev":
                self.operation = len(self.calls)
            return super().__getattr__(name)

    state = saves(tmp_path)
    before = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    storage.local.os = Full(kind="pwritev")
    try:
        with pytest.raises(
            CheckpointError, match=r"No space left on device: '.*rank-00000.safetensors'. The step was not committed"
        ):
            save_sharded(tmp_path, state)
    finally:
        storage.local.os = os
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000002" / "manifest.json").read_bytes() == before


def test_short_writes_are_completed(tmp_path, monkeypatch):
    class Short(WatchedOs):
        def __getattr__(self, name: str):
            real = getattr(os, name)
            if name == "write":
                return lambda handle, data: real(handle, data[:1000])
            if name == "pwritev":
                return lambda handle, parts, offset: real(handle, [memoryview(parts[0])[:1000]], offset)
            return real

    state = train(plain_state(), 1)
    monkeypatch.setattr(storage.local, "os", Short())
    save_sharded(tmp_path, state)
    verify(tmp_path)


def test_digest_error_fails_the_save(tmp_path, monkeypatch):
    def broken(self, data):
        raise MemoryError("no room for a digest")

    monkeypatch.setattr(data_file.BlockDigester, "update", broken)
    with pytest.raises(MemoryError, match="no room"):
        save_sharded(tmp_path, plain_state())
    assert names(tmp_path) == []


def test_read_failure_is_not_reported_as_corruption(tmp_path):
    save_sharded(tmp_path, plain_state())
    state = plain_state(3)
    before = digest(state)
    with (
        watching(operation=3, kind="preadv") as watched,
        pytest.raises(CheckpointError, match="No space left on device: '") as caught,
    ):
        load_sharded(tmp_path, state, on_corrupt="previous")
    assert watched.fired
    assert type(caught.value) is CheckpointError
    assert digest(state) == before
