"""Starting what a job consists of: its ranks, and the process that serves their store."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from dtrain import wire
from dtrain.launch.cores import core_count, share_cores, usable_cores
from dtrain.launch.hang.guard import Guard
from dtrain.launch.job import Job
from dtrain.launch.plan import LOOPBACK_ADDRESS, own_environment
from dtrain.launch.start.request import STORE_ID, Request
from dtrain.launch.start.starter import Event

_BACKLOG = 1024
_ALL_INTERFACES = ("0.0.0.0", "::")


def start_ranks(job: Job) -> None:
    """Have all ranks of this node started; they meet at ``job.store_port``."""
    plan, layout = job.plan, job.plan.layout
    for rank in layout.ranks:
        _remove(plan.failure_file(rank))
    for mark in (wire.failed_file(plan.run_dir), wire.interrupted_file(plan.run_dir)):
        _remove(mark)
    job.guard = Guard(
        run_dir=plan.run_dir,
        world_size=layout.world_size,
        timeout_s=plan.hang_timeout_s,
        node_rank=layout.node_rank,
        ranks=layout.ranks,
    )
    cores, count = usable_cores(), core_count()
    shares = share_cores(cores, layout.nproc) if plan.bind else [[]] * layout.nproc
    for rank, share in zip(layout.ranks, shares, strict=True):
        own = own_environment(plan, rank, port=job.store_port, cores=count, inherited=os.environ, restarts=job.restarts.done)
        try:
            request = _rank_request(job, rank, own, share)
        except OSError as error:
            _could_not_start(job, rank, error.strerror)
            return
        job.attempt.pids[rank] = None
        handle(job, job.starter.start(request))


def _remove(file: Path) -> None:
    """What an earlier start has left. Where that cannot be removed, it can hardly be there."""
    with contextlib.suppress(OSError):
        file.unlink()


def _rank_request(job: Job, rank: int, own: dict[str, str], cores: list[int]) -> Request:
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
        job.watch(fd, lambda fd=fd: relay(job, fd))  # type: ignore[misc]
    stdin = 0 if job.plan.layout.nproc == 1 else job.null  # several ranks would tear one input apart
    fds = {"stdin": stdin, "stdout": out_write, "stderr": err_write, "pulse": job.pulses[1]}
    if job.guard is not None:
        fds["ask"] = job.guard.ask_fd
    return Request(id=rank, kind="rank", fds=fds, owned=frozenset({"stdout", "stderr"}), environment=own, cores=cores)


def relay(job: Job, fd: int) -> None:
    """Pass on what a rank has printed."""
    job.selector.unregister(fd)  # before it may be closed
    if job.output.relay(fd):
        job.watch(fd, lambda: relay(job, fd))


def _could_not_start(job: Job, rank: int, why: str | None) -> None:
    world = job.plan.layout.world_size
    job.attempt.fail([f"dtrain: launch: rank {rank} of {world} could not be started: {why}; use fewer"], time.monotonic())


def open_store(job: Job, listener: socket.socket) -> None:
    """Let the ranks meet at a socket that listens already.

    A process that serves them is started when the first one comes: programs that do not meet need none, and with plain
    interpreters it costs an import of torch.
    """
    job.listener = listener
    job.store_port = int(listener.getsockname()[1])
    job.watch(listener, lambda: _start_store(job))


def listen_on_loopback() -> socket.socket:
    """A socket for the store of ranks that are all here. Nobody can take its port, and nobody else reaches it."""
    listener = socket.socket()
    listener.bind((LOOPBACK_ADDRESS, 0))
    listener.listen(_BACKLOG)
    return listener


def _start_store(job: Job) -> None:
    listener = unwatched_listener(job)
    if listener is None:
        return
    address, port = listener.getsockname()[:2]
    if address in _ALL_INTERFACES:
        address = "localhost"  # the store is a client of its own, too
    fds = {"stdin": job.null, "listener": listener.detach()}
    request = Request(
        id=STORE_ID, kind="store", fds=fds, owned=frozenset({"listener"}), environment={}, address=address, port=port
    )
    handle(job, job.starter.start(request))


def unwatched_listener(job: Job) -> socket.socket | None:
    listener, job.listener = job.listener, None
    if listener is not None:
        job.selector.unregister(listener)
    return listener


def watch_starter(job: Job) -> None:
    if job.starter.preloaded is not None:
        job.attempt.services.add(job.starter.preloaded.pid)
        channel = job.starter.preloaded.channel
        job.watch(channel, lambda: _read_starter(job, channel))


def _read_starter(job: Job, channel: socket.socket) -> None:
    job.selector.unregister(channel)  # before it may be closed
    events = job.starter.read()
    if job.starter.preloaded is not None:
        job.watch(channel, lambda: _read_starter(job, channel))
    handle(job, events)


def handle(job: Job, events: Iterable[Event]) -> None:
    for event in events:
        if event.id is None:
            job.output.say(f"dtrain: launch: {event.error}")
        elif event.id == STORE_ID and event.error is None:
            job.store = event.pid
            job.attempt.services.add(event.pid)
        elif event.error is None:
            job.attempt.started(event.id, event.pid, time.monotonic())
        elif event.id == STORE_ID:
            trouble = f"dtrain: launch: the process for the ranks' store could not be started: {event.error}; use fewer ranks"
            job.attempt.fail([trouble], time.monotonic())
        elif event.id in job.attempt.pids:
            del job.attempt.pids[event.id]
            _could_not_start(job, event.id, event.error)
