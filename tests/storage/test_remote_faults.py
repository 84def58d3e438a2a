"""Network faults under the storage layer: transient faults are retried, other faults raise, nothing is done twice."""

import os
import random
import threading
from dataclasses import replace

import fsspec.config
import pytest

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.storage import remote, sftp_store
from dtrain.storage.object_stores import S3Store
from dtrain.storage.remote import disconnect
from dtrain.storage.remote_store import RemoteStore
from dtrain.storage.sftp_store import SftpStore
from places.proxy import Fault

HTTP = ["s3", "az", "gs"]
SIZES = [300_000, 300_000, 70_001]
CONTENT = os.urandom(sum(SIZES))


def part_of(number):
    return [CONTENT[sum(SIZES[:number]) : sum(SIZES[: number + 1])]]


# The number of the request, by server. The object of a file is called "file", that of many parts "data", the folder "folder".
WHICH = {
    ("s3", "create"): lambda r: r.method == "PUT" and r.path.endswith("/file"),
    ("s3", "begin"): lambda r: r.method == "POST" and r.path.endswith("?uploads"),
    ("s3", "part"): lambda r: r.method == "PUT" and "partNumber=2" in r.path,
    ("s3", "finish"): lambda r: r.method == "POST" and "uploadId=" in r.path,
    ("s3", "read"): lambda r: r.method == "GET" and r.path.endswith("/data"),
    ("s3", "look"): lambda r: r.method == "HEAD",
    ("s3", "list"): lambda r: r.method == "GET" and "list-type=2" in r.path,
    ("az", "create"): lambda r: r.method == "PUT" and r.path.endswith("/file"),
    ("az", "part"): lambda r: r.method == "PUT" and "comp=block&" in r.path,
    ("az", "finish"): lambda r: r.method == "PUT" and "comp=blocklist" in r.path,
    ("az", "read"): lambda r: r.method == "GET" and r.path.endswith("/data"),
    ("az", "look"): lambda r: r.method == "HEAD",
    ("az", "list"): lambda r: r.method == "GET" and "comp=list" in r.path,
    ("gs", "create"): lambda r: r.method == "POST" and b'/file"' in r.body and "/upload/" in r.path,
    ("gs", "part"): lambda r: r.method == "POST" and b"/data." in r.body and "/upload/" in r.path,
    ("gs", "finish"): lambda r: r.method == "POST" and "/compose" in r.path,
    ("gs", "read"): lambda r: r.method == "GET" and "/download/" in r.path,
    ("gs", "look"): lambda r: r.method == "GET" and r.path.endswith("%2Fdata"),
    ("gs", "list"): lambda r: r.method == "GET" and "/o?" in r.path,
    **{(place, "remove"): lambda r: r.method == "DELETE" for place in HTTP},
}
KINDS = {
    "create": ["500", "503", "unsent", "lost"],
    "begin": ["503", "lost"],
    "part": ["500", "503", "unsent", "lost"],
    "finish": ["500", "503", "unsent", "lost"],
    "read": ["500", "503", "unsent", "reset", "truncated"],
    "look": ["503", "unsent"],
    "list": ["503", "reset", "truncated", "slow"],
    "remove": ["503", "lost"],
}
AFTER = {"reset": 1000, "truncated": 1000, "slow": 0.3}
SHORT = {"list": 100}  # a listing is no longer than that
CASES = [(place, what, kind) for place in HTTP for what in KINDS for kind in KINDS[what] if (place, what) in WHICH]


@pytest.fixture
def small(monkeypatch):
    """Parts and pieces that are small enough to be many."""
    for store in (RemoteStore, SftpStore):
        monkeypatch.setattr(store, "part_bytes", 2**18)
    monkeypatch.setattr(remote, "_READ_REQUEST_BYTES", 100_000)


def fault_of(place, what, kind, *, times=None):
    after = SHORT.get(what, AFTER.get(kind, 0)) if kind != "slow" else AFTER[kind]
    return Fault(
        kind=int(kind) if kind.isdecimal() else kind,
        matches=WHICH[place, what],
        times=times or (2 if kind.isdecimal() else 1),
        after=after,
    )


@pytest.mark.sample(24)
@pytest.mark.parametrize(("place", "what", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_transient_fault_is_retried(place, what, kind, reach, small):
    server = reach(place)
    root = storage.resolve_path(server.root())
    folder = root / "folder"
    doing = server.proxy.doing(fault_of(place, what, kind))
    if what == "create":
        with doing:
            storage.create_file(folder / "file", CONTENT)
        assert storage.read_file(folder / "file", limit=2**30) == CONTENT
        assert storage.list_names(folder) == ["file"]
    elif what in ("begin", "part", "finish"):
        with doing:
            storage.write_parts(folder / "data", SIZES, part_of, threads=2)
        assert storage.read_file(folder / "data", limit=2**30) == CONTENT
        assert storage.list_names(folder) == ["data"]
    else:
        storage.write_parts(folder / "data", SIZES, part_of, threads=2)
        storage.create_file(folder / "file", b"x")
        with doing:
            assert storage.read_file(folder / "data", limit=2**30) == CONTENT
            assert storage.list_names(folder) == ["data", "file"]
            storage.remove_folder(folder, first="file")
        assert not storage.exists(folder)


@pytest.mark.parametrize("place", HTTP)
def test_busy_server_is_retried_a_bounded_number_of_times(place, reach, monkeypatch):
    server = reach(place)
    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, max_attempts=4))
    root = storage.resolve_path(server.root())
    before = len(server.proxy.requests)
    with (
        server.proxy.doing(fault_of(place, "create", "503", times=99)),
        pytest.raises(OSError, match=rf"\(tried 4 times\): '{root}/file'$") as caught,
    ):
        storage.create_file(root / "file", b"x")
    assert "\n" not in str(caught.value)
    assert len([r for r in server.proxy.since(before) if WHICH[place, "create"](r)]) == 4, "libraries' tries would multiply"
    assert not storage.exists(root / "file")


@pytest.mark.parametrize("place", HTTP)
@pytest.mark.parametrize(("status", "raised"), [(403, PermissionError), (404, FileNotFoundError)])
def test_permanent_errors_are_not_retried(place, status, raised, reach):
    if (place, status) == ("gs", 403):
        raised = OSError  # gcsfs keeps the status to itself
    server = reach(place)
    root = storage.resolve_path(server.root())
    before = len(server.proxy.requests)
    with server.proxy.doing(fault_of(place, "create", str(status), times=99)), pytest.raises(raised, match=f"{root}/file'$"):
        storage.create_file(root / "file", b"x")
    assert len([r for r in server.proxy.since(before) if WHICH[place, "create"](r)]) == 1


@pytest.mark.parametrize("place", HTTP)
def test_retried_create_refuses_file_of_other_process(place, reach, monkeypatch):
    server = reach(place)
    root = storage.resolve_path(server.root())
    pauses = []

    def rival(pause):
        pauses.append(pause)
        storage.replace_file(root / "file", b"theirs")

    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, sleep=rival))
    fault = fault_of(place, "create", "unsent", times=2)  # the first one may be made up for by the HTTP library
    with server.proxy.doing(fault), pytest.raises(FileExistsError):
        storage.create_file(root / "file", b"theirs")
    assert pauses
    assert storage.read_file(root / "file", limit=9) == b"theirs"


@pytest.mark.parametrize("place", HTTP)
def test_failed_upload_leaves_no_parts(place, reach, small, monkeypatch):
    server = reach(place)
    monkeypatch.setattr(remote, "RETRY", replace(remote.RETRY, max_attempts=2))
    folder = storage.resolve_path(server.root()) / "folder"
    storage.create_file(folder / "file", b"x")
    with server.proxy.doing(fault_of(place, "finish", "503", times=99)), pytest.raises(OSError, match="tried 2 times"):
        storage.write_parts(folder / "data", SIZES, part_of, threads=2)
    assert storage.list_names(folder) == ["file"]


# A connection of SSH ends after so many bytes, before, during and after the server's work.
CUTS = [(way, random.Random(f"{way}{draw}").randrange(1, 12_000)) for way in ("cut_sent", "cut_answered") for draw in range(4)]


@pytest.mark.parametrize(("way", "after"), CUTS, ids=[f"{way}-{after}" for way, after in CUTS])
def test_broken_sftp_connection_is_replaced(way, after, reach, small):
    server = reach("sftp")
    assert server.sshd is not None
    root = storage.resolve_path(server.root())
    storage.make_folders(root)
    cuts = server.sshd.cuts
    setattr(server.sshd, way, after)
    for turn in range(20):  # until so many bytes have gone that way
        folder = root / f"folder-{turn}"
        storage.make_folder(folder)
        storage.write_parts(folder / "data", SIZES, part_of, threads=2)
        storage.create_file(folder / "file", CONTENT[:5000])
        assert storage.read_file(folder / "data", limit=2**30) == CONTENT
        assert storage.read_file(folder / "file", limit=2**30) == CONTENT[:5000]
        storage.rename(folder, root / f"step-{turn}")
        storage.remove_file(root / f"step-{turn}" / "file")
        assert storage.list_names(root / f"step-{turn}") == ["data"]
        if server.sshd.cuts > cuts:
            break
    assert server.sshd.cuts == cuts + 1, "the fault has fired"


def test_sftp_connection_that_breaks_between_read_requests_is_replaced(reach, small, monkeypatch):
    server = reach("sftp")
    paramiko = pytest.importorskip("paramiko")
    root = storage.resolve_path(server.root())
    storage.make_folders(root)
    storage.write_parts(root / "data", SIZES, part_of, threads=1)
    send, asked = paramiko.SFTPClient._send_packet, []

    def send_on_a_line_that_breaks(ftp, kind, packet):
        if kind == paramiko.sftp.CMD_READ:
            asked.append(threading.current_thread().name)
            if len(asked) == 2:
                ftp.get_channel().get_transport().close()
        return send(ftp, kind, packet)

    monkeypatch.setattr(paramiko.SFTPClient, "_send_packet", send_on_a_line_that_breaks)
    assert storage.read_file(root / "data", limit=2**30) == CONTENT
    assert len(asked) > 2, "the fault has fired"
    assert all(name.startswith("dtrain-fetch") for name in asked), "who waits for the answers sends, and sees the error"


@pytest.mark.parametrize("kind", ["CMD_READ", "CMD_WRITE", "CMD_STAT"])
def test_silent_sftp_server_times_out_once_per_attempt(kind, reach, small, monkeypatch):
    server = reach("sftp")
    paramiko = pytest.importorskip("paramiko")
    root = storage.resolve_path(server.root())
    storage.make_folders(root)
    storage.write_parts(root / "data", SIZES, part_of, threads=1)
    monkeypatch.setattr(sftp_store, "_TIMEOUT_S", 0.5)
    send, feed, recv = paramiko.SFTPClient._send_packet, paramiko.Channel._feed, paramiko.Channel.recv
    silent, timeouts = [], []

    def send_to_a_server_that_falls_silent(ftp, number, packet):
        if number == getattr(paramiko.sftp, kind) and not silent:
            silent.append(ftp.get_channel().get_transport())
        return send(ftp, number, packet)

    def drop_what_it_says(channel, message):
        return None if channel.get_transport() in silent else feed(channel, message)

    def count_timeouts(channel, count):
        try:
            return recv(channel, count)
        except TimeoutError:
            timeouts.append(channel)
            raise

    monkeypatch.setattr(paramiko.SFTPClient, "_send_packet", send_to_a_server_that_falls_silent)
    monkeypatch.setitem(paramiko.Transport._channel_handler_table, paramiko.common.MSG_CHANNEL_DATA, drop_what_it_says)
    monkeypatch.setattr(paramiko.Channel, "recv", count_timeouts)
    storage.create_file(root / "file", CONTENT[:5000])
    assert storage.read_file(root / "data", limit=2**30) == CONTENT
    assert storage.exists(root / "file")
    assert (len(silent), len(timeouts)) == (1, 1)


def test_unknown_sftp_server_is_refused(reach, monkeypatch, tmp_path):
    server = reach("sftp")
    remote_root = storage.resolve_path(server.root())
    disconnect()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PermissionError, match=r"the host key \(ssh-ed25519\) is not in .*known_hosts. Compare") as caught:
        storage.exists(remote_root)
    assert "\n" not in str(caught.value)


def test_silent_server_times_out(reach, monkeypatch):
    server = reach("s3")
    disconnect()
    monkeypatch.setitem(S3Store.options["config_kwargs"], "read_timeout", 0.5)
    root = storage.resolve_path(server.root())
    before = len(server.proxy.requests)
    with server.proxy.doing(Fault(kind="slow", matches=WHICH["s3", "create"], after=3)):
        storage.create_file(root / "file", b"x")
    disconnect()  # others get the usual time again
    assert storage.read_file(root / "file", limit=9) == b"x"
    assert len([r for r in server.proxy.since(before) if WHICH["s3", "create"](r)]) == 2


def test_connection_without_credentials_is_replaced_when_the_configuration_has_them(reach, monkeypatch):
    """A thread of an ended test or job may connect after its credentials were removed. Later requests must not use that."""
    root = storage.resolve_path(reach("s3").root())
    disconnect()
    with monkeypatch.context() as bare:
        bare.delitem(fsspec.config.conf, "s3")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            bare.delenv(name)
        bare.setenv("AWS_EC2_METADATA_DISABLED", "true")
        bare.setenv("HOME", "/nonexistent")
        with pytest.raises(OSError, match="Unable to locate credentials"):
            storage.replace_file(root / "file", b"x")
    storage.replace_file(root / "file", b"x")
    assert storage.read_file(root / "file", limit=9) == b"x"


def test_missing_credentials_raise_one_line_error(reach, monkeypatch):
    pytest.importorskip("adlfs")
    disconnect()
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"^az://: .*credentials.*. Set options in the environment or in fsspec") as caught:
        storage.exists(storage.resolve_path("az://bucket/x"))
    assert "\n" not in str(caught.value)
