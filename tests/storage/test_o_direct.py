"""Writes past the page cache, and the fallback to the page cache."""

import ctypes
import errno
import mmap
import os

import pytest

from dtrain import storage

MIB = 2**20
CONTENT = os.urandom(MIB) * 3 + os.urandom(12_345)
SIZES = [MIB, MIB, MIB, 12_345]


def part_of(part):
    """A part in pieces, one of which is read-only."""
    data = bytearray(CONTENT[part * MIB : (part + 1) * MIB])
    return [bytes(data[:100]), memoryview(data)[100:200_000], memoryview(data)[200_000:]]


class Recording:
    """Stands in for ``os``: notes which bytes went to the direct handle, and answers there as ``instead`` does."""

    def __init__(self, instead=os.pwritev, refuse=False):
        self.instead, self.refuse, self.direct, self.usual = instead, refuse, [], []
        self.handle = None

    def __getattr__(self, name):
        return {"open": self._open, "pwritev": self._pwritev}.get(name) or getattr(os, name)

    def _open(self, path, flags, *mode):
        if flags & os.O_DIRECT:
            if self.refuse:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.handle = os.open(path, flags & ~os.O_DIRECT, *mode)  # so that it works in any folder that a test may have
            return self.handle
        return os.open(path, flags, *mode)

    def _pwritev(self, handle, buffers, begin):
        if handle != self.handle:
            self.usual.append(begin)
            return os.pwritev(handle, buffers, begin)
        taken = self.instead(handle, buffers, begin)
        self.direct.append((begin, taken))
        return taken


def write(path, monkeypatch, system, threads=2):
    monkeypatch.setattr(storage.local, "os", system)
    monkeypatch.setattr(storage.local, "_DIRECT_MIN_BYTES", 1)
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        storage.write_parts(path, SIZES, part_of, threads=threads)
    finally:
        assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("threads", [1, 2])
def test_whole_blocks_bypass_the_page_cache(tmp_path, monkeypatch, threads):
    system = Recording()
    write(tmp_path / "file", monkeypatch, system, threads)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert sorted(system.direct) == [(0, MIB), (MIB, MIB), (2 * MIB, MIB)]
    assert system.usual == [3 * MIB]


def test_file_system_gets_the_same_bytes(tmp_path, monkeypatch):
    write(tmp_path / "file", monkeypatch, os)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_unsupported_file_system_is_written_normally(tmp_path, monkeypatch):
    system = Recording(refuse=True)
    write(tmp_path / "file", monkeypatch, system)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert system.direct == []


def test_refused_first_write_disables_o_direct(tmp_path, monkeypatch):
    asked = []

    def refuse(handle, buffers, begin):
        asked.append(begin)
        raise OSError(errno.EINVAL, "Invalid argument")

    write(tmp_path / "file", monkeypatch, Recording(refuse), threads=1)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert asked == [0]


@pytest.mark.parametrize("most", [4096, 5000], ids=["in blocks", "within a block"])
def test_short_writes_are_completed(tmp_path, monkeypatch, most):
    write(tmp_path / "file", monkeypatch, Recording(lambda handle, buffers, at: os.pwritev(handle, [buffers[0][:most]], at)))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_other_errors_name_the_file(tmp_path, monkeypatch):
    def full(handle, buffers, begin):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        write(tmp_path / "file", monkeypatch, Recording(full))


def test_small_files_use_the_page_cache(tmp_path, monkeypatch):
    system = Recording()
    monkeypatch.setattr(storage.local, "os", system)
    storage.write_parts(tmp_path / "file", SIZES, part_of, threads=1)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert system.handle is None


@pytest.mark.parametrize("shift", [0, 8], ids=["at-a-page", "elsewhere"])
def test_aligned_memory_is_written_without_a_copy(tmp_path, monkeypatch, shift):
    memory = memoryview(mmap.mmap(-1, 2 * MIB))[shift : shift + MIB]
    memory[:] = CONTENT[:MIB]
    given = []

    def note(handle, buffers, begin):
        given.append(ctypes.addressof(ctypes.c_char.from_buffer(buffers[0])))
        return os.pwritev(handle, buffers, begin)

    monkeypatch.setattr(storage.local, "os", Recording(note))
    monkeypatch.setattr(storage.local, "_DIRECT_MIN_BYTES", 1)
    storage.write_parts(tmp_path / "file", [MIB], lambda part: [memory], threads=1)
    assert (tmp_path / "file").read_bytes() == CONTENT[:MIB]
    (address,) = given
    assert address % 4096 == 0
    assert (address == ctypes.addressof(ctypes.c_char.from_buffer(memory))) is (shift == 0)
