"""Checkpoints on servers: the same saves and loads, the commit of an object store, and networks that fail meanwhile."""

import contextlib
import gc
import queue
import threading

import fsspec.config
import pytest

from checkpoint.states import digest, plain_state, train
from checkpoint.test_ranks import resume_on_ranks
from dtrain import storage
from dtrain.checkpoint import layout, lock
from dtrain.checkpoint.checkpoint_info import latest_checkpoint, list_steps
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.lock import HEARTBEAT_THREAD, LOCK_FILE, lock_root
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.rng import seed_all
from dtrain.storage.object_stores import MemoryStore
from dtrain.storage.remote import disconnect
from places import servers
from places.proxy import Fault


@pytest.fixture(scope="module")
def server_of():
    """Each server, started once, with this process set up for it."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        started: dict[str, servers.Server] = {}

        def server(name: str) -> servers.Server:
            if name not in started:
                started[name] = stack.enter_context(getattr(servers, name)())
                patch.setitem(fsspec.config.conf, name, started[name].options)
            if started[name].home is not None:
                patch.setenv("HOME", str(started[name].home))
            return started[name]

        yield server
        gc.collect()  # of holds on the servers, while these servers are there
        lock._release_at_exit()
        disconnect()


SAVES = [("memory", "sync"), ("memory", "async"), *((place, "async") for place in ("s3", "az", "gs", "sftp"))]


@pytest.mark.costly
@pytest.mark.parametrize(("place", "mode"), SAVES, ids=["-".join(save) for save in SAVES])
def test_resumed_remote_run_equals_uninterrupted_run(server_of, place, mode):
    root = server_of(place).root()
    seed_all("data")
    expected = digest(train(plain_state(), 5))
    seed_all("data")
    state = plain_state()
    for _ in range(3):
        state = train(state, 1)
        save_sharded(root, state, mode=mode, keep_last=2).wait()
    assert [c.step for c in list_steps(root)] == [2, 3]
    assert latest_checkpoint(root).name == "step-00000003"
    seed_all("other")
    resumed = load_sharded(root, plain_state(1))
    assert digest(train(resumed, 2)) == expected
    assert str(verify(root).path) == f"{root}/step-00000003"


def on_ranks(root: str, environment: dict[str, str]) -> list[str]:
    """Save after three steps, train on with other generators, and return the reached state and the expected state."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        results = resume_on_ranks(root, "full_shard")
        gc.collect()
        lock._release_at_exit()
        disconnect()
    return list(results)


@pytest.mark.parametrize(
    "place", ["s3", "sftp", pytest.param("az", marks=pytest.mark.slow), pytest.param("gs", marks=pytest.mark.slow)]
)
def test_two_ranks_save_and_resume_on_server(server_of, ranks, place):
    server = server_of(place)
    for resumed, straight in ranks(2).run(on_ranks, server.root(), server.environment):
        assert resumed == straight


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=() if place == "s3" or kind == "lost" else pytest.mark.slow)
        for place in ("s3", "az", "gs")
        for kind in ("503", "lost", "unsent")
    ],
)
def test_commit_survives_transient_network_fault(server_of, place, kind):
    server = server_of(place)
    root = server.root()
    fault = Fault(
        kind=503 if kind == "503" else kind,
        matches=lambda r: r.method in ("PUT", "POST") and layout.MANIFEST in r.path + repr(r.body[:400]),
    )
    with server.proxy.doing(fault):
        state = train(plain_state(), 1)
        save_sharded(root, state)
    assert digest(load_sharded(root, plain_state(1))) == digest(state)


@pytest.mark.parametrize("place", ["memory", "s3"])
def test_uncommitted_remote_step_is_ignored_and_replaced(server_of, place):
    root = server_of(place).root()
    state = train(plain_state(), 1)
    save_sharded(root, state)
    before = digest(state)
    state = train(state, 1)
    save_sharded(root, state)
    last = storage.resolve_path(root) / "step-00000002"
    storage.remove_file(last / layout.MANIFEST)  # the state of a save that was killed before its end
    assert latest_checkpoint(root).name == "step-00000001"
    state = load_sharded(root, plain_state(1))
    assert digest(state) == before
    save_sharded(root, train(state, 1))
    assert [c.step for c in list_steps(root)] == [1, 2]
    verify(last)


def test_garbage_collected_remote_lock_is_removed_by_heartbeat_thread(server_of, monkeypatch):
    root = storage.resolve_path(server_of("memory").root())
    removed: queue.SimpleQueue[str] = queue.SimpleQueue()
    real = MemoryStore.remove

    def remove(store: MemoryStore, key: str) -> None:
        real(store, key)
        removed.put(threading.current_thread().name)

    monkeypatch.setattr(MemoryStore, "remove", remove)
    held = lock_root(root, "run")
    del held
    assert removed.get(timeout=servers.LONG_S) == HEARTBEAT_THREAD, "this thread may be in the middle of a request"
    assert not storage.exists(root / LOCK_FILE)


@pytest.mark.parametrize("how", ["release", "exit"])
def test_remote_lock_is_removed_before_release_returns(server_of, how):
    root = storage.resolve_path(server_of("memory").root())
    held = lock_root(root, "run")
    assert storage.exists(root / LOCK_FILE)
    held.release() if how == "release" else lock._release_at_exit()
    assert not storage.exists(root / LOCK_FILE)
    lock_root(root, "other").release()
