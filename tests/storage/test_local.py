"""File operations of this machine."""

import os

import pytest

from dtrain import storage


def test_file_is_read_by_ranges(tmp_path):
    path = tmp_path / "file"
    storage.write_file(path, b"0123456789")
    assert storage.file_size(path) == 10
    with storage.FileReader(path) as file:
        out = bytearray(4)
        assert (file.size, file.read_into(3, memoryview(out)), bytes(out)) == (10, 4, b"3456")
        assert file.read_into(8, memoryview(out)) == 2, "the end of the file"
    assert storage.read_file(path, limit=10) == b"0123456789"
    with pytest.raises(OSError, match="must have at most 9 bytes, got 10"):
        storage.read_file(path, limit=9)


def test_existing_files_are_never_overwritten(tmp_path):
    storage.write_file(tmp_path / "file", b"old")
    with pytest.raises(FileExistsError):
        storage.write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_renaming_does_not_replace_a_folder_with_content(tmp_path):
    for name in "ab":
        storage.make_folder(tmp_path / name)
        storage.write_file(tmp_path / name / "file", b"")
    with pytest.raises(OSError, match="not empty"):
        storage.rename(tmp_path / "a", tmp_path / "b")


def test_remove_folder_starts_with_first_and_skips_link_targets(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for name in ("a", "manifest.json", "below/x"):
        (folder / name).touch()
    (folder / "link").symlink_to(outside)
    order = []
    real = os.unlink

    class Watched:
        def __getattr__(self, name):
            return (lambda path: (order.append(path.name), real(path))) if name == "unlink" else getattr(os, name)

    monkeypatch.setattr(storage.local, "os", Watched())
    storage.remove_folder(folder, first="manifest.json")
    assert order == ["manifest.json", "a", "x", "link"]
    assert not folder.exists()
    assert (outside / "kept").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_irregular_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert storage.file_size(path) is None
    with pytest.raises(OSError, match="not a regular file"):
        storage.FileReader(path)
    assert len(os.listdir("/proc/self/fd")) < 500


def test_file_handle_errors_name_the_path(tmp_path, monkeypatch):
    class Failing:
        def __getattr__(self, name):
            if name != "fsync":
                return getattr(os, name)

            def fail(handle):
                raise OSError(5, "Input/output error")

            return fail

    monkeypatch.setattr(storage.local, "os", Failing())
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
    with pytest.raises(FileNotFoundError):
        storage.list_names(tmp_path / "none")


class Recorded:
    """Stands in for ``os``: notes the names of calls, and fails those named."""

    def __init__(self, *, failing=()):
        self.calls, self.failing = [], failing

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append(name)
            if name in self.failing:
                raise OSError(5, "Input/output error")
            return getattr(os, name)(*args, **options)

        return call if callable(getattr(os, name)) else getattr(os, name)


def test_create_file_syncs_file_and_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.local, "os", recorded := Recorded())
    storage.create_file(tmp_path / "file", b"first")
    assert recorded.calls == ["open", "write", "fsync", "close", "open", "fsync", "close"]
    with pytest.raises(FileExistsError):
        storage.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_replace_file_is_atomic_and_durable(tmp_path, monkeypatch):
    storage.replace_file(tmp_path / "file", b"old")
    monkeypatch.setattr(storage.local, "os", recorded := Recorded())
    storage.replace_file(tmp_path / "file", b"new")
    assert recorded.calls == ["open", "write", "fsync", "close", "rename", "open", "fsync", "close"]
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_failed_replacement_leaves_only_the_old_file(tmp_path, monkeypatch, call):
    storage.write_file(tmp_path / "file", b"old")
    monkeypatch.setattr(storage.local, "os", Recorded(failing=[call]))
    with pytest.raises(OSError, match="Input/output error"):
        storage.replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_link_file_adds_a_name(tmp_path):
    storage.write_file(tmp_path / "old", b"data")
    storage.link_file(tmp_path / "old", tmp_path / "new")
    storage.remove_file(tmp_path / "old")
    assert (tmp_path / "new").read_bytes() == b"data"
    storage.write_file(tmp_path / "taken", b"")
    with pytest.raises(FileExistsError):
        storage.link_file(tmp_path / "new", tmp_path / "taken")


def test_free_bytes_uses_the_nearest_existing_folder(tmp_path):
    free = storage.free_bytes(tmp_path / "not" / "yet")
    found = os.statvfs(tmp_path)
    assert free is not None
    assert abs(free - found.f_bavail * found.f_frsize) < 2**30, "others write meanwhile"
