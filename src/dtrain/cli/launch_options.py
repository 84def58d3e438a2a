"""Define the options of ``dtrain launch``, and parse their values. All options are read as text and checked by these functions.

The spellings with underscores are from Composer's launcher and torchrun, so that their command lines run unchanged.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from dtrain import __version__
from dtrain.cli.command_classes import OTHER_HEADING
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import DEFAULT_GRACE_S, SAVING_GRACE_S

_MAX_RESTARTS = 1000
_MAX_DURATION_S = 7 * 86_400
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def parse_int(option: str, text: str | None, *, advice: str) -> int:
    """Parse the integer of ``option``; -1 if unset.

    Raises:
        ConfigError: the text is not an integer.
    """
    if text is None or not text.strip():
        return -1
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ConfigError(f"launch: {option} must be an integer, got {text!r}. {advice}")
    return int(text)


def parse_restarts(option: str, text: str | None) -> int:
    """Parse the number of restarts.

    Raises:
        ConfigError: not an integer, or out of range.
    """
    if text is None:
        return 0
    restarts = parse_int(option, text, advice="Use 3, for example.")
    if not 0 <= restarts <= _MAX_RESTARTS:
        raise ConfigError(f"launch: {option} must be from 0 to {_MAX_RESTARTS}, got {text!r}. Use 3, for example.")
    return restarts


def parse_duration(option: str, text: str | None, *, usual: int) -> float | None:
    """Parse a positive number of seconds; None if unset.

    Raises:
        ConfigError: not a number, or out of range.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"launch: {option} must be a number of seconds, got {text!r}. Use {usual}, for example.") from None
    # The comparison is False for nan, too.
    if not 0 < seconds <= _MAX_DURATION_S:
        problem = f"launch: {option} must be more than 0 and at most {_MAX_DURATION_S} seconds, got {text!r}"
        raise ConfigError(f"{problem}. Use {usual}, for example.")
    return seconds


def parse_host(option: str, text: str | None) -> str:
    """Parse a host name or address; empty if unset.

    Raises:
        ConfigError: the text has a port, a scheme, or white space.
    """
    host = (text or "").strip()
    if re.search(r"[\s/]", host) or re.fullmatch(r"[^:]*:[^:]*", host):
        raise ConfigError(
            f"launch: {option} must be a host, got {text!r}. Pass the name that the nodes know, and the port as --master-port."
        )
    return host


def parse_stop_signal(option: str, text: str | None) -> int | None:
    """Parse a signal's name, with or without SIG, or its number.

    Raises:
        ConfigError: an unknown signal, or a signal with another meaning.
    """
    if text is None:
        return None
    name = text.strip().upper()
    known = {str(int(number)): number for number in _STOP_SIGNALS} | {number.name: number for number in _STOP_SIGNALS}
    number = known.get(name) or known.get(f"SIG{name}")
    if number is None:
        raise ConfigError(f"launch: {option} must be TERM, USR1 or USR2, got {text!r}. Use USR1, for example.")
    return int(number)


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


def _option(heading: str, *spellings: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


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
    _option(
        RANKS,
        "-n",
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        "-np",
        metavar="N",
        help="Ranks on this node.  [default: one per GPU, or 1]",
    ),
]
Module = Annotated[bool, _option(RANKS, "-m", "--module", "--module_mode", help="SCRIPT is a module, as in python -m.")]
Command = Annotated[
    bool,
    _option(
        RANKS,
        "-c",
        "--command",
        "--command_mode",
        "--no-python",
        "--no_python",
        help="SCRIPT is a program, which need not be Python.",
    ),
]
Preload = Annotated[
    str | None,
    _option(
        RANKS,
        "--preload",
        metavar="MODULES",
        help="Import a,b,... once and fork the ranks.  [default: torch and other modules that the script imports]",
    ),
]
NoPreload = Annotated[bool, _option(RANKS, "--no-preload", help="Start each rank as a new interpreter.")]
Bind = Annotated[bool, _option(RANKS, "--bind", help="Bind each rank to its own physical cores on one NUMA node.")]

Nnodes = Annotated[
    str | None,
    _option(NODES, "--nnodes", metavar="N|MIN:MAX", help="Number of nodes; MIN:MAX for nodes that join and leave."),
]
WorldSize = Annotated[
    str | None,
    _option(NODES, "--world-size", "--world_size", metavar="N", help="Ranks of all nodes; -1 for one node.  [default: -n]"),
]
NodeRank = Annotated[
    str | None, _option(NODES, "--node-rank", "--node_rank", metavar="K", help="Number of this node, counted from 0.")
]
BaseRank = Annotated[
    str | None,
    _option(NODES, "--base-rank", "--base_rank", metavar="K", help="First rank of this node.  [default: node rank times -n]"),
]
MasterAddr = Annotated[
    str | None, _option(NODES, "--master-addr", "--master_addr", metavar="HOST", help="Host of node 0; empty for one node.")
]
MasterPort = Annotated[
    str | None, _option(NODES, "--master-port", "--master_port", metavar="PORT", help="Port of the rendezvous on node 0.")
]
RdzvEndpoint = Annotated[
    str | None,
    _option(NODES, "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help="With MIN:MAX: address of the rendezvous."),
]
RdzvId = Annotated[
    str | None,
    _option(
        NODES, "--rdzv-id", "--rdzv_id", metavar="TEXT", help="Name of the job; other jobs at the same address are refused."
    ),
]
RdzvBackend = Annotated[
    str | None,
    _option(NODES, "--rdzv-backend", "--rdzv_backend", metavar="NAME", help="torchrun's: c10d, or static for --master-addr."),
]
Standalone = Annotated[bool, _option(NODES, "--standalone", help="Run on one node, whatever the environment contains.")]
JoinTimeout = Annotated[
    str | None, _option(NODES, "--join-timeout", metavar="SECONDS", help="Time limit until all nodes join.  [default: 300]")
]
CheckPath = Annotated[
    list[str] | None,
    _option(NODES, "--check-path", metavar="PATH", help="Path that must be the same on all nodes; may be repeated."),
]

RunDir = Annotated[
    str | None,
    _option(
        OUTPUT,
        "--run-dir",
        "--run_directory",
        metavar="FOLDER",
        help="Folder of logs, failure records and launch.json.  [default: runs/<date and time>]",
    ),
]
LogRanks = Annotated[
    str | None,
    _option(
        OUTPUT, "--log-ranks", metavar="RANKS", help="Ranks to show: 0,8-15 or all or none.  [default: 0 and a rank that fails]"
    ),
]
Prefix = Annotated[
    str | None, _option(OUTPUT, "--prefix", metavar="TEXT", help="Prefix of each line shown.  [default: '[rank {rank}] ']")
]
Stdout = Annotated[
    str | None,
    _option(
        OUTPUT,
        "--stdout",
        metavar="FILE",
        help="File of each rank's output, with {rank} {local_rank} {world_size} {local_world_size} {node_rank} {host} in its "
        "name; relative to the run folder.  [default: logs/rank-{rank:05d}.stdout]",
    ),
]
Stderr = Annotated[
    str | None,
    _option(OUTPUT, "--stderr", metavar="FILE", help="File of each rank's errors.  [default: logs/rank-{rank:05d}.stderr]"),
]
FullTraceback = Annotated[
    bool, _option(OUTPUT, "--full-traceback", help="Also show the frames of dtrain and torch in tracebacks.")
]
Verbose = Annotated[bool, _option(OUTPUT, "-v", "--verbose", help="Print the launch plan in one line.")]

Grace = Annotated[
    str | None,
    _option(
        ENDING,
        "--grace",
        metavar="SECONDS",
        help="Time between SIGTERM and SIGKILL.  "
        f"[default: {DEFAULT_GRACE_S:g} after a failure, {SAVING_GRACE_S:g} after a signal]",
    ),
]
HangTimeout = Annotated[
    str | None,
    _option(
        ENDING, "--hang-timeout", metavar="SECONDS", help="End the job if no rank makes progress for so long.  [default: never]"
    ),
]
MaxRestarts = Annotated[
    str | None,
    _option(
        ENDING,
        "--max-restarts",
        "--max_restarts",
        metavar="K",
        help="Restart all ranks after a failure, up to K times in a row without a new checkpoint.  [default: 0]",
    ),
]
StopSignal = Annotated[
    str | None,
    _option(ENDING, "--stop-signal", metavar="SIGNAL", help="TERM, USR1 or USR2: asks the ranks to save and stop, like TERM."),
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
