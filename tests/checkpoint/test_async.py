"""Background saves store the state of the call, never lose a failure, and commit nothing after a failure."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from checkpoint.states import digest, names, plain_state, train, watching
from dtrain import storage
from dtrain.checkpoint import save_thread
from dtrain.checkpoint.checkpoint_info import latest_checkpoint
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.lock import LOCK_FILE
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import init_dist
from dtrain.errors import CheckpointError

LONG_S = 300


@pytest.fixture(autouse=True)
def nothing_under_way():
    """Begin each test without saves of other tests, and leave none."""
    yield
    with pytest.MonkeyPatch.context():
        for task in save_thread.save_thread().tasks:
            task.wait()
            task.failure_reported = True


class Held:
    """Stands in for ``os`` in the storage: the first ``pwritev`` of every save waits until it is let go."""

    def __init__(self):
        self.go, self.reached = threading.Event(), threading.Event()

    def __getattr__(self, name):
        if name != "pwritev":
            return getattr(os, name)
        return self._wait

    def _wait(self, *args):
        self.reached.set()
        assert self.go.wait(LONG_S)
        return os.pwritev(*args)


@pytest.fixture
def held(monkeypatch):
    stand_in = Held()
    monkeypatch.setattr(storage.local, "os", stand_in)
    yield stand_in
    stand_in.go.set()
    save_thread.save_thread().wait_all()


def spoil(state):
    """Overwrite every tensor of a state, in place."""
    with torch.no_grad():
        tensors = [*state.params.values(), *(b for _, b in state.model.named_buffers())]
        tensors += [t for content in state.optimizer.state.values() for t in content.values() if isinstance(t, torch.Tensor)]
        tensors += [t for tree in state.transform_states.values() for t in tree.values() if isinstance(t, torch.Tensor)]
        for tensor in tensors:
            tensor.fill_(77)
    return len(tensors)


def with_average(state):
    return replace(state, transform_states={"ema": {name: param.detach().clone() for name, param in state.params.items()}})


def test_async_save_stores_state_at_call_time(tmp_path, held):
    state = with_average(train(plain_state(), 2))
    before = digest(state, rng=False)
    handle = save_sharded(tmp_path, state, mode="async")
    handle.wait_staged()
    assert spoil(state) > 10
    assert held.reached.wait(LONG_S)
    assert not handle.done, "nothing was written yet"
    held.go.set()
    assert handle.result(LONG_S).written
    back = load_sharded(tmp_path, with_average(plain_state(1)))
    assert digest(back, rng=False) == before


def test_consecutive_async_saves_reuse_staging_memory(tmp_path, monkeypatch):
    made, empty = [], torch.empty
    state = plain_state()
    for _ in range(4):
        state = train(state, 1)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *a, **o: made.append(a) or empty(*a, **o))
            save_sharded(tmp_path, state, mode="async").wait()
        expected = digest(state, rng=False)
        assert digest(load_sharded(tmp_path, plain_state(1)), rng=False) == expected
    assert len(made) <= 2, "one for the file, one for the scalars in the index"


def test_third_concurrent_save_blocks(tmp_path, held):
    state = train(plain_state(), 1)
    handles = [save_sharded(tmp_path, state, mode="async")]
    state = train(state, 1)
    handles.append(save_sharded(tmp_path, state, mode="async"))
    state = train(state, 1)
    third = []
    thread = threading.Thread(target=lambda: third.append(save_sharded(tmp_path, state, mode="async")))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert third == []
    held.go.set()
    thread.join(LONG_S)
    assert [handle.result(LONG_S).step for handle in (*handles, *third)] == [1, 2, 3]
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3)]


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """A state of which step 1 is saved and the save of step 2 has failed in the background, unseen."""
    state = train(plain_state(), 1)
    save_sharded(tmp_path, state)
    state = train(state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage.local, "os", Failing())
        handle = save_sharded(tmp_path, state, mode="async")
        handle._task.wait()
    assert handle.done
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    return state, handle


class Failing:
    def __getattr__(self, name):
        return full_disk if name == "pwritev" else getattr(os, name)


def test_handle_raises_background_failure(failed, tmp_path):
    _, handle = failed
    for call in (handle.wait, handle.result):
        with pytest.raises(CheckpointError, match=r"No space left on device.*The step was not committed"):
            call(LONG_S)
    save_thread.save_thread().wait_all()  # it was seen
    assert names(tmp_path) == ["step-00000001"]


def test_next_save_raises_earlier_failure_once(failed, tmp_path):
    state, _ = failed
    with pytest.raises(CheckpointError, match=r"step 2.*No space left on device"):
        save_sharded(tmp_path, state, mode="async")
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    assert save_sharded(tmp_path, state).result().written
    assert verify(tmp_path).step == 2


def test_init_dist_exit_raises_background_failure(tmp_path, monkeypatch):
    def loop():
        with init_dist(), monkeypatch.context() as patch:
            patch.setattr(storage.local, "os", Failing())
            save_sharded(tmp_path, train(plain_state(), 1), mode="async")._task.wait()

    with pytest.raises(CheckpointError, match="No space left on device"):
        loop()
    assert latest_checkpoint(tmp_path) is None


def test_background_failure_is_added_as_note_to_loop_error(tmp_path, monkeypatch):
    def loop():
        with init_dist(), monkeypatch.context() as patch:
            patch.setattr(storage.local, "os", Failing())
            save_sharded(tmp_path, train(plain_state(), 1), mode="async")._task.wait()
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop") as caught:
        loop()
    assert "No space left on device" in "".join(caught.value.__notes__)


def test_init_dist_exit_waits_for_commit_after_error(tmp_path, monkeypatch):
    stand_in = Held()
    monkeypatch.setattr(storage.local, "os", stand_in)
    threading.Timer(0.5, stand_in.go.set).start()

    def loop():
        with init_dist():
            save_sharded(tmp_path, train(plain_state(), 1), mode="async")
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"):
        loop()
    assert verify(tmp_path).step == 1


SCRIPT = """
    import errno, os, sys, time, torch
    import dtrain as dt
    from dtrain import storage

    class Slow:
        def __getattr__(self, name):
            real = getattr(os, name)
            def slow(*args):
                time.sleep(0.5)
                if "fail" in sys.argv:
                    raise OSError(errno.ENOSPC, "full")
                return real(*args)
            return slow if name == "pwritev" else real

    def main():
        model = torch.nn.Linear(2, 2)
        state = dt.compose_step(len, []).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        storage.local.os = Slow()
        dt.save_sharded("ckpt", state, mode="async")
        print("the loop has ended", flush=True)

    if "block" in sys.argv:
        with dt.init_dist():
            main()
            if "exit" in sys.argv:
                sys.exit(0)
    else:
        main()
"""


WAYS_OUT = {"in init_dist": ["block"], "by sys.exit": ["block", "exit"], "without": []}
QUICK = (("without", False), ("by sys.exit", True))  # each process loads torch


@pytest.mark.costly
@pytest.mark.parametrize(
    ("how", "fails"),
    [
        pytest.param(
            words, fails, id=f"{'fails' if fails else 'works'}-{how}", marks=() if (how, fails) in QUICK else pytest.mark.slow
        )
        for fails in (False, True)
        for how, words in WAYS_OUT.items()
    ],
)
def test_process_exit_waits_and_exit_code_reports_failure(tmp_path, how, fails):
    (tmp_path / "loop.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "loop.py", *how, *["fail"] * fails]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "the loop has ended\n"
    assert done.returncode == int(fails), done.stderr
    assert ("CheckpointError: save_sharded: step 0: [Errno 28] full" in done.stderr) is fails
    assert (latest_checkpoint(tmp_path / "ckpt") is None) is fails


def test_load_waits_for_pending_save(tmp_path, monkeypatch):
    stand_in = Held()
    monkeypatch.setattr(storage.local, "os", stand_in)
    state = train(plain_state(), 1)
    expected = digest(state)
    save_sharded(tmp_path, state, mode="async")
    threading.Timer(0.3, stand_in.go.set).start()
    restored = load_sharded(tmp_path, plain_state(1))
    assert (restored.step, digest(restored)) == (1, expected)


def test_wait_timeout_does_not_cancel_save(tmp_path, held):
    handle = save_sharded(tmp_path, train(plain_state(), 1), mode="async")
    with pytest.raises(TimeoutError, match="the save of step 1 has not ended yet"):
        handle.wait(0.2)
    held.go.set()
    assert handle.result(LONG_S).step == 1


def test_async_handle_raises_fsync_failure(tmp_path):
    state = train(plain_state(), 1)
    with watching(operation=0, kind="fsync") as watched:
        handle = save_sharded(tmp_path, state, mode="async")
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait(LONG_S)
    assert watched.fired


def test_interrupted_sync_save_is_not_committed(tmp_path, held, monkeypatch):
    """The loop may catch the interrupt and continue: its later changes must not be committed."""
    state = train(plain_state(), 1)
    result = save_thread.SaveTask.result

    def interrupted(task, timeout_s=None):
        monkeypatch.setattr(save_thread.SaveTask, "result", result)
        assert held.reached.wait(LONG_S)
        threading.Timer(0.2, held.go.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(save_thread.SaveTask, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_sharded(tmp_path, state)
    spoil(state)
    assert names(tmp_path) == []
    save_thread.save_thread().wait_all()  # the interrupted caller knows


def test_save_pending_after_group_close_is_not_committed(tmp_path, held, monkeypatch):
    """A second Ctrl-C ends the wait at the end of the block; without the groups each rank would seem to be alone."""
    handles = []

    def impatient(*_):
        raise KeyboardInterrupt

    def loop():
        with init_dist():
            handles.append(save_sharded(tmp_path, train(plain_state(), 1), mode="async"))
            assert held.reached.wait(LONG_S)
            monkeypatch.setattr(save_thread.SaveThread, "wait_all", impatient)

    with pytest.raises(KeyboardInterrupt):
        loop()
    monkeypatch.undo()
    held.go.set()
    with pytest.raises(CheckpointError, match="the process groups were closed during the save of step 1"):
        handles[0].wait(LONG_S)
    assert latest_checkpoint(tmp_path) is None


def test_async_save_releases_tensors_after_staging(tmp_path, held):
    state = with_average(train(plain_state(), 1))
    old = weakref.ref(next(iter(state.transform_states["ema"].values())))
    save_sharded(tmp_path, state, mode="async")
    state = replace(state, transform_states={})
    assert held.reached.wait(LONG_S)
    assert old() is None


def test_staging_memory_ignores_default_device(tmp_path):
    state = train(plain_state(), 1)
    with torch.device("meta"):
        save_sharded(tmp_path, state, mode="async").wait(LONG_S)
    assert verify(tmp_path).step == 1


def test_preemption_save_precedes_earlier_failure(failed, tmp_path, monkeypatch):
    state, _ = failed
    monkeypatch.setattr("dtrain.dist.context.Preemption.is_agreed", lambda _: True)
    monkeypatch.setattr(
        "dtrain.dist.context.Preemption.record_save", lambda _, *, after_agreement: None
    )  # else this process is a preempted one
    assert save_sharded(tmp_path, state).result().written
    with pytest.raises(CheckpointError, match="No space left"):
        save_thread.save_thread().wait_all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_continues_after_its_root_was_removed(tmp_path, mode):
    """The heartbeat of the lock is alive, and the removed steps are no parents to return to."""
    root, state = tmp_path / "runs" / "root", plain_state()
    for step in (1, 2, 3):
        state = train(state, 1)
        if step == 2:
            shutil.rmtree(tmp_path / "runs")
            with pytest.warns(UserWarning, match="root was removed while this run was using it, and its steps with it"):
                save_sharded(root, state, mode=mode).wait(LONG_S)
        else:
            save_sharded(root, state, mode=mode).wait(LONG_S)
    assert names(root) == ["step-00000002", "step-00000003"]
    assert (root / LOCK_FILE).exists()
    assert digest(load_sharded(root, plain_state(1)), rng=False) == digest(state, rng=False)


def test_step_is_saved_again_after_its_root_was_removed(tmp_path):
    state = train(plain_state(), 1)
    save_sharded(tmp_path / "root", state)
    shutil.rmtree(tmp_path / "root")
    with pytest.warns(UserWarning, match="root was removed"):
        assert save_sharded(tmp_path / "root", state).result().written
    assert names(tmp_path / "root") == ["step-00000001"]


def test_root_removed_during_a_save_is_named(tmp_path, held):
    state = train(plain_state(), 1)
    handle = save_sharded(tmp_path / "root", state, mode="async")
    assert held.reached.wait(LONG_S)
    shutil.rmtree(tmp_path / "root")
    held.go.set()
    with pytest.raises(
        CheckpointError, match=r"step 1: .*step-00000001.tmp-\S+ must exist until the end of the save, but was removed"
    ):
        handle.wait(LONG_S)
    with pytest.warns(UserWarning, match="root was removed"):
        save_sharded(tmp_path / "root", state).wait()
    assert names(tmp_path / "root") == ["step-00000001"]
