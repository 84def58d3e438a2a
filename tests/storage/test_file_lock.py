"""Locks, memory maps and private folders of files that several processes share."""

import os

import pytest

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.storage import LockableFile
from dtrain.testing import inject_fault


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


def test_mapped_view_stays_readable_after_unlink(path):
    with LockableFile(path) as file:
        assert file.lock(shared=True)
        view = file.map_memory()
    path.unlink()
    part = view[3:5]
    del view
    assert bytes(part) == b"34"


def test_lock_is_released_with_last_view(path):
    with LockableFile(path) as file:
        file.lock(shared=True)
        part = file.map_memory()[3:5]
    assert not can_lock(path)
    del part
    assert can_lock(path)


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


def test_empty_file_is_mapped(tmp_path):
    with LockableFile(tmp_path / "lock", "lock") as file:
        assert bytes(file.map_memory()) == b""


def test_failed_write_names_the_file(tmp_path):
    with (
        LockableFile(tmp_path / "new", "new") as file,
        inject_fault("raise", at="dtrain.storage.local.os.write", error=OSError(28, "full")),
        pytest.raises(OSError, match=rf"full: '{tmp_path}/new'"),
    ):
        file.write(b"x")


def test_walk_files_lists_local_folders(tmp_path):
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "b/c/two").write_bytes(b"22")
    (tmp_path / "one").write_bytes(b"1")
    os.symlink(tmp_path / "one", tmp_path / "b/link")
    os.symlink(tmp_path / "nothing", tmp_path / "dangling")
    assert sorted(storage.walk_files(tmp_path)) == [("b/c/two", 2), ("b/link", 1), ("one", 1)]


def test_walk_files_lists_remote_folders():
    top = storage.resolve_path("memory://walk/top")
    for name in ("one", "b/c/two"):
        storage.create_file(top / name, name.encode())
    assert sorted(storage.walk_files(top)) == [("b/c/two", 7), ("one", 3)]
    storage.remove_folder(top)


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
