"""Take part in a multi-node job through the nodes' store: join, beat, and exchange failures and exits, in one thread.

One session is one connection. If a request never returns, the agent abandons the session with its thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dtrain.launch.addresses import find_interface
from dtrain.launch.coordinator import HEARTBEAT_S, LEFT, LOST_NODE_EXIT_CODE, Coordinator
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.node_messages import (
    Hello,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    NodeFailed,
    NodeStore,
    Notice,
    RanksExited,
    RanksFailed,
    Welcome,
)

POLL_S = 0.2
# Node 0 marks its store at once.
_WELCOME_TIMEOUT_S = 3.0


class NotALaunchError(Exception):
    """Raised if the program at the address of node 0 serves a store, but is not a launcher of dtrain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """Last event of a session: the error that ended the session, or None after ``leave``."""

    error: Exception | None


class NodeSession:
    """Session of one node.

    Args:
        config: entry of the node.
        hello: record of the node.
        store: unconnected store.
        serves: if True, this process serves the store, and coordinates the nodes.
        notify: function that receives the session's events, in the session's thread: the messages for the supervisor, and
            ``Welcome`` once the store is known to be one of a launch.
    """

    def __init__(
        self,
        config: NodeRendezvous,
        hello: Hello,
        store: NodeStore,
        *,
        serves: bool,
        notify: Callable[[NodeSession, Message | SessionEnded], None],
    ) -> None:
        self._config, self._hello, self._store, self._serves = config, hello, store, serves
        self._notify = notify
        self._inbox: queue.SimpleQueue[RanksFailed | RanksExited | None] = queue.SimpleQueue()
        self._coordinator: Coordinator | None = None
        self._number = 0
        self._beat_at = 0.0
        self._answered = self._joined = self._failure_known = self._exits_posted = self._finished = self._end_read = False
        self.was_welcome = False

    @property
    def waiting_since(self) -> float | None:
        """Start of the request to the store that has no answer yet; None between requests."""
        return self._store.waiting_since

    def start(self) -> None:
        """Run the session in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Pass a message of the supervisor to the other nodes."""
        self._inbox.put(message)

    def leave(self) -> None:
        """End the session. On node 0 the session ends after the other nodes have read the end of the job."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """End the session without another request."""
        self._store.abandoned = True
        self._inbox.put(None)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._connect()
            self._arrive()
            while self._handle_next_message():
                self._poll(time.monotonic())
            self._leave()
        except Exception as caught:  # noqa: BLE001 - the agent reports every error to the supervisor
            error = caught
        self._notify(self, SessionEnded(error=error))

    def _connect(self) -> None:
        if self._serves:
            notice = self._store.serve(self._config)
            if notice:
                self._notify(self, Notice(line=notice))
            self._coordinator = Coordinator(
                self._config, self._hello, self._store, notify=lambda line: self._notify(self, Notice(line=line))
            )
        else:
            self._store.connect(self._config)
        deadline = time.monotonic() + _WELCOME_TIMEOUT_S
        while not isinstance(welcome := self._store.find("welcome"), Welcome):
            if time.monotonic() > deadline:
                raise NotALaunchError("serves a store without a launch")
            time.sleep(POLL_S)
        self.was_welcome = True
        self._notify(self, welcome)

    def _arrive(self) -> None:
        self._number = self._store.add("arrivals")
        # Node 0 reads the heartbeats of all arrivals, so the counter comes first.
        self._beat(time.monotonic())
        self._store.post(f"hello/{self._number}", replace(self._hello, own_addr=self._store.own_addr))

    def _beat(self, now: float) -> None:
        self._store.add(f"heartbeat/{self._number}")
        self._beat_at = now

    def _handle_next_message(self) -> bool:
        """Handle a message of the supervisor, or wait until the next poll is due. Return False after ``leave``."""
        try:
            message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return True
        if isinstance(message, RanksFailed):
            self._post_failure(f": {message.line}", message.code)
        elif isinstance(message, RanksExited):
            self._store.post(f"exits/{self._hello.node_rank}", message)
            self._store.add("exited")
            self._exits_posted = True
        return message is not None

    def _post_failure(self, reason: str, code: int) -> None:
        """Post the failure of this node, unless another failure was first, which the next poll reads."""
        if not self._joined or self._failure_known:
            return
        line = f"{self._hello.display_name}{reason}"
        failure = NodeFailed(line=line, code=code, node_rank=self._hello.node_rank)
        self._failure_known = self._store.post_first("failure", failure)
        self._mark_end_read(self._failure_known)

    def _poll(self, now: float) -> None:
        if self._coordinator is not None:
            self._coordinator.poll(now)
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat(now)
        if not self._answered:
            self._read_answer()
        elif self._joined and not self._failure_known and isinstance(failure := self._store.find("failure"), NodeFailed):
            self._failure_known = True
            self._notify(self, failure)
            self._mark_end_read()
        if self._exits_posted and not self._finished and isinstance(finished := self._store.find("finished"), JobFinished):
            self._finished = True
            self._notify(self, finished)
            self._mark_end_read()

    def _read_answer(self) -> None:
        answer = self._store.find(f"answer/{self._number}")
        if isinstance(answer, JoinAccepted):
            self._answered = self._joined = True
            # The address of node 0 works from this node, whatever names resolve to on other nodes.
            layout = replace(answer.layout, master_addr=self._store.server_addr)
            interface = answer.interface or (find_interface(self._store.own_addr) if self._store.own_addr else "")
            self._notify(self, replace(answer, layout=layout, interface=interface))
        elif isinstance(answer, JoinRefused):
            self._answered = True
            self._notify(self, answer)
            self._mark_end_read()

    def _mark_end_read(self, end_read: bool = True) -> None:
        """Count this node among those that do not need the store any more. Node 0 waits for all of them."""
        if end_read and not self._end_read:
            self._end_read = True
            self._store.add("readers_done")

    def _leave(self) -> None:
        if not self._exits_posted:
            self._post_failure(" is lost: its launcher has ended", LOST_NODE_EXIT_CODE)
        self._store.set_counter(f"heartbeat/{self._number}", LEFT)
        self._mark_end_read()
        if self._coordinator is None or self._coordinator.is_joining:
            return
        while self._store.add("readers_done", 0) < self._coordinator.readers:
            time.sleep(POLL_S / 4)
            self._coordinator.poll(time.monotonic())
