"""``dtrain launch``: from the command line to a plan, and from the plan to an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.cli import launch_options as given
from dtrain.cli.torchrun import Rendezvous, parse_ranks, place_nodes
from dtrain.cli.values import parse_duration, parse_host, parse_modules, parse_restarts, parse_stop_signal, parse_whole
from dtrain.errors import ConfigError
from dtrain.launch.elastic.request import elastic_plan
from dtrain.launch.limits import allow_open_files
from dtrain.launch.nodes.facts import collect_facts
from dtrain.launch.nodes.meeting import Meeting
from dtrain.launch.output.lines import harmless
from dtrain.launch.output.outlet import Outlet
from dtrain.launch.output.shown import list_ranks, parse_log_ranks
from dtrain.launch.output.templates import check_output
from dtrain.launch.plan import Kind, LaunchPlan, Layout, OutputPlan, Target, count_gpus, parse_nproc, parse_seconds
from dtrain.launch.record import write_record
from dtrain.launch.rundir import claim_run_dir, create_run_dir, default_run_dir
from dtrain.launch.schedulers import scheduled
from dtrain.launch.target import check_command, check_module, check_script
from dtrain.launch.topology import Asked, Topology, infer
from dtrain.wire import THREADS

_LEFT_OUT = "leave it out to have it inferred"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How this node joins the others."""

    timeout_s: float | None
    paths: tuple[str, ...]  # what has to be the same on all nodes


def launch(
    script: given.Script,
    args: given.Arguments = None,
    nproc: given.Nproc = None,
    module: given.Module = False,
    command: given.Command = False,
    preload: given.Preload = None,
    no_preload: given.NoPreload = False,
    bind: given.Bind = False,
    run_dir: given.RunDir = None,
    log_ranks: given.LogRanks = None,
    prefix: given.Prefix = None,
    stdout: given.Stdout = None,
    stderr: given.Stderr = None,
    full_traceback: given.FullTraceback = False,
    verbose: given.Verbose = False,
    grace: given.Grace = None,
    hang_timeout: given.HangTimeout = None,
    max_restarts: given.MaxRestarts = None,
    stop_signal: given.StopSignal = None,
    nnodes: given.Nnodes = None,
    world_size: given.WorldSize = None,
    node_rank: given.NodeRank = None,
    base_rank: given.BaseRank = None,
    master_addr: given.MasterAddr = None,
    master_port: given.MasterPort = None,
    rdzv_endpoint: given.RdzvEndpoint = None,
    rdzv_id: given.RdzvId = None,
    rdzv_backend: given.RdzvBackend = None,
    standalone: given.Standalone = False,
    join_timeout: given.JoinTimeout = None,
    check_path: given.CheckPath = None,
    version: given.Version = False,
) -> int:
    """Run a script on N ranks of this machine, or of several.

    When a rank fails the others are ended, and no process is left behind. The terminal shows rank 0, in whole lines that
    are marked with the rank; the run folder keeps what every rank prints.

    Exit codes: 0 done; 2 bad usage, nothing was started; the failing rank's own code, or 128 + signal if it was killed;
    124 hang; 130 after Ctrl-C, 143 after SIGTERM; 75 when all ranks exited with 75 (preempted and saved: run it again).
    """
    target = _target(script, args, module=module, command=command)
    grace_s = None if grace is None else parse_seconds("--grace", grace)
    hang_timeout_s = parse_duration("--hang-timeout", hang_timeout, usual=600)
    modules = parse_modules(preload, no_preload=no_preload)
    restarts = parse_restarts("--max-restarts", max_restarts)
    stop = parse_stop_signal("--stop-signal", stop_signal)
    joining = Joining(timeout_s=parse_duration("--join-timeout", join_timeout, usual=300), paths=tuple(check_path or ()))
    nodes = Rendezvous(nnodes=nnodes, endpoint=rdzv_endpoint, master_addr=master_addr, master_port=master_port)
    nodes = place_nodes(nodes, standalone=standalone, backend=rdzv_backend)
    ranks = parse_ranks(nproc, gpus=_gpus())
    topology = _topology(
        Asked(
            nproc=-1 if ranks is None else parse_nproc(ranks),
            nnodes=nodes.nnodes or "",
            world_size=parse_whole("--world-size", world_size, advice=_LEFT_OUT),
            base_rank=parse_whole("--base-rank", base_rank, advice=_LEFT_OUT),
            node_rank=parse_whole("--node-rank", node_rank, advice="say 0 on the first node, 1 on the next, and so on"),
            master_addr=parse_host("--master-addr", nodes.master_addr),
            master_port=parse_whole("--master-port", nodes.master_port, advice="choose one that is free on node 0"),
            rdzv_endpoint=nodes.endpoint or "",
            rdzv_id=rdzv_id or "",
        )
    )
    meeting = _meeting(topology, joining, target)
    layout = _layout(topology, meeting)
    if meeting is not None and restarts:
        raise ConfigError("launch: --max-restarts is for one node, and for --nnodes MIN:MAX; leave it out")
    output = _output(layout, shown=log_ranks, prefix=prefix, stdout=stdout, stderr=stderr, full_traceback=full_traceback)
    allow_open_files(layout.nproc)
    folder = _folder(run_dir, layout)  # last of the checks: a typing error leaves nothing behind
    plan = LaunchPlan(
        target=target,
        layout=layout,
        run_dir=folder,
        meeting=None if meeting is None else replace(meeting, run_name=folder.name),
        grace_s=grace_s,
        preload=modules,
        max_restarts=restarts,
        hang_timeout_s=hang_timeout_s,
        stop_signal=stop,
        bind=bind,
        output=output,
    )
    _say(*topology.notices, *([_describe(plan)] if verbose else []), *(_record(plan) if meeting is None else []))
    return _run(plan, topology)


def _folder(run_dir: str | None, layout: Layout) -> Path:
    """The folder of this launch; on a later node it is not made before node 0 has named it, unless the user did."""
    now = datetime.now()
    if layout.node_rank > 0 and run_dir is None:
        return default_run_dir(now)
    folder = create_run_dir(run_dir, now=now)
    if run_dir is not None:
        claim_run_dir(folder, layout.node_rank)  # until this process ends
    return folder


def _run(plan: LaunchPlan, topology: Topology) -> int:
    from dtrain.launch.front import launch as run_job  # not before it is needed: a refusal should come at once

    if topology.elastic is not None:
        plan = elastic_plan(plan, topology.elastic, threads=os.environ.get(THREADS, ""))
    return run_job(plan)


def _topology(asked: Asked) -> Topology:
    return infer(asked, scheduled(os.environ), gpus=max(1, _gpus()))


def _gpus() -> int:
    return count_gpus(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _layout(topology: Topology, meeting: Meeting | None) -> Layout:
    """The place of this node, as far as it is known before the nodes meet."""
    if topology.elastic is not None:
        return Layout.one_node(topology.elastic.nproc)
    layout = topology.layout if meeting is None else meeting.expected_layout()
    assert layout is not None, "one node has a layout, several have a meeting"
    return layout


def _meeting(topology: Topology, joining: Joining, target: Target) -> Meeting | None:
    """What this node brings to the meeting of all nodes; None for one node."""
    if topology.meeting is None:
        for path in joining.paths:
            if not os.path.exists(path):
                raise ConfigError(f"launch: --check-path {path!r} does not exist; check the path")
        return None
    facts = collect_facts(target, joining.paths)
    timeout_s = topology.meeting.timeout_s if joining.timeout_s is None else joining.timeout_s
    return replace(topology.meeting, facts=facts, timeout_s=timeout_s)


def _target(script: str, args: list[str] | None, *, module: bool, command: bool) -> Target:
    """What to run, looked at without running it."""
    if module and command:
        raise ConfigError("launch: -m and -c exclude each other; -m runs a Python module, -c any program")
    kind: Kind = "module" if module else "command" if command else "script"
    {"module": check_module, "command": check_command, "script": check_script}[kind](script)
    return Target(kind=kind, name=script, args=tuple(args or ()))


def _output(layout: Layout, *, shown: str | None, prefix: str | None, **given: Any) -> OutputPlan:
    """Return where output goes, checked; ``given`` are fields of ``OutputPlan`` as they are."""
    ranks = None if shown is None else parse_log_ranks(shown, layout.world_size)
    plan = OutputPlan(shown=ranks, **given) if prefix is None else OutputPlan(shown=ranks, prefix=prefix, **given)
    check_output(plan, layout)
    return plan


def _record(plan: LaunchPlan) -> list[str]:
    warning = write_record(plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
    return [] if warning is None else [warning]


def _describe(plan: LaunchPlan) -> str:
    """The plan in one line."""
    target, layout = plan.target, plan.layout
    how = {"script": ["python"], "module": ["python", "-m"], "command": []}[target.kind]
    parts = [
        f"ranks {list_ranks(layout.ranks)} of {layout.world_size}: {shlex.join([*how, target.name, *target.args])}",
        f"run folder {str(plan.run_dir)!r}",
        "no preload" if plan.preload == () else "preload",
        f"grace {plan.grace_after_failure_s:g} s after a failure, {plan.grace_after_signal_s:g} s after a signal",
        f"restarts {plan.max_restarts}",
        "no hang time-out" if plan.hang_timeout_s is None else f"hang time-out {plan.hang_timeout_s:g} s",
    ]
    return f"launch: {'; '.join(parts)}"


def _say(*lines: str) -> None:
    """Lines on standard error. One that cannot be written is no reason not to start."""
    stderr = Outlet(2, "standard error")
    for line in lines:
        stderr.put(harmless(f"dtrain: {line}".encode(errors="backslashreplace")) + b"\n")
    stderr.close()
