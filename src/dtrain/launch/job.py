"""Keep the state of a job across restarts, start its ranks and their store, and exchange exits with other nodes."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.addresses import listen_for_nodes
from dtrain.launch.agent import Agent, start_agent
from dtrain.launch.heartbeats import ProgressDecoder
from dtrain.launch.host_resources import assign_cores, core_count, usable_cores
from dtrain.launch.job_output import JobOutput
from dtrain.launch.launch_dir import create_run_dir, write_launch_record
from dtrain.launch.launch_plan import LOOPBACK_ADDRESS, LaunchPlan, NodeRendezvous, build_rank_environment
from dtrain.launch.node_messages import JobFinished, JoinAccepted, JoinRefused, NodeFailed, Notice, RanksExited, RanksFailed
from dtrain.launch.processes import STORE_ID, ProcessRequest
from dtrain.launch.result import JobResult
from dtrain.launch.starter import ProcessStarter, StartEvent
from dtrain.launch.watchdog import Watchdog
from dtrain.launch.worker_group import RestartPolicy, WorkerGroup


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """State of a job, which only the supervisor's loop changes.

    Attributes:
        plan: the launch.
        selector: events of the supervisor's loop.
        output: output of the ranks.
        starter: starter of processes.
        worker_group: the current attempt.
        restart_policy: restarts so far.
        progress_pipe: pipe with the ranks' progress reports.
        progress_decoder: decoder of progress reports.
        devnull_fd: descriptor of ``/dev/null``.
        initial_oom_kills: out-of-memory kills before the job.
        store_listener: socket of the ranks' store, until a process serves the store.
        store_pid: process that serves the store.
        store_exit_code: exit code of the store process, if it exited before the ranks.
        watchdog: detector of hangs.
        agent: process that communicates with other nodes.
        store_port: port of the ranks' store.
        joined: True once all nodes have joined.
        failure_reported: True once all nodes know of a failure.
        job_finished: exits of the ranks of all nodes.
        launcher_gone: True once the launcher process has exited.
    """

    plan: LaunchPlan
    selector: selectors.BaseSelector
    output: JobOutput
    starter: ProcessStarter
    worker_group: WorkerGroup
    restart_policy: RestartPolicy
    progress_pipe: tuple[int, int]
    progress_decoder: ProgressDecoder
    devnull_fd: int
    initial_oom_kills: int | None
    store_listener: socket.socket | None = None
    store_pid: int | None = None
    store_exit_code: int | None = None
    watchdog: Watchdog | None = None
    agent: Agent | None = None
    store_port: int = 0
    joined: bool = False
    failure_reported: bool = False
    job_finished: JobFinished | None = None
    launcher_gone: bool = False

    def watch(self, file: Any, action: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, action)


_BACKLOG = 1024
_WILDCARD_ADDRESSES = ("0.0.0.0", "::")


def start_ranks(job: Job) -> None:
    """Start all ranks of this node; their store is at ``job.store_port``."""
    plan, layout = job.plan, job.plan.layout
    for rank in layout.ranks:
        _remove_stale_file(plan.failure_file(rank))
    for mark in (launch_protocol.job_failed_file(plan.run_dir), launch_protocol.interrupted_file(plan.run_dir)):
        _remove_stale_file(mark)
    job.watchdog = Watchdog(
        run_dir=plan.run_dir,
        world_size=layout.world_size,
        timeout_s=plan.hang_timeout_s,
        node_rank=layout.node_rank,
        ranks=layout.ranks,
    )
    cores, count = usable_cores(), core_count()
    shares = assign_cores(cores, layout.nproc) if plan.bind else [[]] * layout.nproc
    for rank, share in zip(layout.ranks, shares, strict=True):
        environment = build_rank_environment(
            plan, rank, port=job.store_port, cores=count, inherited=os.environ, restart_count=job.restart_policy.total
        )
        try:
            request = _rank_request(job, rank, environment, share)
        except OSError as error:
            _fail_start(job, rank, error.strerror)
            return
        job.worker_group.pids[rank] = None
        handle_start_events(job, job.starter.start(request))


def _remove_stale_file(file: Path) -> None:
    """Remove a file of an earlier attempt, if possible. A file that cannot be removed hardly exists."""
    with contextlib.suppress(OSError):
        file.unlink()


def _rank_request(job: Job, rank: int, environment: dict[str, str], cores: list[int]) -> ProcessRequest:
    out, out_write = os.pipe()
    try:
        err, err_write = os.pipe()
    except OSError:
        os.close(out)
        os.close(out_write)
        raise
    job.output.open(rank, out, err)
    for fd in (out, err):
        os.set_blocking(fd, False)
        job.watch(fd, lambda fd=fd: relay_output(job, fd))  # type: ignore[misc]
    # Several ranks would compete for the same input.
    stdin = 0 if job.plan.layout.nproc == 1 else job.devnull_fd
    fds = {"stdin": stdin, "stdout": out_write, "stderr": err_write, "pulse": job.progress_pipe[1]}
    if job.watchdog is not None:
        fds["ask"] = job.watchdog.ask_fd
    owned = frozenset({"stdout", "stderr"})
    return ProcessRequest(id=rank, kind="rank", fds=fds, owned=owned, environment=environment, cores=cores)


def relay_output(job: Job, fd: int) -> None:
    """Relay the output of a rank from one descriptor."""
    # The descriptor may be closed below.
    job.selector.unregister(fd)
    if job.output.relay(fd):
        job.watch(fd, lambda: relay_output(job, fd))


def _fail_start(job: Job, rank: int, reason: str | None) -> None:
    world = job.plan.layout.world_size
    line = f"dtrain: launch: rank {rank} of {world} could not be started: {reason}; use fewer"
    job.worker_group.fail([line], time.monotonic())


def open_store(job: Job, listener: socket.socket) -> None:
    """Use a listening socket for the ranks' store.

    The store process starts when the first rank connects. Programs without process groups need no store, and with plain
    interpreters the process imports torch.
    """
    job.store_listener = listener
    job.store_port = int(listener.getsockname()[1])
    job.watch(listener, lambda: _start_store(job))


def listen_on_loopback() -> socket.socket:
    """Return a listening socket for the store of a single-node job. No other program can take or reach its port."""
    listener = socket.socket()
    listener.bind((LOOPBACK_ADDRESS, 0))
    listener.listen(_BACKLOG)
    return listener


def _start_store(job: Job) -> None:
    listener = take_store_listener(job)
    if listener is None:
        return
    address, port = listener.getsockname()[:2]
    if address in _WILDCARD_ADDRESSES:
        # The store connects to itself as a client.
        address = "localhost"
    fds = {"stdin": job.devnull_fd, "listener": listener.detach()}
    request = ProcessRequest(
        id=STORE_ID, kind="store", fds=fds, owned=frozenset({"listener"}), environment={}, address=address, port=port
    )
    handle_start_events(job, job.starter.start(request))


def take_store_listener(job: Job) -> socket.socket | None:
    listener, job.store_listener = job.store_listener, None
    if listener is not None:
        job.selector.unregister(listener)
    return listener


def watch_starter(job: Job) -> None:
    if job.starter.forkserver is not None:
        job.worker_group.services.add(job.starter.forkserver.pid)
        channel = job.starter.forkserver.channel
        job.watch(channel, lambda: _read_starter(job, channel))


def _read_starter(job: Job, channel: socket.socket) -> None:
    # The channel may be closed below.
    job.selector.unregister(channel)
    events = job.starter.read_events()
    if job.starter.forkserver is not None:
        job.watch(channel, lambda: _read_starter(job, channel))
    handle_start_events(job, events)


def handle_start_events(job: Job, events: Iterable[StartEvent]) -> None:
    for event in events:
        if event.id is None:
            job.output.write_line(f"dtrain: launch: {event.error}")
        elif event.id == STORE_ID and event.error is None:
            job.store_pid = event.pid
            job.worker_group.services.add(event.pid)
        elif event.error is None:
            job.worker_group.record_start(event.id, event.pid, time.monotonic())
        elif event.id == STORE_ID:
            line = f"dtrain: launch: the process for the ranks' store could not be started: {event.error}; use fewer ranks"
            job.worker_group.fail([line], time.monotonic())
        elif event.id in job.worker_group.pids:
            del job.worker_group.pids[event.id]
            _fail_start(job, event.id, event.error)


WaitWhile = Callable[[Callable[[], bool]], None]
"""Function that runs the loop while a condition is true, or until the user forces the end of the job."""


def join_nodes(job: Job, config: NodeRendezvous, wait: WaitWhile) -> None:
    """Join the other nodes, which determines the ranks of this node. If the join fails, the job fails.

    Mutates: ``job``, whose plan is then complete; the run folder, whose name comes from node 0.
    """
    try:
        if config.node_rank == 0:
            listener, notice = listen_for_nodes(config.addr, 0, fallback=config.fallback_addr)
            if notice:
                job.output.write_line(f"dtrain: {notice}")
            open_store(job, listener)
            config = replace(config, store_port=job.store_port)
        job.agent = start_agent(config)
    except OSError as error:
        _fail_join(job, f"launch: cannot reach the other nodes at {config.addr}: {error.strerror}; is it an address of node 0?")
        return
    job.worker_group.services.add(job.agent.pid)
    job.watch(job.agent, lambda: _read_agent_messages(job))
    wait(lambda: not job.joined)


def _read_agent_messages(job: Job) -> None:
    assert job.agent is not None
    messages = job.agent.read()
    if job.agent.has_exited:
        job.selector.unregister(job.agent)
    for message in messages:
        match message:
            case Notice():
                job.output.write_line(f"dtrain: {message.line}")
            case JoinAccepted():
                _apply_layout(job, message)
            case JoinRefused():
                _fail_join(job, message.line)
            case NodeFailed():
                job.failure_reported = True
                job.worker_group.fail([f"dtrain: launch: {message.line}"], time.monotonic(), code=message.code)
            case JobFinished():
                job.job_finished = message


def _fail_join(job: Job, line: str) -> None:
    """Fail the job because the nodes could not join. No rank starts."""
    job.failure_reported = True
    job.worker_group.fail([f"dtrain: {line}"], time.monotonic(), code=1)


def _apply_layout(job: Job, joined: JoinAccepted) -> None:
    run_dir = job.plan.run_dir
    # Without --run-dir, the folder gets its name from node 0.
    if joined.layout.node_rank > 0 and not run_dir.exists():
        try:
            run_dir = create_run_dir(None, now=datetime.now(), name=joined.run_name)
        except ConfigError as error:
            job.worker_group.fail([f"dtrain: {error}"], time.monotonic())
            return
    job.plan = replace(job.plan, layout=replace(joined.layout, interface=joined.interface), run_dir=run_dir)
    job.worker_group.plan, job.joined = job.plan, True
    job.store_port = joined.store_port
    job.output.set_layout(joined.layout, run_dir)
    warning = write_launch_record(job.plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
    if warning is not None:
        job.output.write_line(f"dtrain: {warning}")


def report_failure_to_nodes(job: Job, conclude: Callable[[], JobResult]) -> None:
    """Report a failure of this node's ranks to the other nodes as soon as it is known, so that they need not wait."""
    group = job.worker_group
    if job.agent is None or job.failure_reported or not (group.root_cause or group.launch_error):
        return
    job.failure_reported = True
    result = conclude()
    failed_rank = -1 if result.failed_rank is None else result.failed_rank
    job.agent.send(RanksFailed(rank=failed_rank, code=result.code, line=_cause_line(result)))


def wait_for_all_nodes(job: Job, result: JobResult, wait: WaitWhile) -> None:
    """Wait until the ranks of all nodes have exited, or a node has failed. The ranks of this node have exited.

    Mutates: ``job.job_finished``.
    """
    if job.agent is None or job.failure_reported or job.launcher_gone:
        return
    codes = {exit_.rank: exit_.code for exit_ in job.worker_group.exits.values()}
    if job.worker_group.requested_signal is not None and result.code != launch_protocol.PREEMPTED_EXIT_CODE:
        job.failure_reported = True
        job.agent.send(RanksFailed(rank=-1, code=result.code, line=_cause_line(result)))
        return
    job.agent.send(RanksExited(exit_codes=codes))
    wait(lambda: job.job_finished is None)


def leave_nodes(job: Job) -> int | None:
    """Disconnect from the other nodes, and return the pid of the agent, which the caller waits for."""
    if job.agent is None:
        return None
    if not job.agent.has_exited:
        job.selector.unregister(job.agent)
    job.agent.close()
    return job.agent.pid


def _cause_line(result: JobResult) -> str:
    """Return the launcher's line about the cause, without the common prefix of all lines."""
    return result.lines[-1].removeprefix("dtrain: launch: ") if result.lines else "ended"
