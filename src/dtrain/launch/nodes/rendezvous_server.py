"""Serve the rendezvous on node 0: accept nodes, check that they agree, and broadcast failures and exits. Never waits."""

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

from dtrain.launch.launch_plan import NodeRendezvous
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
# exit code of a launcher for a failure without an exit code
LOST_NODE_EXIT_CODE = 1
INTERFACE_HINT = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of the ranks"
_WAITING_NOTICE_S = 10.0
_ACCEPT_RETRY_S = 0.05
# connections without a Hello message
_MAX_UNIDENTIFIED = 64
_MAX_HELLO_BYTES = 1 << 16
# Unknown programs may connect as long as the job runs.
_MAX_REJECTION_NOTICES = 16


@dataclass(slots=True, eq=False)
class _Peer:
    """Connection to the server. ``hello`` is set once the peer is a node of the job."""

    socket: MessageSocket
    address: str
    hello: Hello | None = None
    exit_codes: dict[int, int] | None = None

    @property
    def display_name(self) -> str:
        return self.address if self.hello is None else self.hello.display_name


def _local_server_address(listener: socket.socket) -> str:
    """Return the address at which this host reaches ``listener``."""
    address = str(listener.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


class RendezvousServer:
    """Rendezvous server of node 0. Call ``poll`` a few times per second.

    Args:
        config: entry of node 0 to the rendezvous.
        own: first message of node 0, whose client joins by a connection passed to ``add_connection``.
        notify: function that receives lines for node 0's terminal.
    """

    def __init__(
        self,
        config: NodeRendezvous,
        own: Hello,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        notify: Callable[[str], None],
    ) -> None:
        self._config, self._own_hello, self._listener, self._selector, self._notify = config, own, listener, selector, notify
        self._addr = f"{config.addr}:{config.port}"
        self._peers: list[_Peer] = []
        self._members: dict[int, _Peer] = {}
        self._phase: Literal["joining", "running", "over"] = "joining"
        self._started_at = time.monotonic()
        self._waiting_noted = False
        # Reasons for the message about missing nodes.
        self._rejections: list[str] = []
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def add_connection(self, sock: socket.socket, address: str) -> None:
        """Add a connection whose peer has not identified itself."""
        peer = _Peer(socket=MessageSocket(sock, max_line=_MAX_HELLO_BYTES), address=address)
        peer.socket.watch(self._selector, partial(self._read_peer, peer))
        self._peers.append(peer)

    def poll(self, now: float) -> None:
        """Take the steps that are due: send pings, and give up nodes that are silent or do not join."""
        for peer in list(self._peers):
            if now - peer.socket.last_received_at > self._config.silence_s:
                self._peer_lost(peer, f"was silent for {self._config.silence_s:.0f} s")
            elif peer.hello is not None and now - peer.socket.last_sent_at >= PING_INTERVAL_S:
                peer.socket.send(Ping())
        if self._phase == "joining":
            waited = now - self._started_at
            if waited > self._config.timeout_s:
                self._refuse_all(self._describe_missing_nodes())
            elif waited > _WAITING_NOTICE_S and not self._waiting_noted:
                self._waiting_noted = True
                progress = compatibility.describe_progress(self._hellos(), self._config.hosts, waited)
                self._notify(f"launch: {progress}; waits up to {self._config.timeout_s:.0f} s")

    def reset_timeouts(self, now: float) -> None:
        """Restart the timeouts, because this process was suspended and the silence of peers has no meaning."""
        for peer in self._peers:
            peer.socket.last_received_at = now

    def flush(self) -> bool:
        """Return True if all messages were sent."""
        return not [peer for peer in self._peers if not peer.socket.flush()]

    def close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _hellos(self) -> dict[int, Hello]:
        return {rank: peer.hello for rank, peer in self._members.items() if peer.hello is not None}

    def _accept(self) -> None:
        """Accept a connection. If too many peers are unidentified, drop the peer that has waited longest."""
        unidentified = [peer for peer in self._peers if peer.hello is None]
        try:
            sock, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                for peer in unidentified[:1]:
                    self._drop(peer)
                # If no peer could be dropped, the listener stays ready.
                time.sleep(_ACCEPT_RETRY_S)
            return
        if len(unidentified) >= _MAX_UNIDENTIFIED:
            self._drop(unidentified[0])
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
                failure = NodeFailed(line=line, code=message.code, node_rank=peer.hello.node_rank)
                self._broadcast_failure(failure, exclude=peer)
            case RanksExited() if peer.hello is not None and self._phase != "joining":
                peer.exit_codes = dict(message.exit_codes)
                self._finish_if_all_exited()
            case _ if peer.hello is None:
                self._peer_lost(peer, "sent an unexpected message")
            case _:
                # A late message cannot change the decision.
                pass

    def _handle_hello(self, peer: _Peer, hello: Hello) -> None:
        if objection := self._find_objection(hello):
            self._reject(peer, objection)
            return
        peer.hello, peer.socket.max_line = hello, MAX_LINE
        if (reason := compatibility.find_rank_conflict(self._hellos(), hello)) is not None:
            self._members[hello.node_rank] = peer
            self._refuse_all(reason)
            return
        self._members[hello.node_rank] = peer
        peer.socket.send(Welcome(host=self._own_hello.host))
        if compatibility.all_joined(self._hellos()):
            self._start_ranks()

    def _find_objection(self, hello: Hello) -> str:
        """Return the reason that a node may not join, "" if it may. The text names both nodes, because both show the text."""
        mine, theirs = self._own_hello, f"{hello.display_name}, pid {hello.pid}"
        here = f"{mine.host}, pid {mine.pid}" + (f", run {mine.run_name}" if mine.run_name else "")
        if hello.protocol != PROTOCOL:
            return f"{theirs} uses another version of this protocol. Install the same dtrain on all nodes."
        if not hmac.compare_digest(hello.token.encode(), mine.token.encode()):
            return f"{theirs} belongs to another job than the one at {self._addr} ({here}): their run tokens differ"
        if not compatibility.is_plausible(hello):
            return f"{theirs} sent numbers that are out of range"
        member = self._members.get(hello.node_rank)
        if member is not None and member.hello is not None:
            first = f"{member.display_name}, pid {member.hello.pid}"
            return f"{theirs} came to {self._addr} ({here}), where {first}, is already. Give each node its own --node-rank."
        if self._phase != "joining":
            return f"{theirs} came to {self._addr} ({here}), which has begun without it. Choose another --master-port."
        return ""

    def _reject(self, peer: _Peer, reason: str) -> None:
        peer.socket.send(JoinRefused(line=f"launch: {reason}"))
        self._drop(peer)
        if reason not in self._rejections and len(self._rejections) < _MAX_REJECTION_NOTICES:
            self._rejections.append(reason)
            self._notify(f"launch: turned away: {reason}")

    def _start_ranks(self) -> None:
        hellos = self._hellos()
        if reason := compatibility.find_mismatch(hellos):
            self._refuse_all(reason)
            return
        self._phase = "running"
        sockets = (peer.socket.sock for peer in self._members.values() if peer.socket.sock.family != socket.AF_UNIX)
        interface = next(iter({find_interface(sock.getsockname()[0]): None for sock in sockets}), "")
        for rank, layout in compatibility.assign_layouts(hellos, _local_server_address(self._listener)).items():
            joined = JoinAccepted(
                layout=layout,
                store_port=self._own_hello.store_port,
                run_name=self._own_hello.run_name,
                interface=interface if rank == 0 else "",
            )
            self._members[rank].socket.send(joined)

    def _describe_missing_nodes(self) -> str:
        progress = compatibility.describe_progress(self._hellos(), self._config.hosts, self._config.timeout_s)
        line = f"{progress}; node 0 waited at {self._describe_address()}. "
        line += f"Check that they run, and their --master-addr and --master-port. {INTERFACE_HINT}."
        return line + (f" Turned away: {self._rejections[-1]}" if self._rejections else "")

    def _describe_address(self) -> str:
        """Describe the address and its interface."""
        interface = find_interface(str(self._listener.getsockname()[0]))
        return f"{self._addr} ({f'interface {interface}' if interface else 'all interfaces'})"

    def _refuse_all(self, reason: str) -> None:
        self._phase = "over"
        for peer in list(self._members.values()):
            peer.socket.send(JoinRefused(line=f"launch: {reason}"))

    def _broadcast_failure(self, failure: NodeFailed, *, exclude: _Peer) -> None:
        """Report a failure to all nodes but ``exclude``; the first failure wins."""
        self._phase = "over"
        for peer in self._members.values():
            if peer is not exclude:
                peer.socket.send(failure)

    def _finish_if_all_exited(self) -> None:
        """Send the exit codes to all nodes once the ranks of all nodes have exited."""
        codes: dict[int, int] = {}
        for peer in self._members.values():
            if peer.exit_codes is None:
                return
            codes.update(peer.exit_codes)
        for peer in self._members.values():
            peer.socket.send(JobFinished(exit_codes=codes))
        self._phase = "over"

    def _peer_lost(self, peer: _Peer, reason: str) -> None:
        if peer not in self._peers:
            return
        self._drop(peer)
        hello = peer.hello
        if hello is None or self._members.get(hello.node_rank) is not peer:
            return
        if self._phase == "joining":
            del self._members[hello.node_rank]
            self._rejections.append(f"{peer.display_name} came, and then {reason}")
        elif self._phase == "running" and peer.exit_codes is None:
            failure = NodeFailed(line=f"{peer.display_name} {reason}", code=LOST_NODE_EXIT_CODE, node_rank=hello.node_rank)
            self._broadcast_failure(failure, exclude=peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        peer.socket.close()
