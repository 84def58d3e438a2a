"""The other nodes of a job: joining them before the ranks start, and hearing of each other's ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.job import Job, open_store
from dtrain.launch.launch_dir import create_run_dir, write_launch_record
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.nodes.addresses import listen_for_nodes
from dtrain.launch.nodes.agent import start_agent
from dtrain.launch.nodes.messages import JobFinished, JoinAccepted, JoinRefused, Notice, RanksExited, RanksFailed
from dtrain.launch.nodes.messages import NodeFailed as EndOfPeer
from dtrain.launch.result import JobResult

WaitWhile = Callable[[Callable[[], bool]], None]
"""Goes on with the loop as long as something is true, or until somebody has had enough."""


def join_nodes(job: Job, config: NodeRendezvous, wait: WaitWhile) -> None:
    """Meet the other nodes; then it is known which ranks run here. Where that fails, so does the job's attempt.

    Mutates: ``job``, whose plan is complete afterwards; the run folder, which has the name that node 0 gave it.
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
        _fail_join(job, f"launch: cannot meet the other nodes at {config.addr}: {error.strerror}; is it an address of node 0?")
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
            case EndOfPeer():
                job.failure_reported = True
                job.worker_group.fail([f"dtrain: launch: {message.line}"], time.monotonic(), code=message.code)
            case JobFinished():
                job.job_finished = message


def _fail_join(job: Job, line: str) -> None:
    """The nodes do not come together: nothing is started."""
    job.failure_reported = True
    job.worker_group.fail([f"dtrain: {line}"], time.monotonic(), code=1)


def _apply_layout(job: Job, joined: JoinAccepted) -> None:
    run_dir = job.plan.run_dir
    if joined.layout.node_rank > 0 and not run_dir.exists():  # nobody has named one: it is called as on node 0
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
    """As soon as the ranks here have failed, or were told to end and did not save: the other nodes need not wait for them."""
    attempt = job.worker_group
    if job.agent is None or job.failure_reported or not (attempt.root_cause or attempt.launch_error):
        return
    job.failure_reported = True
    end = conclude()
    job.agent.send(RanksFailed(rank=-1 if end.failed_rank is None else end.failed_rank, code=end.code, line=_cause_line(end)))


def wait_for_all_nodes(job: Job, end: JobResult, wait: WaitWhile) -> None:
    """The ranks here have ended: wait until those of all nodes have, or one has failed.

    Mutates: ``job.over``.
    """
    if job.agent is None or job.failure_reported or job.launcher_gone:
        return
    codes = {exit_.rank: exit_.code for exit_ in job.worker_group.exits.values()}
    if job.worker_group.requested_signal is not None and end.code != launch_protocol.PREEMPTED_EXIT_CODE:
        job.failure_reported = True
        job.agent.send(RanksFailed(rank=-1, code=end.code, line=_cause_line(end)))
        return
    job.agent.send(RanksExited(exit_codes=codes))
    wait(lambda: job.job_finished is None)


def leave_nodes(job: Job) -> int | None:
    """Take leave of the other nodes; the pid of the process that is to be waited for."""
    if job.agent is None:
        return None
    if not job.agent.has_exited:
        job.selector.unregister(job.agent)
    job.agent.close()
    return job.agent.pid


def _cause_line(end: JobResult) -> str:
    """The launcher's line about the cause, without what all of its lines begin with."""
    return end.lines[-1].removeprefix("dtrain: launch: ") if end.lines else "ended"
