"""Define the protocol between the launcher and its ranks: environment variables, files and failure records. Imports no torch.

The launcher writes the variables (``rank_environment``), and only ``dist/`` reads them. Names without the ``DTRAIN_`` prefix
are torchrun's names, so a script for torchrun's environment runs unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.errors import ConfigError

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
NODE_RANK = "GROUP_RANK"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
# "True" if another process serves the store, so that rank 0 is a client, too.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Name of one launch. torch treats a process with this variable as started by torchrun.
RUN_ID = "TORCHELASTIC_RUN_ID"
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
OMP_THREADS = "OMP_NUM_THREADS"
# Folder of this launch, not of the training run.
RUN_DIR = "DTRAIN_RUN_DIR"
# "1" if all ranks are on this host, so that servers listen on loopback only.
LOOPBACK = "DTRAIN_LOOPBACK"
# Secret of the job, with which its ranks prove to each other over TCP that they belong to it.
JOB_SECRET = "DTRAIN_JOB_SECRET"
# Beginning of the path of a rank's folder for the sockets of its workers. The launcher removes such folders at the end.
SOCKET_FOLDER_PREFIX = "DTRAIN_SOCKET_FOLDER_PREFIX"
# Folder in shared memory for copies of states, which outlive the ranks. The launcher removes it at the end.
MEMORY_FOLDER = "DTRAIN_MEMORY_FOLDER"
# Descriptor of the memory in which each rank writes its last step.
STEPS_FD = "DTRAIN_STEPS_FD"
# JSON of the start of a rank: its time, and the deaths before it.
START = "DTRAIN_START"
# "1" if the rank takes the place of a dead one, while the other ranks stay.
JOINS = "DTRAIN_JOINS"
# File in which a rank records the exception that leaves its script.
FAILURE_FILE = "DTRAIN_FAILURE_FILE"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
# Pipe to which a rank reports progress and commits; see ``heartbeats``.
HEARTBEAT_FD = "DTRAIN_HEARTBEAT_FD"
# Pipe that becomes readable when the launcher requests a dump of all ranks. Nobody reads its bytes.
DUMP_REQUEST_FD = "DTRAIN_DUMP_REQUEST_FD"
# "1" if the launcher draws the newest progress of rank 0 as the last line of its terminal; see ``live_line``.
LIVE_LINE = "DTRAIN_LIVE_LINE"
# Number of collectives that torch's flight recorder stores. torch warns about the older name of the variable.
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE",)
# Exit code of a rank that was asked to stop and has saved.
PREEMPTED_EXIT_CODE = 75
# Number of a signal that asks a rank to save and stop, in addition to SIGTERM.
STOP_SIGNAL = "DTRAIN_STOP_SIGNAL"

# The launcher ends the ranks by the same signal.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The launcher only forwards these signals to the ranks.
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# A rank writes its stacks on this signal.
STACKS_SIGNAL = signal.SIGRTMIN + 6 if sys.platform == "linux" else signal.SIGURG

# A live line on the standard error of rank 0: an application program command, which terminals ignore.
LIVE_LINE_BEGIN, LIVE_LINE_END = "\x1b_dtrain;", "\x1b\\"


def live_line(text: str) -> str:
    """Return ``text`` as a live line, which replaces the previous one. An empty text removes it."""
    plain = text.replace("\x1b", " ").replace("\n", " ")
    return f"{LIVE_LINE_BEGIN}{plain[:400]}{LIVE_LINE_END}"


OWNED_PREFIXES = ("DTRAIN_", "TORCHELASTIC_")
"""Prefixes of variables that describe one launch. The variables of an outer launch are wrong for ranks of an inner launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Exception that left a rank's script. ``at`` is the host's monotonic clock in seconds, comparable on one host."""

    rank: int
    at: float
    error_type: str
    message: str
    traceback_text: str
    # Exit code that the rank is about to return.
    exit_code: int
    # True for exception classes that a lost peer can cause, so another rank may have failed first.
    maybe_from_peer: bool = False
    # True if raised in communication code, so the error may only report a lost peer.
    in_collective: bool = False
    # Traceback without frames of dtrain and torch.
    short_traceback: str = ""
    # True if the rank has printed the traceback itself.
    already_printed: bool = False
    # True for a wrong argument, which the next attempt would pass again.
    is_config_error: bool = False

    @classmethod
    def from_exception(
        cls, rank: int, error: BaseException, *, short_traceback: str = "", already_printed: bool = False
    ) -> RankFailure:
        """Make the record of ``error``, at the current time.

        Args:
            rank: rank of the script.
            error: exception that leaves the script.
            short_traceback: traceback without frames of libraries.
            already_printed: if True, the rank prints the traceback itself.
        """
        maybe_from_peer = isinstance(error, OSError | EOFError | RuntimeError)
        return cls(
            rank=rank,
            at=time.monotonic(),
            error_type=type(error).__name__,
            message=_message(error),
            traceback_text="".join(traceback.format_exception(error)),
            exit_code=exit_code_for(error),
            maybe_from_peer=maybe_from_peer,
            in_collective=maybe_from_peer and _is_communication_error(error),
            short_traceback=short_traceback,
            already_printed=already_printed,
            is_config_error=isinstance(error, ConfigError),
        )

    def write(self, path: Path) -> None:
        """Write atomically, so that the launcher never reads half a record.

        Raises:
            OSError: the folder is gone, or the disk is full.
        """
        # The user may have removed the folder.
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RankFailure | None:
        """Return the record at ``path``, or None without a readable record."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            # A record only improves the message about a failure, so a damaged record is ignored.
            return None


def _is_communication_error(error: BaseException) -> bool:
    """Return True if the innermost frame is in communication code of torch or dtrain."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return "/torch/distributed/" in file or "/dtrain/dist/" in file


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return ""


def exit_code_for(error: BaseException) -> int:
    """Return Python's exit code if ``error`` leaves the main module, in the form of a shell."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def failure_file(run_dir: Path, rank: int) -> Path:
    """Return the file in which ``rank`` records the exception that leaves its script."""
    return run_dir / "failures" / f"rank-{rank:05d}.json"


def remove_marks(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove the marks of an earlier attempt of ``ranks``. A file that cannot be removed hardly exists."""
    marks = (job_failed_file(run_dir), interrupted_file(run_dir), rejoin_file(run_dir))
    for file in (*(failure_file(run_dir, rank) for rank in ranks), *marks):
        with contextlib.suppress(OSError):
            file.unlink()


def job_failed_file(run_dir: Path) -> Path:
    """Return the file that exists once the job has failed. Then a stop signal no longer asks for a checkpoint."""
    return run_dir / "failures" / "failed"


def interrupted_file(run_dir: Path) -> Path:
    """Return the file that exists once the launcher has forwarded a Ctrl-C. Then ranks do not print their stacks."""
    return run_dir / "failures" / "interrupted"


def opened_run_file(run_dir: Path) -> Path:
    """Return the file in which rank 0 names the folder of the training run that it has opened."""
    return run_dir / "opened-run"


def modules_file(run_dir: Path) -> Path:
    """Return the file in which a rank lists the modules that it has imported up to its first step, one a line."""
    return run_dir / "modules"


def rejoin_file(run_dir: Path) -> Path:
    """Return the file with the value of ``START`` of the rank that last took the place of a dead one."""
    return run_dir / "failures" / "rejoin"


def hang_folder(run_dir: Path) -> Path:
    """Return the folder of the records that ranks and launchers write when the launcher asks."""
    return run_dir / "hang"


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Return the file to which ``rank`` writes the Python stacks of its threads when the launcher asks."""
    return hang_folder(run_dir) / f"rank-{rank:05d}.stacks"


def flight_record_file(run_dir: Path, rank: int) -> Path:
    """Return the file to which ``rank`` writes its last collectives when the launcher asks."""
    return hang_folder(run_dir) / f"rank-{rank:05d}.json"


def rank_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    nodes: int,
    addr: str,
    port: int,
) -> Mapping[str, str]:
    """Make the environment variables of one rank, like torchrun."""
    return {
        RANK: str(rank),
        WORLD_SIZE: str(world_size),
        LOCAL_RANK: str(local_rank),
        LOCAL_WORLD_SIZE: str(local_world_size),
        NODE_RANK: str(node_rank),
        "NODE_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        MASTER_ADDR: addr,
        MASTER_PORT: str(port),
    }


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees half of it. A failed write leaves the file as it was.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    partial = path.with_suffix(".partial")
    try:
        # Names of files and lines of output may have surrogates.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
