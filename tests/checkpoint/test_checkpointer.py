"""``Checkpointer``: one root with fixed options, its lock and its end."""

import errno
import gc
import os

import pytest

from checkpoint.states import digest, names, plain_state, train
from dtrain import storage
from dtrain.checkpoint.checkpoint_info import list_steps
from dtrain.checkpoint.lock import LOCK_FILE
from dtrain.checkpoint.save import Checkpointer, save_sharded
from dtrain.checkpoint.save_thread import save_thread
from dtrain.dist.init import init_dist
from dtrain.errors import CheckpointError, ConfigError


def test_checkpointer_saves_with_its_options_and_loads_the_newest_step(tmp_path):
    state = plain_state()
    with Checkpointer(tmp_path, mode="async", keep_last=2) as checkpoints:
        for _ in range(3):
            state = train(state, 1)
            checkpoints.save(state, extra={"note": [1]})
        note: list[int] = []
        result = checkpoints.load(plain_state(1), extra={"note": note})
        assert (result.step, note) == (3, [1])
        assert digest(result) == digest(state)
        checkpoints.close()
        assert [info.step for info in list_steps(tmp_path)] == [2, 3]
    assert repr(checkpoints) == f"Checkpointer({str(tmp_path)!r})"


def test_checkpointer_releases_lock_on_close_and_reacquires_on_save(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    assert names(tmp_path) == []
    state = train(plain_state(), 1)
    checkpoints.save(state)
    assert (tmp_path / LOCK_FILE).exists()
    checkpoints.close()
    checkpoints.close()
    assert not (tmp_path / LOCK_FILE).exists()
    assert checkpoints.save(train(state, 1)).result().written
    assert (tmp_path / LOCK_FILE).exists()
    del checkpoints
    gc.collect()
    assert not (tmp_path / LOCK_FILE).exists()


def test_saves_into_one_root_share_checkpointer(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "a", state)
    (first,) = state._run_context.checkpointers.values()
    state = train(state, 1)
    save_sharded(str(tmp_path / "a"), state)
    save_sharded(tmp_path / "weights", state, scope="weights")
    checkpointers = state._run_context.checkpointers
    assert list(checkpointers) == [str(tmp_path / "a"), str(tmp_path / "weights")]
    assert checkpointers[str(tmp_path / "a")] is first
    assert len({info.run_id for root in checkpointers for info in list_steps(root)}) == 1


def test_init_dist_exit_releases_locks_of_all_roots(tmp_path):
    with init_dist():
        state = train(plain_state(), 1)
        save_sharded(tmp_path / "a", state)
        own = Checkpointer(tmp_path / "b")
        own.save(state)
        assert all((tmp_path / name / LOCK_FILE).exists() for name in "ab")
    assert not any((tmp_path / name / LOCK_FILE).exists() for name in "ab")
    with init_dist():
        assert save_sharded(tmp_path / "a", train(state, 1)).result().written
        assert (tmp_path / "a" / LOCK_FILE).exists()


class FullDisk:
    def __getattr__(self, name):
        if name != "pwritev":
            return getattr(os, name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_close_raises_save_failure_and_releases_lock(tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path, mode="async")
    with monkeypatch.context() as patch:
        patch.setattr(storage.local, "os", FullDisk())
        checkpoints.save(train(plain_state(), 1))
        save_thread().wait_for_slot(1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"keep_last": 0}, {"keep_every": 1.5}, {"keep_steps": ["a"]}], ids=str)
def test_invalid_options_are_refused_at_once(tmp_path, options):
    with pytest.raises(ConfigError, match=f"^Checkpointer: {next(iter(options))} must be"):
        Checkpointer(tmp_path, **options)
