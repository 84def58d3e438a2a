"""The shard cache: bounded, shared by processes, never with incomplete shards."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from dtrain.data.stream.shard_cache import FORK_REGISTRY, ShardCache
from dtrain.errors import DataError
from dtrain.testing import inject_fault

LONG_S = 300
A, B, C, D = (digit * 32 for digit in "abcd")


def made(cache, name, size, *, byte=b"x"):
    """The view of a shard that is made if it is not there; None without room."""
    return cache.get(name, size, lambda file: file.write(byte * size))


def shards(folder):
    return sorted(name[0] for name in os.listdir(folder) if len(name) == 32)


@pytest.fixture
def cache(tmp_path):
    cache = ShardCache(tmp_path / "cache", 100)
    cache.space_timeout_s = 0.05
    return cache


def test_shard_is_created_once(cache):
    assert bytes(made(cache, A, 40)) == b"x" * 40
    assert bytes(made(cache, A, 40, byte=b"y")) == b"x" * 40


def test_least_recently_used_shard_is_removed(cache):
    for name in (A, B):
        made(cache, name, 40)
    made(cache, A, 40)
    made(cache, C, 40)
    assert shards(cache.folder) == ["a", "c"]


def test_shard_in_use_is_kept(cache):
    view = made(cache, A, 40)
    made(cache, B, 40)
    made(cache, C, 40)
    assert shards(cache.folder) == ["a", "c"]
    assert bytes(view) == b"x" * 40


def test_full_cache_returns_none_and_stays_bounded(cache):
    views = [made(cache, A, 40), made(cache, B, 40)]
    assert made(cache, C, 40) is None
    assert shards(cache.folder) == ["a", "b"]
    del views
    assert made(cache, C, 40) is not None


def test_full_cache_waits_for_room_once(cache, monkeypatch):
    views = [made(cache, A, 40), made(cache, B, 40)]
    assert made(cache, C, 40) is None
    monkeypatch.setattr("dtrain.data.stream.shard_cache.time.sleep", lambda seconds: pytest.fail("it waits again"))
    cache.space_timeout_s = LONG_S
    assert made(cache, C, 40) is None
    views.clear()
    assert made(cache, C, 40) is not None


def test_full_cache_releases_open_shards(tmp_path):
    views = []
    cache = ShardCache(tmp_path / "cache", 100, views.clear)
    views += [made(cache, A, 40), made(cache, B, 40)]
    assert bytes(made(cache, C, 40)) == b"x" * 40


def test_shard_larger_than_the_cache_is_refused(cache):
    with pytest.raises(DataError, match=r"^a shard needs 101 bytes, but the cache .* has cache_bytes=100. Raise it\.$"):
        made(cache, A, 101)
    assert os.listdir(cache.folder) == [] if cache.folder.exists() else True


def test_reservation_grows_with_the_written_bytes(cache, monkeypatch):
    monkeypatch.setattr("dtrain.data.stream.shard_cache._RESERVE_STEP_BYTES", 10)
    made(cache, A, 40)
    reserved = []

    def make(file):
        for _ in range(7):
            file.write(b"y" * 10)
            reserved.append([name for name in os.listdir(cache.folder) if name.endswith(".part")])

    assert bytes(cache.get(B, 15, make)) == b"y" * 70
    assert reserved[0] == [f"{B}.15.part"]
    assert reserved[1] == reserved[2] == [f"{B}.30.part"]
    assert reserved[6] == [f"{B}.90.part"] or reserved[6] == [f"{B}.70.part"]
    assert shards(cache.folder) == ["b"]


def test_reservation_above_the_limit_is_refused(cache):
    with pytest.raises(
        DataError, match=r"^a shard needs at least 120 bytes, but the cache .* has cache_bytes=100. Raise it\.$"
    ):
        cache.get(A, 15, lambda file: file.write(b"y" * 120))
    assert os.listdir(cache.folder) == [".lock"]


def test_failed_creation_leaves_no_file(cache):
    def make(file):
        file.write(b"y" * 10)
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        cache.get(A, 40, make)
    assert os.listdir(cache.folder) == [".lock"]
    assert bytes(made(cache, A, 40)) == b"x" * 40


@pytest.mark.parametrize("call", ["write", "rename"])
def test_failing_disk_leaves_no_file(call, cache):
    point = {"write": "dtrain.storage.local.os.write", "rename": "dtrain.storage.local.os.rename"}[call]
    with pytest.raises(OSError, match="injected"), inject_fault("raise", at=point):
        made(cache, A, 40)
    assert os.listdir(cache.folder) == [".lock"]


@pytest.mark.parametrize("when", ["while it is made", "before"])
def test_removed_folder_is_created_again(when, cache):
    made(cache, A, 40)
    times = []

    def make(file):
        times.append(1)
        file.write(b"y" * 40)
        if when != "before" and len(times) == 1:
            shutil.rmtree(cache.folder)

    if when == "before":
        shutil.rmtree(cache.folder)
    assert bytes(cache.get(B, 40, make)) == b"y" * 40
    assert len(times) == (1 if when == "before" else 2)
    assert shards(cache.folder) == ["b"]


def test_waiter_on_a_removed_lock_file_locks_the_new_file(cache):
    inside = []
    with cache.index_lock():
        waiting = threading.Thread(target=lambda: made(cache, B, 40))
        waiting.start()
        while cache.folder.exists():  # a waiting thread may just put its lock there
            shutil.rmtree(cache.folder, ignore_errors=True)
    with cache.index_lock():
        waiting.join(0.2)
        inside = shards(cache.folder)
    waiting.join(LONG_S)
    assert inside in ([], ["b"])
    assert shards(cache.folder) == ["b"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM], ids=["a disk that is only read", "a file of another user"])
def test_shard_with_unwritable_times_is_read(number, cache):
    made(cache, A, 40)
    with inject_fault("raise", at="dtrain.storage.local.os.utime", error=OSError(number, os.strerror(number))):
        assert bytes(made(cache, A, 40, byte=b"y")) == b"x" * 40


def test_unremovable_file_counts_against_the_cache_size(cache):
    made(cache, A, 40)
    made(cache, B, 40)
    denied = PermissionError(errno.EPERM, "Operation not permitted")
    with inject_fault("raise", at="dtrain.storage.local.os.unlink", error=denied, call=1):
        made(cache, C, 40)
    assert shards(cache.folder) == ["a", "c"]


def test_existing_lock_file_is_not_created_again(cache, monkeypatch):
    made(cache, A, 40)
    flags, open_ = [], os.open

    def opened(path, how, *mode):
        flags.append((os.path.basename(path), how & os.O_CREAT))
        return open_(path, how, *mode)

    monkeypatch.setattr("dtrain.storage.local.os.open", opened)
    made(cache, B, 40)
    assert (".lock", 0) in flags
    assert (".lock", os.O_CREAT) not in flags  # which systems refuse for another user's file where all may write


def test_other_files_in_the_folder_are_kept(cache):
    cache.folder.mkdir()
    others = ["thesis.tex", "x.part", "abc", f"{A}.txt", f"{A}.9.part.txt"]
    for name in others:
        (cache.folder / name).write_bytes(b"x" * 500)
    made(cache, A, 60)
    made(cache, B, 60)
    assert sorted(os.listdir(cache.folder)) == sorted([".lock", *others, B])


def test_two_threads_create_a_shard_once(cache):
    made_by, views = [], []

    def make(file):
        made_by.append(threading.get_ident())
        time.sleep(0.2)
        file.write(b"x" * 40)

    threads = [threading.Thread(target=lambda: views.append(cache.get(A, 40, make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(made_by) == 1
    assert [bytes(view) for view in views] == [b"x" * 40] * 4


def test_slow_writer_is_waited_for_a_limited_time(cache):
    cache.writer_timeout_s = 0.05
    begun, end = threading.Event(), threading.Event()

    def make(file):
        begun.set()
        end.wait(LONG_S)
        file.write(b"x" * 40)

    owner = threading.Thread(target=cache.get, args=(A, 40, make))
    owner.start()
    begun.wait(LONG_S)
    assert made(cache, A, 40) is None
    cache.fill(A, 40, lambda file: pytest.fail("somebody makes it"))
    end.set()
    owner.join(LONG_S)
    assert bytes(made(cache, A, 40)) == b"x" * 40


OWNER = """
import sys, time
from pathlib import Path
from dtrain.data.stream.shard_cache import ShardCache
def make(part):
    part.write(b"y" * 30)
    print("half", flush=True)
    time.sleep(600)
ShardCache(Path(sys.argv[1]), 100).get("a" * 32, 60, make)
"""


def test_partial_file_of_a_killed_writer_is_removed(cache):
    with subprocess.Popen([sys.executable, "-c", OWNER, str(cache.folder)], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "half\n"
            assert f"{A}.60.part" in os.listdir(cache.folder)
            assert made(cache, B, 50) is None  # 60 of 100 are reserved
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait(LONG_S)
    assert f"{A}.60.part" in os.listdir(cache.folder)
    assert bytes(made(cache, B, 50)) == b"x" * 50
    assert shards(cache.folder) == ["b"]
    assert not [name for name in os.listdir(cache.folder) if name.endswith(".part")]
    assert bytes(made(cache, A, 60)) == b"x" * 60


def in_child(do):
    """The exit status of a fork that runs ``do``, and ends without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: this is about them
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = do() or 0
        finally:
            os._exit(status)
    return pid


def test_fork_keeps_no_lock_of_its_parent(cache):
    begun, end = threading.Event(), threading.Event()

    def make(file):
        begun.set()
        end.wait(LONG_S)
        file.write(b"y" * 90)

    thread = threading.Thread(target=cache.get, args=(A, 90, make))
    thread.start()
    begun.wait(LONG_S)
    runs, child_runs = os.pipe()
    pid = in_child(lambda: os.write(child_runs, b"1") and time.sleep(600))
    try:
        # The child has left Python's handlers of a fork.
        os.read(runs, 1)
        end.set()
        thread.join(LONG_S)
        assert shards(cache.folder) == ["a"]
        assert made(cache, B, 90) is not None, "the child keeps what the parent has made"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(runs), os.close(child_runs)


def test_fork_can_use_the_cache_at_once(cache):
    made(cache, A, 40)
    assert FORK_REGISTRY.lock.acquire(timeout=LONG_S)
    FORK_REGISTRY.lock.release()
    pid = in_child(lambda: bytes(made(cache, B, 40)) != b"x" * 40 or bytes(made(cache, A, 40)) != b"x" * 40)
    assert os.waitpid(pid, 0)[1] == 0
    assert shards(cache.folder) == ["a", "b"]
