"""Ranks that get a stop signal: forked processes whose ends the test sees."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # optimizers and FSDP2 load it: once here, not once in every rank
import torch.distributed.fsdp  # noqa: F401

from dtrain import launch_protocol
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.processes import die_with_parent

LONG_S = 300  # how long a busy test machine may take

Body = Callable[[int], Any]


def endings(
    body: Body, world_size: int, folder: Path, *, meanwhile: Callable[[list[int]], None] | None = None, **env: str
) -> tuple[list[int], list[Any]]:
    """Run ``body(rank)`` on each rank; return the exit codes (negative: by a signal), and the returned values.

    A body may call ``say`` before it ends otherwise; None stands for a rank that has said nothing. ``meanwhile`` gets the pids.
    """
    pids = []
    # Ranks end without finalizers, so their sockets go into this process's folder, which is removed at its end.
    multiprocessing.util.get_temp_dir()
    try:
        with reserve_port() as held:
            pids += [_start(body, rank, world_size, held.getsockname()[1], folder, env) for rank in range(world_size)]
            if meanwhile is not None:
                meanwhile(pids)
            codes = [_end_of(pid) for pid in pids]
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            os.waitpid(pid, 0)
    paths = [folder / f"said-{rank}" for rank in range(world_size)]
    return codes, [json.loads(path.read_text()) if path.exists() else None for path in paths]


def say(folder: Path, rank: int, what: Any) -> None:
    """Leave word for the test."""
    (folder / f"said-{rank}").write_text(json.dumps(what))


def _start(body: Body, rank: int, world_size: int, port: int, folder: Path, env: dict[str, str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_rank(body, rank, folder, parent, {
            **launch_protocol.rank_environment(
                rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, nodes=1,
                addr="127.0.0.1", port=port,
            ),
            launch_protocol.LOOPBACK: "1",
            launch_protocol.GLOO_INTERFACE: "lo",
            **env,
        })  # fmt: skip
    return pid


def _be_rank(body: Body, rank: int, folder: Path, parent: int, env: dict[str, str]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        os.environ.pop(launch_protocol.AGENT_STORE, None)
        os.environ.update(env)
        said = body(rank)
        if said is not None:
            say(folder, rank, said)
        code = 0
    except SystemExit as leave:
        code = leave.code
    except BaseException:  # noqa: BLE001 - a fork must not return into pytest
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_of(pid: int) -> int:
    deadline = time.monotonic() + LONG_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, f"{pid} has not ended"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
