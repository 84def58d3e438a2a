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

from dtrain.launch.nodes import agreement
from dtrain.launch.nodes.addresses import interface_of
from dtrain.launch.nodes.lines import Lines
from dtrain.launch.nodes.messages import (
    MAX_LINE,
    PROTOCOL,
    End,
    Ended,
    Failed,
    Hello,
    Joined,
    Message,
    Over,
    Ping,
    Refused,
    Welcome,
)

PING_S = 1.0
LOST_CODE = 1  # what a launcher exits with when the failure has no code of its own
CHOOSERS = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of the ranks"
_SAY_WAITING_S = 10.0
_PAUSE_S = 0.05
_STRANGERS = 64  # connections that have not said who they are
_HELLO_LINE = 1 << 16
_SAID_AT_MOST = 16  # notices about strangers: they may come for as long as the job runs


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to the hub; a member once it has a place, and gone once it is closed."""

    lines: Lines
    came_from: str
    hello: Hello | None = None
    codes: dict[int, int] | None = None

    @property
    def who(self) -> str:
        return self.came_from if self.hello is None else self.hello.who


def _from_here(listener: socket.socket) -> str:
    """The address by which this host reaches what listens like ``listener``."""
    address = str(listener.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


class Hub:
    """The meeting at node 0. ``turn`` has to be called a few times a second.

    Args:
        own: what node 0 says of itself: its agent joins like all others, over a connection given to ``adopt``.
        addr: address and port, as they are shown.
        hosts: by node rank, as far as they are known before they come.
        say: takes lines for node 0's terminal.
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
        say: Callable[[str], None],
    ) -> None:
        self._own, self._listener, self._selector = own, listener, selector
        self._addr, self._hosts, self._timeout_s, self._say = addr, hosts, timeout_s, say
        self._silence_s = silence_s
        self._peers: list[_Peer] = []
        self._members: dict[int, _Peer] = {}
        self._phase: Literal["joining", "running", "over"] = "joining"
        self._began = time.monotonic()
        self._said_waiting = False
        self._turned_away: list[str] = []  # for the message when somebody is missing in the end
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def adopt(self, sock: socket.socket, came_from: str) -> None:
        """Take a connection in, of which nothing is known yet."""
        peer = _Peer(lines=Lines(sock, max_line=_HELLO_LINE), came_from=came_from)
        peer.lines.watch(self._selector, partial(self._ready, peer))
        self._peers.append(peer)

    def turn(self, now: float) -> None:
        """Do what is due: pings, and giving up on who is silent, or does not come."""
        for peer in list(self._peers):
            if now - peer.lines.heard_at > self._silence_s:
                self._lose(peer, f"was silent for {self._silence_s:.0f} s")
            elif peer.hello is not None and now - peer.lines.sent_at >= PING_S:
                peer.lines.send(Ping())
        if self._phase == "joining":
            waited = now - self._began
            if waited > self._timeout_s:
                self._refuse_all(self._not_all_came())
            elif waited > _SAY_WAITING_S and not self._said_waiting:
                self._said_waiting = True
                self._say(
                    f"launch: {agreement.progress(self._hellos(), self._hosts, waited)}; waits up to {self._timeout_s:.0f} s"
                )

    def forgive(self, now: float) -> None:
        """Start counting anew: this process itself stood still, so nobody's silence means anything."""
        for peer in self._peers:
            peer.lines.heard_at = now

    def flush(self) -> bool:
        """Whether everything that was said is on its way."""
        return not [peer for peer in self._peers if not peer.lines.flush()]

    def close(self) -> None:
        for peer in self._peers:
            peer.lines.close()
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
                time.sleep(_PAUSE_S)  # where none could be dropped, the listener stays ready
            return
        if len(strangers) >= _STRANGERS:
            self._drop(strangers[0])
        self.adopt(sock, str(host))

    def _ready(self, peer: _Peer) -> None:
        peer.lines.flush()
        for message in peer.lines.receive():
            self._take(peer, message)
            if peer not in self._peers:
                return
        if peer.lines.lost:
            self._lose(peer, f"is lost: {peer.lines.lost}")

    def _take(self, peer: _Peer, message: Message) -> None:
        match message:
            case Ping():
                pass
            case Hello() if peer.hello is None:
                self._greet(peer, message)
            case Failed() if peer.hello is not None and self._phase == "running":
                line = f"{peer.who}: {message.line}"
                self._end_all(End(line=line, code=message.code, node_rank=peer.hello.node_rank), but=peer)
            case Ended() if peer.hello is not None and self._phase != "joining":
                peer.codes = dict(message.codes)
                self._settle()
            case _ if peer.hello is None:
                self._lose(peer, "sent what no launcher sends")
            case _:
                pass  # late: what it says has been decided already

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        if objection := self._objection(hello):
            self._turn_away(peer, objection)
            return
        peer.hello, peer.lines.max_line = hello, MAX_LINE
        if (why := agreement.clash(self._hellos(), hello)) is not None:
            self._members[hello.node_rank] = peer
            self._refuse_all(why)
            return
        self._members[hello.node_rank] = peer
        peer.lines.send(Welcome(host=self._own.host))
        if agreement.all_here(self._hellos()):
            self._start()

    def _objection(self, hello: Hello) -> str:
        """Why this one may not join, while the others go on. Also said to it, so it names both."""
        mine, theirs = self._own, f"{hello.who}, pid {hello.pid}"
        here = f"{mine.host}, pid {mine.pid}" + (f", run {mine.run_name}" if mine.run_name else "")
        if hello.protocol != PROTOCOL:
            return f"{theirs} speaks another version of this protocol; install the same dtrain on all nodes"
        if not hmac.compare_digest(hello.token.encode(), mine.token.encode()):
            return f"{theirs} belongs to another job than the one at {self._addr} ({here}): their run tokens differ"
        if not agreement.is_possible(hello):
            return f"{theirs} says of itself what cannot be"
        there = self._members.get(hello.node_rank)
        if there is not None and there.hello is not None:
            first = f"{there.who}, pid {there.hello.pid}"
            return f"{theirs} came to {self._addr} ({here}), where {first}, is already; give each node its own --node-rank"
        if self._phase != "joining":
            return f"{theirs} came to {self._addr} ({here}), which has begun without it; choose another --master-port"
        return ""

    def _turn_away(self, peer: _Peer, why: str) -> None:
        peer.lines.send(Refused(line=f"launch: {why}"))
        self._drop(peer)
        if why not in self._turned_away and len(self._turned_away) < _SAID_AT_MOST:
            self._turned_away.append(why)
            self._say(f"launch: turned away: {why}")

    def _start(self) -> None:
        hellos = self._hellos()
        if why := agreement.disagreement(hellos):
            self._refuse_all(why)
            return
        self._phase = "running"
        reached = (peer.lines.sock for peer in self._members.values() if peer.lines.sock.family != socket.AF_UNIX)
        interface = next(iter({interface_of(sock.getsockname()[0]): None for sock in reached}), "")
        for rank, layout in agreement.layouts(hellos, _from_here(self._listener)).items():
            joined = Joined(
                layout=layout,
                store_port=self._own.store_port,
                run_name=self._own.run_name,
                interface=interface if rank == 0 else "",
            )
            self._members[rank].lines.send(joined)

    def _not_all_came(self) -> str:
        line = (
            f"{agreement.progress(self._hellos(), self._hosts, self._timeout_s)}; node 0 waited at {self._where()}: check that "
        )
        line += f"they run, and their --master-addr and --master-port; {CHOOSERS}"
        return line + (f"; turned away: {self._turned_away[-1]}" if self._turned_away else "")

    def _where(self) -> str:
        """The address, and the interface that it is on."""
        interface = interface_of(str(self._listener.getsockname()[0]))
        return f"{self._addr} ({f'interface {interface}' if interface else 'all interfaces'})"

    def _refuse_all(self, why: str) -> None:
        self._phase = "over"
        for peer in list(self._members.values()):
            peer.lines.send(Refused(line=f"launch: {why}"))

    def _end_all(self, end: End, *, but: _Peer) -> None:
        """Tell all nodes that the job has failed; the first failure wins."""
        self._phase = "over"
        for peer in self._members.values():
            if peer is not but:
                peer.lines.send(end)

    def _settle(self) -> None:
        """When the ranks of all nodes have ended, everybody learns how."""
        codes: dict[int, int] = {}
        for peer in self._members.values():
            if peer.codes is None:
                return
            codes.update(peer.codes)
        for peer in self._members.values():
            peer.lines.send(Over(codes=codes))
        self._phase = "over"

    def _lose(self, peer: _Peer, how: str) -> None:
        if peer not in self._peers:
            return
        self._drop(peer)
        hello = peer.hello
        if hello is None or self._members.get(hello.node_rank) is not peer:
            return
        if self._phase == "joining":
            del self._members[hello.node_rank]
            self._turned_away.append(f"{peer.who} came, and then {how}")
        elif self._phase == "running" and peer.codes is None:
            self._end_all(End(line=f"{peer.who} {how}", code=LOST_CODE, node_rank=hello.node_rank), but=peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        peer.lines.close()
