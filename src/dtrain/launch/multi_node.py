"""Join the other nodes of a job before the ranks start, and exchange failures and exits with them."""

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
from dtrain.launch.nodes.messages import (
    JobFinished,
    JoinAccepted,
    JoinRefused,
    NodeFailed,
    Notice,
    RanksExited,
    RanksFailed,
)
from dtrain.launch.result import JobResult

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
