"""Run one job on this node: start its ranks and their store, relay their output, restart them, and talk to the other nodes.

``Job`` has the state, which only the event loop changes: each event calls one method. Decisions about ranks are in
``WorkerGroup``, about restarts in ``RestartPolicy``, about hangs in ``Watchdog``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch import processes
from dtrain.launch.agent import Agent, OtherNodes, describe_smaller_job, describe_wait, start_agent
from dtrain.launch.failure import HANG_EXIT_CODE, describe_exit
from dtrain.launch.heartbeats import ProgressKind, SharedFiles
from dtrain.launch.job_output import Events, JobOutput
from dtrain.launch.launch_dir import SharedFolders, create_run_dir, write_launch_record
from dtrain.launch.launch_plan import (
    DEFAULT_SILENCE_S,
    LOOPBACK_ADDRESS,
    LaunchPlan,
    NodeRendezvous,
    build_common_environment,
    build_rank_environment,
)
from dtrain.launch.node_messages import (
    JobFinished,
    JoinAccepted,
    JoinRefused,
    NodeFailed,
    Notice,
    RanksExited,
    RanksFailed,
    listen_for_nodes,
)
from dtrain.launch.processes import SUCCESSOR_ID, ProcessRequest
from dtrain.launch.recovery import Death, StepBoard, add_death, add_killed, start_environment
from dtrain.launch.result import JobResult, describe_failures, summarize
from dtrain.launch.starter import ProcessStarter, StartEvent
from dtrain.launch.watchdog import Watchdog
from dtrain.launch.worker_group import RankStore, RestartPolicy, WorkerGroup
from dtrain.machine import assign_cores, core_count, count_oom_kills, usable_cores

_BACKLOG = 1024
_WILDCARD_ADDRESSES = ("0.0.0.0", "::")
# seconds for the last messages to other nodes, which read them at once or are lost
_AGENT_EXIT_S = DEFAULT_SILENCE_S + 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Job on this node.

    Attributes:
        plan: the launch.
        events: event loop of the supervisor.
        output: output of the ranks.
        starter: starter of processes.
        worker_group: the current attempt.
        restart_policy: restarts so far.
        files: descriptors that all ranks get.
        store: store of the ranks.
        nodes: exchange with other nodes.
        watchdog: detector of hangs, while ranks run.
        initial_oom_kills: out-of-memory kills before the job.
        deaths: deaths since the last step.
        steps: last step of each rank.
        launcher_gone: True once the launcher process has exited.
    """

    plan: LaunchPlan
    events: Events
    output: JobOutput
    starter: ProcessStarter
    worker_group: WorkerGroup
    restart_policy: RestartPolicy
    files: SharedFiles = field(default_factory=SharedFiles)
    store: RankStore = field(default_factory=RankStore)
    nodes: OtherNodes = field(default_factory=OtherNodes)
    watchdog: Watchdog | None = None
    initial_oom_kills: int | None = None
    deaths: tuple[Death, ...] = ()
    steps: StepBoard = field(default_factory=StepBoard)
    launcher_gone: bool = False

    @classmethod
    def of_plan(cls, plan: LaunchPlan) -> Job:
        """Return the job of ``plan`` before the start of its processes."""
        job = cls(
            plan=plan,
            events=Events(),
            output=JobOutput(plan.output, plan.layout, plan.run_dir),
            starter=ProcessStarter(target=plan.target),
            worker_group=WorkerGroup(plan=plan, services=set()),
            restart_policy=RestartPolicy(max_fruitless=plan.max_restarts),
            initial_oom_kills=count_oom_kills(),
        )
        job.events.watch(job.files.progress_fd, job.read_progress)
        return job

    # The loop.

    def run_attempts(self) -> JobResult:
        """Start the ranks, restart them as the restart policy allows, and return the result of the last attempt."""
        while True:
            if not self.worker_group.stopping:
                if self.nodes.agent is None:
                    # No other program can take or reach the port.
                    self._open_store(socket.create_server((LOOPBACK_ADDRESS, 0), backlog=_BACKLOG))
                self.start_ranks()
            self.run_loop(lambda: self.worker_group.diagnosis.awaits_news and not self.worker_group.stopping)
            result = self._summarize()
            self._close_worker_group()
            self._wait_for_all_nodes(result)
            # Another node may have failed meanwhile.
            result = self._summarize()
            delay_s = self.restart_policy.delay_s
            if not result.may_restart or delay_s is None or self.launcher_gone or self.nodes.is_job_over:
                return result
            for line in self.final_lines(result):
                self.output.write_line(line)
            self.output.write_line(f"dtrain: launch: {self.restart_policy.describe_next()}")
            self.restart_policy, self.store = self.restart_policy.after_restart(), RankStore()
            self.deaths = self._deaths_with(self.worker_group)
            self._leave_nodes()
            self.worker_group = WorkerGroup(plan=self.plan, services=self.worker_group.services)
            begin_at = time.monotonic() + delay_s
            self.run_loop(lambda limit=begin_at: time.monotonic() < limit, wake_at=begin_at)  # type: ignore[misc]
            # A stop was requested between two attempts.
            if self.worker_group.ending.requested_signal is not None:
                return self._summarize()
            if self.plan.rendezvous is not None:
                self.join_nodes(self.plan.rendezvous)

    def run_loop(self, condition: Callable[[], bool] = lambda: False, *, wake_at: float | None = None) -> None:
        """Handle events until no process of the attempt runs and ``condition`` is false, or until the end is forced."""
        while True:
            now, group = time.monotonic(), self.worker_group
            # A rank that asks later may know of a later death.
            is_asked, group.is_asked = group.is_asked, False
            group.record_exits(processes.reap_children()[0], now)
            self._check_store(now)
            group.may_replace = self.plan.layout.nodes == 1 and self.restart_policy.delay_s == 0
            group.advance(now)
            if group.dead_ranks:
                self._replace_dead_ranks()
            elif is_asked:
                self.steps.answer()
            self._check_hang(now)
            self._report_failure_to_nodes()
            if group.stopping and any(pid is None for pid in group.pids.values()):
                self._drop_unstarted_ranks()
            waiting = group.ending.kill_at is None and condition()
            if (group.is_finished and not waiting) or group.has_given_up(now):
                return
            self.events.watch_pending(self.output)
            due = group.deadlines() + ([] if wake_at is None else [wake_at])
            if self.watchdog is not None and not group.stopping and (poll_at := self.watchdog.deadline()) is not None:
                due.append(poll_at)
            self.events.handle(max(0.0, min(due) - now) if due else None)

    def _check_hang(self, now: float) -> None:
        group = self.worker_group
        if self.watchdog is None or group.stopping or group.diagnosis.decide_at is not None:
            # A failure explains more than the silence that follows it.
            return
        exit_codes = {rank: exit_.code for rank, exit_ in group.exits.items()}
        report = self.watchdog.poll(now, pids=group.running_pids(), exit_codes=exit_codes)
        group.diagnosis.hung = self.watchdog.is_hang_found
        if report is not None and report.is_hang:
            group.fail(report.lines, now, code=HANG_EXIT_CODE)
        elif report is not None:
            for line in report.lines:
                self.output.write_line(line)

    def _deaths_with(self, group: WorkerGroup) -> tuple[Death, ...]:
        lines = group.launch_error.lines if group.launch_error is not None else ()
        step = self.steps.last_step(self.plan.layout.nproc)
        return add_death(self.deaths, group.root_cause, lines, group.exits, step)

    def handle_signal(self, number: int) -> None:
        """End the job, or forward a signal to the ranks, or dump their stacks."""
        has_no_receiver = number == self.plan.stop_signal and not self.worker_group.running_pids()
        if number in launch_protocol.ENDING_SIGNALS or has_no_receiver:
            self.worker_group.request_stop(number, time.monotonic())
        elif number in launch_protocol.FORWARDED_SIGNALS:
            self.worker_group.forward_signal(number)
        elif number == launch_protocol.STACKS_SIGNAL and self.watchdog is not None:
            self.watchdog.request_dump()

    def read_progress(self) -> None:
        """Pass the ranks' progress reports to the watchdog, the restart policy and the worker group."""
        for record in self.files.read_progress():
            if self.watchdog is not None:
                self.watchdog.record_progress(record)
            if record.kind == ProgressKind.COMMITTED:
                self.restart_policy = self.restart_policy.after_commit(record.value)
            self.worker_group.record_progress(record, time.monotonic())
            if record.kind == ProgressKind.STARTED and not self.worker_group.stopping:
                self._start_successor()

    # The ranks.

    def start_ranks(self) -> None:
        """Start all ranks of this node; their store is at ``store.port``."""
        plan, layout = self.plan, self.plan.layout
        launch_protocol.remove_marks(plan.run_dir, layout.ranks)
        self.watchdog = Watchdog(
            run_dir=plan.run_dir,
            world_size=layout.world_size,
            timeout_s=plan.hang_timeout_s,
            node_rank=layout.node_rank,
            ranks=layout.ranks,
        )
        self._start_processes(layout.ranks, start_environment(self.deaths))

    def _start_processes(self, ranks: Iterable[int], start: Mapping[str, str]) -> None:
        plan, layout = self.plan, self.plan.layout
        assert self.watchdog is not None, "ranks run below a watchdog"
        self.steps.clear(layout.nproc)
        count = core_count()
        shares = assign_cores(usable_cores(), layout.nproc) if plan.bind else [[]] * layout.nproc
        for rank in ranks:
            cores = shares[rank - layout.base_rank]
            environment = build_rank_environment(
                plan, rank, port=self.store.port, cores=count, inherited=os.environ, restart_count=self.restart_policy.total
            )
            try:
                fds = self._open_streams(rank)
            except OSError as error:
                self._fail_start(rank, error.strerror)
                return
            fds |= self.steps.fds
            fds |= {launch_protocol.HEARTBEAT_FD: self.files.pulse, launch_protocol.DUMP_REQUEST_FD: self.watchdog.ask_fd}
            self.worker_group.pids[rank] = None
            owned, environment = frozenset({"stdout", "stderr"}), {**environment, **start}
            request = ProcessRequest(id=rank, kind="rank", fds=fds, owned=owned, environment=environment, cores=cores)
            self._handle_start_events(self.starter.start(request))

    def _replace_dead_ranks(self) -> None:
        """Start a process in the place of each dead rank. The other ranks stay, and connect with it."""
        group, dead_ranks = self.worker_group, self.worker_group.dead_ranks
        assert self.watchdog is not None, "ranks run below a watchdog"
        self.deaths = add_killed(self.deaths, dead_ranks, group.exits, self.steps.last_step(self.plan.layout.nproc))
        self.watchdog.forget(dead_ranks)
        self.output.write_line(f"dtrain: launch: {self.restart_policy.describe_next(group.exits)}")
        group.forget_dead_ranks()
        self.restart_policy = self.restart_policy.after_replacement()
        total, survivors = self.restart_policy.total, len(group.running_pids())
        self._start_processes(dead_ranks, self.steps.announce(total, self.plan.run_dir, self.deaths, survivors))

    def _open_streams(self, rank: int) -> dict[str, int]:
        """Open the standard streams of a rank, and relay its output.

        Raises:
            OSError: the limit of files is reached.
        """
        (out_write, err_write), fds = self.output.open_pipes(rank)
        for fd in fds:
            self.events.watch(fd, lambda fd=fd: self._relay_output(fd))  # type: ignore[misc]
        # Several ranks would compete for the same input.
        stdin = 0 if self.plan.layout.nproc == 1 else self.files.devnull
        return {"stdin": stdin, "stdout": out_write, "stderr": err_write}

    def _relay_output(self, fd: int) -> None:
        # The descriptor may be closed below.
        self.events.unwatch(fd)
        if self.output.relay(fd):
            self.events.watch(fd, lambda: self._relay_output(fd))

    def _fail_start(self, rank: int, reason: str | None) -> None:
        world = self.plan.layout.world_size
        line = f"dtrain: launch: rank {rank} of {world} could not be started: {reason}; use fewer"
        self.worker_group.fail([line], time.monotonic())

    def preload(self, folders: SharedFolders) -> None:
        """Set the common environment of the ranks, and start the fork server if there are modules to preload."""
        # A single node has a secret of its own.
        secret = {launch_protocol.JOB_SECRET: secrets.token_hex(16)} if self.plan.rendezvous is None else {}
        extra = folders.environment
        if self.output.has_live_line:
            extra[launch_protocol.LIVE_LINE] = "1"
        self.starter.common_environment = build_common_environment(self.plan, {**os.environ, **secret}) | extra
        self.starter.log_path = self.plan.run_dir / "logs" / "launcher.log"
        self.starter.preload(self.plan.preload)
        if self.starter.forkserver is not None:
            self.worker_group.services.add(self.starter.forkserver.pid)
            self.events.watch(self.starter.forkserver.channel, self._read_starter)

    def _read_starter(self) -> None:
        forkserver = self.starter.forkserver
        assert forkserver is not None, "the channel is watched while the fork server is known"
        # The channel may be closed below.
        self.events.unwatch(forkserver.channel)
        events = self.starter.read_events()
        if self.starter.forkserver is not None:
            self.events.watch(forkserver.channel, self._read_starter)
        self._handle_start_events(events)

    def _handle_start_events(self, events: Iterable[StartEvent]) -> None:
        for event in events:
            if event.id is None:
                self.output.write_line(f"dtrain: launch: {event.error}")
            elif event.id < 0 and event.error is None:
                self._record_service(event.id, event.pid)
            elif event.error is None:
                self.worker_group.record_start(event.id, event.pid, time.monotonic())
            elif event.id == -self.store.port:
                line = f"dtrain: launch: the process for the ranks' store could not be started: {event.error}; use fewer ranks"
                self.worker_group.fail([line], time.monotonic())
            elif event.id in self.worker_group.pids:
                del self.worker_group.pids[event.id]
                self._fail_start(event.id, event.error)

    def _record_service(self, number: int, pid: int) -> None:
        self.worker_group.services.add(pid)
        if number == -self.store.port:
            self.store.pid = pid
        elif number != SUCCESSOR_ID:
            # The store of an earlier attempt, whose ranks have ended.
            self.worker_group.kill_service(pid)

    def _start_successor(self) -> None:
        """Prepare the next restart: fork a server that imports what a rank has imported."""
        with contextlib.suppress(OSError):
            if self.starter.start_successor(launch_protocol.modules_file(self.plan.run_dir)):
                assert self.starter.successor is not None, "it was requested"
                self.events.watch(self.starter.successor.channel, self._promote_successor)

    def _promote_successor(self) -> None:
        old, new = self.starter.forkserver, self.starter.successor
        assert new is not None, "its channel is watched"
        self.events.unwatch(new.channel)
        if old is not None:
            self.events.unwatch(old.channel)
        if pid := self.starter.promote_successor():
            self.worker_group.kill_service(pid)
        if self.starter.forkserver is not None:
            self.events.watch(self.starter.forkserver.channel, self._read_starter)

    def _drop_unstarted_ranks(self) -> None:
        """Drop the ranks that have not started. Ranks that the fork server is forking get SIGTERM on arrival."""
        if self.starter.forkserver is not None and self.starter.forkserver.is_ready:
            self.worker_group.drop_ranks(self.starter.withdraw_pending())
            return
        # The fork server may import modules for a long time.
        if self.starter.forkserver is not None:
            self.events.unwatch(self.starter.forkserver.channel)
            self.starter.stop_forkserver()
        self.worker_group.drop_ranks([rank for rank, pid in self.worker_group.pids.items() if pid is None])

    # The store of the ranks.

    def _open_store(self, listener: socket.socket) -> None:
        """Use a listening socket for the ranks' store.

        The store process starts when the first rank connects. Programs without process groups need no store, and with plain
        interpreters the process imports torch.
        """
        self.store.listener, self.store.port = listener, int(listener.getsockname()[1])
        self.events.watch(listener, self._start_store)

    def _start_store(self) -> None:
        listener = self._take_store_listener()
        if listener is None:
            return
        address, port = listener.getsockname()[:2]
        if address in _WILDCARD_ADDRESSES:
            # The store connects to itself as a client.
            address = "localhost"
        fds = {"stdin": self.files.devnull, "listener": listener.detach()}
        request = ProcessRequest(
            id=-port, kind="store", fds=fds, owned=frozenset({"listener"}), environment={}, address=address, port=port
        )
        self._handle_start_events(self.starter.start(request))

    def _take_store_listener(self) -> socket.socket | None:
        listener, self.store.listener = self.store.listener, None
        if listener is not None:
            self.events.unwatch(listener)
        return listener

    def _check_store(self, now: float) -> None:
        """End the job if the store process has exited, because ranks would notice much later, with unrelated errors."""
        pid, group = self.store.pid, self.worker_group
        if pid is None or pid not in group.unclaimed or self.store.exit_code is not None:
            return
        self.store.exit_code = group.unclaimed[pid].code
        exit_text = describe_exit(self.store.exit_code)
        line = (
            f"dtrain: launch: the process that serves the ranks' store ended early ({exit_text}, pid {pid}); ranks were ended"
        )
        if group.alive:
            group.fail([line], now)

    # Other nodes.

    def join_nodes(self, config: NodeRendezvous) -> None:
        """Join the other nodes, which determines the ranks of this node. If the join fails, the job fails.

        Mutates: this job, whose plan is then complete; the run folder, whose name comes from node 0.
        """
        config = self.nodes.enter(config, self.restart_policy)
        if line := describe_wait(config, self.nodes.lost):
            self.output.write_line(f"dtrain: {line}")
        try:
            if config.node_rank == 0:
                listener, notice = listen_for_nodes(config.addr, 0, fallback=config.fallback_addr)
                if notice:
                    self.output.write_line(f"dtrain: {notice}")
                self._open_store(listener)
                config = replace(config, store_port=self.store.port)
            agent = self.nodes.agent = start_agent(config)
        except OSError as error:
            self._fail_join(
                f"launch: cannot reach the other nodes at {config.addr}: {error.strerror}; is it an address of node 0?"
            )
            return
        self.worker_group.services.add(agent.pid)
        self.events.watch(agent, lambda: self._read_agent(agent))
        self.run_loop(lambda: not self.nodes.joined)

    def _read_agent(self, agent: Agent) -> None:
        messages = agent.read()
        if agent.has_exited:
            self.events.unwatch(agent)
        for message in messages:
            match message:
                case Notice():
                    self.output.write_line(f"dtrain: {message.line}")
                    self.nodes.waiting = self.nodes.waiting if message.waiting is None else message.waiting
                case JoinAccepted():
                    self._apply_layout(message)
                case JoinRefused():
                    self._fail_join(message.line, message.code)
                case NodeFailed():
                    self.nodes.failure_reported, self.nodes.is_job_over = True, message.is_final
                    self.nodes.lost = message.node_rank if message.is_lost else None
                    self.worker_group.fail([f"dtrain: launch: {message.line}"], time.monotonic(), code=message.code)
                case JobFinished():
                    self.nodes.finished = message

    def _fail_join(self, line: str, code: int = 1) -> None:
        """Fail the job because the nodes could not join. No rank starts."""
        self.nodes.failure_reported = self.nodes.is_job_over = True
        self.worker_group.fail([f"dtrain: {line}"], time.monotonic(), code=code)

    def _apply_layout(self, joined: JoinAccepted) -> None:
        run_dir = self.plan.run_dir
        # Without --run-dir, the folder gets its name from node 0.
        if joined.layout.node_rank > 0 and not run_dir.exists():
            try:
                run_dir = create_run_dir(None, now=datetime.now(), name=joined.run_name)
            except ConfigError as error:
                self.worker_group.fail([f"dtrain: {error}"], time.monotonic())
                return
        self.plan = replace(self.plan, layout=replace(joined.layout, interface=joined.interface), run_dir=run_dir)
        self.worker_group.plan = self.plan
        self.nodes.accept(joined)
        if self.plan.rendezvous is not None and (line := describe_smaller_job(self.plan.rendezvous, joined)):
            self.output.write_line(f"dtrain: {line}")
        self.store.port = joined.store_port
        self.restart_policy = replace(self.restart_policy, total=joined.restarts, fruitless=joined.fruitless_restarts)
        self.output.set_layout(joined.layout, run_dir)
        warning = write_launch_record(self.plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
        if warning is not None:
            self.output.write_line(f"dtrain: {warning}")

    def _report_failure_to_nodes(self) -> None:
        """Report a failure of this node's ranks to the other nodes as soon as it is known, so that they need not wait."""
        group, nodes = self.worker_group, self.nodes
        if nodes.agent is not None and not nodes.failure_reported and (group.root_cause or group.launch_error):
            result = self._summarize()
            self._send_failure(nodes.agent, result, -1 if result.failed_rank is None else result.failed_rank)

    def _send_failure(self, agent: Agent, result: JobResult, rank: int) -> None:
        is_final = not result.may_restart or self.restart_policy.delay_s is None
        self.nodes.failure_reported, self.nodes.is_job_over = True, is_final
        # The common prefix of all lines is omitted.
        line = result.lines[-1].removeprefix("dtrain: launch: ") if result.lines else "ended"
        agent.send(RanksFailed(rank=rank, code=result.code, line=line, is_final=is_final))

    def _wait_for_all_nodes(self, result: JobResult) -> None:
        """Wait until the ranks of all nodes have exited, or a node has failed. The ranks of this node have exited."""
        agent, group = self.nodes.agent, self.worker_group
        if agent is None or self.nodes.failure_reported or self.launcher_gone:
            return
        if group.ending.requested_signal is not None and result.code != launch_protocol.PREEMPTED_EXIT_CODE:
            self._send_failure(agent, result, -1)
            return
        agent.send(RanksExited(exit_codes={exit_.rank: exit_.code for exit_ in group.exits.values()}))
        self.run_loop(lambda: self.nodes.finished is None and not self.nodes.failure_reported)

    def _leave_nodes(self) -> None:
        """End the exchange of this attempt. The agent of node 0 first waits until the other nodes know the failure."""
        agent = self.nodes.agent
        if agent is None:
            return
        self._close_agent(agent)
        limit = time.monotonic() + _AGENT_EXIT_S
        self.run_loop(lambda: agent.pid not in self.worker_group.unclaimed and time.monotonic() < limit, wake_at=limit)
        self.worker_group.kill_service(agent.pid)
        self.nodes = OtherNodes(members=self.nodes.members, waiting=self.nodes.waiting, lost=self.nodes.lost)

    def _close_agent(self, agent: Agent) -> None:
        if not agent.has_exited:
            self.events.unwatch(agent)
        agent.close()

    # The end.

    def _summarize(self) -> JobResult:
        if self.store.pid is not None and self.store.pid in self.worker_group.unclaimed:
            self.store.exit_code = self.worker_group.unclaimed[self.store.pid].code
        oom_kills = count_oom_kills()
        return summarize(
            self.worker_group,
            host=socket.gethostname(),
            # The control group has counted a kill since the start of the job.
            oom_killed=oom_kills is not None and self.initial_oom_kills is not None and oom_kills > self.initial_oom_kills,
            exit_codes=None if self.nodes.finished is None else self.nodes.finished.exit_codes,
            store_exit_code=self.store.exit_code,
        )

    def final_lines(self, result: JobResult) -> list[str]:
        """Return the lines about a finished attempt: exceptions, then the summary."""
        full, is_shown, read_tail = self.plan.output.full_traceback, self.output.is_shown, self.output.read_tail
        lines = describe_failures(self.worker_group, result, is_shown=is_shown, read_tail=read_tail, full=full)
        return [*lines, *result.lines]

    def _close_worker_group(self) -> None:
        """Relay the rest of the output and stop the store process, after the exit of the last rank."""
        for fd in self.output.fds():
            self.events.unwatch(fd)
        self.output.drain()
        for record in self.worker_group.read_failures():
            if not record.already_printed and record.error_type != "SystemExit":
                self.output.append_to_log(record.rank, record.traceback_text)
        # The last commit of a rank may arrive together with its exit.
        self.read_progress()
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None
        listener = self._take_store_listener()
        if listener is not None:
            listener.close()
        if self.store.pid is not None:
            self.worker_group.kill_service(self.store.pid)
            self.store.pid = None

    def stop_services(self) -> None:
        """Stop the fork server and the agent at the end of the job."""
        forkserver, agent = self.starter.forkserver, self.nodes.agent
        if self.starter.successor is not None:
            self._promote_successor()
            forkserver = self.starter.forkserver
        if forkserver is not None:
            self.events.unwatch(forkserver.channel)
            self.starter.stop_forkserver()
            self.worker_group.kill_service(forkserver.pid)
        if agent is not None:
            self._close_agent(agent)
            self.worker_group.wait_for_service(agent.pid, _AGENT_EXIT_S)
            self.worker_group.kill_service(agent.pid)
