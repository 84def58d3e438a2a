"""Define the options of ``dtrain launch``, and parse their values.

The spellings with underscores are from Composer's launcher and torchrun, so that their command lines run unchanged.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from typing import Annotated

import typer

from dtrain import __version__
from dtrain.cli.parameters import OTHER_HEADING, ValueType, integer, number, option
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import DEFAULT_GRACE_S, MAX_GRACE_S, MAX_RANKS, SAVING_GRACE_S
from dtrain.launch.topology import MAX_NODES

_MAX_DURATION_S = 7 * 86_400
_OMIT_ADVICE = "Remove the option to infer it."
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


def list_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ``parse_log_ranks`` reads them: ``0-3,8`` for 0, 1, 2, 3, 8; ``none`` for no rank."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


RANKS = "Ranks"
NODES = "Several nodes (start the same line once on each)"
OUTPUT = "Output and files"
ENDING = "Failures and signals"

EXAMPLES = """
dtrain launch -n 8 train.py --lr 3e-4                   eight ranks of a script
dtrain launch -n 2 -m package.train                     of a module
dtrain launch -n 2 -c ./simulate input.txt              of any program
dtrain launch -n 8 --log-ranks all --max-restarts 3 train.py
dtrain launch -n 8 --nnodes 2 --node-rank 0 --master-addr n0 --master-port 29500 train.py
srun --ntasks-per-node=1 dtrain launch -n 8 train.py    nodes and addresses from Slurm
"""


def _complete_script(incomplete: str) -> list[str]:
    """Complete the names of Python files and folders for the shell."""
    folder, begin = os.path.split(incomplete)
    try:
        entries = [entry for entry in os.scandir(folder or ".") if entry.name.startswith(begin)]
    except OSError:
        return []
    names = [entry.name + "/" if entry.is_dir() else entry.name for entry in entries if begin or entry.name[0] != "."]
    return sorted(os.path.join(folder, name) for name in names if name.endswith((".py", "/")))


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


_option = partial(option, "launch")

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="Python file; or a module with -m, a program with -c.", autocompletion=_complete_script
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Passed to the script as they are.", show_default=False)
]

Nproc = Annotated[
    str | None,
    _option(RANKS, "-n --nproc --nproc-per-node --nproc_per_node -np N", "Ranks on this node.  [default: one per GPU, or 1]"),
]
Module = Annotated[bool, _option(RANKS, "-m --module --module_mode", "SCRIPT is a module, as in python -m.")]
Command = Annotated[
    bool,
    _option(RANKS, "-c --command --command_mode --no-python --no_python", "SCRIPT is a program, which need not be Python."),
]
Preload = Annotated[
    str | None,
    _option(
        RANKS,
        "--preload MODULES",
        "Import a,b,... once, too, and fork the ranks.  [always: torch and other modules that the script imports]",
    ),
]
NoPreload = Annotated[bool, _option(RANKS, "--no-preload", "Start each rank as a new interpreter.")]
Bind = Annotated[bool, _option(RANKS, "--bind", "Bind each rank to its own physical cores on one NUMA node.")]

Nnodes = Annotated[str, _option(NODES, "--nnodes N", "Number of nodes. Use torchrun for nodes that join and leave.")]
WorldSize = Annotated[
    int | None,
    _option(
        NODES,
        "--world-size --world_size N",
        "Ranks of all nodes; -1 for one node.  [default: -n]",
        integer_or_unset(1, 10**6, advice=_OMIT_ADVICE),
    ),
]
NodeRank = Annotated[
    int | None,
    _option(
        NODES,
        "--node-rank --node_rank K",
        "Number of this node, counted from 0.",
        integer_or_unset(0, MAX_NODES - 1, advice="Pass 0 on the first node, 1 on the next, and so on."),
    ),
]
BaseRank = Annotated[
    int | None,
    _option(
        NODES,
        "--base-rank --base_rank K",
        "First rank of this node.  [default: node rank times -n]",
        integer_or_unset(0, 10**6, advice=_OMIT_ADVICE),
    ),
]
MasterAddr = Annotated[
    str, _option(NODES, "--master-addr --master_addr HOST", "Host of node 0; empty for one node.", parse_host)
]
MasterPort = Annotated[
    int | None,
    _option(
        NODES,
        "--master-port --master_port PORT",
        "Port of the rendezvous on node 0.",
        integer_or_unset(1, 65_535, advice="Choose a port that is free on node 0."),
    ),
]
RdzvEndpoint = Annotated[
    str, _option(NODES, "--rdzv-endpoint --rdzv_endpoint HOST:PORT", "torchrun's: node 0, with --rdzv-backend static.")
]
RdzvId = Annotated[
    str, _option(NODES, "--rdzv-id --rdzv_id TEXT", "Name of the job; other jobs at the same address are refused.")
]
RdzvBackend = Annotated[
    str, _option(NODES, "--rdzv-backend --rdzv_backend NAME", "torchrun's: c10d, or static for --master-addr.")
]
Standalone = Annotated[bool, _option(NODES, "--standalone", "Run on one node, whatever the environment contains.")]
JoinTimeout = Annotated[
    float | None,
    _option(
        NODES,
        "--join-timeout SECONDS",
        "Time limit until all nodes join.  [default: 300]",
        number(above=0, maximum=_MAX_DURATION_S, advice="Use 300 seconds, for example."),
    ),
]
CheckPath = Annotated[
    list[str] | None, _option(NODES, "--check-path PATH", "Path that must be the same on all nodes; may be repeated.")
]

RunDir = Annotated[
    str | None,
    _option(
        OUTPUT,
        "--run-dir --run_directory FOLDER",
        "Folder of logs, failure records and launch.json.  [default: runs/<date and time>]",
    ),
]
LogRanks = Annotated[
    str | None,
    _option(OUTPUT, "--log-ranks RANKS", "Ranks to show: 0,8-15 or all or none.  [default: 0 and a rank that fails]"),
]
Prefix = Annotated[str, _option(OUTPUT, "--prefix TEXT", "Prefix of each line shown.  [default: '[rank {rank}] ']")]
Stdout = Annotated[
    str | None,
    _option(
        OUTPUT,
        "--stdout FILE",
        "File of each rank's output, with {rank} {local_rank} {world_size} {local_world_size} {node_rank} {host} in its "
        "name; relative to the run folder.  [default: logs/rank-{rank:05d}.stdout]",
    ),
]
Stderr = Annotated[
    str | None, _option(OUTPUT, "--stderr FILE", "File of each rank's errors.  [default: logs/rank-{rank:05d}.stderr]")
]
FullTraceback = Annotated[bool, _option(OUTPUT, "--full-traceback", "Also show the frames of dtrain and torch in tracebacks.")]
Verbose = Annotated[bool, _option(OUTPUT, "-v --verbose", "Print the launch plan in one line.")]

Grace = Annotated[
    float | None,
    _option(
        ENDING,
        "--grace SECONDS",
        f"Time between SIGTERM and SIGKILL.  [default: {DEFAULT_GRACE_S:g} after a failure, {SAVING_GRACE_S:g} after a signal]",
        number(minimum=0, maximum=MAX_GRACE_S, advice="Use 5 seconds, for example."),
    ),
]
HangTimeout = Annotated[
    float | None,
    _option(
        ENDING,
        "--hang-timeout SECONDS",
        "End the job if no rank makes progress for so long.  [default: never]",
        number(above=0, maximum=_MAX_DURATION_S, advice="Use 600 seconds, for example."),
    ),
]
MaxRestarts = Annotated[
    int,
    _option(
        ENDING,
        "--max-restarts --max_restarts K",
        "Restart all ranks after a failure, up to K times in a row without a new checkpoint.  [default: 0]",
        integer(0, 1000, advice="Use 3, for example."),
    ),
]
StopSignal = Annotated[
    int | None,
    _option(
        ENDING, "--stop-signal SIGNAL", "TERM, USR1 or USR2: asks the ranks to save and stop, like TERM.", parse_stop_signal
    ),
]
Version = Annotated[
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
]
