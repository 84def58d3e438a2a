"""Messages over a socket that never waits."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from dtrain.launch.nodes.messages import MAX_LINE, GarbageError, Message, decode, encode

_CHUNK = 1 << 16
_MAX_QUEUED = 4 * MAX_LINE  # bytes for a peer that does not read: it is given up then


class Lines:
    """One end of a connection: messages are queued to be sent, and read as far as they have come."""

    def __init__(self, sock: socket.socket, *, max_line: int = MAX_LINE) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.max_line = max_line
        self.lost = ""  # why nothing can be received any more; "" while it can
        self.heard_at = self.sent_at = time.monotonic()
        self._selector: selectors.BaseSelector | None = None
        self._in, self._out = bytearray(), bytearray()
        self._interest = selectors.EVENT_READ

    def watch(self, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        """Have ``selector`` notice, until ``close``, when there is something to read, or room for what is queued."""
        selector.register(self.sock, self._interest, on_ready)
        self._selector = selector

    def send(self, message: Message) -> None:
        """Queue ``message`` and send what goes without waiting."""
        self._out += encode(message)
        self.sent_at = time.monotonic()
        if len(self._out) > _MAX_QUEUED:
            self.lost = self.lost or "it does not read"
        self.flush()

    def flush(self) -> bool:
        """Send what goes without waiting; whether nothing is left, or nobody to send it to."""
        if self.sock.fileno() == -1:
            return True
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[:_CHUNK])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # what the peer said before it left can still be read, and reading finds the end
            self._out.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector is not None and wanted != self._interest:
            self._interest = wanted
            self._selector.modify(self.sock, wanted, self._selector.get_key(self.sock).data)
        return not self._out

    def receive(self) -> list[Message]:
        """The messages that have come whole. Afterwards ``lost`` says whether these were the last."""
        messages: list[Message] = []
        while not self.lost and self.sock.fileno() != -1:
            try:
                data = self.sock.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.lost = error.strerror or str(error)
                break
            if not data:
                self.lost = "it closed the connection"
                break
            self.heard_at = time.monotonic()
            self._in += data
            self._take(messages)
        return messages

    def _take(self, messages: list[Message]) -> None:
        *lines, rest = self._in.split(b"\n")
        try:
            messages.extend(decode(bytes(line)) for line in lines)
        except GarbageError:
            self.lost = "it sent what is no message"
        if len(rest) > self.max_line:
            self.lost = "it sent a line without end"
        self._in = bytearray() if self.lost else rest

    def close(self) -> None:
        """Send what goes without waiting, and close."""
        if self.sock.fileno() == -1:
            return
        self.flush()
        with contextlib.suppress(OSError):  # unread bytes would turn the end into a reset, which overtakes what was sent
            while self.sock.recv(_CHUNK):
                pass
        if self._selector is not None:
            self._selector.unregister(self.sock)
        self.sock.close()
