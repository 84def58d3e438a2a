"""``dtrain launch``: from the command line to a plan, and from the plan to an exit code.

Options of torchrun: those that work here under torchrun's spelling, and advice for the others."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.cli import launch_options as given
from dtrain.cli.launch_options import (
    list_ranks,
    parse_duration,
    parse_host,
    parse_int,
    parse_log_ranks,
    parse_modules,
    parse_restarts,
    parse_stop_signal,
)
from dtrain.errors import ConfigError
from dtrain.launch.elastic.agent_request import make_elastic_plan
from dtrain.launch.entrypoint import check_command, check_module, check_script
from dtrain.launch.host_resources import raise_open_file_limit
from dtrain.launch.launch_dir import claim_run_dir, create_run_dir, default_run_dir, write_launch_record
from dtrain.launch.launch_plan import (
    MAX_RANKS,
    LaunchPlan,
    NodeLayout,
    NodeRendezvous,
    OutputPlan,
    Target,
    TargetKind,
    count_gpus,
    parse_nproc,
    parse_seconds,
)
from dtrain.launch.nodes.compatibility import collect_node_facts
from dtrain.launch.output.log_files import check_output_plan
from dtrain.launch.output.non_blocking_writer import NonBlockingWriter
from dtrain.launch.output.terminal_lines import escape_controls
from dtrain.launch.schedulers import read_scheduler
from dtrain.launch.topology import LaunchArgs, Topology, infer_topology
from dtrain.launch_protocol import OMP_THREADS

TORCHRUN_ADVICE = {
    "--log-dir": "say --run-dir FOLDER, which keeps logs and failure records",
    "--redirects": "leave it out: the run folder keeps the output of every rank",
    "-r": "leave it out: the run folder keeps the output of every rank",
    "--tee": "leave it out, and say --log-ranks all to see every rank here",
    "-t": "leave it out, and say --log-ranks all to see every rank here",
    "--local-ranks-filter": "say --log-ranks RANKS, counted over all nodes",
    "--duplicate-stdout-filters": "leave it out: the run folder keeps the output of every rank",
    "--duplicate-stderr-filters": "leave it out: the run folder keeps the output of every rank",
    "--logs-specs": "say --stdout FILE and --stderr FILE",
    "--rdzv-conf": "say --join-timeout SECONDS",
    "--monitor-interval": "leave it out: the end of a rank is noticed at once",
    "--start-method": "leave it out: ranks are forks, or interpreters of their own with --no-preload",
    "--role": "leave it out: all ranks have one role",
    "--run-path": "leave it out: the script runs as with `python`",
    "--local-addr": "leave it out, and say --master-addr, by which the address of this node is found",
    "--numa-binding": "say --bind",
    "--signals-to-handle": "leave it out, and see --stop-signal",
    "--virtual-local-rank": "leave it out, and set CUDA_VISIBLE_DEVICES",
    "--event-log-handler": "leave it out",
}
"""Advice for each option of torchrun that is none of ours."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
_ENDPOINT = re.compile(r"(?P<host>.+?)(?::(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORT = "29400"  # torchrun's, where an endpoint has none


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """The options that say where nodes meet, as texts; None for those that were not given."""

    nnodes: str | None
    endpoint: str | None
    master_addr: str | None
    master_port: str | None


def torchrun_advice(option: str) -> str | None:
    """Return what to do about ``option``, if torchrun has it and ``dtrain launch`` does not."""
    name = option if len(option) == 2 else option.replace("_", "-")
    return f"{option} is torchrun's; {TORCHRUN_ADVICE[name]}" if name in TORCHRUN_ADVICE else None


def resolve_nproc(text: str | None, *, gpus: int) -> str | None:
    """Return the number of ranks as a text, where torchrun's ``auto``, ``gpu`` and ``cpu`` are numbers.

    Args:
        text: the value of ``-n``.
        gpus: number of GPUs of this node, 0 if there is none.

    Raises:
        ConfigError: ``gpu`` on a node without.
    """
    word = (text or "").strip().lower()
    if word == "auto":
        return None
    if word == "gpu":
        if gpus == 0:
            raise ConfigError("launch: -n gpu, but this node has no GPU; say a number, or cpu")
        return str(gpus)
    if word == "cpu":
        return str(min(MAX_RANKS, os.cpu_count() or 1))
    return text


def resolve_rendezvous(options: RendezvousOptions, *, standalone: bool, backend: str | None) -> RendezvousOptions:
    """Return ``options`` with what ``--standalone`` and ``--rdzv-backend`` say.

    Raises:
        ConfigError: ``standalone`` with several nodes, or a backend that is not there.
    """
    if standalone:
        if options.nnodes not in (None, "", "1", "1:1"):
            raise ConfigError(f"launch: --standalone is one node, not --nnodes {options.nnodes}; leave one of them out")
        return RendezvousOptions(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend not in (None, "", "c10d", "static"):
        raise ConfigError(
            f"launch: --rdzv-backend must be c10d or static, got {backend!r}; say --rdzv-endpoint or --master-addr instead"
        )
    if options.endpoint is None or (match := _ENDPOINT.fullmatch(options.endpoint)) is None:
        return options
    host, port = match["host"], match["port"]
    if backend == "static":
        return RendezvousOptions(
            nnodes=options.nnodes,
            endpoint=None,
            master_addr=options.master_addr or host,
            master_port=options.master_port or port or _DEFAULT_PORT,
        )
    one = options.nnodes in (None, "", "1") or (options.nnodes == "1:1" and backend == "c10d")
    if one and host in _LOOPBACK:
        return RendezvousOptions(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend == "c10d" and port is None:
        return RendezvousOptions(
            nnodes=options.nnodes,
            endpoint=f"{host}:{_DEFAULT_PORT}",
            master_addr=options.master_addr,
            master_port=options.master_port,
        )
    return options


_OMIT_ADVICE = "leave it out to have it inferred"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
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
    target = _make_target(script, args, module=module, command=command)
    grace_s = None if grace is None else parse_seconds("--grace", grace)
    hang_timeout_s = parse_duration("--hang-timeout", hang_timeout, usual=600)
    modules = parse_modules(preload, no_preload=no_preload)
    restarts = parse_restarts("--max-restarts", max_restarts)
    stop = parse_stop_signal("--stop-signal", stop_signal)
    joining = JoinOptions(timeout_s=parse_duration("--join-timeout", join_timeout, usual=300), paths=tuple(check_path or ()))
    nodes = RendezvousOptions(nnodes=nnodes, endpoint=rdzv_endpoint, master_addr=master_addr, master_port=master_port)
    nodes = resolve_rendezvous(nodes, standalone=standalone, backend=rdzv_backend)
    ranks = resolve_nproc(nproc, gpus=_count_gpus())
    topology = _infer_topology(
        LaunchArgs(
            nproc=-1 if ranks is None else parse_nproc(ranks),
            nnodes=nodes.nnodes or "",
            world_size=parse_int("--world-size", world_size, advice=_OMIT_ADVICE),
            base_rank=parse_int("--base-rank", base_rank, advice=_OMIT_ADVICE),
            node_rank=parse_int("--node-rank", node_rank, advice="say 0 on the first node, 1 on the next, and so on"),
            master_addr=parse_host("--master-addr", nodes.master_addr),
            master_port=parse_int("--master-port", nodes.master_port, advice="choose one that is free on node 0"),
            rdzv_endpoint=nodes.endpoint or "",
            rdzv_id=rdzv_id or "",
        )
    )
    meeting = _make_rendezvous(topology, joining, target)
    layout = _expected_layout(topology, meeting)
    if meeting is not None and restarts:
        raise ConfigError("launch: --max-restarts is for one node, and for --nnodes MIN:MAX; leave it out")
    output = _make_output_plan(
        layout, shown=log_ranks, prefix=prefix, stdout=stdout, stderr=stderr, full_traceback=full_traceback
    )
    raise_open_file_limit(layout.nproc)
    folder = _prepare_run_dir(run_dir, layout)  # last of the checks: a typing error leaves nothing behind
    plan = LaunchPlan(
        target=target,
        layout=layout,
        run_dir=folder,
        rendezvous=None if meeting is None else replace(meeting, run_name=folder.name),
        grace_s=grace_s,
        preload=modules,
        max_restarts=restarts,
        hang_timeout_s=hang_timeout_s,
        stop_signal=stop,
        bind=bind,
        output=output,
    )
    _print_notices(
        *topology.notices, *([_describe_plan(plan)] if verbose else []), *(_write_record(plan) if meeting is None else [])
    )
    return _run_plan(plan, topology)


def _prepare_run_dir(run_dir: str | None, layout: NodeLayout) -> Path:
    """The folder of this launch; on a later node it is not made before node 0 has named it, unless the user did."""
    now = datetime.now()
    if layout.node_rank > 0 and run_dir is None:
        return default_run_dir(now)
    folder = create_run_dir(run_dir, now=now)
    if run_dir is not None:
        claim_run_dir(folder, layout.node_rank)  # until this process ends
    return folder


def _run_plan(plan: LaunchPlan, topology: Topology) -> int:
    from dtrain.launch.launcher import launch_job as run_job  # not before it is needed: a refusal should come at once

    if topology.elastic is not None:
        plan = make_elastic_plan(plan, topology.elastic, threads=os.environ.get(OMP_THREADS, ""))
    return run_job(plan)


def _infer_topology(asked: LaunchArgs) -> Topology:
    return infer_topology(asked, read_scheduler(os.environ), gpus=max(1, _count_gpus()))


def _count_gpus() -> int:
    return count_gpus(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _expected_layout(topology: Topology, meeting: NodeRendezvous | None) -> NodeLayout:
    """The place of this node, as far as it is known before the nodes meet."""
    if topology.elastic is not None:
        return NodeLayout.one_node(topology.elastic.nproc)
    layout = topology.layout if meeting is None else meeting.expected_layout()
    assert layout is not None, "one node has a layout, several have a meeting"
    return layout


def _make_rendezvous(topology: Topology, joining: JoinOptions, target: Target) -> NodeRendezvous | None:
    """What this node brings to the meeting of all nodes; None for one node."""
    if topology.rendezvous is None:
        for path in joining.paths:
            if not os.path.exists(path):
                raise ConfigError(f"launch: --check-path {path!r} does not exist; check the path")
        return None
    facts = collect_node_facts(target, joining.paths)
    timeout_s = topology.rendezvous.timeout_s if joining.timeout_s is None else joining.timeout_s
    return replace(topology.rendezvous, facts=facts, timeout_s=timeout_s)


def _make_target(script: str, args: list[str] | None, *, module: bool, command: bool) -> Target:
    """What to run, looked at without running it."""
    if module and command:
        raise ConfigError("launch: -m and -c exclude each other; -m runs a Python module, -c any program")
    kind: TargetKind = "module" if module else "command" if command else "script"
    {"module": check_module, "command": check_command, "script": check_script}[kind](script)
    return Target(kind=kind, name=script, args=tuple(args or ()))


def _make_output_plan(layout: NodeLayout, *, shown: str | None, prefix: str | None, **given: Any) -> OutputPlan:
    """Return where output goes, checked; ``given`` are fields of ``OutputPlan`` as they are."""
    ranks = None if shown is None else parse_log_ranks(shown, layout.world_size)
    plan = OutputPlan(shown=ranks, **given) if prefix is None else OutputPlan(shown=ranks, prefix=prefix, **given)
    check_output_plan(plan, layout)
    return plan


def _write_record(plan: LaunchPlan) -> list[str]:
    warning = write_launch_record(plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
    return [] if warning is None else [warning]


def _describe_plan(plan: LaunchPlan) -> str:
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


def _print_notices(*lines: str) -> None:
    """Lines on standard error. One that cannot be written is no reason not to start."""
    stderr = NonBlockingWriter(2, "standard error")
    for line in lines:
        stderr.write(escape_controls(f"dtrain: {line}".encode(errors="backslashreplace")) + b"\n")
    stderr.close()
