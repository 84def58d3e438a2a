"""What the launcher and its ranks say to each other: environment variables and failure records. Imports no torch.

The launcher writes the variables (``rank_environment``), ``dist/`` reads them, and nobody else does. The names
without the ``DTRAIN_`` prefix are those of torchrun, so a script that knows torchrun's environment runs unchanged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
NODE_RANK = "GROUP_RANK"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": somebody else serves the store, rank 0 is a client too
RUN_ID = "TORCHELASTIC_RUN_ID"  # names one launch; torch counts a process that has it as started by torchrun
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
OMP_THREADS = "OMP_NUM_THREADS"
RUN_DIR = "DTRAIN_RUN_DIR"  # folder of this launch, for what belongs to the launch and not to the training run
LOOPBACK = "DTRAIN_LOOPBACK"  # "1": all ranks are on this host, so nothing may listen beyond loopback
FAILURE_FILE = "DTRAIN_FAILURE_FILE"  # where a rank records the exception that leaves its script
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
HEARTBEAT_FD = "DTRAIN_HEARTBEAT_FD"  # where a rank reports its progress and commits: see ``pulse``
DUMP_REQUEST_FD = (
    "DTRAIN_DUMP_REQUEST_FD"  # can be read when the launcher wants every rank to write down what it is doing; nobody reads it
)
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE",)  # how many collectives torch remembers; its older name draws a warning
PREEMPTED_EXIT_CODE = 75  # what a rank exits with that was asked to stop, and has saved
STOP_SIGNAL = "DTRAIN_STOP_SIGNAL"  # number of a signal that asks a rank to save and stop, besides SIGTERM

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to the launcher: it asks the ranks to end by the same one
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # to the launcher: the ranks get them, and nothing else happens
STACKS_SIGNAL = signal.SIGRTMIN + 6 if sys.platform == "linux" else signal.SIGURG  # on which a rank writes its stacks

OWNED_PREFIXES = ("DTRAIN_", "TORCHELASTIC_")
"""Variables that describe one launch: those of an outer launch say nothing true about the ranks of an inner one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The exception that left a rank's script. ``at`` is seconds of the host's monotonic clock: comparable on one host."""

    rank: int
    at: float
    error_type: str
    message: str
    traceback_text: str
    exit_code: int  # what the rank is about to exit with
    maybe_from_peer: bool = False  # of a class that a lost peer causes, too: perhaps another rank's failure came first
    in_collective: bool = False  # raised where ranks talk to each other: it may say no more than that a peer is gone
    short_traceback: str = ""  # ``frames`` without those of dtrain and torch
    already_printed: bool = False  # the rank has printed the traceback in a way of its own

    @classmethod
    def from_exception(
        cls, rank: int, error: BaseException, *, short_traceback: str = "", already_printed: bool = False
    ) -> RankFailure:
        """Record ``error``, now.

        Args:
            rank: whose script it leaves.
            error: the exception.
            short_traceback: its traceback without frames of libraries.
            already_printed: if True, the rank prints the traceback itself.
        """
        maybe_of_a_peer = isinstance(error, OSError | EOFError | RuntimeError)
        return cls(
            rank=rank,
            at=time.monotonic(),
            error_type=type(error).__name__,
            message=_message(error),
            traceback_text="".join(traceback.format_exception(error)),
            exit_code=exit_code_for(error),
            maybe_from_peer=maybe_of_a_peer,
            in_collective=maybe_of_a_peer and _is_communication_error(error),
            short_traceback=short_traceback,
            already_printed=already_printed,
        )

    def write(self, path: Path) -> None:
        """Write atomically, so that the launcher never reads half a record.

        Raises:
            OSError: the folder is gone, or the disk is full.
        """
        partial = path.with_suffix(".partial")
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> RankFailure | None:
        """The record at ``path``, or None when the rank left none that can be read."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            # A record only improves the message about a failure that was noticed anyway; a damaged one is worth none.
            return None


def _is_communication_error(error: BaseException) -> bool:
    """Return True if the innermost frame is in torch's or dtrain's part that talks to other ranks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return "/torch/distributed/" in file or "/dtrain/dist/" in file


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ of the script's must not hide the failure itself
        return ""


def exit_code_for(error: BaseException) -> int:
    """What Python exits with when ``error`` leaves the main module, as a shell gives it."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def failure_file(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` records the exception that leaves its script."""
    return run_dir / "failures" / f"rank-{rank:05d}.json"


def job_failed_file(run_dir: Path) -> Path:
    """There once the job has failed: a signal that ranks get then is no request to save, for which all would be needed."""
    return run_dir / "failures" / "failed"


def interrupted_file(run_dir: Path) -> Path:
    """There once the launcher has passed a Ctrl-C on: ranks that end of it need not show where they were."""
    return run_dir / "failures" / "interrupted"


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` writes the Python stacks of its threads when the launcher asks."""
    return run_dir / "hang" / f"rank-{rank:05d}.stacks"


def flight_record_file(run_dir: Path, rank: int) -> Path:
    """Where ``rank`` writes its last collectives when the launcher asks."""
    return run_dir / "hang" / f"rank-{rank:05d}.json"


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
    """The variables that tell a process which rank it is, as torchrun sets them."""
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
