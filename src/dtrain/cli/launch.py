"""Define ``dtrain launch``: build a launch plan from the command line, and run the plan.

Options of torchrun work with torchrun's spelling; options without a counterpart get advice. The spellings with underscores are
from Composer's launcher and torchrun, so that their command lines run unchanged. The last functions parse the values of
options, and complete paths for the shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dtrain import __version__, launch_protocol
from dtrain.arguments import format_count
from dtrain.cli.parameters import OTHER_HEADING, ValueType, integer, number, option
from dtrain.errors import ConfigError
from dtrain.launch.coordinator import collect_node_facts
from dtrain.launch.entrypoint import check_command, check_module, check_script
from dtrain.launch.job_output import check_output_plan
from dtrain.launch.launch_dir import claim_run_dir, create_run_dir, default_run_dir, write_launch_record
from dtrain.launch.launch_plan import (
    DEFAULT_GRACE_S,
    DEFAULT_PREFIX,
    DEFAULT_REPLACE_TIMEOUT_S,
    MAX_GRACE_S,
    MAX_RANKS,
    RESTART_GRACE_S,
    SAVING_GRACE_S,
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
from dtrain.launch.topology import MAX_NODES, LaunchArgs, Topology, infer_topology, read_scheduler
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


_NODES = "Several nodes (start the same line once on each)"
_ranks, _nodes, _output, _ending = (
    partial(option, "launch", heading) for heading in ("Ranks", _NODES, "Output and files", "Failures and signals")
)
_MAX_DURATION_S = 7 * 86_400
_OMIT_ADVICE = "Remove the option to infer it."


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


def launch(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Python file; or a module with -m, a program with -c.", autocompletion=complete_script
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Passed to the script as they are.", show_default=False)
    ] = None,
    nproc: Annotated[
        str | None,
        _ranks("-n --nproc --nproc-per-node --nproc_per_node -np N", "Ranks on this node.  [default: one per GPU, or 1]"),
    ] = None,
    module: Annotated[bool, _ranks("-m --module --module_mode", "SCRIPT is a module, as in python -m.")] = False,
    command: Annotated[
        bool, _ranks("-c --command --command_mode --no-python --no_python", "SCRIPT is a program, which need not be Python.")
    ] = False,
    preload: Annotated[
        str | None,
        _ranks(
            "--preload MODULES",
            "Import a,b,... once, too, and fork the ranks.  [always: torch and other modules that the script imports]",
        ),
    ] = None,
    no_preload: Annotated[bool, _ranks("--no-preload", "Start each rank as a new interpreter.")] = False,
    bind: Annotated[bool, _ranks("--bind", "Bind each rank to its own physical cores on one NUMA node.")] = False,
    run_dir: Annotated[
        str | None,
        _output(
            "--run-dir --run_directory FOLDER",
            "Folder of logs, failure records and launch.json.  [default: runs/<date and time>]",
        ),
    ] = None,
    log_ranks: Annotated[
        str | None, _output("--log-ranks RANKS", "Ranks to show: 0,8-15 or all or none.  [default: 0 and a rank that fails]")
    ] = None,
    prefix: Annotated[
        str, _output("--prefix TEXT", "Prefix of each line shown.  [default: '[rank {rank}] ']")
    ] = DEFAULT_PREFIX,
    stdout: Annotated[
        str | None,
        _output(
            "--stdout FILE",
            "File of each rank's output, with {rank} {local_rank} {world_size} {local_world_size} {node_rank} {host} in its "
            "name; relative to the run folder.  [default: logs/rank-{rank:05d}.stdout]",
        ),
    ] = None,
    stderr: Annotated[
        str | None, _output("--stderr FILE", "File of each rank's errors.  [default: logs/rank-{rank:05d}.stderr]")
    ] = None,
    full_traceback: Annotated[
        bool, _output("--full-traceback", "Also show the frames of dtrain and torch in tracebacks.")
    ] = False,
    verbose: Annotated[bool, _output("-v --verbose", "Print the launch plan in one line.")] = False,
    grace: Annotated[
        float | None,
        _ending(
            "--grace SECONDS",
            f"Time between SIGTERM and SIGKILL.  [default: {DEFAULT_GRACE_S:g} after a failure, "
            f"{RESTART_GRACE_S:g} with --max-restarts, {SAVING_GRACE_S:g} after a signal]",
            number(minimum=0, maximum=MAX_GRACE_S, advice="Use 5 seconds, for example."),
        ),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        _ending(
            "--hang-timeout SECONDS",
            "End the job if no rank makes progress for so long.  [default: never]",
            number(above=0, maximum=_MAX_DURATION_S, advice="Use 600 seconds, for example."),
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        _ending(
            "--max-restarts --max_restarts K",
            "Restart all ranks after a failure, up to K times in a row without a new checkpoint.  [default: 0]",
            integer(0, 1000, advice="Use 3, for example."),
        ),
    ] = 0,
    stop_signal: Annotated[
        int | None,
        _ending("--stop-signal SIGNAL", "TERM, USR1 or USR2: asks the ranks to save and stop, like TERM.", parse_stop_signal),
    ] = None,
    nnodes: Annotated[
        str,
        _nodes("--nnodes N", "Number of nodes; or MIN:MAX, with --max-restarts: a lost node may stay away."),
    ] = "",
    world_size: Annotated[
        int | None,
        _nodes(
            "--world-size --world_size N",
            "Ranks of all nodes; -1 for one node.  [default: -n]",
            integer_or_unset(1, 10**6, advice=_OMIT_ADVICE),
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        _nodes(
            "--node-rank --node_rank K",
            "Number of this node, counted from 0.",
            integer_or_unset(0, MAX_NODES - 1, advice="Pass 0 on the first node, 1 on the next, and so on."),
        ),
    ] = None,
    base_rank: Annotated[
        int | None,
        _nodes(
            "--base-rank --base_rank K",
            "First rank of this node.  [default: node rank times -n]",
            integer_or_unset(0, 10**6, advice=_OMIT_ADVICE),
        ),
    ] = None,
    master_addr: Annotated[
        str, _nodes("--master-addr --master_addr HOST", "Host of node 0; empty for one node.", parse_host)
    ] = "",
    master_port: Annotated[
        int | None,
        _nodes(
            "--master-port --master_port PORT",
            "Port of the rendezvous on node 0.",
            integer_or_unset(1, 65_535, advice="Choose a port that is free on node 0."),
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str, _nodes("--rdzv-endpoint --rdzv_endpoint HOST:PORT", "torchrun's: node 0, with --rdzv-backend static.")
    ] = "",
    rdzv_id: Annotated[
        str, _nodes("--rdzv-id --rdzv_id TEXT", "Name of the job; other jobs at the same address are refused.")
    ] = "",
    rdzv_backend: Annotated[
        str, _nodes("--rdzv-backend --rdzv_backend NAME", "torchrun's: c10d, or static for --master-addr.")
    ] = "",
    standalone: Annotated[bool, _nodes("--standalone", "Run on one node, whatever the environment contains.")] = False,
    join_timeout: Annotated[
        float | None,
        _nodes(
            "--join-timeout SECONDS",
            "Time limit until all nodes join.  [default: 300]",
            number(above=0, maximum=_MAX_DURATION_S, advice="Use 300 seconds, for example."),
        ),
    ] = None,
    replace_timeout: Annotated[
        float | None,
        _nodes(
            "--replace-timeout SECONDS",
            f"With MIN:MAX, time that others wait for a lost node; above --grace.  [default: {DEFAULT_REPLACE_TIMEOUT_S:g}]",
            number(above=0, maximum=_MAX_DURATION_S, advice="Use 60 seconds, for example."),
        ),
    ] = None,
    check_path: Annotated[
        list[str] | None, _nodes("--check-path PATH", "Path that must be the same on all nodes; may be repeated.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            rich_help_panel=OTHER_HEADING,
            show_default=False,
            # Eager options precede the check for a missing script.
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> int:
    """Run a script on N ranks of one or more machines.

    When a rank fails, the other ranks are ended, and no process is left. The terminal shows rank 0, in whole lines with a
    prefix; the run folder keeps the output of every rank.

    Exit codes: 0 done; 2 bad usage, nothing was started; the exit code of the failed rank, or 128 + signal if it was killed;
    124 hang; 130 after Ctrl-C, 143 after SIGTERM; 75 if all ranks exited with 75 (preempted and saved: run it again).

    Examples:
        dtrain launch -n 8 train.py --lr 3e-4                   eight ranks of a script
        dtrain launch -n 2 -m package.train                     of a module
        dtrain launch -n 2 -c ./simulate input.txt              of any program
        dtrain launch -n 8 --log-ranks all --max-restarts 3 train.py
        dtrain launch -n 8 --nnodes 2 --node-rank 0 --master-addr n0 --master-port 29500 train.py
        srun --ntasks-per-node=1 dtrain launch -n 8 train.py    nodes and addresses from Slurm
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
        join_timeout=join_timeout,
        replace_timeout=replace_timeout,
        max_restarts=max_restarts,
        grace=grace,
    )
    nodes = resolve_rendezvous(nodes, standalone=standalone, backend=rdzv_backend)
    if module and command:
        raise ConfigError("launch: -m and -c exclude each other. Use -m for a Python module, or -c for any program.")
    kind: TargetKind = "module" if module else "command" if command else "script"
    {"module": check_module, "command": check_command, "script": check_script}[kind](script)
    target = Target(kind=kind, name=script, args=tuple(args or ()))
    modules = parse_modules(preload, no_preload=no_preload)
    topology = infer_topology(nodes, read_scheduler(os.environ), gpus=max(1, _count_gpus()))
    rendezvous = _make_rendezvous(topology, target, check_path or [])
    # The layout of this node as far as it is known before the rendezvous.
    layout = topology.layout if rendezvous is None else rendezvous.expected_layout()
    assert layout is not None, "one node has a layout, several nodes have a rendezvous"
    output = OutputPlan(prefix=prefix, stdout=stdout, stderr=stderr, full_traceback=full_traceback)
    if log_ranks is not None:
        output = replace(output, shown=parse_log_ranks(log_ranks, layout.world_size))
    check_output_plan(output, layout)
    raise_open_file_limit("launch", layout.world_size)
    # This check is last, so that a wrong option creates no folder.
    folder = _prepare_run_dir(run_dir, layout)
    plan = LaunchPlan(
        target=target,
        layout=layout,
        run_dir=folder,
        rendezvous=rendezvous and replace(rendezvous, run_name=folder.name),
        output=output,
        grace_s=grace,
        preload=modules,
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout,
        stop_signal=stop_signal,
        bind=bind,
    )
    _print_notices(*topology.notices, *_describe_start(plan, nodes.nproc, verbose=verbose))
    # Imported late, so that wrong options are reported sooner.
    from dtrain.launch.supervisor import launch_job

    code = launch_job(plan)
    if code == 0 and rendezvous is None:
        _print_notices(*_describe_results(plan))
    return code


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


def _describe_start(plan: LaunchPlan, nproc: int | None, *, verbose: bool) -> list[str]:
    """Return the notices before the start. Mutates: the record of the launch in its folder, on one node."""
    notices = _describe_script_options(plan, nproc)
    if (name := find_binding_variable(plan, os.environ)) is not None:
        notices.append(
            f"launch: {name}={os.environ[name]} binds the threads of all {plan.layout.nproc} ranks to the same cores. "
            f"Unset {name}, or pass --bind, which gives each rank cores of its own"
        )
    notices += [_describe_plan(plan)] if verbose else []
    if plan.rendezvous is None:
        warning = write_launch_record(plan, command=sys.argv, variables=os.environ, now=datetime.now().astimezone())
        ranks = format_count(plan.layout.world_size, "rank")
        start = f"launch: starting {ranks}; run folder of the launch: {_relative_path(plan.run_dir)}"
        notices += [start] if warning is None else [warning, start]
    return notices


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


def _count_gpus() -> int:
    return count_gpus(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _make_rendezvous(topology: Topology, target: Target, paths: Sequence[str]) -> NodeRendezvous | None:
    """Return this node's entry to the rendezvous; None for one node. ``paths`` must be the same on all nodes."""
    if topology.rendezvous is None:
        for path in paths:
            if not os.path.exists(path):
                raise ConfigError(f"launch: --check-path {path!r} does not exist. Check the path.")
        return None
    facts = {**collect_node_facts(target, paths), "--max-restarts": str(topology.rendezvous.max_restarts)}
    return replace(topology.rendezvous, facts=facts)


def _describe_plan(plan: LaunchPlan) -> str:
    """Describe the plan in one line."""
    target, layout = plan.target, plan.layout
    ranks = f"ranks {layout.base_rank}" + (f"-{layout.ranks[-1]}" if layout.nproc > 1 else "")
    prefix = {"script": ["python"], "module": ["python", "-m"], "command": []}[target.kind]
    parts = [
        f"{ranks} of {layout.world_size}: {shlex.join([*prefix, target.name, *target.args])}",
        f"run folder {str(plan.run_dir)!r}",
        "no preload" if plan.preload == () else "preload",
        f"grace {plan.grace_of_others_s:g} s after a failure, {plan.grace_after_signal_s:g} s after a signal",
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


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def integer_or_unset(minimum: int, maximum: int, *, advice: str) -> ValueType:
    """Return the type of integers within the limits; blank text and -1 mean the same as no option."""
    parse = integer(minimum, maximum, advice=advice)
    return lambda command, name, text: None if text.strip() in ("", "-1") else parse(command, name, text)


def parse_host(command: str, name: str, text: str) -> str:
    """Parse a host name or address.

    Raises:
        ConfigError: the text has a port, a scheme, or white space.
    """
    host = text.strip()
    if re.search(r"[\s/]", host) or re.fullmatch(r"[^:]*:[^:]*", host):
        raise ConfigError(
            f"{command}: {name} must be a host, got {text!r}. Pass the name that the nodes know, and the port as --master-port."
        )
    return host


def parse_stop_signal(command: str, name: str, text: str) -> int:
    """Parse a signal's name, with or without SIG, or its number.

    Raises:
        ConfigError: an unknown signal, or a signal with another meaning.
    """
    word = text.strip().upper()
    for stop_signal in _STOP_SIGNALS:
        if word in (str(int(stop_signal)), stop_signal.name, stop_signal.name.removeprefix("SIG")):
            return int(stop_signal)
    raise ConfigError(f"{command}: {name} must be TERM, USR1 or USR2, got {text!r}. Use USR1, for example.")


def parse_nproc(text: str | None, *, gpus: int) -> int | None:
    """Parse the number of ranks; None if unset.

    Args:
        text: the value of ``-n``: a number, or torchrun's ``auto``, ``gpu`` or ``cpu``.
        gpus: number of GPUs of this node.

    Raises:
        ConfigError: not an integer, out of range, or ``gpu`` on a node without GPUs.
    """
    word = "auto" if text is None else text.strip().lower()
    if word == "gpu" and gpus == 0:
        raise ConfigError("launch: -n must not be gpu on a node without a GPU. Pass a number, or cpu.")
    known = {"auto": None, "gpu": gpus, "cpu": min(MAX_RANKS, os.cpu_count() or 1)}
    if word in known:
        return known[word]
    nproc: int = integer(1, MAX_RANKS, advice="Use one rank per GPU.")("launch", "-n", text or "")
    return nproc


def parse_modules(text: str | None, *, no_preload: bool) -> tuple[str, ...] | None:
    """Parse the modules of ``--preload``; () with ``--no-preload``, None if both are unset.

    Raises:
        ConfigError: both are set, or a name is not a module name.
    """
    if text is None:
        return () if no_preload else None
    if no_preload:
        raise ConfigError("launch: --preload and --no-preload exclude each other. Remove one of them.")
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"launch: --preload must be names of modules, as in torch,numpy, got {name!r}. Correct the name.")
    return names


_RANK_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_log_ranks(text: str, world_size: int) -> frozenset[int]:
    """Parse the global ranks of ``0,8-15``, ``all`` or ``none``.

    Raises:
        ConfigError: another text, or a rank that the job does not have.
    """
    if text.strip() in ("all", "none"):
        return frozenset(range(world_size) if text.strip() == "all" else ())
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANK_RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"launch: --log-ranks must be ranks as in 0,8-15, or all, or none, got {text!r}. Correct {part!r}."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"launch: --log-ranks {text!r}: {part.strip()} goes backwards. Write {last}-{first}.")
        if last >= world_size:
            raise ConfigError(f"launch: --log-ranks {text!r}: there is no rank {last}. Use ranks from 0 to {world_size - 1}.")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def complete_script(incomplete: str) -> list[str]:
    """Complete the names of Python files and folders for the shell."""
    folder, begin = os.path.split(incomplete)
    try:
        entries = [entry for entry in os.scandir(folder or ".") if entry.name.startswith(begin)]
    except OSError:
        return []
    names = [entry.name + "/" if entry.is_dir() else entry.name for entry in entries if begin or entry.name[0] != "."]
    return sorted(os.path.join(folder, name) for name in names if name.endswith((".py", "/")))
