"""A web server on loopback for the files of a folder: with ranges and listings, or without."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: object, ranges: bool, listing: bool, **more: object) -> None:
        self.ranges, self.listing = ranges, listing
        super().__init__(*args, **more)  # type: ignore[arg-type]

    def log_message(self, *args: object) -> None:
        pass

    def list_directory(self, path: str) -> None:  # type: ignore[override]
        if not self.listing:
            return self.send_error(403)
        return super().list_directory(path)  # type: ignore[return-value]

    def do_GET(self) -> None:
        path = Path(self.translate_path(urllib.parse.urlsplit(self.path).path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not self.ranges or asked is None or not path.is_file():
            return super().do_GET()
        size = path.stat().st_size
        begin, end = int(asked[1]), min(int(asked[2]) + 1, size)
        if begin >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *request: object) -> None:
        """Nothing: a client that has gone is not this server's affair."""


@contextlib.contextmanager
def web(folder: Path | str, *, ranges: bool = True, listing: bool = True) -> Iterator[int]:
    """The port of a server of ``folder``."""
    handler = partial(_Handler, directory=os.fspath(folder), ranges=ranges, listing=listing)
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(90)
