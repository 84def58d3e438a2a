"""What this rank was doing, written down when the launcher asks: its stacks, its last collectives, and where it had come.

The main thread cannot be asked, since it may wait in a collective for ever. So one thread sleeps on a pipe of the launcher's,
and takes no part in anything before that pipe can be read. The collectives are those of torch's flight recorder.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtrain import heartbeats, launch_protocol

if TYPE_CHECKING:
    from dtrain.dist.init import DistInfo

COLLECTIVES_PER_GROUP = 20
"""How many collectives of each group are written, besides those that wait."""

_JOIN_TIMEOUT_S = 5.0  # for a thread that is just writing
_POLL_INTERVAL_MS = 200  # once the launcher has asked: the pipe has something to read from then on
_DUMP_FUNCTIONS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo and of NCCL; which exist depends on the build
# What NCCL calls them, and how the functions are called that a reader finds in his program.
_TORCH_NAMES = {
    "allgather_base": "all_gather_into_tensor",
    "all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
}


@dataclass(slots=True, kw_only=True)
class _DumpThread:
    thread: threading.Thread
    stop_fd: int  # written to when the thread is to end
    pid: int


@dataclass(slots=True)
class _FlightRecorderState:
    request_fd: int | None = None  # the launcher's pipe
    requests_served: int = 0  # how many questions of the launcher's
    ignore_before_ns: int = 0  # what was recorded before is of groups that are closed; torch gives their names to later ones
    dump_thread: _DumpThread | None = None


_STATE = _FlightRecorderState()


def start_dump_thread(environment: MutableMapping[str, str], info: DistInfo) -> None:
    """Be ready to write down what this rank does. Nothing without a launcher that may ask.

    Args:
        environment: that of this rank. The variable of the pipe is taken out: what this rank starts would inherit it, and not
            the pipe.
        info: this rank and its groups, which are open.

    Mutates: ``environment``, and the pipe, which programs that this process starts do not inherit any more; starts a thread.
    """
    number, run_dir = environment.pop(launch_protocol.DUMP_REQUEST_FD, ""), environment.get(launch_protocol.RUN_DIR)
    if number.isdecimal() and _is_pipe(int(number)):
        _STATE.request_fd = int(number)
        os.set_inheritable(_STATE.request_fd, False)
    if _STATE.request_fd is None or _STATE.dump_thread is not None or run_dir is None:
        return
    end, wake = os.pipe()
    args = (_STATE.request_fd, end, Path(run_dir), info)
    thread = threading.Thread(target=_serve_requests, args=args, daemon=True, name="dtrain-flight-recorder")
    thread.start()
    _STATE.dump_thread = _DumpThread(thread=thread, stop_fd=wake, pid=os.getpid())


def stop_dump_thread() -> None:
    """End the thread. Nothing without one, or in a fork of the rank, which has none."""
    box, _STATE.dump_thread = _STATE.dump_thread, None
    if box is not None and box.pid == os.getpid():
        os.close(box.stop_fd)
        box.thread.join(_JOIN_TIMEOUT_S)
        _STATE.ignore_before_ns = time.time_ns()


def _is_pipe(fd: int) -> bool:
    """Whether ``fd`` can be the launcher's, and not something that took the number of a pipe that is gone."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _serve_requests(request_fd: int, stop_fd: int, run_dir: Path, info: DistInfo) -> None:
    """Write as often as the launcher asks, until this rank leaves the block. Not when it has died: then it asks nothing."""
    poll = select.poll()
    poll.register(request_fd, select.POLLIN if _STATE.requests_served == 0 else 0)
    poll.register(stop_fd, select.POLLIN)
    try:
        while True:
            events = dict(poll.poll(None if _STATE.requests_served == 0 else _POLL_INTERVAL_MS))
            questions = _count_requests(request_fd)
            if stop_fd not in events and questions > _STATE.requests_served:
                _STATE.requests_served = questions
                write_stacks(launch_protocol.stacks_file(run_dir, info.rank))
                write_flight_record(
                    launch_protocol.flight_record_file(run_dir, info.rank), info
                )  # last: with it the launcher has all it asked for
                poll.modify(request_fd, 0)  # it can be read for good now: look from time to time whether there is more
            if events.get(stop_fd) or events.get(request_fd, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                return
    except Exception as problem:  # noqa: BLE001 - a record only improves a message
        print(f"dtrain: rank {info.rank} could not write down its collectives: {problem!r}", file=sys.stderr)
    finally:
        os.close(stop_fd)


def _count_requests(request_fd: int) -> int:
    """How many there have been: each is a byte in the pipe, which all ranks of the node share, and which nobody reads."""
    return int(struct.unpack("i", fcntl.ioctl(request_fd, termios.FIONREAD, bytes(4)))[0])


def write_stacks(path: Path) -> None:
    """Add the Python stacks of the other threads to ``path``, the main thread last, in the form that faulthandler writes.

    This thread has the interpreter meanwhile, so no other changes its frames while they are read.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    frames, main = sys._current_frames(), threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for ident in (*others, *([main] if main in frames else [])):
            file.write(f"Thread {ident:#018x} (most recent call first):\n{''.join(_format_frames(frames[ident]))}\n")


def _format_frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno or 0} in {frame.f_code.co_name}\n'
        frame = frame.f_back


def write_flight_record(path: Path, info: DistInfo) -> None:
    """Write what this rank was doing to ``path``, atomically, so that nobody reads half of it.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    passed, doing = heartbeats.last_progress()
    record = {"rank": info.rank, "passed": passed, "doing": doing, "groups": list(_describe_groups(info))}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record), encoding="utf-8")
    os.replace(partial, path)


def _describe_groups(info: DistInfo) -> Iterator[dict[str, Any]]:
    """Each group of this rank that has run a collective, once for each backend that did."""
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in read_flight_recorder():
        backend, _, _ = entry["profiling_name"].partition(":")
        if not entry["is_p2p"] and entry["time_created_ns"] > _STATE.ignore_before_ns:
            entries.setdefault((entry["process_group"][0], backend), []).append(entry)
    known = {
        str(group.group_name): group for group in dist.distributed_c10d._world.pg_map.copy()
    }  # the main thread may open one
    for (name, backend), found in entries.items():
        if name in known:  # closed ones wait for nobody
            yield {
                "id": name,
                "backend": backend,
                "name": _group_name(known[name], info),
                "ranks": dist.get_process_group_ranks(known[name]),
                "last": max(entry["collective_seq_id"] for entry in found),
                "collectives": [
                    _describe_collective(entry)
                    for i, entry in enumerate(found)
                    if i >= len(found) - COLLECTIVES_PER_GROUP or _is_pending(entry)
                ],
            }


def _group_name(group: dist.ProcessGroup, info: DistInfo) -> str:
    """What the documentation calls a group: the axis for one of a mesh, whose name torch writes into the description."""
    if group == dist.group.WORLD:
        return "training"
    if group in (info.control, info.background):
        return "control" if group == info.control else "background"
    described = group.group_desc
    return group.group_name if described in ("", "undefined") else described.removeprefix("mesh_")


def read_flight_recorder() -> list[dict[str, Any]]:
    """What torch's flight recorders remember, oldest first; nothing where this build of torch has none, or they are off."""
    entries: list[dict[str, Any]] = []
    for name in _DUMP_FUNCTIONS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries") or []
    return sorted({_entry_key(entry): entry for entry in entries}.values(), key=lambda entry: entry["record_id"])


def _entry_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Two recorders may tell of the same collective."""
    return (entry["profiling_name"], *entry["process_group"], entry["collective_seq_id"], entry["is_p2p"], entry["record_id"])


def _describe_collective(entry: dict[str, Any]) -> dict[str, Any]:
    operation = entry["profiling_name"].partition(":")[2].lstrip("_")
    return {
        "number": entry["collective_seq_id"],
        "op": _TORCH_NAMES.get(operation, operation),
        "sizes": entry["input_sizes"],
        "waits": _is_pending(entry),
    }


def _is_pending(entry: dict[str, Any]) -> bool:
    """gloo's recorder knows only ``retired``; NCCL's says ``completed`` before its watchdog retires an entry."""
    return not entry["retired"] and entry["state"] != "completed"
