"""Define ``dtrain launch``: build a launch plan from the command line, and run the plan.

Options of torchrun work with torchrun's spelling; options without a counterpart get advice.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain import launch_protocol
from dtrain.arguments import format_count
from dtrain.cli import launch_options as options
from dtrain.cli.launch_options import list_ranks, parse_log_ranks, parse_modules, parse_nproc
from dtrain.errors import ConfigError
from dtrain.launch.coordinator import collect_node_facts
from dtrain.launch.entrypoint import check_command, check_module, check_script
from dtrain.launch.job_output import check_output_plan
from dtrain.launch.launch_dir import claim_run_dir, create_run_dir, default_run_dir, write_launch_record
from dtrain.launch.launch_plan import (
    DEFAULT_PREFIX,
    LaunchPlan,
    NodeLayout,
    NodeRendezvous,
    OutputPlan,
    Target,
    TargetKind,
    count_gpus,
    find_binding_variable,
)
from dtrain.launch.terminal import NonBlockingWriter, escape_controls
from dtrain.launch.topology import LaunchArgs, Topology, infer_topology, read_scheduler
from dtrain.machine import raise_open_file_limit

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
_NPROC_OPTION = re.compile("(-n|-np|--nproc|--nproc[-_]per[-_]node)(=.*)?")
# torchrun's default port of an endpoint.
_DEFAULT_PORT = "29400"


def torchrun_advice(option: str) -> str | None:
    """Return advice for ``option`` if torchrun has the option and ``dtrain launch`` does not."""
    name = option if len(option) == 2 else option.replace("_", "-")
    return f"{option} is an option of torchrun. {TORCHRUN_ADVICE[name]}" if name in TORCHRUN_ADVICE else None


def resolve_rendezvous(args: LaunchArgs, *, standalone: bool, backend: str) -> LaunchArgs:
    """Apply ``--standalone`` and ``--rdzv-backend`` to the other options.

    Raises:
        ConfigError: ``standalone`` with several nodes, or an unknown backend.
    """
    one_node = replace(args, nnodes="1", rdzv_endpoint="", master_addr="", master_port=None)
    if standalone:
        if args.nnodes not in ("", "1", "1:1"):
            raise ConfigError(f"launch: --standalone is one node, not --nnodes {args.nnodes}. Remove one of them.")
        return one_node
    if backend not in ("", "c10d", "static"):
        raise ConfigError(f"launch: --rdzv-backend must be c10d or static, got {backend!r}. Use --master-addr instead.")
    if (match := _ENDPOINT.fullmatch(args.rdzv_endpoint)) is None:
        return args
    host, port = match["host"], match["port"]
    if backend == "static":
        master_port = args.master_port or int(port or _DEFAULT_PORT)
        return replace(args, rdzv_endpoint="", master_addr=args.master_addr or host, master_port=master_port)
    return one_node if args.nnodes in ("", "1", "1:1") and host in _LOOPBACK else args


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
    prefix: options.Prefix = DEFAULT_PREFIX,
    stdout: options.Stdout = None,
    stderr: options.Stderr = None,
    full_traceback: options.FullTraceback = False,
    verbose: options.Verbose = False,
    grace: options.Grace = None,
    hang_timeout: options.HangTimeout = None,
    max_restarts: options.MaxRestarts = 0,
    stop_signal: options.StopSignal = None,
    nnodes: options.Nnodes = "",
    world_size: options.WorldSize = None,
    node_rank: options.NodeRank = None,
    base_rank: options.BaseRank = None,
    master_addr: options.MasterAddr = "",
    master_port: options.MasterPort = None,
    rdzv_endpoint: options.RdzvEndpoint = "",
    rdzv_id: options.RdzvId = "",
    rdzv_backend: options.RdzvBackend = "",
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
    nodes = LaunchArgs(
        nproc=parse_nproc(nproc, gpus=_count_gpus()),
        nnodes=nnodes,
        world_size=world_size,
        base_rank=base_rank,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
    )
    return _launch(
        resolve_rendezvous(nodes, standalone=standalone, backend=rdzv_backend),
        _make_target(script, args, module=module, command=command),
        OutputPlan(prefix=prefix, stdout=stdout, stderr=stderr, full_traceback=full_traceback),
        log_ranks=log_ranks,
        join_timeout_s=join_timeout,
        paths=check_path or [],
        run_dir=run_dir,
        verbose=verbose,
        grace_s=grace,
        preload=parse_modules(preload, no_preload=no_preload),
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout,
        stop_signal=stop_signal,
        bind=bind,
    )


def _launch(
    nodes: LaunchArgs,
    target: Target,
    output: OutputPlan,
    *,
    log_ranks: str | None,
    join_timeout_s: float | None,
    paths: Sequence[str],
    run_dir: str | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Complete the plan, run the job, and return its exit code. ``options`` are further fields of ``LaunchPlan``."""
    topology = infer_topology(nodes, read_scheduler(os.environ), gpus=max(1, _count_gpus()))
    rendezvous = _make_rendezvous(topology, target, timeout_s=join_timeout_s, paths=paths)
    layout = _expected_layout(topology, rendezvous)
    if rendezvous is not None and options["max_restarts"]:
        raise ConfigError("launch: --max-restarts needs one node. Remove --max-restarts.")
    if log_ranks is not None:
        output = replace(output, shown=parse_log_ranks(log_ranks, layout.world_size))
    check_output_plan(output, layout)
    raise_open_file_limit("launch", layout.world_size)
    # This check is last, so that a wrong option creates no folder.
    folder = _prepare_run_dir(run_dir, layout)
    if rendezvous is not None:
        rendezvous = replace(rendezvous, run_name=folder.name)
    plan = LaunchPlan(target=target, layout=layout, run_dir=folder, rendezvous=rendezvous, output=output, **options)
    _print_notices(
        *topology.notices,
        *_describe_script_options(plan, nodes.nproc),
        *_describe_binding(plan),
        *([_describe_plan(plan)] if verbose else []),
        *(_write_record(plan) if rendezvous is None else []),
        *([_describe_start(plan)] if rendezvous is None else []),
    )
    # Imported late, so that wrong options are reported sooner.
    from dtrain.launch.supervisor import launch_job

    code = launch_job(plan)
    if code == 0 and rendezvous is None:
        _print_notices(*_describe_results(plan))
    return code


def _describe_script_options(plan: LaunchPlan, nproc: int | None) -> list[str]:
    """Warn about an option for the number of ranks that stands behind the script, which gets the option."""
    args = plan.target.args
    places = [place for place, arg in enumerate(args) if _NPROC_OPTION.fullmatch(arg)]
    if nproc is not None or not places or plan.target.kind == "command":
        return []
    option = args[places[0] : places[0] + 2 - ("=" in args[places[0]])]
    rest = [*args[: places[0]], *args[places[0] + len(option) :]]
    target = ["-m", plan.target.name] if plan.target.kind == "module" else [plan.target.name]
    return [
        f"launch: {shlex.join(option)} stands after {plan.target.name} and is passed to it. "
        f"Options of the launcher stand before it: dtrain launch {shlex.join([*option, *target, *rest])}"
    ]


def _describe_start(plan: LaunchPlan) -> str:
    ranks = format_count(plan.layout.world_size, "rank")
    return f"launch: starting {ranks}; run folder of the launch: {_relative_path(plan.run_dir)}"


def _describe_results(plan: LaunchPlan) -> list[str]:
    """Name the folders in which the job has left its files."""
    folder = _relative_path(plan.run_dir)
    place = f"logs of all ranks: {folder}/logs" if plan.output.stdout is None else f"run folder: {folder}"
    try:
        path = launch_protocol.opened_run_file(plan.run_dir).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return [f"launch: done; {place}"]
    run = _relative_path(Path(path))
    return [f"launch: done; {place}", f"launch: results: {run}; for a summary and a page: dtrain report {shlex.quote(run)}"]


def _relative_path(path: Path) -> str:
    try:
        here = Path.cwd()
    except OSError:
        # The working directory was deleted.
        return str(path)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _describe_binding(plan: LaunchPlan) -> list[str]:
    if (name := find_binding_variable(plan, os.environ)) is None:
        return []
    return [
        f"launch: {name}={os.environ[name]} binds the threads of all {plan.layout.nproc} ranks to the same cores. "
        f"Unset {name}, or pass --bind, which gives each rank cores of its own"
    ]


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


def _count_gpus() -> int:
    return count_gpus(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _expected_layout(topology: Topology, rendezvous: NodeRendezvous | None) -> NodeLayout:
    """Return the layout of this node as far as it is known before the rendezvous."""
    layout = topology.layout if rendezvous is None else rendezvous.expected_layout()
    assert layout is not None, "one node has a layout, several nodes have a rendezvous"
    return layout


def _make_rendezvous(
    topology: Topology, target: Target, *, timeout_s: float | None, paths: Sequence[str]
) -> NodeRendezvous | None:
    """Return this node's entry to the rendezvous; None for one node. ``paths`` must be the same on all nodes."""
    if topology.rendezvous is None:
        for path in paths:
            if not os.path.exists(path):
                raise ConfigError(f"launch: --check-path {path!r} does not exist. Check the path.")
        return None
    timeout_s = topology.rendezvous.timeout_s if timeout_s is None else timeout_s
    return replace(topology.rendezvous, facts=collect_node_facts(target, paths), timeout_s=timeout_s)


def _make_target(script: str, args: list[str] | None, *, module: bool, command: bool) -> Target:
    """Return the target after checks that do not run it."""
    if module and command:
        raise ConfigError("launch: -m and -c exclude each other. Use -m for a Python module, or -c for any program.")
    kind: TargetKind = "module" if module else "command" if command else "script"
    {"module": check_module, "command": check_command, "script": check_script}[kind](script)
    return Target(kind=kind, name=script, args=tuple(args or ()))


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
    stderr = NonBlockingWriter(2)
    for line in lines:
        stderr.write(escape_controls(f"dtrain: {line}".encode(errors="backslashreplace")) + b"\n")
    stderr.close()
