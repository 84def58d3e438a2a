"""Gather small rows of numbers from all ranks of one node over Unix sockets (``RecordExchange``).

A step exchanges two records of a hundred bytes. gloo passes such a message between several threads of each rank. That takes
twenty times the processor time of a socket that the calling thread itself writes and reads. On several nodes, and if the
sockets cannot be opened, the records are collectives of the control group.

The ranks gather in ``log2(ranks)`` rounds. In round *k* each rank sends all rows that it has to the rank ``2**k`` before, and
receives the rows of the rank ``2**k`` after.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import torch.distributed as dist

from dtrain.dist.context import current_context
from dtrain.errors import StepError

if TYPE_CHECKING:
    from dtrain.dist.init import DistInfo

# Number of the exchange, and numbers in a row. Ranks that exchange different records raise.
_HEADER = struct.Struct("=qq")


class RecordExchange:
    """Sockets between the ranks of one node, which gather rows of numbers. Used by the main thread alone.

    An exception that leaves ``all_gather`` closes the sockets, so that the other ranks do not wait for this rank.

    Args:
        rank: index of this rank.
        world_size: number of ranks.
        senders: by round, the socket to the rank that receives.
        receivers: by round, the socket to the rank that sends.
        timeout_s: time to wait for a rank, in seconds.

    Attributes:
        count: number of exchanges that this rank has begun.
        row_length: length of the row of the last exchange.
        waits: if True, the last exchange has not ended.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        senders: Sequence[socket.socket],
        receivers: Sequence[socket.socket],
        *,
        timeout_s: float,
    ) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._rounds = list(zip(senders, receivers, strict=True))
        for connection in (*senders, *receivers):
            connection.settimeout(timeout_s)
        self.count, self.row_length, self.waits = 0, 0, False

    def all_gather(self, row: Sequence[float]) -> list[tuple[float, ...]]:
        """Return the rows of all ranks, in the order of ranks.

        Collective: one message per round, of at most 8 bytes for each number of each rank.

        Raises:
            DistNetworkError: a rank has closed its sockets, or did not send within ``timeout_s``.
            StepError: a rank exchanges another record.
        """
        self.count, self.row_length, self.waits = self.count + 1, len(row), True
        pack = _row_struct(len(row))
        rows, header, interruption = pack.pack(*row), _HEADER.pack(self.count, len(row)), None
        try:
            for sender, receiver in self._rounds:
                # The rank before has all rows but these.
                new = rows[: (self._world_size * pack.size) - len(rows)]
                sender.sendall(header + new)
                message, raised = _receive(receiver, header, len(header) + len(new))
                interruption = interruption or raised
                rows += message[len(header) :]
        except OSError as error:
            self.close()
            raise dist.DistNetworkError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise
        self.waits = False
        if interruption is not None:
            raise interruption
        # The first row is that of this rank.
        found = list(pack.iter_unpack(rows))
        return found[self._world_size - self._rank :] + found[: self._world_size - self._rank]

    def close(self) -> None:
        """Close the sockets."""
        for connection in (connection for pair in self._rounds for connection in pair):
            connection.close()


def _receive(connection: socket.socket, header: bytes, length: int) -> tuple[bytes, BaseException | None]:
    """Receive ``length`` bytes. Return them with the exception of a signal handler, to be raised after the exchange.

    Raises:
        OSError: the connection was closed, or the time is over.
        StepError: the message does not begin with ``header``.
        BaseException: a second exception of a signal handler.
    """
    message, interruption = b"", None
    while len(message) < length:
        try:
            part = connection.recv(length - len(message))
        except OSError:
            raise
        # The other ranks need this exchange, too, as with a collective of torch, which no signal interrupts.
        except BaseException as error:
            if interruption is not None:
                raise
            interruption = error
            continue
        if not part:
            raise ConnectionError("connection closed by peer")
        message += part
        if not message.startswith(header[: len(message)]):
            raise StepError(
                "step: ranks must exchange the same record, got another record from another rank. Take the same steps on all "
                "ranks, as loader.until does."
            )
    return message, interruption


@lru_cache(maxsize=16)
def _row_struct(length: int) -> struct.Struct:
    return struct.Struct(f"={length}d")


def open_record_exchange(info: DistInfo) -> RecordExchange | None:
    """Connect the ranks; None on all ranks if they are on several nodes, or if some rank cannot connect.

    Collective: the ranks of one node wait for each other in the rendezvous store.
    """
    reporter = current_context().missing_rank_reporter
    if reporter is None or info.world_size != info.local_world_size:
        return None
    store = dist.PrefixStore(f"{reporter.prefix}/records", reporter.store)
    # By round, the rank that receives.
    peers = [(info.rank - 2**k) % info.world_size for k in range((info.world_size - 1).bit_length())]
    listener = socket.socket(socket.AF_UNIX)
    senders: list[socket.socket] = []
    folder = ""
    try:
        # An address that does not exist makes the connection of another rank fail.
        address = ""
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="dtrain-")
            listener.bind(f"{folder}/records")
            listener.listen(len(peers))
            address = f"{folder}/records"
        store.set(f"address/{info.rank}", address)
        with suppress(OSError):
            senders.extend(_connect(store.get(f"address/{peer}").decode(), number) for number, peer in enumerate(peers))
        store.set(f"connected/{info.rank}", str(len(senders)))
        connected = [int(store.get(f"connected/{rank}")) for rank in range(info.world_size)]
        if min(connected) < len(peers):
            for sender in senders:
                sender.close()
            return None
        # All ranks have connected, so nothing waits here.
        accepted = dict(_accept(listener) for _ in peers)
        receivers = [accepted[number] for number in range(len(peers))]
        return RecordExchange(info.rank, info.world_size, senders, receivers, timeout_s=info.timeout_s)
    finally:
        listener.close()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, number: int) -> socket.socket:
    """Connect to the rank that listens at ``address``, as the sender of round ``number``.

    Raises:
        OSError: the rank does not listen there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(bytes([number]))
    except OSError:
        connection.close()
        raise
    return connection


def _accept(listener: socket.socket) -> tuple[int, socket.socket]:
    """Return the next connection with the number of its round."""
    connection, _ = listener.accept()
    return connection.recv(1)[0], connection


def _close_in_fork() -> None:
    """Close the sockets in a fork of a rank, which would keep the connections open after the rank has died."""
    context = current_context()
    if context.record_exchange is not None:
        context.record_exchange.close()
        context.record_exchange = None


os.register_at_fork(after_in_child=_close_in_fork)
