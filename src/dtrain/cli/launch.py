"""Define ``dtrain launch``: build a launch plan from the command line, and run the plan.

Options of torchrun work with torchrun's spelling; options without a counterpart get advice.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.cli import launch_options as options
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
    "--log-dir": "Use --run-dir FOLDER, which keeps logs and failure records.",
    "--redirects": "Remove it, because the run folder keeps the output of every rank.",
    "-r": "Remove it, because the run folder keeps the output of every rank.",
    "--tee": "Remove it, and pass --log-ranks all to see every rank here.",
    "-t": "Remove it, and pass --log-ranks all to see every rank here.",
    "--local-ranks-filter": "Use --log-ranks RANKS, counted over all nodes.",
    "--duplicate-stdout-filters": "Remove it, because the run folder keeps the output of every rank.",
    "--duplicate-stderr-filters": "Remove it, because the run folder keeps the output of every rank.",
    "--logs-specs": "Use --stdout FILE and --stderr FILE.",
    "--rdzv-conf": "Use --join-timeout SECONDS.",
    "--monitor-interval": "Remove it, because the exit of a rank is detected at once.",
    "--start-method": "Remove it, because ranks are forks, or new interpreters with --no-preload.",
    "--role": "Remove it, because all ranks have one role.",
    "--run-path": "Remove it, because the script runs as with `python`.",
    "--local-addr": "Remove it, and pass --master-addr, which determines the address of this node.",
    "--numa-binding": "Use --bind.",
    "--signals-to-handle": "Remove it, and see --stop-signal.",
    "--virtual-local-rank": "Remove it, and set CUDA_VISIBLE_DEVICES.",
    "--event-log-handler": "Remove it.",
}
"""Advice for each option of torchrun that ``dtrain launch`` does not have."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
_ENDPOINT = re.compile(r"(?P<host>.+?)(?::(?P<port>[0-9]{1,5}))?")
# torchrun's default port of an endpoint.
_DEFAULT_PORT = "29400"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """Options of the nodes' rendezvous, as texts; None if unset."""

    nnodes: str | None
    endpoint: str | None
    master_addr: str | None
    master_port: str | None


def torchrun_advice(option: str) -> str | None:
    """Return advice for ``option`` if torchrun has the option and ``dtrain launch`` does not."""
    name = option if len(option) == 2 else option.replace("_", "-")
    return f"{option} is an option of torchrun. {TORCHRUN_ADVICE[name]}" if name in TORCHRUN_ADVICE else None


def resolve_nproc(text: str | None, *, gpus: int) -> str | None:
    """Replace torchrun's ``auto``, ``gpu`` and ``cpu`` by a number of ranks.

    Args:
        text: the value of ``-n``.
        gpus: number of GPUs of this node.

    Raises:
        ConfigError: ``gpu`` on a node without GPUs.
    """
    word = (text or "").strip().lower()
    if word == "auto":
        return None
    if word == "gpu":
        if gpus == 0:
            raise ConfigError("launch: -n must not be gpu on a node without a GPU. Pass a number, or cpu.")
        return str(gpus)
    if word == "cpu":
        return str(min(MAX_RANKS, os.cpu_count() or 1))
    return text


def resolve_rendezvous(given_options: RendezvousOptions, *, standalone: bool, backend: str | None) -> RendezvousOptions:
    """Apply ``--standalone`` and ``--rdzv-backend`` to the options of the rendezvous.

    Raises:
        ConfigError: ``standalone`` with several nodes, or an unknown backend.
    """
    if standalone:
        if given_options.nnodes not in (None, "", "1", "1:1"):
            raise ConfigError(f"launch: --standalone is one node, not --nnodes {given_options.nnodes}. Remove one of them.")
        return RendezvousOptions(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend not in (None, "", "c10d", "static"):
        raise ConfigError(
            f"launch: --rdzv-backend must be c10d or static, got {backend!r}. Use --rdzv-endpoint or --master-addr instead."
        )
    if given_options.endpoint is None or (match := _ENDPOINT.fullmatch(given_options.endpoint)) is None:
        return given_options
    host, port = match["host"], match["port"]
    if backend == "static":
        return RendezvousOptions(
            nnodes=given_options.nnodes,
            endpoint=None,
            master_addr=given_options.master_addr or host,
            master_port=given_options.master_port or port or _DEFAULT_PORT,
        )
    is_single = given_options.nnodes in (None, "", "1") or (given_options.nnodes == "1:1" and backend == "c10d")
    if is_single and host in _LOOPBACK:
        return RendezvousOptions(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend == "c10d" and port is None:
        return RendezvousOptions(
            nnodes=given_options.nnodes,
            endpoint=f"{host}:{_DEFAULT_PORT}",
            master_addr=given_options.master_addr,
            master_port=given_options.master_port,
        )
    return given_options


_OMIT_ADVICE = "Remove the option to infer it."


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Options of the join: the time limit, and paths that must be the same on all nodes."""

    timeout_s: float | None
    paths: tuple[str, ...]


def launch(
    script: options.Script,
    args: options.Arguments = None,
    nproc: options.Nproc = None,
    module: options.Module = False,
    command: options.Command = False,
    preload: options.Preload = None,
    no_preload: options.NoPreload = False,
    bind: options.Bind = False,
    run_dir: options.RunDir = None,
    log_ranks: options.LogRanks = None,
    prefix: options.Prefix = None,
    stdout: options.Stdout = None,
    stderr: options.Stderr = None,
    full_traceback: options.FullTraceback = False,
    verbose: options.Verbose = False,
    grace: options.Grace = None,
    hang_timeout: options.HangTimeout = None,
    max_restarts: options.MaxRestarts = None,
    stop_signal: options.StopSignal = None,
    nnodes: options.Nnodes = None,
    world_size: options.WorldSize = None,
    node_rank: options.NodeRank = None,
    base_rank: options.BaseRank = None,
    master_addr: options.MasterAddr = None,
    master_port: options.MasterPort = None,
    rdzv_endpoint: options.RdzvEndpoint = None,
    rdzv_id: options.RdzvId = None,
    rdzv_backend: options.RdzvBackend = None,
    standalone: options.Standalone = False,
    join_timeout: options.JoinTimeout = None,
    check_path: options.CheckPath = None,
    version: options.Version = False,
) -> int:
    """Run a script on N ranks of one or more machines.

    When a rank fails, the other ranks are ended, and no process is left. The terminal shows rank 0, in whole lines with a
    prefix; the run folder keeps the output of every rank.

    Exit codes: 0 done; 2 bad usage, nothing was started; the exit code of the failed rank, or 128 + signal if it was killed;
    124 hang; 130 after Ctrl-C, 143 after SIGTERM; 75 if all ranks exited with 75 (preempted and saved: run it again).
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
            node_rank=parse_int("--node-rank", node_rank, advice="Pass 0 on the first node, 1 on the next, and so on."),
            master_addr=parse_host("--master-addr", nodes.master_addr),
            master_port=parse_int("--master-port", nodes.master_port, advice="Choose a port that is free on node 0."),
            rdzv_endpoint=nodes.endpoint or "",
            rdzv_id=rdzv_id or "",
        )
    )
    rendezvous = _make_rendezvous(topology, joining, target)
    layout = _expected_layout(topology, rendezvous)
    if rendezvous is not None and restarts:
        raise ConfigError("launch: --max-restarts needs one node, or --nnodes MIN:MAX. Remove --max-restarts.")
    output = _make_output_plan(
        layout, shown=log_ranks, prefix=prefix, stdout=stdout, stderr=stderr, full_traceback=full_traceback
    )
    raise_open_file_limit(layout.nproc)
    # This check is last, so that a wrong option creates no folder.
    folder = _prepare_run_dir(run_dir, layout)
    plan = LaunchPlan(
        target=target,
        layout=layout,
        run_dir=folder,
        rendezvous=None if rendezvous is None else replace(rendezvous, run_name=folder.name),
        grace_s=grace_s,
        preload=modules,
        max_restarts=restarts,
        hang_timeout_s=hang_timeout_s,
        stop_signal=stop,
        bind=bind,
        output=output,
    )
    _print_notices(
        *topology.notices, *([_describe_plan(plan)] if verbose else []), *(_write_record(plan) if rendezvous is None else [])
    )
    return _run_plan(plan, topology)


def _prepare_run_dir(run_dir: str | None, layout: NodeLayout) -> Path:
    """Return the folder of this launch. On a node but node 0, a folder without --run-dir is created after the rendezvous."""
    now = datetime.now()
    if layout.node_rank > 0 and run_dir is None:
        return default_run_dir(now)
    folder = create_run_dir(run_dir, now=now)
    if run_dir is not None:
        # The lock lasts until this process exits.
        claim_run_dir(folder, layout.node_rank)
    return folder


def _run_plan(plan: LaunchPlan, topology: Topology) -> int:
    # Imported late, so that wrong options are reported sooner.
    from dtrain.launch.launcher import launch_job as run_job

    if topology.elastic is not None:
        plan = make_elastic_plan(plan, topology.elastic, threads=os.environ.get(OMP_THREADS, ""))
    return run_job(plan)


def _infer_topology(args: LaunchArgs) -> Topology:
    return infer_topology(args, read_scheduler(os.environ), gpus=max(1, _count_gpus()))


def _count_gpus() -> int:
    return count_gpus(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _expected_layout(topology: Topology, rendezvous: NodeRendezvous | None) -> NodeLayout:
    """Return the layout of this node as far as it is known before the rendezvous."""
    if topology.elastic is not None:
        return NodeLayout.one_node(topology.elastic.nproc)
    layout = topology.layout if rendezvous is None else rendezvous.expected_layout()
    assert layout is not None, "one node has a layout, several nodes have a rendezvous"
    return layout


def _make_rendezvous(topology: Topology, joining: JoinOptions, target: Target) -> NodeRendezvous | None:
    """Return this node's entry to the rendezvous; None for one node."""
    if topology.rendezvous is None:
        for path in joining.paths:
            if not os.path.exists(path):
                raise ConfigError(f"launch: --check-path {path!r} does not exist. Check the path.")
        return None
    facts = collect_node_facts(target, joining.paths)
    timeout_s = topology.rendezvous.timeout_s if joining.timeout_s is None else joining.timeout_s
    return replace(topology.rendezvous, facts=facts, timeout_s=timeout_s)


def _make_target(script: str, args: list[str] | None, *, module: bool, command: bool) -> Target:
    """Return the target after checks that do not run it."""
    if module and command:
        raise ConfigError("launch: -m and -c exclude each other. Use -m for a Python module, or -c for any program.")
    kind: TargetKind = "module" if module else "command" if command else "script"
    {"module": check_module, "command": check_command, "script": check_script}[kind](script)
    return Target(kind=kind, name=script, args=tuple(args or ()))


def _make_output_plan(layout: NodeLayout, *, shown: str | None, prefix: str | None, **fields: Any) -> OutputPlan:
    """Build and check the output plan; ``fields`` are further fields of ``OutputPlan``."""
    ranks = None if shown is None else parse_log_ranks(shown, layout.world_size)
    plan = OutputPlan(shown=ranks, **fields) if prefix is None else OutputPlan(shown=ranks, prefix=prefix, **fields)
    check_output_plan(plan, layout)
    return plan


def _write_record(plan: LaunchPlan) -> list[str]:
    warning = write_launch_record(plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
    return [] if warning is None else [warning]


def _describe_plan(plan: LaunchPlan) -> str:
    """Describe the plan in one line."""
    target, layout = plan.target, plan.layout
    prefix = {"script": ["python"], "module": ["python", "-m"], "command": []}[target.kind]
    parts = [
        f"ranks {list_ranks(layout.ranks)} of {layout.world_size}: {shlex.join([*prefix, target.name, *target.args])}",
        f"run folder {str(plan.run_dir)!r}",
        "no preload" if plan.preload == () else "preload",
        f"grace {plan.grace_after_failure_s:g} s after a failure, {plan.grace_after_signal_s:g} s after a signal",
        f"restarts {plan.max_restarts}",
        "no hang time-out" if plan.hang_timeout_s is None else f"hang time-out {plan.hang_timeout_s:g} s",
    ]
    return f"launch: {'; '.join(parts)}"


def _print_notices(*lines: str) -> None:
    """Print lines to standard error. The launch starts even if a line cannot be written."""
    stderr = NonBlockingWriter(2, "standard error")
    for line in lines:
        stderr.write(escape_controls(f"dtrain: {line}".encode(errors="backslashreplace")) + b"\n")
    stderr.close()
