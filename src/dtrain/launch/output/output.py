"""All output of a job, as its supervisor handles it: read when there is some, and sent where it belongs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dtrain.launch.output.files import FileStream, LogFiles
from dtrain.launch.output.lines import LineMarker, PlainText, harmless
from dtrain.launch.output.outlet import Outlet, flush, open_outlets
from dtrain.launch.output.tail import Tail, last_lines
from dtrain.launch.output.templates import fill, log_files
from dtrain.launch.plan import Layout, OutputPlan

_CHUNK = 1 << 16


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    """One output stream of one rank and where it goes; ``lines`` is None while the terminal does not show it."""

    rank: int
    fd: int
    outlet: Outlet
    file: FileStream
    tail: Tail
    lines: LineMarker | PlainText | None


class Output:
    """The streams of the ranks of this node, and the launcher's own.

    Every stream goes to its file; the terminal shows the ranks that were asked for. Never waits, never raises for a
    disk or a reader. Watch ``fds`` for reading, and the ``fd`` of each outlet that is ``waiting`` for room (then ``pump``).
    """

    def __init__(self, plan: OutputPlan, layout: Layout, run_dir: Path) -> None:
        self._plan, self._layout, self._run_dir = plan, layout, run_dir
        self._stdout, self._stderr = open_outlets()
        self._files = LogFiles()
        self._streams: dict[int, _Stream] = {}
        self._tails: dict[int, tuple[Tail, Tail]] = {}
        self._shown = frozenset({0}) if plan.shown is None else plan.shown
        self._clock = count()

    @property
    def outlets(self) -> tuple[Outlet, ...]:
        """The launcher's own streams: one where both lead to the same file."""
        return (self._stdout,) if self._stdout is self._stderr else (self._stdout, self._stderr)

    def fds(self) -> list[int]:
        """The descriptors to read from, open ones only."""
        return list(self._streams)

    def place(self, layout: Layout, run_dir: Path) -> None:
        """The place of this node and the run folder, once they are known. Before any rank is opened."""
        self._layout, self._run_dir = layout, run_dir

    def open(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Take over the read ends of a rank's pipes. A rank that was started again begins anew with its last lines.

        Mutates: the descriptors, which do not block any more and are closed at their end.
        """
        paths = log_files(self._plan, self._layout, self._run_dir, rank)
        self._tails[rank] = Tail(self._clock), Tail(self._clock)
        sinks = zip((stdout_fd, stderr_fd), (self._stdout, self._stderr), paths, self._tails[rank], strict=True)
        for which, (fd, outlet, path, tail) in enumerate(sinks):
            os.set_blocking(fd, False)
            lines = self._lines(rank) if rank in self._shown else None
            file = self._files.stream(path, (rank, which))
            self._streams[fd] = _Stream(rank=rank, fd=fd, outlet=outlet, file=file, tail=tail, lines=lines)

    def relay(self, fd: int) -> bool:
        """Read what there is, one piece of it; whether more may come. At its end the descriptor is closed and forgotten."""
        stream = self._streams[fd]
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # nothing can be read from it any more
            chunk = b""
        if not chunk:
            self._close(stream)
            return False
        _pass_on(stream, chunk)
        return True

    def keep(self, rank: int, text: str) -> None:
        """Append ``text`` to the file of a rank's standard error, on lines of its own; the terminal does not show it."""
        _, path = log_files(self._plan, self._layout, self._run_dir, rank)
        stream = self._files.stream(path, (rank, 1))
        stream.begin_line()
        stream.feed(text.encode(errors="backslashreplace"))
        stream.close()

    def shows(self, rank: int) -> bool:
        """Whether the terminal shows ``rank``."""
        return rank in self._shown

    def tail(self, rank: int, n: int) -> list[str]:
        """The last ``n`` lines of both streams of ``rank``, fit for a terminal; at most 50 of each stream are kept."""
        return last_lines(self._tails[rank], n) if rank in self._tails else []

    def say(self, line: str) -> None:
        """A line of the launcher's own, or about a rank: what a terminal would obey in it is shown as an escape."""
        self._stderr.put(harmless(line.encode(errors="backslashreplace")) + b"\n")

    def drain(self) -> None:
        """Read what is there without waiting for more, and close all streams of the ranks.

        When the job has ended: a process that is not of it may hold a pipe open for ever.
        """
        for stream in list(self._streams.values()):
            for chunk in _left(stream.fd):
                _pass_on(stream, chunk)
            self._close(stream)

    def finish(self, last_words: Iterable[str], *, patience_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """The end of the job: what is left to read, what the files lack, ``last_words``, and what nobody has read.

        A reader that takes nothing is waited for ``patience_s`` seconds, or until ``give_up`` says that somebody has had
        enough; the last words come before that wait. The launcher's own streams are closed then.
        """
        self.drain()
        self._files.close()
        for line in [*(f"dtrain: launch: {lost}" for lost in self._files.lost()), *last_words]:
            self.say(line)
        flush(self.outlets, patience_s=patience_s, give_up=give_up)
        if self._stdout is not self._stderr and self._stdout.dropped:
            self.say(f"dtrain: launch: {self._stdout.dropped} lines of standard output were dropped: {self._stdout.reason}")
            self._stderr.flush(patience_s=0.0)
        for outlet in self.outlets:
            outlet.close()

    def _lines(self, rank: int) -> LineMarker | PlainText:
        if self._layout.world_size == 1:
            return PlainText()
        return LineMarker(fill("--prefix", self._plan.prefix, self._layout, rank))

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.fd]
        os.close(stream.fd)
        if stream.lines is not None:
            stream.outlet.put(stream.lines.close())
        stream.file.close()


def _pass_on(stream: _Stream, chunk: bytes) -> None:
    stream.file.feed(chunk)
    stream.tail.feed(chunk)
    if stream.lines is not None:
        stream.outlet.put(stream.lines.feed(chunk))


def _left(fd: int) -> Iterable[bytes]:
    try:
        while chunk := os.read(fd, _CHUNK):
            yield chunk
    except OSError:  # nothing there now, or nothing to be read any more
        return
