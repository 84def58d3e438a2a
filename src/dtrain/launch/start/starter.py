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
from dtrain.launch.plan import Target, rank_command
from dtrain.launch.start.plain import start_plain
from dtrain.launch.start.preloaded import Modules, Preloaded, modules_to_load, start_preloaded
from dtrain.launch.start.request import Request

_AT_ONCE = 16  # requests that wait in a channel: it holds some 100 KiB, and few descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What became of a request: its ``pid``, or the ``error``. Without an ``id``, something to tell the user."""

    id: int | None = None
    pid: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Starter:
    """How the processes of one job are started. It closes what descriptors a request owns, once they are passed on."""

    target: Target
    log: Path = Path(os.devnull)  # for what the processes print that are no ranks
    common: Mapping[str, str] = field(default_factory=dict)  # the environment of all ranks
    preloaded: Preloaded | None = None
    pending: dict[int, Request] = field(default_factory=dict)  # not there yet, in the order in which they came
    asked: set[int] = field(default_factory=set)  # those of them that the preloaded process knows of

    def preload(self, asked: Sequence[str] | None) -> None:
        """Start the preloaded process, where it has something to load.

        Args:
            asked: modules that the user wants to have loaded; None: what the program seems to import.

        Raises:
            OSError: no more processes or files.
        """
        if self.target.kind == "command" or sys.platform != "linux":  # only Linux gives its forks to the supervisor
            return
        modules = modules_to_load(self.target) if asked is None else Modules(needed=tuple(asked))
        if not modules.needed:
            return
        fd = self._open_log()
        try:
            self.preloaded = start_preloaded(self.target, modules, self.common, log=fd)
        finally:
            os.close(fd)

    def start(self, request: Request) -> list[Event]:
        """Have a process started; its event comes now, or later from ``read``."""
        if request.kind == "store":
            log = {"stdout": self._open_log(), "stderr": self._open_log()}
            request = replace(request, fds={**request.fds, **log}, owned=request.owned | set(log))
        if self.preloaded is None:
            return [self._start_plain(request)]
        self.pending[request.id] = request
        self._ask()
        return []

    def read(self) -> list[Event]:
        """What the preloaded process has to say."""
        events: list[Event] = []
        for message in [] if self.preloaded is None else list(self.preloaded.read()):
            if "ended" in message:
                events += self._fall_back("the preloaded process has ended", ended=True)
            elif "unsafe" in message:
                if message["unsafe"] is not None:
                    events += self._fall_back(message["unsafe"])
                elif self.preloaded is not None:
                    self.preloaded.ready = True
            else:
                self.asked.discard(message["id"])
                self._release(self.pending.pop(message["id"]))
                events.append(Event(id=message["id"], pid=message.get("pid", 0), error=message.get("error")))
        self._ask()
        return events

    def withdraw(self) -> list[int]:
        """Take back what the preloaded process does not know of yet; the ids."""
        ids = [number for number in self.pending if number not in self.asked]
        for number in ids:
            self._release(self.pending.pop(number))
        return ids

    def abandon(self, *, ended: bool = False) -> None:
        """End the preloaded process, unless it has ``ended``, and forget what it was asked for."""
        if self.preloaded is not None:
            if not ended:
                processes.send(self.preloaded.pid, signal.SIGKILL)
            self.preloaded.channel.close()
            self.preloaded = None
        for request in self.pending.values():
            self._release(request)
        self.pending.clear()
        self.asked.clear()

    def _ask(self) -> None:
        """Pass requests on, as many as the channel has room for."""
        for number, request in self.pending.items():
            if self.preloaded is None or len(self.asked) >= _AT_ONCE:
                return
            if number not in self.asked:
                with contextlib.suppress(OSError):  # it has ended: the end of its channel will be read, and all fall back
                    self.preloaded.ask(request)
                    self.asked.add(number)

    def _fall_back(self, why: str, *, ended: bool = False) -> list[Event]:
        """Start plain interpreters from now on, and what was asked for and is not there."""
        missing, self.pending = list(self.pending.values()), {}
        self.abandon(ended=ended)
        notice = Event(error=f"{why}; starting plain interpreters (--no-preload does so at once)")
        return [notice, *(self._start_plain(request) for request in missing)] if missing else []

    def _open_log(self) -> int:
        try:
            return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a run folder that is full or gone costs the log only
            return os.open(os.devnull, os.O_WRONLY)

    def _start_plain(self, request: Request) -> Event:
        command = rank_command(self.target)
        if request.kind == "store":
            program = Path(__file__).with_name("store.py")
            command = [sys.executable, os.fspath(program), str(request.fds["listener"]), request.address, str(request.port)]
        try:
            wait = request.kind == "rank" and self.target.kind != "command"
            return Event(id=request.id, pid=start_plain(request, command, self.common, interrupts_wait=wait))
        except OSError as error:
            return Event(id=request.id, error=error.strerror)
        finally:
            self._release(request)

    @staticmethod
    def _release(request: Request) -> None:
        for name, fd in request.fds.items():
            if name in request.owned:
                os.close(fd)
