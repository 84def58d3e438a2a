"""Write this rank's stacks, last collectives and progress to files when the launcher asks, for reports of hangs.

The main thread may wait in a collective forever, so a separate thread writes the files. The thread sleeps until it can read a
pipe of the launcher. The collectives come from torch's flight recorder.
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
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.launch import heartbeats

if TYPE_CHECKING:
    from dtrain.dist.control_plane import ControlPlane
    from dtrain.dist.init import DistInfo

COLLECTIVES_PER_GROUP = 20
"""Number of collectives that are written per group, in addition to pending collectives."""

# Time for a thread that is just writing.
_JOIN_TIMEOUT_S = 5.0
# After the first request the pipe stays readable, so the thread polls.
_POLL_INTERVAL_MS = 200
# Functions of gloo and of NCCL. The build of torch decides which exist.
_DUMP_FUNCTIONS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# NCCL's names, and the names of the functions in a user's program.
_TORCH_NAMES = {
    "allgather_base": "all_gather_into_tensor",
    "all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
}


@dataclass(slots=True, kw_only=True)
class _DumpThread:
    thread: threading.Thread
    # The thread ends when this pipe is closed.
    stop_fd: int
    pid: int


@dataclass(slots=True, kw_only=True, eq=False)
class FlightRecorder:
    """Thread that answers the launcher's requests while ``init_dist``'s block is open. ``DistContext`` holds the only instance.

    Args:
        request_fd: the launcher's pipe, once found.
        requests_served: number of the launcher's requests that were served.
        ignore_before_ns: time of the last closing. Earlier records belong to closed groups, whose names torch reuses.
        dump_thread: the running thread.
    """

    request_fd: int | None = None
    requests_served: int = 0
    ignore_before_ns: int = 0
    dump_thread: _DumpThread | None = None

    def start(self, environment: MutableMapping[str, str], info: DistInfo, plane: ControlPlane | None = None) -> None:
        """Start the thread. Do nothing without a launcher that may ask.

        Args:
            environment: environment of this rank. The pipe's variable is removed, because processes started by this rank would
                inherit the variable but not the pipe.
            info: this rank and its open groups.
            plane: open control plane, if there is one.

        Mutates: ``environment``, and the pipe, which processes started by this process no longer inherit; starts a thread.
        """
        number, run_dir = environment.pop(launch_protocol.DUMP_REQUEST_FD, ""), environment.get(launch_protocol.RUN_DIR)
        # If the launcher's pipe is gone, its number may belong to another file.
        with suppress(OSError):
            if number.isdecimal() and stat.S_ISFIFO(os.fstat(int(number)).st_mode):
                self.request_fd = int(number)
                os.set_inheritable(self.request_fd, False)
        if self.request_fd is None or self.dump_thread is not None or run_dir is None:
            return
        stop_read, stop_write = os.pipe()
        args = (self.request_fd, stop_read, Path(run_dir), info, plane)
        thread = threading.Thread(target=self._serve_requests, args=args, daemon=True, name="dtrain-flight-recorder")
        thread.start()
        self.dump_thread = _DumpThread(thread=thread, stop_fd=stop_write, pid=os.getpid())

    def stop(self) -> None:
        """Stop the thread. Do nothing without a thread, or in a fork of the rank, which has no thread."""
        dump_thread, self.dump_thread = self.dump_thread, None
        if dump_thread is not None and dump_thread.pid == os.getpid():
            os.close(dump_thread.stop_fd)
            dump_thread.thread.join(_JOIN_TIMEOUT_S)
            self.ignore_before_ns = time.time_ns()

    def _serve_requests(self, request_fd: int, stop_fd: int, run_dir: Path, info: DistInfo, plane: ControlPlane | None) -> None:
        """Serve the launcher's requests until this rank leaves ``init_dist``'s block, or until the launcher dies."""
        poll = select.poll()
        poll.register(request_fd, select.POLLIN if self.requests_served == 0 else 0)
        poll.register(stop_fd, select.POLLIN)
        try:
            while True:
                events = dict(poll.poll(None if self.requests_served == 0 else _POLL_INTERVAL_MS))
                # Each request is one byte in a pipe that all ranks of the node share, and that nobody reads.
                (requests,) = struct.unpack("i", fcntl.ioctl(request_fd, termios.FIONREAD, bytes(4)))
                if stop_fd not in events and requests > self.requests_served:
                    self.requests_served = requests
                    write_stacks(launch_protocol.stacks_file(run_dir, info.rank))
                    # The launcher takes this file as the sign that all files are complete, so it is written last.
                    path = launch_protocol.flight_record_file(run_dir, info.rank)
                    write_flight_record(path, info, plane, ignore_before_ns=self.ignore_before_ns)
                    # The pipe stays readable from now on, so the loop polls for further requests.
                    poll.modify(request_fd, 0)
                if events.get(stop_fd) or events.get(request_fd, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    return
        except Exception as error:  # noqa: BLE001 - a record only improves a message
            print(f"dtrain: rank {info.rank} could not write its last collectives: {error!r}", file=sys.stderr)
        finally:
            os.close(stop_fd)


def write_stacks(path: Path) -> None:
    """Append the Python stacks of the other threads to ``path``, the main thread last, in faulthandler's format.

    This thread holds the interpreter lock, so no frame changes while it is read.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    frames, main = sys._current_frames(), threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for ident in (*others, *([main] if main in frames else [])):
            file.write(f"Thread {ident:#018x} (most recent call first):\n")
            for frame, line in traceback.walk_stack(frames[ident]):
                file.write(f'  File "{frame.f_code.co_filename}", line {line or 0} in {frame.f_code.co_name}\n')
            file.write("\n")


def write_flight_record(path: Path, info: DistInfo, plane: ControlPlane | None = None, *, ignore_before_ns: int = 0) -> None:
    """Write progress and collectives of this rank to ``path``, atomically, so that no reader sees half of the file.

    Args:
        path: file to write.
        info: this rank and its open groups.
        plane: open control plane, if there is one.
        ignore_before_ns: creation time of the oldest collective to write, in nanoseconds.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    count, activity = heartbeats.last_progress()
    groups = [*_describe_groups(ignore_before_ns), *_describe_channels(plane)]
    record = {"rank": info.rank, "passed": count, "doing": activity, "groups": groups}
    launch_protocol.replace_text(path, json.dumps(record))


def _describe_groups(ignore_before_ns: int) -> Iterator[dict[str, Any]]:
    """Describe each group of this rank that has run a collective, once for each backend."""
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in read_flight_recorder():
        backend, _, _ = entry["profiling_name"].partition(":")
        if not entry["is_p2p"] and entry["time_created_ns"] > ignore_before_ns:
            entries.setdefault((entry["process_group"][0], backend), []).append(entry)
    # Copied, because the main thread may open a group at the same time.
    open_groups = {str(group.group_name): group for group in dist.distributed_c10d._world.pg_map.copy()}
    for (name, backend), group_entries in entries.items():
        # Closed groups have no pending collectives.
        if name in open_groups:
            yield {
                "id": name,
                "backend": backend,
                "name": _group_name(open_groups[name]),
                "ranks": dist.get_process_group_ranks(open_groups[name]),
                "last": max(entry["collective_seq_id"] for entry in group_entries),
                "collectives": [
                    _describe_collective(entry)
                    for i, entry in enumerate(group_entries)
                    if i >= len(group_entries) - COLLECTIVES_PER_GROUP or _is_pending(entry)
                ],
            }


def _describe_channels(plane: ControlPlane | None) -> Iterator[dict[str, Any]]:
    """Describe the last exchange of each channel as the collective of a group."""
    if plane is None or plane.layout.world_size == 1:
        return
    for channel in plane.channels.values():
        if channel.count:
            last = {"number": channel.count, "op": channel.op, "sizes": [[channel.size]], "waits": channel.waits}
            yield {
                "id": channel.name,
                "backend": "socket",
                "name": channel.name,
                "ranks": list(range(plane.layout.world_size)),
                "last": channel.count,
                "collectives": [last],
            }


def _group_name(group: dist.ProcessGroup) -> str:
    """Return the documented name of a group. For a group of a mesh, the axis, which torch writes into the description."""
    if group == dist.group.WORLD:
        return "training"
    description = group.group_desc
    return group.group_name if description in ("", "undefined") else description.removeprefix("mesh_")


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorders, oldest first; empty if the recorders are missing or off."""
    entries: list[dict[str, Any]] = []
    for name in _DUMP_FUNCTIONS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries") or []
    # Two recorders may record the same collective.
    names = ("profiling_name", "collective_seq_id", "is_p2p", "record_id")
    unique = {(*(entry[name] for name in names), *entry["process_group"]): entry for entry in entries}
    return sorted(unique.values(), key=lambda entry: entry["record_id"])


def _describe_collective(entry: dict[str, Any]) -> dict[str, Any]:
    operation = entry["profiling_name"].partition(":")[2].lstrip("_")
    return {
        "number": entry["collective_seq_id"],
        "op": _TORCH_NAMES.get(operation, operation),
        "sizes": entry["input_sizes"],
        "waits": _is_pending(entry),
    }


def _is_pending(entry: dict[str, Any]) -> bool:
    """Return True if the collective is pending. gloo records only ``retired``, NCCL sets ``completed`` before ``retired``."""
    return not entry["retired"] and entry["state"] != "completed"
