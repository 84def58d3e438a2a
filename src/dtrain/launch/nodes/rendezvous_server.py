"""Node 0's side: takes the nodes in, compares them, and passes on how their ranks end. Decides; does no waiting."""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dtrain.launch.nodes import compatibility
from dtrain.launch.nodes.addresses import find_interface
from dtrain.launch.nodes.messages import (
    MAX_LINE,
    PROTOCOL,
    Hello,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    MessageSocket,
    NodeFailed,
    Ping,
    RanksExited,
    RanksFailed,
    Welcome,
)

PING_INTERVAL_S = 1.0
LOST_NODE_EXIT_CODE = 1  # what a launcher exits with when the failure has no code of its own
INTERFACE_HINT = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of the ranks"
_WAITING_NOTICE_S = 10.0
_ACCEPT_RETRY_S = 0.05
_MAX_UNIDENTIFIED = 64  # connections that have not said who they are
_MAX_HELLO_BYTES = 1 << 16
_MAX_REJECTION_NOTICES = 16  # notices about strangers: they may come for as long as the job runs


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to the hub; a member once it has a place, and gone once it is closed."""

    socket: MessageSocket
    address: str
    hello: Hello | None = None
    exit_codes: dict[int, int] | None = None

    @property
    def display_name(self) -> str:
        return self.address if self.hello is None else self.hello.display_name


def _local_server_address(listener: socket.socket) -> str:
    """The address by which this host reaches what listens like ``listener``."""
    address = str(listener.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


class RendezvousServer:
    """The meeting at node 0. ``poll`` has to be called a few times a second.

    Args:
        own: what node 0 says of itself: its agent joins like all others, over a connection given to ``add_connection``.
        addr: address and port, as they are shown.
        hosts: by node rank, as far as they are known before they come.
        notify: takes lines for node 0's terminal.
    """

    def __init__(
        self,
        own: Hello,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        addr: str,
        hosts: tuple[str, ...],
        timeout_s: float,
        silence_s: float,
        notify: Callable[[str], None],
    ) -> None:
        self._own_hello, self._listener, self._selector = own, listener, selector
        self._addr, self._hosts, self._timeout_s, self._notify = addr, hosts, timeout_s, notify
        self._silence_s = silence_s
        self._peers: list[_Peer] = []
        self._members: dict[int, _Peer] = {}
        self._phase: Literal["joining", "running", "over"] = "joining"
        self._started_at = time.monotonic()
        self._said_waiting = False
        self._rejections: list[str] = []  # for the message when somebody is missing in the end
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def add_connection(self, sock: socket.socket, came_from: str) -> None:
        """Take a connection in, of which nothing is known yet."""
        peer = _Peer(socket=MessageSocket(sock, max_line=_MAX_HELLO_BYTES), address=came_from)
        peer.socket.watch(self._selector, partial(self._read_peer, peer))
        self._peers.append(peer)

    def poll(self, now: float) -> None:
        """Do what is due: pings, and giving up on who is silent, or does not come."""
        for peer in list(self._peers):
            if now - peer.socket.last_received_at > self._silence_s:
                self._peer_lost(peer, f"was silent for {self._silence_s:.0f} s")
            elif peer.hello is not None and now - peer.socket.last_sent_at >= PING_INTERVAL_S:
                peer.socket.send(Ping())
        if self._phase == "joining":
            waited = now - self._started_at
            if waited > self._timeout_s:
                self._refuse_all(self._describe_missing_nodes())
            elif waited > _WAITING_NOTICE_S and not self._said_waiting:
                self._said_waiting = True
                self._notify(
                    f"launch: {compatibility.describe_progress(self._hellos(), self._hosts, waited)}; waits up to {self._timeout_s:.0f} s"
                )

    def reset_timeouts(self, now: float) -> None:
        """Start counting anew: this process itself stood still, so nobody's silence means anything."""
        for peer in self._peers:
            peer.socket.last_received_at = now

    def flush(self) -> bool:
        """Whether everything that was said is on its way."""
        return not [peer for peer in self._peers if not peer.socket.flush()]

    def close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _hellos(self) -> dict[int, Hello]:
        return {rank: peer.hello for rank, peer in self._members.items() if peer.hello is not None}

    def _accept(self) -> None:
        """Take in who has connected. Among too many that do not say who they are, the one that waits longest has to go."""
        strangers = [peer for peer in self._peers if peer.hello is None]
        try:
            sock, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                for peer in strangers[:1]:
                    self._drop(peer)
                time.sleep(_ACCEPT_RETRY_S)  # where none could be dropped, the listener stays ready
            return
        if len(strangers) >= _MAX_UNIDENTIFIED:
            self._drop(strangers[0])
        self.add_connection(sock, str(host))

    def _read_peer(self, peer: _Peer) -> None:
        peer.socket.flush()
        for message in peer.socket.receive():
            self._handle_message(peer, message)
            if peer not in self._peers:
                return
        if peer.socket.closed_reason:
            self._peer_lost(peer, f"is lost: {peer.socket.closed_reason}")

    def _handle_message(self, peer: _Peer, message: Message) -> None:
        match message:
            case Ping():
                pass
            case Hello() if peer.hello is None:
                self._handle_hello(peer, message)
            case RanksFailed() if peer.hello is not None and self._phase == "running":
                line = f"{peer.display_name}: {message.line}"
                self._broadcast_failure(NodeFailed(line=line, code=message.code, node_rank=peer.hello.node_rank), but=peer)
            case RanksExited() if peer.hello is not None and self._phase != "joining":
                peer.exit_codes = dict(message.exit_codes)
                self._finish_if_all_exited()
            case _ if peer.hello is None:
                self._peer_lost(peer, "sent what no launcher sends")
            case _:
                pass  # late: what it says has been decided already

    def _handle_hello(self, peer: _Peer, hello: Hello) -> None:
        if objection := self._find_objection(hello):
            self._reject(peer, objection)
            return
        peer.hello, peer.socket.max_line = hello, MAX_LINE
        if (why := compatibility.find_rank_conflict(self._hellos(), hello)) is not None:
            self._members[hello.node_rank] = peer
            self._refuse_all(why)
            return
        self._members[hello.node_rank] = peer
        peer.socket.send(Welcome(host=self._own_hello.host))
        if compatibility.all_joined(self._hellos()):
            self._start_ranks()

    def _find_objection(self, hello: Hello) -> str:
        """Why this one may not join, while the others go on. Also said to it, so it names both."""
        mine, theirs = self._own_hello, f"{hello.display_name}, pid {hello.pid}"
        here = f"{mine.host}, pid {mine.pid}" + (f", run {mine.run_name}" if mine.run_name else "")
        if hello.protocol != PROTOCOL:
            return f"{theirs} speaks another version of this protocol; install the same dtrain on all nodes"
        if not hmac.compare_digest(hello.token.encode(), mine.token.encode()):
            return f"{theirs} belongs to another job than the one at {self._addr} ({here}): their run tokens differ"
        if not compatibility.is_plausible(hello):
            return f"{theirs} says of itself what cannot be"
        there = self._members.get(hello.node_rank)
        if there is not None and there.hello is not None:
            first = f"{there.display_name}, pid {there.hello.pid}"
            return f"{theirs} came to {self._addr} ({here}), where {first}, is already; give each node its own --node-rank"
        if self._phase != "joining":
            return f"{theirs} came to {self._addr} ({here}), which has begun without it; choose another --master-port"
        return ""

    def _reject(self, peer: _Peer, why: str) -> None:
        peer.socket.send(JoinRefused(line=f"launch: {why}"))
        self._drop(peer)
        if why not in self._rejections and len(self._rejections) < _MAX_REJECTION_NOTICES:
            self._rejections.append(why)
            self._notify(f"launch: turned away: {why}")

    def _start_ranks(self) -> None:
        hellos = self._hellos()
        if why := compatibility.find_mismatch(hellos):
            self._refuse_all(why)
            return
        self._phase = "running"
        reached = (peer.socket.sock for peer in self._members.values() if peer.socket.sock.family != socket.AF_UNIX)
        interface = next(iter({find_interface(sock.getsockname()[0]): None for sock in reached}), "")
        for rank, layout in compatibility.assign_layouts(hellos, _local_server_address(self._listener)).items():
            joined = JoinAccepted(
                layout=layout,
                store_port=self._own_hello.store_port,
                run_name=self._own_hello.run_name,
                interface=interface if rank == 0 else "",
            )
            self._members[rank].socket.send(joined)

    def _describe_missing_nodes(self) -> str:
        line = f"{compatibility.describe_progress(self._hellos(), self._hosts, self._timeout_s)}; node 0 waited at {self._describe_address()}: check that "
        line += f"they run, and their --master-addr and --master-port; {INTERFACE_HINT}"
        return line + (f"; turned away: {self._rejections[-1]}" if self._rejections else "")

    def _describe_address(self) -> str:
        """The address, and the interface that it is on."""
        interface = find_interface(str(self._listener.getsockname()[0]))
        return f"{self._addr} ({f'interface {interface}' if interface else 'all interfaces'})"

    def _refuse_all(self, why: str) -> None:
        self._phase = "over"
        for peer in list(self._members.values()):
            peer.socket.send(JoinRefused(line=f"launch: {why}"))

    def _broadcast_failure(self, end: NodeFailed, *, but: _Peer) -> None:
        """Tell all nodes that the job has failed; the first failure wins."""
        self._phase = "over"
        for peer in self._members.values():
            if peer is not but:
                peer.socket.send(end)

    def _finish_if_all_exited(self) -> None:
        """When the ranks of all nodes have ended, everybody learns how."""
        codes: dict[int, int] = {}
        for peer in self._members.values():
            if peer.exit_codes is None:
                return
            codes.update(peer.exit_codes)
        for peer in self._members.values():
            peer.socket.send(JobFinished(exit_codes=codes))
        self._phase = "over"

    def _peer_lost(self, peer: _Peer, how: str) -> None:
        if peer not in self._peers:
            return
        self._drop(peer)
        hello = peer.hello
        if hello is None or self._members.get(hello.node_rank) is not peer:
            return
        if self._phase == "joining":
            del self._members[hello.node_rank]
            self._rejections.append(f"{peer.display_name} came, and then {how}")
        elif self._phase == "running" and peer.exit_codes is None:
            self._broadcast_failure(
                NodeFailed(line=f"{peer.display_name} {how}", code=LOST_NODE_EXIT_CODE, node_rank=hello.node_rank), but=peer
            )

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        peer.socket.close()
