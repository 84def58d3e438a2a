"""One live job per root: refusals, takeovers and leftovers of the lock."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from checkpoint.states import watching
from dtrain import storage
from dtrain.checkpoint import lock as locks
from dtrain.checkpoint.lock import LOCK_FILE, lock_root
from dtrain.errors import CheckpointError

RUN = "a" * 32
OTHER = "b" * 32
NOW = 1_000_000.0
PATIENCE_S = 90.0


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Send no heartbeat from this process unless a test wants it, and do not wait for torn files."""
    monkeypatch.setattr(locks, "HEARTBEAT_INTERVAL_S", 3600.0)
    monkeypatch.setattr(locks, "TORN_AFTER_S", 0.05)
    monkeypatch.setattr(locks, "_POLL_S", 0.01)


def is_held_here(root: Path) -> bool:
    return str(root) in locks.process_instance(locks._LockRegistry).locks


def names(root: Path) -> list[str]:
    """All that is there."""
    return sorted(os.listdir(root))


def python(script: str, *args: object, **options) -> subprocess.Popen[str]:
    """A process of its own, without torch: it is there in a tenth of a second."""
    imports = "import os, sys, time; from pathlib import Path; from dtrain import storage"
    imports += "; from dtrain.checkpoint import lock"
    command = [sys.executable, "-c", f"{imports}\n{script}", *map(str, args)]
    return subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Return the output of a process that must end with code 0."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out


@contextmanager
def holding(root: Path):
    """Another process, which holds the root until the block ends. It is killed then, so that the lock file stays."""
    process = python(f"held = lock.lock_root(Path(sys.argv[1]), {OTHER!r}); print('held', flush=True); sys.stdin.read()", root)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def on_disk(root: Path) -> locks.LockOwner:
    owner = locks.parse_owner((root / LOCK_FILE).read_bytes())
    assert owner is not None
    return owner


def somebody(**changes: object) -> locks.LockOwner:
    """A holder on another host, alive now."""
    fields = {
        "host": "elsewhere",
        "pid": 17,
        "start_ticks": 5,
        "boot_id": "other-boot",
        "pid_namespace": "pid:[1]",
        "run_id": OTHER,
    }
    return replace(
        locks.LockOwner(token="0123456789abcdef", acquired_at=time.time(), heartbeat_at=time.time(), **fields), **changes
    )


def test_lock_file_exists_until_last_release(tmp_path):
    root = tmp_path / "new" / "root"
    first = lock_root(root, RUN, protected=[3])
    second = lock_root(root, OTHER, protected=[4])
    assert (on_disk(root).pid, on_disk(root).run_id) == (os.getpid(), RUN), "the second changed nothing"
    assert locks.protected_steps(root) == {3, 4}
    first.release()
    first.release()
    second.check()
    assert is_held_here(root)
    with pytest.raises(CheckpointError, match=r"the lock was released. Lock the root again before saving"):
        first.check()
    second.release()
    assert names(root) == []
    assert not is_held_here(root)
    assert locks.protected_steps(root) == set()


def test_garbage_collected_lock_is_released(tmp_path):
    held = lock_root(tmp_path, RUN)
    assert repr(held) == f"Lock('{tmp_path / LOCK_FILE}')"
    del held
    gc.collect()
    assert names(tmp_path) == []
    with lock_root(tmp_path, RUN) as held:
        assert held.root == tmp_path
    assert names(tmp_path) == []
    assert locks.HEARTBEAT_THREAD not in {thread.name for thread in threading.enumerate() if not thread.daemon}


def test_heartbeat_thread_ends_after_last_release(tmp_path):
    with lock_root(tmp_path / "a", RUN), lock_root(tmp_path / "b", RUN):
        assert [thread.name for thread in threading.enumerate()].count(locks.HEARTBEAT_THREAD) >= 1
    beating = [thread for thread in threading.enumerate() if thread.name == locks.HEARTBEAT_THREAD]
    for thread in beating:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in beating)


def test_root_locked_by_live_process_is_refused(tmp_path):
    with holding(tmp_path) as process:
        there = on_disk(tmp_path)
        with pytest.raises(CheckpointError) as refused:
            lock_root(tmp_path, RUN)
        assert str(refused.value) == (
            f"{tmp_path}: another live job uses this root (host {there.host}, pid {process.pid}, since "
            f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(there.acquired_at))}, run {OTHER}). "
            "Save into another root, or end that job first."
        )
        assert on_disk(tmp_path) == there
        assert names(tmp_path) == [LOCK_FILE]
    assert not is_held_here(tmp_path)


def test_stopped_process_counts_as_live(tmp_path):
    with holding(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=f"pid {process.pid}"):
            lock_root(tmp_path, RUN)


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_lock_of_killed_process_is_taken_over(tmp_path, reaped):
    with holding(tmp_path) as process:
        process.kill()
        if reaped:
            process.wait(PATIENCE_S)
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert on_disk(tmp_path).pid == process.pid, "SIGKILL leaves it"
        with lock_root(tmp_path, RUN):
            assert on_disk(tmp_path).pid == os.getpid()
            assert names(tmp_path) == [LOCK_FILE]
    assert names(tmp_path) == []


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
def test_process_exit_removes_lock(tmp_path, end):
    process = python(
        f"held = lock.lock_root(Path(sys.argv[1]), {RUN!r})\nassert Path(sys.argv[1], 'run.lock').exists()\n{end}", tmp_path
    )
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == {"": 0, "sys.exit(3)": 3, "raise ValueError": 1}[end]
    assert names(tmp_path) == []


def test_exec_reacquires_lock_of_same_process(tmp_path):
    script = """
root = Path(sys.argv[1])
if (root / "run.lock").exists():
    held = lock.lock_root(root, "b" * 32)
    held.check()
    print(lock.parse_owner((root / "run.lock").read_bytes()).run_id)
else:
    held = lock.lock_root(root, "a" * 32)
    os.execv(sys.executable, [sys.executable, "-c", Path(sys.argv[2]).read_text(), *sys.argv[1:]])
"""
    process = python(script, tmp_path / "root", tmp_path / "script")
    (tmp_path / "script").write_text(process.args[2])
    assert finished(process) == OTHER + "\n"
    assert names(tmp_path / "root") == []


def test_forked_child_neither_holds_nor_removes_lock(tmp_path):
    script = """
root = Path(sys.argv[1])
held = lock.lock_root(root, "a" * 32)
pid = os.fork()
if pid == 0:
    for attempt in (held.check, lambda: lock.lock_root(root, "a" * 32)):
        try:
            attempt()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    assert str(root) not in lock.process_instance(lock._LockRegistry).locks
    held.release()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print((root / "run.lock").exists())
held.check()
"""
    lines = finished(python(script, tmp_path)).splitlines()
    assert lines[0].endswith("the lock belongs to the parent process of this fork. Save from the parent.")
    assert "another live job uses this root" in lines[1]
    assert lines[2:] == ["True"]
    assert names(tmp_path) == []


ME = {"host": "here", "boot_id": "boot", "pid_namespace": "pid:[1]"}
ALIVE = {"pid": os.getpid(), "start_ticks": locks.process_start_ticks(os.getpid())}
ENDED = {"pid": 2**31 - 1, "start_ticks": 7}
VERDICTS = {
    "this process": (ME | ALIVE, 1e9, "live"),
    "a pid that does not exist": (ME | ENDED, 0.0, "dead"),
    "a pid that was given out again": (ME | ALIVE | {"start_ticks": 7}, 0.0, "dead"),
    "a start time that nobody wrote down": (ME | ALIVE | {"start_ticks": None}, 1e9, "live"),
    "another user's process": (ME | {"pid": 1, "start_ticks": None}, 1e9, "live"),
    "the same kernel by another name": (ME | ALIVE | {"host": "container"}, 1e9, "live"),
    "another pid namespace, silent for 59 s": (ME | ENDED | {"pid_namespace": "pid:[2]"}, 59.0, "unknown"),
    "another pid namespace, silent for 60 s": (ME | ALIVE | {"pid_namespace": "pid:[2]"}, 60.0, "dead"),
    "another boot, silent for 19 s": (ME | ENDED | {"boot_id": "before"}, 19.0, "unknown"),
    "another boot, silent for 20 s": (ME | ALIVE | {"boot_id": "before"}, 20.0, "dead"),
    "another host, silent for 59 s": (ME | ENDED | {"host": "there", "boot_id": "its"}, 59.0, "unknown"),
    "another host, silent for 60 s": (ME | ALIVE | {"host": "there", "boot_id": "its"}, 60.0, "dead"),
    "another host, whose clock is an hour ahead": (ME | ALIVE | {"host": "there", "boot_id": "its"}, -3600.0, "unknown"),
    "no /proc there": (ME | ENDED | {"boot_id": None, "pid_namespace": None}, 30.0, "unknown"),
}


@pytest.mark.parametrize(("who", "silent_s", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_owner_status_uses_local_pid_or_heartbeat(who, silent_s, verdict):
    me = somebody(**ME, **ALIVE)
    holder = somebody(**{**who, "heartbeat_at": NOW - silent_s})
    assert locks.owner_status(holder, me, now=NOW, unchanged_s=0.0) == verdict


BARE = {"boot_id": None, "pid_namespace": None, "start_ticks": None}


@pytest.mark.parametrize(("silent_s", "verdict"), [(59, "unknown"), (60, "dead")])
def test_owner_status_uses_silence_despite_clock_skew_and_without_proc(silent_s, verdict):
    holder, me = somebody(heartbeat_at=NOW + 3600), somebody(**ME, **ALIVE)
    assert locks.owner_status(holder, me, now=NOW, unchanged_s=silent_s) == verdict
    holder, me = somebody(**{**ME, **ENDED, **BARE}, heartbeat_at=NOW), somebody(**{**ME, **ALIVE, **BARE})
    assert locks.owner_status(holder, me, now=NOW + silent_s, unchanged_s=0.0) == verdict


def test_owner_record_round_trips_and_invalid_data_is_rejected():
    me = locks.current_owner(RUN, now=NOW)
    data = me.encode()
    assert locks.parse_owner(data) == me
    assert len(data) < locks.MAX_BYTES / 4
    assert (me.pid, me.start_ticks) == (os.getpid(), locks.process_start_ticks(os.getpid()))
    assert None not in (me.boot_id, me.pid_namespace), "this is Linux"
    assert data.startswith(b'{"token": "'), "a part of it is known by its token"
    assert locks.parse_owner(replace(me, pid=10**30).encode()).pid < 2**31, "what no process has can be asked about"
    for wrong in (
        *(data[:length] for length in range(len(data) - 2)),
        data.replace(b'"version": 1', b'"version": 2'),
        data.replace(b"dtrain-lock", b"other-lock"),
        data.replace(b'"pid": ', b'"pid": -'),
        data.replace(b'"acquired_at": 1000000.0', b'"acquired_at": 1e300'),
        data.replace(b'"acquired_at": 1000000.0', b'"acquired_at": NaN'),
        data.replace(RUN.encode(), b"\\u001b[2J"),
        b"[" * 4000,
    ):
        assert locks.parse_owner(wrong) is None, wrong


def test_heartbeat_increases_when_clock_goes_back():
    me = locks.current_owner(RUN, now=NOW)
    assert locks.with_heartbeat(me, now=NOW + 5).heartbeat_at == NOW + 5
    assert locks.with_heartbeat(me, now=NOW - 5).heartbeat_at > NOW


def test_lock_renewed_by_remote_owner_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(somebody().encode())
    stop = threading.Event()

    def renew():
        while not stop.wait(0.05):
            storage.replace_file(tmp_path / LOCK_FILE, somebody(heartbeat_at=time.time()).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"another live job uses this root \(host elsewhere, pid 17"):
            lock_root(tmp_path, RUN)
    finally:
        stop.set()
        thread.join()
    assert names(tmp_path) == [LOCK_FILE]


def test_silent_remote_lock_is_taken_over_after_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "DEAD_AFTER_S", 0.3)
    (tmp_path / LOCK_FILE).write_bytes(somebody(heartbeat_at=time.time() + 1000).encode())
    begun = time.monotonic()
    with lock_root(tmp_path, RUN):
        assert time.monotonic() - begun >= 0.3
        assert on_disk(tmp_path).pid == os.getpid()


def test_expired_remote_lock_is_taken_over_without_waiting(tmp_path, monkeypatch):
    (tmp_path / LOCK_FILE).write_bytes(somebody(heartbeat_at=time.time() - 61).encode())
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: pytest.fail("waited"))
    with lock_root(tmp_path, RUN):
        assert on_disk(tmp_path).pid == os.getpid()
    assert names(tmp_path) == []


TORN = {"empty": b"", "half": somebody().encode()[:50], "text": b"mine!\n", "large": b"x" * 10_000, "binary": b"\xff\0" * 9}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_unchanging_invalid_lock_file_is_taken_over(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    with lock_root(tmp_path, RUN):
        assert on_disk(tmp_path).pid == os.getpid()
    assert names(tmp_path) == []


def test_partially_written_lock_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TORN_AFTER_S", PATIENCE_S)
    with holding(tmp_path):
        whole = (tmp_path / LOCK_FILE).read_bytes()
        (tmp_path / LOCK_FILE).write_bytes(whole[:40])
        timer = threading.Timer(0.2, (tmp_path / LOCK_FILE).write_bytes, [whole])
        timer.start()
        with pytest.raises(CheckpointError, match="another live job uses this root"):
            lock_root(tmp_path, RUN)
        timer.join()


def test_folder_at_lock_path_raises_and_is_kept(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        lock_root(tmp_path, RUN)
    assert names(tmp_path) == [LOCK_FILE]


def test_acquire_removes_takeover_leftovers_but_not_user_files(tmp_path):
    for name in (f"{LOCK_FILE}.0123456789abcdef", f"{LOCK_FILE}.01234567.tmp", f"{LOCK_FILE}.bak", "notes"):
        (tmp_path / name).touch()
    with lock_root(tmp_path, RUN):
        assert names(tmp_path) == ["notes", LOCK_FILE, f"{LOCK_FILE}.bak"]


def test_heartbeat_renews_lock_and_detects_takeover(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_INTERVAL_S", 0.02)
    with lock_root(tmp_path, RUN) as held:
        before, deadline = on_disk(tmp_path), time.monotonic() + PATIENCE_S
        while on_disk(tmp_path).heartbeat_at == before.heartbeat_at:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.check()
        assert replace(on_disk(tmp_path), heartbeat_at=before.heartbeat_at) == before
        while held._held.lost_to is None:
            # A renewal that has just read its own lock replaces this lock.
            storage.replace_file(tmp_path / LOCK_FILE, somebody().encode())
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / LOCK_FILE).unlink()  # the other process has ended, but its changes to the root are not known here
        with pytest.raises(
            CheckpointError, match=r"another process has taken over the lock of this run \(host elsewhere, pid 17"
        ):
            held.check()
        with lock_root(tmp_path, RUN) as again:
            again.check()
            with pytest.raises(CheckpointError, match="another process has taken over the lock"):
                held.check()
        assert names(tmp_path) == []


def test_release_keeps_lock_of_new_owner(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        storage.replace_file(tmp_path / LOCK_FILE, somebody().encode())
        with pytest.raises(CheckpointError, match=r"sent no heartbeat for too long. End one of the two"):
            held.check()
    assert on_disk(tmp_path) == replace(
        somebody(), acquired_at=on_disk(tmp_path).acquired_at, heartbeat_at=on_disk(tmp_path).heartbeat_at
    )


def test_check_recreates_deleted_lock_file(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        (tmp_path / LOCK_FILE).unlink()
        locks._renew_heartbeat(held._held)
        assert names(tmp_path) == [], "it may have gone with its folder: a save sees to it"
        held.check()
        assert on_disk(tmp_path).pid == os.getpid()


def test_check_refuses_missing_lock_after_expired_heartbeat(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        held._held.owner = replace(held._held.owner, heartbeat_at=time.time() - 61)
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(CheckpointError, match="a process that has ended since"):
            held.check()


@pytest.mark.parametrize("silent_s", [1, 61, 3600])
def test_check_recreates_removed_root_with_warning(tmp_path, silent_s):
    with lock_root(tmp_path / "root", RUN) as held:
        shutil.rmtree(tmp_path / "root")
        locks._renew_heartbeat(held._held)
        assert names(tmp_path) == [], "the heartbeat creates no folder"
        held._held.owner = replace(held._held.owner, heartbeat_at=time.time() - silent_s)
        with pytest.warns(UserWarning, match=r"root was removed while this run was using it, and its steps with it"):
            held.check()
        assert on_disk(tmp_path / "root").token == held._held.owner.token
        assert on_disk(tmp_path / "root").heartbeat_at > time.time() - 30, "other hosts see a live owner"
        held.check()
    assert names(tmp_path / "root") == []


def test_removed_root_belongs_to_the_first_job_that_locks_it(tmp_path):
    with lock_root(tmp_path / "root", RUN) as held:
        shutil.rmtree(tmp_path / "root")
        with holding(tmp_path / "root"), pytest.raises(CheckpointError, match="another process has taken over the lock"):
            held.check()


def test_removal_of_root_between_two_heartbeats_keeps_the_lock(tmp_path):
    """The folder was removed and made anew while this process was alive: no other process can have written there."""
    with lock_root(tmp_path / "root", RUN) as held:
        shutil.rmtree(tmp_path / "root")
        held._held.owner = replace(held._held.owner, heartbeat_at=time.time() - 61)
        locks._renew_heartbeat(held._held)
        (tmp_path / "root").mkdir()
        held.check()
        assert names(tmp_path / "root") == [LOCK_FILE]


def test_only_one_of_two_checks_recreates_removed_root(tmp_path, monkeypatch):
    """Another job creates the root and its lock just after this process has found no root."""
    real = storage.make_folders

    def make_after_other(path):
        real(path)
        storage.create_file(path / LOCK_FILE, somebody().encode())

    with lock_root(tmp_path / "root", RUN) as held:
        shutil.rmtree(tmp_path / "root")
        monkeypatch.setattr(storage, "make_folders", make_after_other)
        with (
            pytest.warns(UserWarning, match="was removed"),
            pytest.raises(CheckpointError, match="another process has taken over the lock"),
        ):
            held.check()
    assert on_disk(tmp_path / "root").token == somebody().token


def test_failed_heartbeat_is_retried(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        before = on_disk(tmp_path)
        with watching(operation=0, kind="write") as watched:
            locks._renew_heartbeat(held._held)
        assert watched.fired
        assert on_disk(tmp_path) == before
        locks._renew_heartbeat(held._held)
        assert on_disk(tmp_path).heartbeat_at > before.heartbeat_at
        held.check()


def test_failed_lock_write_leaves_no_file(tmp_path):
    with watching(operation=0, kind="write") as watched, pytest.raises(OSError, match=r"No space left on device: '.*run.lock'"):
        lock_root(tmp_path, RUN)
    assert watched.fired
    assert names(tmp_path) == []


def test_release_during_heartbeat_leaves_no_lock_file(tmp_path, monkeypatch):
    """The garbage collector runs anywhere, in the thread of the heartbeat as well."""
    held = lock_root(tmp_path, RUN)
    real = storage.replace_file

    def replace_after_release(path, data):
        held.release()
        real(path, data)

    monkeypatch.setattr(storage, "replace_file", replace_after_release)
    locks._renew_heartbeat(held._held)
    assert names(tmp_path) == []


def test_lock_works_on_object_store(tmp_path):
    """In this process's memory: a store that renames nothing and has no folders."""
    root = storage.resolve_path(f"memory://{tmp_path.name}/root")
    assert not storage.supports_rename(root)
    with lock_root(root, RUN) as held:
        assert storage.list_names(root) == [LOCK_FILE]
        locks._renew_heartbeat(held._held)
        held.check()
    assert not storage.exists(root)
    storage.create_file(root / LOCK_FILE, replace(locks.current_owner(OTHER, now=time.time()), **ENDED).encode())
    with lock_root(root, RUN):
        assert storage.list_names(root) == [LOCK_FILE]
    assert not storage.exists(root)


def test_threads_of_one_process_share_lock(tmp_path):
    meet, held, errors = threading.Barrier(4), [], []

    def take():
        meet.wait(PATIENCE_S)
        try:
            held.append(lock_root(tmp_path, RUN))
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []
    for hold in held:
        hold.check()
        hold.release()
    assert (len(held), names(tmp_path)) == (4, [])


def left_by_the_dead(root: Path) -> None:
    """The lock of a process of this host that has ended."""
    root.mkdir(exist_ok=True)
    (root / LOCK_FILE).write_bytes(replace(locks.current_owner(OTHER, now=time.time()), **ENDED).encode())


@pytest.mark.parametrize("begin", [Path.mkdir, left_by_the_dead], ids=["free", "dead"])
def test_acquire_succeeds_after_failure_of_any_operation(tmp_path, begin):
    with watching() as watched:
        begin(tmp_path / "all")
        lock_root(tmp_path / "all", RUN).release()
    raised = 0
    for operation in range(len(watched.calls)):
        root = tmp_path / str(operation)
        begin(root)
        with watching(operation=operation) as watched:
            try:
                lock_root(root, RUN).release()
            except OSError:
                raised += 1
        assert watched.fired
        with lock_root(root, RUN) as held:
            held.check()
            assert names(root) == [LOCK_FILE], f"{watched.calls[operation]} {operation} failed"
        assert names(root) == []
    assert raised > len(watched.calls) / 4


DYING = """
import msgspec
class Dying:
    def __init__(self, at):
        self.left = at
    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "close", "rename", "unlink", "listdir", "stat", "lstat", "preadv"):
            return real
        def counted(*args, **options):
            if self.left == 0:
                os._exit(9)
            self.left -= 1
            return real(*args, **options)
        return counted

lock.TORN_AFTER_S, lock._POLL_S = 0.05, 0.01
ended = msgspec.structs.replace(lock.current_owner("b" * 32, now=time.time()), pid=2**31 - 1)
root, at, code = Path(sys.argv[1]), 0, 9
root.mkdir()
while code == 9:
    if sys.argv[2] == "dead":
        (root / "run.lock").write_bytes(ended.encode())
    pid = os.fork()
    if pid == 0:
        storage.local.os = Dying(at)
        held = lock.lock_root(root, "a" * 32)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with lock.lock_root(root, "c" * 32) as held:
        held.check()
        assert os.listdir(root) == ["run.lock"], (at, os.listdir(root))
    assert os.listdir(root) == [], at
    at += 1
assert code == 0
print(at)
"""


@pytest.mark.parametrize(("begin", "least"), [("free", 8), ("dead", 25)])
def test_acquire_succeeds_after_owner_dies_at_any_operation(tmp_path, begin, least):
    assert int(finished(python(DYING, tmp_path / "root", begin))) > least


class Interleaved:
    """An ``os`` for ``dtrain.storage.local`` that lets another process act before the k-th operation on a file."""

    def __init__(self, calls: int, act) -> None:
        self.left, self.act = calls, act

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name not in ("open", "rename", "unlink", "stat", "preadv"):
            return real

        def counted(*args, **options):
            self.left -= 1
            if self.left == -1:
                self.act()
            return real(*args, **options)

        return counted


def attempt(path: Path, who: locks.LockOwner) -> locks.LockOwner | None:
    try:
        return locks.acquire_file(path, who)
    except CheckpointError:
        return None


def test_interleaved_takeovers_of_dead_lock_have_one_winner(tmp_path):
    """Both are live processes of this host; the second acts as a whole at every point of the first one's way."""
    with holding(tmp_path / "a") as a, holding(tmp_path / "b") as b:
        assert a.pid != b.pid
        one, two = on_disk(tmp_path / "a"), on_disk(tmp_path / "b")
        won, calls, fired = [], 0, True
        while fired:
            root = tmp_path / str(calls)
            left_by_the_dead(root)
            got: list[locks.LockOwner | None] = []

            def act(root=root, got=got):
                storage.local.os = os
                got.append(attempt(root / LOCK_FILE, two))

            storage.local.os = Interleaved(calls, act)
            try:
                mine = attempt(root / LOCK_FILE, one)
            finally:
                storage.local.os = os
            fired = bool(got)
            if fired:
                theirs = got[0]
                assert (mine is None) != (theirs is None), f"at {calls}: {mine}, {theirs}"
                winner = mine or theirs
                assert on_disk(root).token == winner.token
                won.append(winner.pid)
                assert names(root) == [LOCK_FILE]
            calls += 1
    assert set(won) == {a.pid, b.pid}, "the second comes early enough, and too late"
    assert len(won) > 10


def test_server_that_does_not_answer_delays_no_other_root(tmp_path, monkeypatch):
    """The heartbeat thread waits for the server of a released lock. Saves to another root continue, and end."""
    from fsspec.implementations.memory import MemoryFileSystem

    asked, answers = threading.Event(), threading.Event()

    def silent(self, path, **options):
        asked.set()
        answers.wait(PATIENCE_S)
        return MemoryFileSystem.ls(self, path, detail=True)[0]

    far = lock_root(storage.resolve_path("memory://bucket/run"), RUN)
    with lock_root(tmp_path, RUN) as near:
        monkeypatch.setattr(MemoryFileSystem, "info", silent)
        releasing = threading.Thread(target=far.release)
        releasing.start()
        assert asked.wait(PATIENCE_S)
        checking = threading.Thread(target=near.check)
        checking.start()
        checking.join(PATIENCE_S)
        assert not answers.is_set()
        assert not checking.is_alive(), "it waits for the server of another root"
        answers.set()
        releasing.join(PATIENCE_S)
    assert not is_held_here(tmp_path)


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_check_recovers_from_lock_file_overwritten_with_garbage(tmp_path, content):
    with lock_root(tmp_path, RUN) as held:
        token = on_disk(tmp_path).token
        (tmp_path / LOCK_FILE).write_bytes(content)
        held.check()
        assert (on_disk(tmp_path).token, on_disk(tmp_path).pid) == (token, os.getpid())
        assert names(tmp_path) == [LOCK_FILE]
    assert names(tmp_path) == []


def test_heartbeat_recovers_from_lock_file_overwritten_with_garbage(tmp_path, monkeypatch):
    """A job that saves once an hour must not look dead for an hour."""
    monkeypatch.setattr(locks, "HEARTBEAT_INTERVAL_S", 0.02)
    with lock_root(tmp_path, RUN) as held:
        (tmp_path / LOCK_FILE).write_bytes(b"mine!\n")
        deadline = time.monotonic() + PATIENCE_S
        while (tmp_path / LOCK_FILE).read_bytes() == b"mine!\n":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert on_disk(tmp_path).pid == os.getpid()
        held.check()


def test_check_recovers_after_garbage_was_removed(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        (tmp_path / LOCK_FILE).write_bytes(b"mine!\n")
        locks._renew_heartbeat(held._held)
        (tmp_path / LOCK_FILE).unlink()
        held.check()
        assert on_disk(tmp_path).pid == os.getpid()


def test_check_recovers_after_a_folder_at_the_lock_path_was_removed(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        (tmp_path / LOCK_FILE).unlink()
        (tmp_path / LOCK_FILE).mkdir()
        with pytest.raises(OSError, match="directory"):
            held.check()
        (tmp_path / LOCK_FILE).rmdir()
        held.check()
        assert on_disk(tmp_path).pid == os.getpid()


def test_check_names_the_job_that_took_over_a_lock_of_garbage(tmp_path):
    with lock_root(tmp_path, RUN) as held:
        (tmp_path / LOCK_FILE).write_bytes(b"mine!\n")
        with holding(tmp_path), pytest.raises(CheckpointError, match=rf"has taken over the lock .* run {OTHER}"):
            held.check()
