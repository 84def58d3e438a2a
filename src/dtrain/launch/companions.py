"""The other nodes of a job: joining them before the ranks start, and hearing of each other's ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from dtrain import wire
from dtrain.errors import ConfigError
from dtrain.launch.conclusion import End
from dtrain.launch.job import Job
from dtrain.launch.nodes.addresses import listen
from dtrain.launch.nodes.agent import start_agent
from dtrain.launch.nodes.meeting import Meeting
from dtrain.launch.nodes.messages import End as EndOfPeer
from dtrain.launch.nodes.messages import Ended, Failed, Joined, Notice, Over, Refused
from dtrain.launch.record import write_record
from dtrain.launch.rundir import create_run_dir
from dtrain.launch.starting import open_store

Wait = Callable[[Callable[[], bool]], None]
"""Goes on with the loop as long as something is true, or until somebody has had enough."""


def join(job: Job, meeting: Meeting, wait: Wait) -> None:
    """Meet the other nodes; then it is known which ranks run here. Where that fails, so does the job's attempt.

    Mutates: ``job``, whose plan is complete afterwards; the run folder, which has the name that node 0 gave it.
    """
    try:
        if meeting.node_rank == 0:
            listener, notice = listen(meeting.addr, 0, fallback=meeting.fallback_addr)
            if notice:
                job.output.say(f"dtrain: {notice}")
            open_store(job, listener)
            meeting = replace(meeting, store_port=job.store_port)
        job.agent = start_agent(meeting)
    except OSError as error:
        _fail(job, f"launch: cannot meet the other nodes at {meeting.addr}: {error.strerror}; is it an address of node 0?")
        return
    job.attempt.services.add(job.agent.pid)
    job.watch(job.agent, lambda: _read_agent(job))
    wait(lambda: not job.joined)


def _read_agent(job: Job) -> None:
    assert job.agent is not None
    messages = job.agent.read()
    if job.agent.gone:
        job.selector.unregister(job.agent)
    for message in messages:
        match message:
            case Notice():
                job.output.say(f"dtrain: {message.line}")
            case Joined():
                _take_place(job, message)
            case Refused():
                _fail(job, message.line)
            case EndOfPeer():
                job.told = True
                job.attempt.fail([f"dtrain: launch: {message.line}"], time.monotonic(), code=message.code)
            case Over():
                job.over = message


def _fail(job: Job, line: str) -> None:
    """The nodes do not come together: nothing is started."""
    job.told = True
    job.attempt.fail([f"dtrain: {line}"], time.monotonic(), code=1)


def _take_place(job: Job, joined: Joined) -> None:
    run_dir = job.plan.run_dir
    if joined.layout.node_rank > 0 and not run_dir.exists():  # nobody has named one: it is called as on node 0
        try:
            run_dir = create_run_dir(None, now=datetime.now(), name=joined.run_name)
        except ConfigError as error:
            job.attempt.fail([f"dtrain: {error}"], time.monotonic())
            return
    job.plan = replace(job.plan, layout=replace(joined.layout, interface=joined.interface), run_dir=run_dir)
    job.attempt.plan, job.joined = job.plan, True
    job.store_port = joined.store_port
    job.output.place(joined.layout, run_dir)
    warning = write_record(job.plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
    if warning is not None:
        job.output.say(f"dtrain: {warning}")


def tell_of_failure(job: Job, conclude: Callable[[], End]) -> None:
    """As soon as the ranks here have failed, or were told to end and did not save: the other nodes need not wait for them."""
    attempt = job.attempt
    if job.agent is None or job.told or not (attempt.cause or attempt.trouble):
        return
    job.told = True
    end = conclude()
    job.agent.send(Failed(rank=-1 if end.culprit is None else end.culprit, code=end.code, line=_bare(end)))


def wait_for_all(job: Job, end: End, wait: Wait) -> None:
    """The ranks here have ended: wait until those of all nodes have, or one has failed.

    Mutates: ``job.over``.
    """
    if job.agent is None or job.told or job.front_gone:
        return
    codes = {exit_.rank: exit_.code for exit_ in job.attempt.exits.values()}
    if job.attempt.asked_by is not None and end.code != wire.PREEMPTED:
        job.told = True
        job.agent.send(Failed(rank=-1, code=end.code, line=_bare(end)))
        return
    job.agent.send(Ended(codes=codes))
    wait(lambda: job.over is None)


def leave(job: Job) -> int | None:
    """Take leave of the other nodes; the pid of the process that is to be waited for."""
    if job.agent is None:
        return None
    if not job.agent.gone:
        job.selector.unregister(job.agent)
    job.agent.close()
    return job.agent.pid


def _bare(end: End) -> str:
    """The launcher's line about the cause, without what all of its lines begin with."""
    return end.lines[-1].removeprefix("dtrain: launch: ") if end.lines else "ended"
