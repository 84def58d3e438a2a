"""Start processes for the supervisor: as forks of the fork server if one runs, otherwise as plain interpreters."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrain.launch import processes
from dtrain.launch.launch_plan import Target, build_rank_command
from dtrain.launch.spawn.exec import ProcessRequest, start_process
from dtrain.launch.spawn.forkserver import ForkServer, PreloadModules, find_preload_modules, start_forkserver

# A channel buffers some 100 KiB and few descriptors.
_MAX_IN_FLIGHT = 16  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent:
    """Result of a request: its ``pid`` or its ``error``. An event without ``id`` is a message to the user."""

    id: int | None = None
    pid: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessStarter:
    """Starter of the processes of one job. The starter closes the descriptors that a request owns after passing them on.

    Attributes:
        target: program of the ranks.
        log_path: log of processes that are not ranks.
        common_environment: environment of all ranks.
        forkserver: the fork server, if one runs.
        pending: requests without a process, in order of arrival.
        in_flight: ids of pending requests that the fork server knows.
    """

    target: Target
    log_path: Path = Path(os.devnull)
    common_environment: Mapping[str, str] = field(default_factory=dict)
    forkserver: ForkServer | None = None
    pending: dict[int, ProcessRequest] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)

    def preload(self, requested: Sequence[str] | None) -> None:
        """Start the fork server if there are modules to preload.

        Args:
            requested: modules that the user names; None uses the modules that the program seems to import.

        Raises:
            OSError: the limit of processes or files is reached.
        """
        # Only on Linux the forks become children of the supervisor.
        if self.target.kind == "command" or sys.platform != "linux":
            return
        modules = find_preload_modules(self.target) if requested is None else PreloadModules(needed=tuple(requested))
        if not modules.needed:
            return
        fd = self._open_log()
        try:
            self.forkserver = start_forkserver(self.target, modules, self.common_environment, log_fd=fd)
        finally:
            os.close(fd)

    def start(self, request: ProcessRequest) -> list[StartEvent]:
        """Start a process; its event is returned now, or later by ``read_events``."""
        if request.kind == "store":
            log = {"stdout": self._open_log(), "stderr": self._open_log()}
            request = replace(request, fds={**request.fds, **log}, owned=request.owned | set(log))
        if self.forkserver is None:
            return [self._start_process(request)]
        self.pending[request.id] = request
        self._send_pending()
        return []

    def read_events(self) -> list[StartEvent]:
        """Return the new events of the fork server."""
        events: list[StartEvent] = []
        for message in [] if self.forkserver is None else list(self.forkserver.read_messages()):
            if "ended" in message:
                events += self._fall_back_to_exec("the preloaded process has ended", ended=True)
            elif "unsafe" in message:
                if message["unsafe"] is not None:
                    events += self._fall_back_to_exec(message["unsafe"])
                elif self.forkserver is not None:
                    self.forkserver.is_ready = True
            else:
                self.in_flight.discard(message["id"])
                self._release(self.pending.pop(message["id"]))
                events.append(StartEvent(id=message["id"], pid=message.get("pid", 0), error=message.get("error")))
        self._send_pending()
        return events

    def withdraw_pending(self) -> list[int]:
        """Withdraw the requests that the fork server does not know yet, and return their ids."""
        ids = [number for number in self.pending if number not in self.in_flight]
        for number in ids:
            self._release(self.pending.pop(number))
        return ids

    def stop_forkserver(self, *, ended: bool = False) -> None:
        """Stop the fork server, unless it has ``ended``, and drop its requests."""
        if self.forkserver is not None:
            if not ended:
                processes.send_signal(self.forkserver.pid, signal.SIGKILL)
            self.forkserver.channel.close()
            self.forkserver = None
        for request in self.pending.values():
            self._release(request)
        self.pending.clear()
        self.in_flight.clear()

    def _send_pending(self) -> None:
        """Send pending requests, as many as the channel holds."""
        for number, request in self.pending.items():
            if self.forkserver is None or len(self.in_flight) >= _MAX_IN_FLIGHT:
                return
            if number not in self.in_flight:
                # If the server exited, the end of its channel is read later, and all requests fall back to exec.
                with contextlib.suppress(OSError):
                    self.forkserver.request_process(request)
                    self.in_flight.add(number)

    def _fall_back_to_exec(self, reason: str, *, ended: bool = False) -> list[StartEvent]:
        """Start the pending requests and all later requests as plain interpreters."""
        missing, self.pending = list(self.pending.values()), {}
        self.stop_forkserver(ended=ended)
        notice = StartEvent(error=f"{reason}; starting plain interpreters (--no-preload does so at once)")
        return [notice, *(self._start_process(request) for request in missing)] if missing else []

    def _open_log(self) -> int:
        try:
            return os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        # A full or removed run folder only costs the log.
        except OSError:
            return os.open(os.devnull, os.O_WRONLY)

    def _start_process(self, request: ProcessRequest) -> StartEvent:
        command = build_rank_command(self.target)
        if request.kind == "store":
            program = Path(__file__).with_name("store_main.py")
            command = [sys.executable, os.fspath(program), str(request.fds["listener"]), request.address, str(request.port)]
        try:
            wait = request.kind == "rank" and self.target.kind != "command"
            return StartEvent(
                id=request.id, pid=start_process(request, command, self.common_environment, block_interrupts=wait)
            )
        except OSError as error:
            return StartEvent(id=request.id, error=error.strerror)
        finally:
            self._release(request)

    @staticmethod
    def _release(request: ProcessRequest) -> None:
        for name, fd in request.fds.items():
            if name in request.owned:
                os.close(fd)
