"""A job as its supervisor knows it: what outlives one start of the ranks.

Starting what a job consists of: its ranks, and the process that serves their store."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import launch_protocol
from dtrain.heartbeats import ProgressDecoder
from dtrain.launch.hang.watchdog import Watchdog
from dtrain.launch.host_resources import assign_cores, core_count, usable_cores
from dtrain.launch.launch_plan import LOOPBACK_ADDRESS, LaunchPlan, build_rank_environment
from dtrain.launch.nodes.agent import Agent
from dtrain.launch.nodes.messages import JobFinished
from dtrain.launch.output.job_output import JobOutput
from dtrain.launch.spawn.exec import STORE_ID, ProcessRequest
from dtrain.launch.spawn.starter import ProcessStarter, StartEvent
from dtrain.launch.worker_group import RestartPolicy, WorkerGroup


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Changed by the supervisor's loop alone."""

    plan: LaunchPlan
    selector: selectors.BaseSelector
    output: JobOutput
    starter: ProcessStarter
    worker_group: WorkerGroup
    restart_policy: RestartPolicy
    progress_pipe: tuple[int, int]  # the pipe in which the ranks report
    progress_decoder: ProgressDecoder
    devnull_fd: int
    initial_oom_kills: int | None
    store_listener: socket.socket | None = None  # of the ranks' store, until a process serves it
    store_pid: int | None = None  # that process
    store_exit_code: int | None = None  # the code with which it ended while there were ranks
    watchdog: Watchdog | None = None  # against hangs
    agent: Agent | None = None  # the process that talks to the other nodes
    store_port: int = 0  # where the ranks meet
    joined: bool = False  # all nodes are there
    failure_reported: bool = False  # the other nodes know of a failure here, or it is theirs
    job_finished: JobFinished | None = None  # how the ranks of all nodes have ended
    launcher_gone: bool = False

    def watch(self, file: Any, action: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, action)


_BACKLOG = 1024
_WILDCARD_ADDRESSES = ("0.0.0.0", "::")


def start_ranks(job: Job) -> None:
    """Have all ranks of this node started; they meet at ``job.store_port``."""
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
        own = build_rank_environment(
            plan, rank, port=job.store_port, cores=count, inherited=os.environ, restart_count=job.restart_policy.total
        )
        try:
            request = _rank_request(job, rank, own, share)
        except OSError as error:
            _fail_start(job, rank, error.strerror)
            return
        job.worker_group.pids[rank] = None
        handle_start_events(job, job.starter.start(request))


def _remove_stale_file(file: Path) -> None:
    """What an earlier start has left. Where that cannot be removed, it can hardly be there."""
    with contextlib.suppress(OSError):
        file.unlink()


def _rank_request(job: Job, rank: int, own: dict[str, str], cores: list[int]) -> ProcessRequest:
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
    stdin = 0 if job.plan.layout.nproc == 1 else job.devnull_fd  # several ranks would tear one input apart
    fds = {"stdin": stdin, "stdout": out_write, "stderr": err_write, "pulse": job.progress_pipe[1]}
    if job.watchdog is not None:
        fds["ask"] = job.watchdog.ask_fd
    return ProcessRequest(id=rank, kind="rank", fds=fds, owned=frozenset({"stdout", "stderr"}), environment=own, cores=cores)


def relay_output(job: Job, fd: int) -> None:
    """Pass on what a rank has printed."""
    job.selector.unregister(fd)  # before it may be closed
    if job.output.relay(fd):
        job.watch(fd, lambda: relay_output(job, fd))


def _fail_start(job: Job, rank: int, why: str | None) -> None:
    world = job.plan.layout.world_size
    job.worker_group.fail([f"dtrain: launch: rank {rank} of {world} could not be started: {why}; use fewer"], time.monotonic())


def open_store(job: Job, listener: socket.socket) -> None:
    """Let the ranks meet at a socket that listens already.

    A process that serves them is started when the first one comes: programs that do not meet need none, and with plain
    interpreters it costs an import of torch.
    """
    job.store_listener = listener
    job.store_port = int(listener.getsockname()[1])
    job.watch(listener, lambda: _start_store(job))


def listen_on_loopback() -> socket.socket:
    """A socket for the store of ranks that are all here. Nobody can take its port, and nobody else reaches it."""
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
        address = "localhost"  # the store is a client of its own, too
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
    job.selector.unregister(channel)  # before it may be closed
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
            trouble = f"dtrain: launch: the process for the ranks' store could not be started: {event.error}; use fewer ranks"
            job.worker_group.fail([trouble], time.monotonic())
        elif event.id in job.worker_group.pids:
            del job.worker_group.pids[event.id]
            _fail_start(job, event.id, event.error)
