"""Real servers on loopback, each behind a proxy, for the tests of the storage layer. None has a fixed port.

Where a server cannot be had its tests are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from places.proxy import Proxy, Request

LONG_S = 300
_ACCOUNT = "devstoreaccount1"  # azurite's, with its key, which its documentation gives
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_MOTO = """
from moto.server import ThreadedMotoServer
import moto.s3.models
import threading
moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1  # the tests send small parts
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""
_GCP = """
from gcp_storage_emulator.server import create_server
import threading
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print("port", server._api._httpd.server_port, flush=True)
threading.Event().wait()
"""


@dataclass(kw_only=True)
class Server:
    """A place to keep files: ``root()`` is the URL of a new, empty folder, ``options`` are fsspec's for ``protocol``."""

    protocol: str
    top: str
    options: dict[str, Any] = field(repr=False)
    proxy: Proxy | None = None
    sshd: Sshd | None = None
    folders: int = 0
    home: Path | None = None
    """Home folder that clients need."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that clients need."""
        home = {} if self.home is None else {"HOME": str(self.home)}
        return {f"FSSPEC_{self.protocol.upper()}": json.dumps(self.options), **home}

    def root(self) -> str:
        self.folders += 1
        return f"{self.top}/test-{self.folders}"


@contextlib.contextmanager
def program(command: list[str], pattern: str, environment: dict[str, str] | None = None) -> Iterator[int]:
    """A server as a process of its own, ended with all it has started; the port that it announces on standard output."""
    setpriv = shutil.which("setpriv")  # so that it ends with us even when we are killed
    process = subprocess.Popen(
        [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment,
    )
    assert process.stdout is not None
    reading = threading.Thread(target=process.stdout.read, daemon=True)  # so that it never waits for a reader
    ending = threading.Timer(LONG_S, process.kill)
    ending.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := re.search(pattern, line):
                ending.cancel()
                reading.start()
                yield int(match[1])
                break
        else:
            pytest.fail(f"{command[0]} has ended without a port: {''.join(lines)}")
    finally:
        ending.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LONG_S)
        if reading.ident is not None:
            reading.join(LONG_S)
        process.stdout.close()


def needs(*modules: str) -> None:
    """Skip where a Python package is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs the package {module}, which the extra [test] installs")


@contextlib.contextmanager
def s3(behind_proxy: bool = True) -> Iterator[Server]:
    """An S3 server with a bucket; without the proxy it is as fast as it can be, and nothing can be done to its answers."""
    needs("s3fs", "moto", "flask")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(program([sys.executable, "-c", _MOTO], r"port (\d+)"))
        proxy = stack.enter_context(proxied(port)) if behind_proxy else None
        url = f"http://127.0.0.1:{port}" if proxy is None else proxy.url
        options = {"endpoint_url": url, "key": "testing", "secret": "testing"}
        import boto3

        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-east-1"
        )
        client.create_bucket(Bucket="bucket")
        client.close()
        yield Server(protocol="s3", top="s3://bucket", options=options, proxy=proxy)


@contextlib.contextmanager
def az() -> Iterator[Server]:
    needs("adlfs")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("needs azurite-blob: npm install --global azurite")
    command = [azurite, "--blobHost", "127.0.0.1", "--blobPort", "0", "--skipApiVersionCheck", "--inMemoryPersistence"]
    with (
        program([*command, "--disableTelemetry", "--silent"], r"listens on http://127.0.0.1:(\d+)") as port,
        proxied(port) as proxy,
    ):
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={proxy.url}/{_ACCOUNT};"
        )
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container("bucket").close()
        yield Server(protocol="az", top="az://bucket", options={"connection_string": connection}, proxy=proxy)


@contextlib.contextmanager
def gs() -> Iterator[Server]:
    needs("gcsfs", "gcp_storage_emulator")
    with program([sys.executable, "-c", _GCP], r"port (\d+)") as port, proxied(port) as proxy:
        proxy.rule = _generation_0
        options = {"endpoint_url": proxy.url, "token": "anon", "project": "test"}
        yield Server(protocol="gs", top="gs://bucket", options=options, proxy=proxy)


def _generation_0(request: Request) -> int | None:
    """The emulator takes ``ifGenerationMatch=0`` and ignores it; Google answers 412 when the object is there."""
    if request.method != "POST" or "ifGenerationMatch=0" not in request.path:
        return None
    if match := re.search(r"/b/([^/]+)/o/(.+)/compose", request.path):
        name = match[2]
    else:
        match = re.search(r"/b/([^/?]+)/o\?", request.path)
        named = re.search(rb"^\{.*\}\r$", request.body, re.MULTILINE)
        assert match is not None, request.path
        assert named is not None, request.path
        name = urllib.parse.quote(json.loads(named[0])["name"], safe="")
    return 412 if request.there(f"/storage/v1/b/{match[1]}/o/{name}") else None


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


class Sshd:
    """Debian's OpenSSH server, one process for each connection; ``cut`` breaks the next one after so many bytes."""

    def __init__(self, folder: Path, program: str) -> None:
        self._command = [program, "-i", "-e", "-f", str(folder / "sshd_config")]
        self.cut_sent: int | None = None  # bytes from the client
        self.cut_answered: int | None = None  # bytes from the server
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start(self._accept)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            ours, theirs = socket.socketpair()
            self._processes.append(
                subprocess.Popen(self._command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, start_new_session=True)
            )
            theirs.close()
            self._ends += [client, ours]
            self._start(self._relay, client, ours, "cut_sent")
            self._start(self._relay, ours, client, "cut_answered")

    def _relay(self, source: socket.socket, target: socket.socket, which: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                left = getattr(self, which)
                if left is not None:
                    setattr(self, which, left - len(data))
                    if left <= len(data):
                        setattr(self, which, None)
                        self.cuts += 1
                        break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)
        for end in self._ends:
            end.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LONG_S)


_CONFIGURATION = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
Subsystem sftp internal-sftp
"""


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """The server, with keys of its own in ``folder``."""
    needs("paramiko")
    executable = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if executable is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs an SSH server: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it goes with its privileges dropped
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=LONG_S)
    (folder / "sshd_config").write_text(_CONFIGURATION.format(folder=folder))
    server = Sshd(folder, executable)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def sftp() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="places-") as text, sshd(Path(text)) as server:
        folder = Path(text)
        public_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / ".ssh").mkdir()
        (folder / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{server.port} {public_key}\n")
        options = {"key_filename": str(folder / "user_key"), "allow_agent": False, "look_for_keys": False}
        yield Server(
            protocol="sftp",
            top=f"sftp://{getpass.getuser()}@127.0.0.1:{server.port}{folder}/files",
            options=options,
            sshd=server,
            home=folder,
        )


@contextlib.contextmanager
def memory() -> Iterator[Server]:
    yield Server(protocol="memory", top="memory://bucket", options={})
