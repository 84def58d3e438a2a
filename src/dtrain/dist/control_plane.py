"""Exchange small data between all ranks over the ranks' own sockets: ``ControlPlane``.

Records of a step, JSON, agreements of a checkpoint and the stop signal all travel here. gloo passes a message of a hundred
bytes through several threads of each rank, which takes twenty times the processor time of a socket that the calling thread
itself writes and reads. Its groups also connect every rank with every rank. ``control_protocol`` says which rank sends what to
whom, and ``control_sockets`` opens the connections.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar

import torch.distributed as dist

from dtrain.dist.context import current_context
from dtrain.dist.control_protocol import Layout, Protocol, all_gather, gather, reduce_rows
from dtrain.dist.row_summary import RowSpec, RowSummary
from dtrain.errors import DistError, StepError

T = TypeVar("T")
ChannelName: TypeAlias = Literal["control", "background"]
CHANNELS: tuple[ChannelName, ...] = ("control", "background")

# Number of the exchange, length of the data, and the name of the exchange. Ranks whose numbers or names differ raise.
_NAME_BYTES = 40
_HEADER = struct.Struct(f"=qq{_NAME_BYTES}s")
# Most messages fit into one read.
_READ_BYTES = 1 << 16
_MAX_READ_BYTES = 1 << 20
# Sockets hold messages of this size, so a rank can send one before it reads.
_SMALL_BYTES = 1 << 15


@dataclass(frozen=True, slots=True)
class ChannelExchange:
    """One exchange of a channel, for observers.

    Args:
        channel: name of the channel.
        op: ``"all_gather"`` or ``"gather"``.
        bytes: bytes of all ranks that the exchange brings together.
    """

    channel: ChannelName
    op: str
    bytes: int


class Channel:
    """Connections of this rank for the exchanges of one thread. All ranks run the same exchanges in the same order.

    After an exception the connections must be closed, so that the other ranks do not wait for this rank. The block of
    ``report_missing_ranks`` around the exchange does so, after it has told them of the failure.

    Args:
        name: name of the channel.
        layout: place of this rank.
        connections: socket to each rank that this rank exchanges messages with.
        timeout_s: time to wait for a message, in seconds.

    Attributes:
        count: number of exchanges that this rank has begun.
        num_records: number of records of a step among them.
        op: name of the last exchange.
        size: numbers or bytes of this rank in the last exchange.
        waits: if True, the last exchange has not ended.
        failed: if True, an exception has left an exchange.
        lost_peer: rank whose connection was closed; None after a timeout.
    """

    def __init__(
        self, name: ChannelName, layout: Layout, connections: Mapping[int, socket.socket], *, timeout_s: float
    ) -> None:
        self.name, self.layout, self.timeout_s = name, layout, timeout_s
        self._connections = dict(connections)
        self._buffers = {peer: bytearray() for peer in connections}
        for connection in connections.values():
            connection.settimeout(timeout_s)
        self.count, self.num_records, self.op, self.size, self.waits = 0, 0, "", 0, False
        self.failed, self._closed = False, False
        self.lost_peer: int | None = None
        self._interruption: BaseException | None = None

    def all_gather(self, payload: bytes, *, caller: str, timeout_s: float | None = None) -> list[bytes]:
        """Return the payloads of all ranks, by rank.

        Raises:
            DistNetworkError: a rank has closed its connections, or did not send in time.
            DistError: a rank is in another exchange.
        """
        protocol = all_gather(self.layout, payload)
        found = self._run(protocol, "all_gather", caller, len(payload), self.timeout_s if timeout_s is None else timeout_s)
        _notify(self.name, "all_gather", sum(map(len, found)))
        return found

    def gather(self, payload: bytes, dst: int, *, caller: str) -> list[bytes] | None:
        """Return the payloads of all ranks on rank ``dst``, by rank; None on the other ranks. Raises like ``all_gather``."""
        found = self._run(gather(self.layout, payload, dst), "gather", caller, len(payload), self.timeout_s)
        _notify(self.name, "gather", 0 if found is None else sum(map(len, found)))
        return found

    def reduce_rows(
        self, row: Sequence[float], spec: RowSpec, *, caller: str
    ) -> tuple[RowSummary, list[tuple[float, ...]] | None]:
        """Return the summary of the rows of all ranks; on one node also the rows. Raises like ``all_gather``."""
        self.num_records += 1
        return self._run(reduce_rows(self.layout, row, spec), "record", caller, len(row), self.timeout_s)

    def _run(self, protocol: Protocol[T], op: str, caller: str, size: int, timeout_s: float) -> T:
        """Run one exchange. An interrupt of a signal handler is raised after it, because the other ranks need this rank."""
        self.count, self.op, self.size, self.waits = self.count + 1, op, size, True
        self._interruption = None
        tag = _tag(op, size if op == "record" else 0, caller)
        received, peer = b"", -1
        try:
            if timeout_s != self.timeout_s:
                self._set_timeouts(timeout_s)
            transfer = next(protocol)
            while True:
                to, data, source = transfer
                if to is not None:
                    peer = to
                    self._send(to, _HEADER.pack(self.count, len(data), tag) + data, timeout_s)
                if source is not None:
                    peer = source
                    received = self._receive(source, tag, caller)
                transfer = protocol.send(received)
        except StopIteration as stop:
            result: T = stop.value
        except OSError as error:
            self.failed, self.lost_peer = True, None if isinstance(error, TimeoutError) else peer
            raise dist.DistNetworkError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.failed = True
            raise
        self.waits = False
        if timeout_s != self.timeout_s:
            self._set_timeouts(self.timeout_s)
        if self._interruption is not None:
            raise self._interruption
        return result

    def _set_timeouts(self, timeout_s: float) -> None:
        for connection in self._connections.values():
            connection.settimeout(timeout_s)

    def _send(self, to: int, message: bytes, timeout_s: float) -> None:
        if len(message) <= _SMALL_BYTES:
            self._connections[to].sendall(message)
            return
        self._set_timeouts(0)
        try:
            rest = memoryview(message)
            while rest:
                try:
                    rest = rest[self._connections[to].send(rest) :]
                except BlockingIOError:
                    self._read_while_sending(to, timeout_s)
        finally:
            self._set_timeouts(timeout_s)

    def _read_while_sending(self, to: int, timeout_s: float) -> None:
        """Wait until rank ``to`` takes more bytes. Read meanwhile, because that rank may be waiting for this rank to read."""
        poll, peers = select.poll(), {connection.fileno(): peer for peer, connection in self._connections.items()}
        deadline = time.monotonic() + timeout_s
        for peer, connection in self._connections.items():
            poll.register(connection, select.POLLIN | (select.POLLOUT if peer == to else 0))
        while (remaining_s := deadline - time.monotonic()) > 0:
            for number, events in poll.poll(remaining_s * 1000):
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    part = self._connections[peers[number]].recv(_MAX_READ_BYTES)
                    self._buffers[peers[number]] += part
                    if not part:
                        # The exchange itself finds a lost peer when it needs the peer.
                        poll.unregister(number)
                if peers[number] == to and events & (select.POLLOUT | select.POLLHUP | select.POLLERR):
                    return
        raise TimeoutError("timed out")

    def _receive(self, source: int, tag: bytes, caller: str) -> bytes:
        connection, buffer = self._connections[source], self._buffers[source]
        end = 0
        while True:
            if buffer:
                if not end and len(buffer) >= _HEADER.size:
                    end = self._end_of_message(buffer, tag, caller, source)
                if end and len(buffer) >= end:
                    message = bytes(memoryview(buffer)[_HEADER.size : end])
                    del buffer[:end]
                    return message
            missing = end - len(buffer)
            try:
                part = connection.recv(_READ_BYTES if missing < _READ_BYTES else min(missing, _MAX_READ_BYTES))
            except OSError:
                raise
            # The other ranks need this exchange, too, as with a collective of torch, which no signal interrupts.
            except BaseException as error:
                if self._interruption is not None:
                    raise
                self._interruption = error
                continue
            if not part:
                raise ConnectionError("connection closed by peer")
            # A message of a record arrives at once and alone.
            if not buffer and len(part) >= _HEADER.size and len(part) == self._end_of_message(part, tag, caller, source):
                return part[_HEADER.size :]
            buffer += part

    def _end_of_message(self, data: bytes | bytearray, tag: bytes, caller: str, source: int) -> int:
        """Return the length of the message that begins with ``data``. Raise if it belongs to another exchange."""
        number, length, name = _HEADER.unpack_from(data)
        if number != self.count or name != tag:
            raise _mismatch(caller, tag, source, name)
        return _HEADER.size + int(length)

    @property
    def closed_here(self) -> bool:
        """Return True if this process has closed a connection."""
        return self._closed or any(connection.fileno() < 0 for connection in self._connections.values())

    def file_numbers(self) -> dict[int, int]:
        """Return the rank of each connection, by file number."""
        return {connection.fileno(): peer for peer, connection in self._connections.items()}

    def shut_down(self) -> None:
        """End the connections for all processes that hold them, and wake the threads that wait for them."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self, *, shut_down: bool = True) -> None:
        """Close the connections.

        Args:
            shut_down: if False, other processes may go on using them.
        """
        self._closed = True
        if shut_down:
            self.shut_down()
        for connection in self._connections.values():
            connection.close()


@lru_cache(maxsize=256)
def _tag(op: str, size: int, caller: str) -> bytes:
    """Return the name of an exchange in its messages. The length of a record is part of its name."""
    name = f"{op} {size} {caller}" if op == "record" else f"{op} {caller}"
    return name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _mismatch(caller: str, own: bytes, peer: int, other: bytes) -> DistError | StepError:
    """Return the error of ranks that are in different exchanges."""
    here, there = (tag.rstrip(b"\0").decode(errors="replace") for tag in (own, other))
    place = "another record" if here == there or {here.split()[0], there.split()[0]} == {"record"} else repr(there)
    kind = StepError if here.startswith("record") else DistError
    return kind(
        f"{caller}: ranks must run the same exchange, got {place} from rank {peer}. Take the same steps on all ranks, as "
        "loader.until does, and run collectives in one order."
    )


@dataclass(slots=True, eq=False)
class ControlPlane:
    """Channels of this rank, by name. No channel is used from two threads.

    Args:
        layout: place of this rank.
        channels: channels by name.
        observers: functions that are called after each gather of this thread.
    """

    layout: Layout
    channels: dict[ChannelName, Channel] = field(default_factory=dict)

    def __getitem__(self, name: ChannelName) -> Channel:
        return self.channels[name]

    def close(self, *, shut_down: bool = True) -> None:
        """Close the connections of all channels."""
        for channel in self.channels.values():
            channel.close(shut_down=shut_down)


Observer: TypeAlias = Callable[[ChannelExchange], None]
_OBSERVERS: list[Observer] = []


@contextmanager
def observe_exchanges(observer: Observer) -> Iterator[None]:
    """Call ``observer`` after each gather of this process inside of the context, except after records of a step."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def _notify(channel: ChannelName, op: str, size: int) -> None:
    for observer in _OBSERVERS:
        observer(ChannelExchange(channel, op, size))


def _close_in_fork() -> None:
    """Close the sockets in a fork of a rank, which would keep the connections open after the rank has died."""
    context = current_context()
    if context.incidents is not None:
        context.incidents.stop()
    if context.control_plane is not None:
        context.control_plane.close(shut_down=False)
        context.control_plane = None


os.register_at_fork(after_in_child=_close_in_fork)
