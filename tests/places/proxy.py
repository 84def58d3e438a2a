"""A network that does wrong on purpose: between a client and a real server on loopback."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_LONG_S = 90


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request of a client. ``there`` asks the server if the named object exists, with a request of the proxy's own."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    there: Callable[[str], bool] = field(repr=False)


@dataclass(kw_only=True)
class Fault:
    """Fault that is injected into matching requests, a number of times.

    Kinds: a status such as ``500``; ``reset``: the connection breaks after ``after`` bytes of the answer's body, with the
    request done; ``unsent``: it breaks before the server gets the request; ``truncated``: the answer ends after ``after`` bytes
    as if it were whole; ``lost``: the request is done, the connection ends without an answer; ``slow``: the answer takes
    ``after`` seconds.
    """

    kind: int | str
    matches: Callable[[Request], bool] = lambda request: True
    times: int = 1
    after: float = 0
    fired: int = 0


class Proxy:
    """A proxy that hands HTTP requests to a server at ``port``, except requests that a fault of ``faults`` matches."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.rule: Callable[[Request], int | None] | None = None
        """Answer that the emulator should give by its documentation: a status, or None to ask the emulator."""
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_LONG_S)

    @contextlib.contextmanager
    def doing(self, fault: Fault) -> Iterator[Fault]:
        """Inject this fault; a fault that never happens is an error of the test."""
        self.faults.append(fault)
        try:
            yield fault
            assert fault.fired, f"{fault} never fired; requests: {[(r.method, r.path) for r in self.requests[-9:]]}"
        finally:
            self.faults.remove(fault)

    def since(self, count: int) -> list[Request]:
        """Requests after the first ``count``."""
        with self._lock:
            return self.requests[count:]

    def take(self, request: Request) -> Fault | None:
        """Note the request; the fault that is due."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.fired < fault.times and fault.matches(request):
                    fault.fired += 1
                    return fault
        return None


class _Handler(http.server.BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16

    def log_message(self, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client may give up, too
            self._do()

    do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = do_GET

    def _do(self) -> None:
        request = Request(
            method=self.command, path=self.path, headers=dict(self.headers.items()), body=self._body(), there=self._is_there
        )
        fault = self.proxy.take(request)
        kind = fault.kind if fault else None
        if fault is not None and kind == "slow":
            time.sleep(fault.after)
        if kind == "unsent":
            return self._break()
        if isinstance(kind, int):
            return self._answer(kind, [], _said(kind, self.proxy.url))
        with self.proxy.turn if self.proxy.rule else contextlib.nullcontext():  # keeps other requests out
            ruled = self.proxy.rule(request) if self.proxy.rule else None
            status, headers, body = self._asked(request) if ruled is None else (ruled, [], b"")
        if kind == "lost":
            return self._break()
        if fault is not None and kind in ("reset", "truncated"):
            return self._answer(status, headers, body, only=int(fault.after), whole=kind == "truncated")
        return self._answer(status, headers, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _asked(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=_LONG_S)
        try:
            headers = {
                name: value for name, value in request.headers.items() if name.lower() not in ("transfer-encoding", "expect")
            }
            if request.body or request.method in ("PUT", "POST"):
                headers["Content-Length"] = str(len(request.body))
            upstream.request(request.method, request.path, request.body or None, headers)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _is_there(self, path: str) -> bool:
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=_LONG_S)
        try:
            upstream.request("GET", path)
            return upstream.getresponse().status == 200
        finally:
            upstream.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, only: int | None = None, whole: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        if self.command == "HEAD" and length is not None:
            self.send_header("Content-Length", length)
        elif status != 204:
            self.send_header("Content-Length", str(len(body) if only is None or not whole else min(only, len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if only is None else body[:only])
        self.wfile.flush()
        if only is not None and not whole:
            self._break()

    def _break(self) -> None:
        """Reset the connection: the client sees that it was not a proper end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _said(status: int, url: str) -> bytes:
    """An error as S3 words it; the other clients go by the status."""
    code = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 404: "NoSuchKey"}.get(status, "Error")
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>made up at {url}</Message></Error>'.encode()
