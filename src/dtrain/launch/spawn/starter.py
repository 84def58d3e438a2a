"""Starts processes for the supervisor: through the preloaded process where there is one, else as plain interpreters."""

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

_MAX_IN_FLIGHT = 16  # requests that wait in a channel: it holds some 100 KiB, and few descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent:
    """What became of a request: its ``pid``, or the ``error``. Without an ``id``, something to tell the user."""

    id: int | None = None
    pid: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessStarter:
    """How the processes of one job are started. It closes what descriptors a request owns, once they are passed on."""

    target: Target
    log_path: Path = Path(os.devnull)  # for what the processes print that are no ranks
    common_environment: Mapping[str, str] = field(default_factory=dict)  # the environment of all ranks
    forkserver: ForkServer | None = None
    pending: dict[int, ProcessRequest] = field(default_factory=dict)  # not there yet, in the order in which they came
    in_flight: set[int] = field(default_factory=set)  # those of them that the preloaded process knows of

    def preload(self, asked: Sequence[str] | None) -> None:
        """Start the preloaded process, where it has something to load.

        Args:
            asked: modules that the user wants to have loaded; None: what the program seems to import.

        Raises:
            OSError: no more processes or files.
        """
        if self.target.kind == "command" or sys.platform != "linux":  # only Linux gives its forks to the supervisor
            return
        modules = find_preload_modules(self.target) if asked is None else PreloadModules(needed=tuple(asked))
        if not modules.needed:
            return
        fd = self._open_log()
        try:
            self.forkserver = start_forkserver(self.target, modules, self.common_environment, log_fd=fd)
        finally:
            os.close(fd)

    def start(self, request: ProcessRequest) -> list[StartEvent]:
        """Have a process started; its event comes now, or later from ``read``."""
        if request.kind == "store":
            log = {"stdout": self._open_log(), "stderr": self._open_log()}
            request = replace(request, fds={**request.fds, **log}, owned=request.owned | set(log))
        if self.forkserver is None:
            return [self._start_process(request)]
        self.pending[request.id] = request
        self._send_pending()
        return []

    def read_events(self) -> list[StartEvent]:
        """What the preloaded process has to say."""
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
        """Take back what the preloaded process does not know of yet; the ids."""
        ids = [number for number in self.pending if number not in self.in_flight]
        for number in ids:
            self._release(self.pending.pop(number))
        return ids

    def stop_forkserver(self, *, ended: bool = False) -> None:
        """End the preloaded process, unless it has ``ended``, and forget what it was asked for."""
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
        """Pass requests on, as many as the channel has room for."""
        for number, request in self.pending.items():
            if self.forkserver is None or len(self.in_flight) >= _MAX_IN_FLIGHT:
                return
            if number not in self.in_flight:
                with contextlib.suppress(OSError):  # it has ended: the end of its channel will be read, and all fall back
                    self.forkserver.request_process(request)
                    self.in_flight.add(number)

    def _fall_back_to_exec(self, why: str, *, ended: bool = False) -> list[StartEvent]:
        """Start plain interpreters from now on, and what was asked for and is not there."""
        missing, self.pending = list(self.pending.values()), {}
        self.stop_forkserver(ended=ended)
        notice = StartEvent(error=f"{why}; starting plain interpreters (--no-preload does so at once)")
        return [notice, *(self._start_process(request) for request in missing)] if missing else []

    def _open_log(self) -> int:
        try:
            return os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a run folder that is full or gone costs the log only
            return os.open(os.devnull, os.O_WRONLY)

    def _start_process(self, request: ProcessRequest) -> StartEvent:
        command = build_rank_command(self.target)
        if request.kind == "store":
            program = Path(__file__).with_name("store.py")
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
