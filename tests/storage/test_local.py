"""File operations of this machine: their order, their durability, and their behaviour when a system call fails.

``test_stores.py`` has the contract that local files share with files on servers.
"""

import ctypes
import errno
import mmap
import os
import threading
from itertools import accumulate

import pytest

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.storage import LockableFile
from dtrain.testing import inject_fault

MIB = 2**20
SIZES = [5000, 0, 1, 70_000, 3, 12_345]
CONTENT = os.urandom(sum(SIZES))
BEGINS = list(accumulate(SIZES, initial=0))


def part_of(number):
    """A part in three buffers of kinds that a caller may have, one of them empty."""
    data = CONTENT[BEGINS[number] : BEGINS[number + 1]]
    half = len(data) // 2
    return [data[:half], bytearray(), memoryview(data[half:])]


class StandInOs:
    """Stands in for ``os``: records the names of calls, and calls the functions of ``instead`` in place of those of ``os``."""

    def __init__(self, **instead):
        self.instead, self.calls = instead, []

    def __getattr__(self, name):
        value = self.instead.get(name, getattr(os, name))
        if not callable(value):
            return value

        def call(*args, **options):
            self.calls.append(name)
            return value(*args, **options)

        return call


@pytest.fixture
def stand_in(monkeypatch):
    """Put a ``StandInOs`` in the place of ``os``, and return it."""

    def install(**instead):
        monkeypatch.setattr(storage.local, "os", system := StandInOs(**instead))
        return system

    return install


def fail(*args, **options):
    raise OSError(5, "Input/output error")


def open_handles():
    return sorted(os.listdir("/proc/self/fd"))


def test_remove_folder_starts_with_first_and_skips_link_targets(tmp_path, stand_in):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for name in ("a", "manifest.json", "below/x"):
        (folder / name).touch()
    (folder / "link").symlink_to(outside)
    order = []
    stand_in(unlink=lambda path: (order.append(path.name), os.unlink(path)))
    storage.remove_folder(folder, first="manifest.json")
    assert order == ["manifest.json", "a", "x", "link"]
    assert not folder.exists()
    assert (outside / "kept").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_irregular_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = open_handles()
    assert storage.file_size(path) is None
    with pytest.raises(OSError, match="not a regular file"):
        storage.FileReader(path)
    assert open_handles() == before


def test_file_handle_errors_name_the_path(tmp_path, stand_in):
    stand_in(fsync=fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*/file'"):
        storage.write_file(tmp_path / "file", b"x")
    with pytest.raises(OSError, match="Input/output error: '"):
        storage.sync_folder(tmp_path)


def test_missing_paths_are_reported_as_absent(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert not storage.is_folder(tmp_path / "file" / "below")
    assert not storage.exists(tmp_path / "file" / "below")
    assert storage.exists(tmp_path / "dangling")
    assert storage.file_size(tmp_path / "dangling") is None


def test_create_and_replace_sync_file_and_folder(tmp_path, stand_in):
    system = stand_in()
    storage.create_file(tmp_path / "file", b"first")
    assert system.calls == ["open", "write", "fsync", "close", "open", "fsync", "close"]
    system.calls.clear()
    storage.replace_file(tmp_path / "file", b"new")
    assert system.calls == ["open", "write", "fsync", "close", "rename", "open", "fsync", "close"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_failed_replacement_leaves_only_the_old_file(tmp_path, stand_in, call):
    storage.write_file(tmp_path / "file", b"old")
    stand_in(**{call: fail})
    with pytest.raises(OSError, match="Input/output error"):
        storage.replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_free_bytes_uses_the_nearest_existing_folder(tmp_path):
    free = storage.free_bytes(tmp_path / "not" / "yet")
    status = os.statvfs(tmp_path)
    assert free is not None
    assert abs(free - status.f_bavail * status.f_frsize) < 2**30, "others write meanwhile"


def write_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dtrain-write")]


@pytest.mark.parametrize("threads", [1, 3, 99])
def test_parts_are_requested_once_in_the_thread_that_writes(tmp_path, threads):
    asked = []

    def asked_part(number):
        asked.append((number, threading.current_thread() is threading.main_thread()))
        return part_of(number)

    storage.write_parts(tmp_path / "file", SIZES, asked_part, threads=threads)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert sorted(asked) == [(number, threads == 1) for number in range(len(SIZES))]
    assert write_threads() == []


def test_many_buffers_are_written_in_several_calls(tmp_path):
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    storage.write_parts(tmp_path / "file", [sum(map(len, pieces))], lambda index: pieces, threads=1)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("threads", [1, 2])
def test_short_writes_of_parts_are_completed(tmp_path, stand_in, threads):
    stand_in(pwritev=lambda handle, buffers, begin: os.pwritev(handle, [next(view for view in buffers if view)[:999]], begin))
    storage.write_parts(tmp_path / "file", SIZES, part_of, threads=threads)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("threads", [1, 2])
def test_error_ends_all_threads_and_closes_the_file(tmp_path, stand_in, threads):
    failed = threading.Event()

    def full(handle, buffers, begin):
        if begin >= BEGINS[3]:
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(handle, buffers, begin)

    before, system = open_handles(), stand_in(pwritev=full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        storage.write_parts(tmp_path / "file", SIZES, part_of, threads=threads)
    assert failed.is_set()
    assert write_threads() == []
    assert open_handles() == before
    assert "fsync" not in system.calls


LARGE_SIZES = [MIB, MIB, MIB, 12_345]
LARGE = os.urandom(MIB) * 3 + os.urandom(12_345)


def large_part_of(number):
    """A part in pieces, one of which is read-only."""
    data = bytearray(LARGE[number * MIB : (number + 1) * MIB])
    return [bytes(data[:100]), memoryview(data)[100:200_000], memoryview(data)[200_000:]]


class DirectOs(StandInOs):
    """Records the bytes that went past the page cache, and answers there as ``direct_write`` does."""

    def __init__(self, direct_write=os.pwritev, refuse=False):
        super().__init__(open=self._open, pwritev=self._pwritev)
        self.direct_write, self.refuse, self.direct, self.usual, self.handle = direct_write, refuse, [], [], None

    def _open(self, path, flags, *mode):
        if not flags & os.O_DIRECT:
            return os.open(path, flags, *mode)
        if self.refuse:
            raise OSError(errno.EINVAL, "Invalid argument")
        self.handle = os.open(path, flags & ~os.O_DIRECT, *mode)  # so that it works in any folder that a test may have
        return self.handle

    def _pwritev(self, handle, buffers, begin):
        if handle != self.handle:
            self.usual.append(begin)
            return os.pwritev(handle, buffers, begin)
        taken = self.direct_write(handle, buffers, begin)
        self.direct.append((begin, taken))
        return taken


@pytest.fixture
def write_large(tmp_path, monkeypatch):
    """Write a file of parts past the page cache, check its content and the open handles, and return the stand-in."""

    def write(system, *, threads=2, min_bytes=1):
        monkeypatch.setattr(storage.local, "os", system)
        monkeypatch.setattr(storage.local, "_DIRECT_MIN_BYTES", min_bytes)
        before = open_handles()
        try:
            storage.write_parts(tmp_path / "file", LARGE_SIZES, large_part_of, threads=threads)
        finally:
            assert open_handles() == before
        assert (tmp_path / "file").read_bytes() == LARGE
        return system

    return write


@pytest.mark.parametrize("threads", [1, 2])
def test_whole_blocks_bypass_the_page_cache(write_large, threads):
    system = write_large(DirectOs(), threads=threads)
    assert sorted(system.direct) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB)]
    assert system.usual == [3 * MIB]


def test_real_file_system_gets_the_same_bytes(write_large):
    write_large(os)


def test_file_system_without_o_direct_and_small_files_use_the_page_cache(write_large, tmp_path):
    assert write_large(DirectOs(refuse=True)).direct == []
    (tmp_path / "file").unlink()
    assert write_large(DirectOs(), min_bytes=2**30).handle is None


def test_refused_first_write_disables_o_direct(write_large):
    asked = []

    def refuse(handle, buffers, begin):
        asked.append(begin)
        raise OSError(errno.EINVAL, "Invalid argument")

    write_large(DirectOs(refuse), threads=1)
    assert asked == [0]


@pytest.mark.parametrize("most", [4096, 5000], ids=["in blocks", "within a block"])
def test_short_direct_writes_are_completed(write_large, most):
    write_large(DirectOs(lambda handle, buffers, begin: os.pwritev(handle, [buffers[0][:most]], begin)))


def test_other_errors_of_direct_writes_name_the_file(write_large):
    def full(handle, buffers, begin):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        write_large(DirectOs(full))


@pytest.mark.parametrize("shift", [0, 8], ids=["at-a-page", "elsewhere"])
def test_aligned_memory_is_written_without_a_copy(tmp_path, monkeypatch, shift):
    memory = memoryview(mmap.mmap(-1, 2 * MIB))[shift : shift + MIB]
    memory[:] = LARGE[:MIB]
    given = []

    def note(handle, buffers, begin):
        given.append(ctypes.addressof(ctypes.c_char.from_buffer(buffers[0])))
        return os.pwritev(handle, buffers, begin)

    monkeypatch.setattr(storage.local, "os", DirectOs(note))
    monkeypatch.setattr(storage.local, "_DIRECT_MIN_BYTES", 1)
    storage.write_parts(tmp_path / "file", [MIB], lambda number: [memory], threads=1)
    assert (tmp_path / "file").read_bytes() == LARGE[:MIB]
    (address,) = given
    assert address % 4096 == 0
    assert (address == ctypes.addressof(ctypes.c_char.from_buffer(memory))) is (shift == 0)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    return tmp_path / "file"


def can_lock(path):
    with LockableFile(path) as file:
        return file.lock()


def test_lock_is_exclusive_or_shared(path):
    with LockableFile(path) as one, LockableFile(path) as other:
        assert one.lock()
        assert not other.lock()
        assert not other.lock(shared=True)
        assert one.lock(shared=True)
        assert other.lock(shared=True)
        assert not one.lock()
    assert can_lock(path)


def test_mapped_view_stays_readable_after_unlink_and_keeps_the_lock(path):
    with LockableFile(path) as file:
        assert file.lock(shared=True)
        view = file.map_memory()
    assert not can_lock(path)
    middle = view[3:5]
    del view
    assert not can_lock(path)
    kept = path.with_name("kept")
    os.link(path, kept)
    path.unlink()
    assert bytes(middle) == b"34"
    del middle
    assert can_lock(kept)


def test_removed_file_is_not_linked(path):
    with LockableFile(path) as file:
        assert file.is_linked
        path.unlink()
        assert not file.is_linked


def test_new_file_is_written_and_truncated(tmp_path):
    with LockableFile(tmp_path / "new", "new") as file:
        file.write(b"wrong")
        file.truncate()
        file.write(memoryview(b"right!"))
        assert file.size == 6
    assert (tmp_path / "new").read_bytes() == b"right!"
    with pytest.raises(FileExistsError):
        LockableFile(tmp_path / "new", "new")
    with pytest.raises(FileNotFoundError):
        LockableFile(tmp_path / "other")
    with LockableFile(tmp_path / "lock", "lock") as file:
        assert bytes(file.map_memory()) == b""


def test_failed_write_names_the_file(tmp_path):
    with (
        LockableFile(tmp_path / "new", "new") as file,
        inject_fault("raise", at="dtrain.storage.local.os.write", error=OSError(28, "full")),
        pytest.raises(OSError, match=rf"full: '{tmp_path}/new'"),
    ):
        file.write(b"x")


def test_walk_files_follows_links_to_files(path):
    os.symlink(path, path.with_name("link"))
    os.symlink(path.with_name("nothing"), path.with_name("dangling"))
    assert sorted(storage.walk_files(path.parent)) == [("file", 10), ("link", 10)]


def test_scan_folder_lists_regular_files(path):
    os.utime(path, ns=(7, 7))
    (path.parent / "folder").mkdir()
    assert storage.scan_folder(path.parent) == [storage.FolderEntry(name="file", size=10, modified_ns=7)]


def test_private_folder_belongs_to_this_user(tmp_path, monkeypatch):
    for _ in range(2):
        storage.make_private_folder(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/file must be a folder of this user"):
        storage.make_private_folder(tmp_path / "file")
    monkeypatch.setattr("dtrain.storage.local.os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/mine must be a folder of this user \(uid 12345\)"):
        storage.make_private_folder(tmp_path / "mine")
