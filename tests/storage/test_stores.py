"""File operations on this machine and on real servers, which keep one contract, and operations of servers only."""

import io
import os
import sys
import threading

import pytest

from dtrain import storage
from dtrain.storage import remote
from dtrain.storage.object_stores import S3Store
from dtrain.storage.remote_store import RemoteStore
from dtrain.storage.sftp_store import SftpStore
from places import servers

SERVERS = ["memory", "s3", "az", "gs", "sftp"]
SIZES = [300_000, 5, 0, 400_000, 70_001]
CONTENT = os.urandom(sum(SIZES))


def part_of(number):
    """In two buffers, of which one cannot be changed and one can."""
    begin = sum(SIZES[:number])
    data = CONTENT[begin : begin + SIZES[number]]
    return [data[:1000], bytearray(data[1000:])]


@pytest.fixture
def place(request, reach, monkeypatch, tmp_path):
    """An empty folder of this machine, or on a server that takes small parts."""
    if request.param == "local":
        return tmp_path
    for store in (RemoteStore, SftpStore):
        monkeypatch.setattr(store, "part_bytes", 2**18)
    monkeypatch.setattr(remote, "_READ_REQUEST_BYTES", 100_000)
    folder = storage.resolve_path(reach(request.param).root())
    storage.make_folders(folder)
    return folder


def pytest_generate_tests(metafunc):
    """A test of ``root`` runs in all places, and a test of ``server_root`` on servers."""
    for name, places in (("root", ["local", *SERVERS]), ("server_root", SERVERS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize("place", places, indirect=True)


@pytest.fixture
def root(place):
    return place


@pytest.fixture
def server_root(place):
    return place


def test_stat_distinguishes_files_folders_and_missing_names(root):
    assert not storage.exists(root / "file")
    assert storage.file_size(root / "file") is None
    storage.write_file(root / "file", b"0123456789")
    assert storage.exists(root / "file")
    assert storage.file_size(root / "file") == 10
    assert not storage.is_folder(root / "file")
    assert storage.is_folder(root)
    assert storage.file_size(root) is None
    assert (storage.free_bytes(root) is None) is isinstance(root, storage.RemotePath)


def test_file_is_read_by_ranges(root):
    storage.write_file(root / "file", b"0123456789")
    with storage.FileReader(root / "file") as file:
        out = bytearray(4)
        assert (file.size, file.read_into(3, memoryview(out)), bytes(out)) == (10, 4, b"3456")
        assert (file.read_into(8, memoryview(out)), bytes(out)) == (2, b"8956"), "the end of the file"
        assert file.read_into(10, memoryview(out)) == 0
    with pytest.raises(OSError, match="must have at most 9 bytes, got 10"):
        storage.read_file(root / "file", limit=9)


def test_missing_path_errors_name_the_path(root):
    with pytest.raises(FileNotFoundError, match=f"'{root}/none'"):
        storage.FileReader(root / "none")
    with pytest.raises(FileNotFoundError, match=f"'{root}/none'"):
        storage.list_names(root / "none")
    storage.make_folders(root / "folder")
    storage.write_file(root / "folder" / "file", b"")
    with pytest.raises(OSError, match="not a regular file"):
        storage.FileReader(root / "folder")


def test_empty_file_exists(root):
    storage.create_file(root / "file", b"")
    storage.write_parts(root / "parts", [], part_of, threads=4)
    assert storage.list_names(root) == ["file", "parts"]
    assert storage.read_file(root / "file", limit=0) == b"" == storage.read_file(root / "parts", limit=0)


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n", b"\n--==0==--", b"\r\n--"], ids=repr)
def test_content_that_ends_like_a_mime_part_is_stored_whole(root, end):
    content = end + b"content" + end
    storage.create_file(root / "file", content)
    storage.write_parts(root / "parts", [len(content)] * 2, lambda number: [content], threads=1)
    assert storage.read_file(root / "file", limit=100) == content
    assert storage.read_file(root / "parts", limit=100) == content * 2


def test_walk_files_lists_all_folders(root):
    storage.make_folders(root / "b" / "c")
    for name in ("one", "b/c/two"):
        storage.create_file(root / name, name.encode())
    assert sorted(storage.walk_files(root)) == [("b/c/two", 7), ("one", 3)]


@pytest.mark.parametrize("threads", [1, 3])
def test_file_of_parts_is_read_back(root, threads):
    asked, before = [], set(threading.enumerate())  # other tests of this process may have threads that are ending

    def once(number):
        asked.append(number)
        return part_of(number)

    storage.write_parts(root / "data", SIZES, once, threads=threads)
    assert sorted(asked) == list(range(len(SIZES)))
    assert storage.list_names(root) == ["data"], "and nothing beside it"
    assert storage.read_file(root / "data", limit=2**30) == CONTENT
    new = set(threading.enumerate()) - before
    assert [thread.name for thread in new if thread.name.startswith("dtrain-")] == []


def test_failed_part_leaves_no_file(server_root):
    def fails(number):
        if number == 3:
            raise ValueError("the source")
        return part_of(number)

    with pytest.raises(ValueError, match="the source"):
        storage.write_parts(server_root / "data", SIZES, fails, threads=2)
    assert not storage.exists(server_root / "data")
    storage.create_file(server_root / "other", b"")
    assert storage.list_names(server_root) == ["other"]


@pytest.mark.parametrize("how", ["create", "write", "parts"])
def test_existing_files_are_never_overwritten(root, how):
    storage.create_file(root / "file", b"old")
    again = {
        "create": lambda: storage.create_file(root / "file", b"new"),
        "write": lambda: storage.write_file(root / "file", b"new"),
        "parts": lambda: storage.write_parts(root / "file", SIZES, part_of, threads=2),
    }
    with pytest.raises(FileExistsError, match=rf"^\[Errno 17\] File exists: '{root}/file'$"):
        again[how]()
    assert storage.read_file(root / "file", limit=9) == b"old"
    assert storage.list_names(root) == ["file"]


def test_only_one_of_many_creators_succeeds(root):
    ready = threading.Barrier(6, timeout=servers.LONG_S)
    won, lost = [], []

    def create(number):
        ready.wait()
        try:
            storage.create_file(root / "manifest.json", b"%d" % number)
            won.append(number)
        except FileExistsError:
            lost.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(servers.LONG_S)
    assert (len(won), len(lost)) == (1, 5)
    assert storage.read_file(root / "manifest.json", limit=9) == b"%d" % won[0]
    assert storage.list_names(root) == ["manifest.json"]


def test_replace_file_replaces_the_content(root):
    for content in (b"old", b"newer"):
        storage.replace_file(root / "latest", content)
        assert storage.read_file(root / "latest", limit=9) == content
    assert storage.list_names(root) == ["latest"]


def test_remove_folder_keeps_neighbours(root):
    for name in ("step-1", "step-10", "step-1.tmp"):
        for below in ("manifest.json", "data", "deep/down/file"):
            folder = (root / name / below).parent
            storage.make_folders(folder)
            storage.create_file(root / name / below, b"x")
    storage.remove_folder(root / "step-1", first="manifest.json")
    assert storage.list_names(root) == ["step-1.tmp", "step-10"]
    assert not storage.exists(root / "step-1")
    assert storage.list_names(root / "step-10") == ["data", "deep", "manifest.json"]
    storage.remove_file(root / "step-10" / "manifest.json")
    assert storage.list_names(root / "step-10") == ["data", "deep"]


def test_remove_folder_removes_the_first_name_first(server_root, monkeypatch):
    storage.make_folders(server_root / "step")
    for name in ("a", "manifest.json", "z"):
        storage.create_file(server_root / "step" / name, b"x")
    store = type(remote.CONNECTIONS.store_of(server_root))
    order, real = [], store.remove
    monkeypatch.setattr(store, "remove", lambda self, key: (order.append(key.rsplit("/")[-1]), real(self, key))[1])
    storage.remove_folder(server_root / "step", first="manifest.json")
    assert order[0] == "manifest.json"
    assert sorted(order) == ["a", "manifest.json", "z"]


def test_link_file_adds_a_name_or_copies_on_the_server(root):
    storage.write_parts(root / "data", SIZES, part_of, threads=2)
    if "sftp:" in str(root):
        with pytest.raises(OSError, match="no links and no copies"):
            storage.link_file(root / "data", root / "copy")
        return
    storage.link_file(root / "data", root / "copy")
    with pytest.raises(FileExistsError):
        storage.link_file(root / "data", root / "copy")
    storage.remove_file(root / "data")
    assert storage.read_file(root / "copy", limit=2**30) == CONTENT


def test_real_folders_are_renamed(root):
    if not storage.supports_rename(root):
        storage.make_folder(root / "folder")
        assert not storage.exists(root / "folder"), "of an object store: until there is something in it"
        return
    storage.make_folder(root / "side")
    with pytest.raises(FileExistsError):
        storage.make_folder(root / "side")
    storage.create_file(root / "side" / "file", b"x")
    storage.rename(root / "side", root / "step")
    assert (storage.list_names(root), storage.list_names(root / "step")) == (["step"], ["file"])
    storage.make_folder(root / "side")
    storage.create_file(root / "side" / "file", b"y")
    with pytest.raises(OSError, match="side'"):
        storage.rename(root / "side", root / "step")


def test_special_characters_in_names_are_kept(root):
    names = ["a b", "ü", "x?y=1&z", "h#sh", "per%20cent", "st*r[0]", "plus+"]
    for name in names:
        storage.create_file(root / name, name.encode())
    assert storage.list_names(root) == sorted(names)
    assert [storage.read_file(root / name, limit=99).decode() for name in names] == names


def test_parts_of_an_upload_have_the_minimum_size():
    assert S3Store.part_bytes >= 5 * 2**20, "the least that S3 takes"
    sizes = [16 * 2**20, 2**20, 2**20, 8 * 2**20, 3]
    assert remote._group_parts(sizes, 8 * 2**20) == [range(1), range(1, 4), range(4, 5)]
    assert remote._group_parts([], 8) == []
    assert remote._group_parts([0, 0], 8) == [range(2)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "quiet_s", "shown"),
    [(Terminal(), 0.0, True), (Terminal(), 1e9, False), (io.StringIO(), 0.0, False)],
    ids=["long", "short", "pipe"],
)
def test_bar_is_shown_on_a_terminal_for_long_transfers(monkeypatch, stream, quiet_s, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with storage.TransferProgress("writing file", 100, show_after_s=quiet_s) as progress:
        progress.advance(60)
        progress.advance(40)
    assert ("writing file" in stream.getvalue()) is shown
