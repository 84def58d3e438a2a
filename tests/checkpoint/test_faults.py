"""A file operation that fails, or a process that dies in it, at every point of a save."""

import os
import warnings
from pathlib import Path

import pytest

from checkpoint.states import WatchedOs, digest, names, plain_state, train, watching
from dtrain.checkpoint import digest as digest_module
from dtrain.checkpoint.find import list_checkpoints
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.checkpoint.verify import verify_checkpoint
from dtrain.errors import CheckpointError


def saves(root: Path, *, steps: int = 2):
    """A run that has committed steps 1 and 2, gone back to 1, and is about to save 2 again: every branch of a save."""
    state = train(plain_state(), 1)
    for _ in range(steps):
        save_sharded(root, state)
        last, state = state, train(state, 1)
    del last
    state = load_sharded(root / "step-00000001", plain_state()).state
    leftover = root / f"step-00000009.tmp-{state.shared.run_id[:8]}-01234567"
    leftover.mkdir()
    (leftover / "rank-00000.json").touch()
    return train(state, 1)


def operations(folder: Path) -> list[str]:
    state = saves(folder)
    with watching() as watched:
        save_sharded(folder, state, keep_last=1)
    return watched.calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[str]:
    return operations(tmp_path_factory.mktemp("calls"))


def test_a_save_syncs_what_it_writes_before_it_renames(calls):
    assert calls.count("fsync") == 6, "data, index, folder, manifest, folder; then the root"
    renames = [at for at, name in enumerate(calls) if name == "rename"]
    syncs = [at for at, name in enumerate(calls) if name == "fsync"]
    writes = [at for at, name in enumerate(calls) if name == "write"]
    assert len(renames) == 2, "the superseded step aside, the new one in its place"
    assert max(writes) < syncs[4] < min(renames) < max(renames) < syncs[5]


def test_a_failing_operation_anywhere_leaves_the_earlier_steps_and_publishes_nothing(tmp_path, calls):
    raised = 0
    for at in range(len(calls)):
        root = tmp_path / str(at)
        state = saves(root)
        superseded = (root / "step-00000002" / "manifest.json").read_bytes()
        before = digest(state)
        with watching(at=at) as watched, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                handle = save_sharded(root, state, keep_last=1)
            except CheckpointError as error:
                handle, message = None, str(error)
        assert watched.fired, f"operation {at} was not reached"
        assert digest(state) == before
        verify_checkpoint(root / "step-00000001")
        verify_checkpoint(root / "step-00000002")
        now = (root / "step-00000002" / "manifest.json").read_bytes()
        if handle is None:
            raised += 1
            assert "No space left on device" in message
            assert "earlier steps are untouched" in message
            assert now == superseded, f"{calls[at]} failed, but the step changed"
            assert 2 not in state.shared.committed[str(root)]
        else:
            assert now != superseded
            assert caught, f"{calls[at]} failed, and nobody was told"
        # The same state is saved as soon as the file system works again, and nothing is left lying about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert save_sharded(root, state).result().written == (handle is None)
        save_sharded(root, train(state, 1))
        assert names(root) == ["step-00000001", "step-00000002", "step-00000003"], f"after {calls[at]} failed"
    assert raised > len(calls) / 2


def test_a_disk_that_stays_full_publishes_nothing(tmp_path):
    class Full(WatchedOs):
        def __getattr__(self, name: str):
            if name in ("write", "fsync"):
                self.at = len(self.calls)
            return super().__getattr__(name)

    from dtrain import storage

    state = saves(tmp_path)
    before = (tmp_path / "step-00000002" / "manifest.json").read_bytes()
    storage.local.os = Full(kind="write")
    try:
        with pytest.raises(
            CheckpointError, match=r"No space left on device: '.*rank-00000.safetensors'; nothing was published"
        ):
            save_sharded(tmp_path, state)
    finally:
        storage.local.os = os
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000002" / "manifest.json").read_bytes() == before


def test_short_writes_are_completed(tmp_path, monkeypatch):
    from dtrain import storage

    class Short(WatchedOs):
        def __getattr__(self, name: str):
            real = getattr(os, name)
            return (lambda handle, data: real(handle, data[:1000])) if name == "write" else real

    state = train(plain_state(), 1)
    monkeypatch.setattr(storage.local, "os", Short())
    save_sharded(tmp_path, state)
    verify_checkpoint(tmp_path)


def killed_at(root: str, at: int) -> list:
    """Forks a process that saves, and dies in its ``at``-th file operation; then what a resumed run finds."""
    state = saves(Path(root))
    child = os.fork()
    if child == 0:
        with watching(at=at, action="kill"):
            save_sharded(root, state, keep_last=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = [c.step for c in list_checkpoints(root)]
    restored = load_sharded(root, plain_state())
    for step in found:
        verify_checkpoint(Path(root) / f"step-{step:08d}")
    save_sharded(root, train(restored.state, 5))
    return [os.waitstatus_to_exitcode(status), sorted(found), restored.step, names(Path(root))]


def test_a_process_killed_in_any_operation_leaves_a_root_that_loads_and_goes_on(tmp_path, calls, ranks):
    outcomes = set()
    for at in range(len(calls)):
        [[code, found, step, left]] = ranks(1).run(killed_at, str(tmp_path / str(at)), at)
        assert code == 9, f"operation {at} was not reached"
        # Between the two renames of a replacement neither the superseded step nor the new one is there.
        assert found in ([1, 2], [1]), f"killed in {calls[at]}"
        outcomes.add(tuple(found))
        assert step == max(found)
        assert left == [f"step-{s:08d}" for s in [*found, step + 5]], f"killed in {calls[at]}"
    assert outcomes == {(1, 2), (1,)}


def test_an_error_in_the_digest_thread_fails_the_save(tmp_path, monkeypatch):
    def broken(self, data):
        raise MemoryError("no room for a digest")

    monkeypatch.setattr(digest_module.ChunkDigests, "update", broken)
    with pytest.raises(MemoryError, match="no room"):
        save_sharded(tmp_path, plain_state())
    assert names(tmp_path) == []


def test_a_failing_read_is_an_error_and_not_damage(tmp_path):
    save_sharded(tmp_path, plain_state())
    state = plain_state(3)
    before = digest(state)
    with watching(at=3, kind="preadv") as watched, pytest.raises(CheckpointError, match="No space left on device: '") as caught:
        load_sharded(tmp_path, state, on_damaged="previous")
    assert watched.fired
    assert type(caught.value) is CheckpointError
    assert digest(state) == before
