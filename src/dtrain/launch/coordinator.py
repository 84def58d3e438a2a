"""Coordinate the rendezvous on node 0: answer arriving nodes, check that they agree, and find silent nodes.

``Coordinator`` has the effects. The functions below it compare the ``Hello`` messages of the nodes, and assign their ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import NodeLayout, NodeRendezvous, StatedLayout, Target
from dtrain.launch.node_messages import (
    PROTOCOL,
    Hello,
    InvalidMessageError,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    NodeFailed,
    NodeStore,
    Notice,
    RanksExited,
    Welcome,
    outgoing_interface,
)
from dtrain.packages import package_versions

HEARTBEAT_S = 1.0
# heartbeat of a node that has left
LEFT = -1
# With so many seconds between two steps, this process was suspended.
SUSPENDED_S = 2.0
# exit code of a launcher for a failure without an exit code
LOST_NODE_EXIT_CODE = 1
INTERFACE_HINT = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of the ranks"
_WAITING_NOTICE_S = 10.0
# Nodes of other jobs may arrive as long as the job runs.
_MAX_REJECTION_NOTICES = 16


@dataclass(slots=True, eq=False)
class _Arrival:
    """Node that has posted its ``Hello``, under the number of its arrival."""

    number: int
    hello: Hello
    heartbeat: int
    changed_at: float


class Coordinator:
    """Node 0's part of the rendezvous. Call ``poll`` a few times per second.

    Args:
        config: entry of node 0 to the rendezvous.
        own: record of node 0, which arrives like the other nodes.
        store: the nodes' store, which this process serves.
        notify: function that receives notices for node 0's supervisor.
    """

    def __init__(self, config: NodeRendezvous, own: Hello, store: NodeStore, *, notify: Callable[[Notice], None]) -> None:
        self._config, self._own_hello, self._store, self._notify = config, own, store, notify
        self._addr = f"{config.addr}:{config.port}"
        self._arrivals = 0
        # Numbers whose record is not posted yet.
        self._unread: set[int] = set()
        self._watched: dict[int, _Arrival] = {}
        self._members: dict[int, _Arrival] = {}
        # Nodes whose rank is taken wait until the owner shows a heartbeat or is lost.
        self._challengers: list[_Arrival] = []
        # Nodes that came after the start of an attempt without them.
        self._waiting: list[_Arrival] = []
        self._phase: Literal["joining", "running", "over"] = "joining"
        self._started_at = self._polled_at = self._heartbeats_read_at = time.monotonic()
        self._waiting_noted = False
        # Reasons for the message about missing nodes.
        self._rejections: list[str] = []
        # Nodes that will read the end of the job from the store.
        self.readers = 0
        store.post("welcome", Welcome(host=own.host))

    @property
    def is_joining(self) -> bool:
        return self._phase == "joining"

    def poll(self, now: float) -> None:
        """Take the steps that are due: answer arrivals, give up nodes that are silent or do not join, and report the end."""
        if now - self._polled_at > SUSPENDED_S:
            # Other nodes could not reach the store of a suspended process, so their silence has no meaning.
            for arrival in self._watched.values():
                arrival.changed_at = now
        self._polled_at = now
        self._read_arrivals(now)
        if now - self._heartbeats_read_at >= HEARTBEAT_S:
            self._heartbeats_read_at = now
            self._read_heartbeats(now)
        # While a challenger waits, the owner of its rank may be lost.
        if self._phase == "joining" and not self._challengers and self._may_start(now):
            self._start_ranks()
        if self._waiting and (failure := self._find_failure()) is not None:
            self._dismiss_waiting(failure)
        if self._phase == "joining":
            self._check_join_timeout(now)
        elif self._phase == "running" and self._store.add("exited", 0) == len(self._members):
            self._finish()

    def _may_start(self, now: float) -> bool:
        """Return True if all nodes have joined, or enough of them, and the others are not expected any more."""
        hellos, smallest = self._hellos(), self._config.min_nodes
        if all_joined(hellos):
            return True
        if smallest is None or len(hellos) < smallest:
            return False
        expected = expected_nodes(hellos)
        return bool(expected and expected <= hellos.keys()) or now - self._started_at > self._start_limit_s()

    def _start_limit_s(self) -> float:
        """Return the seconds after which enough nodes start without the others."""
        is_restart = any(hello.restarts for hello in self._hellos().values())
        return min(self._config.timeout_s, self._config.replace_timeout_s) if is_restart else self._config.timeout_s

    def _check_join_timeout(self, now: float) -> None:
        waited = now - self._started_at
        if waited > self._config.timeout_s:
            for challenger in self._challengers:
                self._turn_away(challenger)
            self._challengers.clear()
            self._refuse_all(self._describe_missing_nodes())
        elif waited > _WAITING_NOTICE_S and not self._waiting_noted:
            self._waiting_noted = True
            hellos, smallest = self._hellos(), self._config.min_nodes
            is_enough = smallest is not None and len(hellos) >= smallest
            limit_s = self._start_limit_s() if is_enough else self._config.timeout_s
            progress = describe_progress(hellos, self._config.hosts, waited)
            self._notify(Notice(line=f"launch: {progress}; waits up to {limit_s:.0f} s"))

    def _hellos(self) -> dict[int, Hello]:
        return {rank: member.hello for rank, member in self._members.items()}

    def _read_arrivals(self, now: float) -> None:
        count = self._store.add("arrivals", 0)
        self._unread |= set(range(self._arrivals + 1, count + 1))
        self._arrivals = count
        for number in sorted(self._unread):
            try:
                hello = self._store.find(f"hello/{number}")
            except InvalidMessageError:
                self._unread.discard(number)
                self._reject(number, f"arrival {number} sent no record of this version. Install the same dtrain on all nodes.")
                continue
            if isinstance(hello, Hello):
                self._unread.discard(number)
                self.readers += 1
                self._handle_hello(_Arrival(number, hello, heartbeat=0, changed_at=now), now)

    def _handle_hello(self, arrival: _Arrival, now: float) -> None:
        if objection := self._find_objection(arrival.hello):
            self._reject(arrival.number, objection)
            return
        if self._phase != "over" and arrival.hello.node_rank in self._members:
            # Only a later heartbeat of the owner shows that it lives.
            self._read_heartbeats(now)
        rank = arrival.hello.node_rank
        if self._phase == "joining" and rank not in self._members:
            self._admit(arrival)
        elif self._is_between_attempts():
            self._leave_unanswered()
        elif rank != 0 and (self._phase == "joining" or (self._config.max_restarts and rank in self._members)):
            self._challengers.append(arrival)
        elif self._phase == "running" and self._may_wait_for_restart(rank):
            hellos = self._hellos()
            # At the restart it would end the whole job.
            if reason := find_rank_conflict(hellos, arrival.hello) or find_fact_mismatch({**hellos, rank: arrival.hello}):
                self._reject(arrival.number, reason)
                return
            self._waiting.append(arrival)
            self._watched[arrival.number] = arrival
            text = f"launch: {arrival.hello.display_name} came after the start; it joins at the next restart"
            self._store.post(f"answer/{arrival.number}", Notice(line=text))
            self._notify_waiting(text)
        else:
            self._turn_away(arrival)

    def _may_wait_for_restart(self, rank: int) -> bool:
        """Return True if the attempt runs without this node, which belongs to the job."""
        config = self._config
        return config.min_nodes is not None and config.max_restarts > 0 and rank < (config.nodes or 0)

    def _notify_waiting(self, line: str) -> None:
        self._notify(Notice(line=line, waiting=tuple(sorted({arrival.hello.node_rank for arrival in self._waiting}))))

    def _is_between_attempts(self) -> bool:
        """Return True if the attempt has failed and all nodes may join again, at the next store of node 0."""
        failure = self._find_failure() if self._phase != "joining" and self._config.max_restarts else None
        return failure is not None and not failure.is_final

    def _find_failure(self) -> NodeFailed | None:
        failure = self._store.find("failure")
        return failure if isinstance(failure, NodeFailed) else None

    def _dismiss_waiting(self, failure: NodeFailed) -> None:
        """Let waiting nodes come to the next store after a failure. If the failure is final, they end, too."""
        for arrival in self._waiting:
            del self._watched[arrival.number]
            if failure.is_final:
                self._store.post(f"answer/{arrival.number}", JoinRefused(line=f"launch: {failure.line}", code=failure.code))
            else:
                self._leave_unanswered()
        self._waiting.clear()

    def _leave_unanswered(self) -> None:
        """Leave a node without an answer. It connects again when this process, and with it the store, has ended."""
        self.readers -= 1

    def _turn_away(self, arrival: _Arrival) -> None:
        """Reject a node of this job whose rank is taken, or that arrives after the start."""
        theirs, owner = f"{arrival.hello.display_name}, pid {arrival.hello.pid}", self._members.get(arrival.hello.node_rank)
        if owner is not None:
            place = f"where {owner.hello.display_name}, pid {owner.hello.pid}, is already. Give each node its own --node-rank."
        else:
            place = "which has begun without it. Choose another --master-port."
        self._reject(arrival.number, f"{theirs} came to {self._describe_own_job()}, {place}")

    def _admit(self, arrival: _Arrival) -> None:
        conflict = find_rank_conflict(self._hellos(), arrival.hello)
        self._members[arrival.hello.node_rank] = self._watched[arrival.number] = arrival
        if conflict is not None:
            self._refuse_all(conflict)

    def _describe_own_job(self) -> str:
        own = self._own_hello
        return f"{self._addr} ({own.host}, pid {own.pid}" + (f", run {own.run_name})" if own.run_name else ")")

    def _find_objection(self, hello: Hello) -> str:
        """Return the reason that a node is none of this job, "" if it is. The text names both nodes, because both show it."""
        theirs = f"{hello.display_name}, pid {hello.pid}"
        if hello.protocol != PROTOCOL:
            return f"{theirs} uses another version of this protocol. Install the same dtrain on all nodes."
        if not hmac.compare_digest(hello.token.encode(), self._own_hello.token.encode()):
            return f"{theirs} belongs to another job than the one at {self._describe_own_job()}: their run tokens differ"
        return ""

    def _reject(self, number: int, reason: str) -> None:
        self._store.post(f"answer/{number}", JoinRefused(line=f"launch: {reason}"))
        if reason not in self._rejections and len(self._rejections) < _MAX_REJECTION_NOTICES:
            self._rejections.append(reason)
            self._notify(Notice(line=f"launch: turned away: {reason}"))

    def _start_ranks(self) -> None:
        hellos = self._hellos()
        if reason := find_fact_mismatch(hellos) or find_rank_mismatch(hellos):
            self._refuse_all(reason)
            return
        self._phase = "running"
        peer = next((hello.own_addr for hello in hellos.values() if hello.own_addr), "")
        interface = self._store.interface or outgoing_interface(peer, self._config.port)
        # A launcher that takes the place of a lost one does not know the counts.
        restarts = max(hello.restarts for hello in hellos.values())
        fruitless = max(hello.fruitless_restarts for hello in hellos.values())
        for rank, layout in assign_layouts(hellos, self._store.server_addr).items():
            joined = JoinAccepted(
                layout=layout,
                store_port=self._own_hello.store_port,
                run_name=self._own_hello.run_name,
                interface=interface if rank == 0 else "",
                restarts=restarts,
                fruitless_restarts=fruitless,
                members=tuple(sorted(hellos)),
            )
            self._store.post(f"answer/{self._members[rank].number}", joined)

    def _describe_missing_nodes(self) -> str:
        progress = describe_progress(self._hellos(), self._config.hosts, self._config.timeout_s)
        interface = f"interface {self._store.interface}" if self._store.interface else "all interfaces"
        line = f"{progress}; node 0 waited at {self._addr} ({interface}). "
        line += f"Check that they run, and their --master-addr and --master-port. {INTERFACE_HINT}."
        return line + (f" Turned away: {self._rejections[-1]}" if self._rejections else "")

    def _refuse_all(self, reason: str) -> None:
        self._phase = "over"
        for member in self._members.values():
            self._store.post(f"answer/{member.number}", JoinRefused(line=f"launch: {reason}"))

    def _finish(self) -> None:
        """Post the exit codes of the ranks of all nodes."""
        self._phase = "over"
        codes: dict[int, int] = {}
        for rank in self._members:
            exits = self._store.find(f"exits/{rank}")
            assert isinstance(exits, RanksExited)
            codes.update(exits.exit_codes)
        self._store.post("finished", JobFinished(exit_codes=codes))
        code = next(iter(codes.values())) if len(set(codes.values())) == 1 else LOST_NODE_EXIT_CODE
        for arrival in self._waiting:
            line = f"launch: {self._describe_own_job()} has ended without a place for {arrival.hello.display_name}"
            self._store.post(f"answer/{arrival.number}", JoinRefused(line=line, code=code))

    def _read_heartbeats(self, now: float) -> None:
        watched = list(self._watched.values())
        values = self._store.read_counters([f"heartbeat/{arrival.number}" for arrival in watched]) if watched else []
        for arrival, value in zip(watched, values, strict=True):
            if value == LEFT:
                self._remove(arrival, "has left")
            elif value != arrival.heartbeat:
                arrival.heartbeat, arrival.changed_at = value, now
            elif now - arrival.changed_at > self._config.silence_s:
                self.readers -= 1
                self._remove(arrival, f"was silent for {self._config.silence_s:.0f} s")
        self._decide_challengers()

    def _remove(self, arrival: _Arrival, reason: str) -> None:
        del self._watched[arrival.number]
        rank = arrival.hello.node_rank
        if arrival in self._waiting:
            self._waiting.remove(arrival)
            self._notify_waiting(f"launch: {arrival.hello.display_name} waited for the next restart, and {reason}")
        elif self._phase == "joining":
            del self._members[rank]
            self._rejections.append(f"{arrival.hello.display_name} came, and then {reason}")
        elif self._phase == "running" and not self._store.exists(f"exits/{rank}"):
            ranks = assign_layouts(self._hellos(), self._store.server_addr)[rank].ranks
            names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
            line = f"{arrival.hello.display_name} is gone ({names}): it {reason}"
            self._store.post_failure(NodeFailed(line=line, code=LOST_NODE_EXIT_CODE, node_rank=rank, is_lost=True))

    def _decide_challengers(self) -> None:
        """Admit a node whose rank became free, and turn away a node if the owner of its rank lives.

        While ranks run, a launcher in the place of a lost node waits here until the loss is known.
        """
        challengers, self._challengers = self._challengers, []
        for challenger in challengers:
            owner = self._members.get(challenger.hello.node_rank)
            if self._phase == "joining" and owner is None:
                self._admit(challenger)
            elif self._is_between_attempts():
                self._leave_unanswered()
            elif not self._may_wait(owner, challenger):
                self._turn_away(challenger)
            else:
                self._challengers.append(challenger)

    def _may_wait(self, owner: _Arrival | None, challenger: _Arrival) -> bool:
        """Return True if the owner of a challenger's rank may be lost: its heartbeat has not moved since.

        While ranks run, the agent of a killed launcher lives until it has ended its ranks. So the challenger waits as long as
        for a silent node.
        """
        if owner is None or owner.changed_at <= challenger.changed_at:
            return self._phase == "joining" or (self._phase == "running" and self._config.max_restarts > 0)
        waits = self._phase == "running" and self._config.max_restarts > 0
        return waits and owner.changed_at - challenger.changed_at <= self._config.silence_s


# Users compare so many characters of a digest.
_DIGEST_CHARS = 16


def collect_node_facts(target: Target, paths: Iterable[str]) -> dict[str, str]:
    """Collect the facts of this node that must agree on all nodes, by name.

    Args:
        target: program whose source is compared by a digest.
        paths: files and folders, compared by size; the size of a folder is its number of entries.

    A missing path is a fact, too, so all nodes report the node on which the path is missing.
    """
    facts = {**package_versions(), "shared memory": "a /dev/shm" if os.access("/dev/shm", os.W_OK) else "nothing"}
    source = None if target.kind == "command" else find_source(target)
    if source is not None:
        facts[f"the content of {target.name}"] = hashlib.sha256(source.read_bytes()).hexdigest()[:_DIGEST_CHARS]
    for path in paths:
        try:
            is_folder = os.path.isdir(path)
            size = f"a folder of {len(os.listdir(path))} entries" if is_folder else f"{os.path.getsize(path)} bytes"
        except OSError as error:
            size = f"{error.strerror}"
        facts[path] = size
    return facts


# items of a list in a message
_MAX_NAMED = 8
_MAX_VALUE = 80  # characters


def all_joined(hellos: Mapping[int, StatedLayout]) -> bool:
    """Return True if all nodes have joined: by the number of nodes if known, otherwise by the number of ranks."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is not None:
        return len(hellos) >= nodes
    return world_size is not None and sum(hello.nproc for hello in hellos.values()) >= world_size


def expected_nodes(hellos: Mapping[int, Hello]) -> set[int]:
    """Return the nodes of the last attempt, and those that waited for the next one; empty if none of the nodes knows."""
    restarts = max((hello.restarts for hello in hellos.values()), default=0)
    return {member for hello in hellos.values() if hello.restarts == restarts for member in hello.members}


def describe_progress(hellos: Mapping[int, Hello], hosts: Sequence[str], seconds: float) -> str:
    """Describe the state of the rendezvous: ``3 of 4 nodes joined in 60 s; missing: node 2``."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is None:
        joined = sum(hello.nproc for hello in hellos.values())
        members = _join_limited(f"node {rank}" for rank in sorted(hellos))
        return f"{joined} of {world_size} ranks joined in {seconds:.0f} s, with {members}"
    missing = [rank for rank in range(nodes) if rank not in hellos]
    names = _join_limited(f"node {rank} ({hosts[rank]})" if rank < len(hosts) else f"node {rank}" for rank in missing)
    smallest = max((hello.min_nodes or 0 for hello in hellos.values()), default=0)
    too_few = f", fewer than {smallest}" if len(hellos) < smallest else ""
    return f"{len(hellos)} of {nodes} nodes joined in {seconds:.0f} s{too_few}; missing: {names}"


def find_rank_conflict(hellos: Mapping[int, Hello], new: Hello) -> str | None:
    """Return the reason that ``new`` cannot belong to the job of ``hellos``; None without a conflict."""
    for value, option in (("nnodes", "--nnodes"), ("world_size", "--world-size")):
        for hello in hellos.values():
            theirs, mine = getattr(hello, value), getattr(new, value)
            if None not in (theirs, mine) and theirs != mine:
                return (
                    f"{new.display_name} was started for {option} {mine}, {hello.display_name} for {theirs}. "
                    f"Pass the same {option} on every node."
                )
    nodes, _ = _stated_sizes({**hellos, new.node_rank: new})
    beyond = next((hello for hello in (*hellos.values(), new) if nodes is not None and hello.node_rank >= nodes), None)
    if beyond is not None:
        return f"{beyond.display_name} joined a job of {nodes} nodes, numbered from 0. Correct --node-rank or --nnodes there."
    return None


def assign_layouts(hellos: Mapping[int, StatedLayout], addr: str) -> dict[int, NodeLayout]:
    """Assign ranks to each node, in the order of their ``--node-rank``. The nodes must agree."""
    firsts = _first_ranks(hellos)
    world_size = sum(hello.nproc for hello in hellos.values())
    return {
        rank: NodeLayout(
            nproc=hello.nproc,
            world_size=world_size,
            base_rank=firsts[rank],
            node_rank=index,
            nodes=len(hellos),
            master_addr=addr,
        )
        for index, (rank, hello) in enumerate(sorted(hellos.items()))
    }


def _stated_sizes(hellos: Mapping[int, StatedLayout]) -> tuple[int | None, int | None]:
    nodes = next((hello.nodes for hello in hellos.values() if hello.nodes is not None), None)
    return nodes, next((hello.world_size for hello in hellos.values() if hello.world_size is not None), None)


def _first_ranks(hellos: Mapping[int, StatedLayout]) -> dict[int, int]:
    """Return the first rank of each node: its own setting, or the rank after the previous node's last rank."""
    firsts, following = {}, 0
    for rank, hello in sorted(hellos.items()):
        firsts[rank] = following if hello.base_rank is None else hello.base_rank
        following = firsts[rank] + hello.nproc
    return firsts


def find_rank_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """Return the reason that the ranks of all nodes, which have joined, are no job; None if they are."""
    is_elastic = any(hello.min_nodes is not None for hello in hellos.values())
    if not is_elastic and sorted(hellos) != list(range(len(hellos))):
        joined = _join_limited(map(str, sorted(hellos)))
        return f"node ranks must be 0 to {len(hellos) - 1}, got {joined}. Correct --node-rank."
    ranks = sum(hello.nproc for hello in hellos.values())
    _, world_size = _stated_sizes(hellos)
    if world_size is not None and ranks != world_size:
        counts = _join_limited(f"{hello.nproc} on {hello.display_name}" for _, hello in sorted(hellos.items()))
        return f"the nodes run {ranks} ranks ({counts}), not --world-size {world_size}. Correct -n or --world-size."
    following = 0
    for rank, first in sorted(_first_ranks(hellos).items(), key=lambda item: item[1]):
        if first != following:
            node = f"{hellos[rank].display_name} begins at --base-rank {first}"
            return (
                f"{node}, but the ranks of the other nodes make it {following}. Correct --base-rank, or remove it on all nodes."
            )
        following += hellos[rank].nproc
    return None


def find_fact_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """Describe the first fact that differs. A node is odd if most other nodes, or node 0 in a tie, have another value."""
    first = hellos[min(hellos)]
    for name in dict.fromkeys(name for hello in hellos.values() for name in hello.facts):
        values = {rank: hello.facts.get(name, "nothing") for rank, hello in sorted(hellos.items())}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], value == values[first.node_rank]))
        odd = _join_limited(
            f"{hellos[rank].display_name} has {_truncate_value(value)}" for rank, value in values.items() if value != usual
        )
        having = [hellos[rank].display_name for rank, value in values.items() if value == usual]
        others = f"{having[0]} has" if len(having) == 1 else f"the other {len(having)} have"
        return f"nodes differ in {name}: {odd}, {others} {_truncate_value(usual)}. Make them the same."
    return None


def _truncate_value(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[:_MAX_VALUE] + "..."


def _join_limited(items: Iterable[str]) -> str:
    texts = list(items)
    return ", ".join(texts[:_MAX_NAMED]) + (f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else "")
