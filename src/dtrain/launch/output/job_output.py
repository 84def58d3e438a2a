"""All output of a job, as its supervisor handles it: read when there is some, and sent where it belongs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dtrain.launch.launch_plan import NodeLayout, OutputPlan
from dtrain.launch.output.log_files import LogFiles, LogStream, fill_template, log_paths
from dtrain.launch.output.non_blocking_writer import NonBlockingWriter, flush_writers, open_standard_writers
from dtrain.launch.output.terminal_lines import LinePrefixer, PlainStream, TailBuffer, escape_controls, merge_tails

_CHUNK = 1 << 16


@dataclass(slots=True, kw_only=True, eq=False)
class _RankStream:
    """One output stream of one rank and where it goes; ``formatter`` is None while the terminal does not show it."""

    rank: int
    fd: int
    writer: NonBlockingWriter
    file: LogStream
    tail: TailBuffer
    formatter: LinePrefixer | PlainStream | None


class JobOutput:
    """The streams of the ranks of this node, and the launcher's own.

    Every stream goes to its file; the terminal shows the ranks that were asked for. Never waits, never raises for a
    disk or a reader. Watch ``fds`` for reading, and the ``fd`` of each outlet that is ``waiting`` for room (then ``pump``).
    """

    def __init__(self, plan: OutputPlan, layout: NodeLayout, run_dir: Path) -> None:
        self._plan, self._layout, self._run_dir = plan, layout, run_dir
        self._stdout, self._stderr = open_standard_writers()
        self._files = LogFiles()
        self._streams: dict[int, _RankStream] = {}
        self._tails: dict[int, tuple[TailBuffer, TailBuffer]] = {}
        self._shown = frozenset({0}) if plan.shown is None else plan.shown
        self._clock = count()

    @property
    def writers(self) -> tuple[NonBlockingWriter, ...]:
        """The launcher's own streams: one where both lead to the same file."""
        return (self._stdout,) if self._stdout is self._stderr else (self._stdout, self._stderr)

    def fds(self) -> list[int]:
        """The descriptors to read from, open ones only."""
        return list(self._streams)

    def set_layout(self, layout: NodeLayout, run_dir: Path) -> None:
        """The place of this node and the run folder, once they are known. Before any rank is opened."""
        self._layout, self._run_dir = layout, run_dir

    def open(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Take over the read ends of a rank's pipes. A rank that was started again begins anew with its last lines.

        Mutates: the descriptors, which do not block any more and are closed at their end.
        """
        paths = log_paths(self._plan, self._layout, self._run_dir, rank)
        self._tails[rank] = TailBuffer(self._clock), TailBuffer(self._clock)
        sinks = zip((stdout_fd, stderr_fd), (self._stdout, self._stderr), paths, self._tails[rank], strict=True)
        for which, (fd, outlet, path, tail) in enumerate(sinks):
            os.set_blocking(fd, False)
            lines = self._make_formatter(rank) if rank in self._shown else None
            file = self._files.stream(path, (rank, which))
            self._streams[fd] = _RankStream(rank=rank, fd=fd, writer=outlet, file=file, tail=tail, formatter=lines)

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
        _forward_chunk(stream, chunk)
        return True

    def append_to_log(self, rank: int, text: str) -> None:
        """Append ``text`` to the file of a rank's standard error, on lines of its own; the terminal does not show it."""
        _, path = log_paths(self._plan, self._layout, self._run_dir, rank)
        stream = self._files.stream(path, (rank, 1))
        stream.end_partial_line()
        stream.write(text.encode(errors="backslashreplace"))
        stream.close()

    def is_shown(self, rank: int) -> bool:
        """Whether the terminal shows ``rank``."""
        return rank in self._shown

    def read_tail(self, rank: int, n: int) -> list[str]:
        """The last ``n`` lines of both streams of ``rank``, fit for a terminal; at most 50 of each stream are kept."""
        return merge_tails(self._tails[rank], n) if rank in self._tails else []

    def write_line(self, line: str) -> None:
        """A line of the launcher's own, or about a rank: what a terminal would obey in it is shown as an escape."""
        self._stderr.write(escape_controls(line.encode(errors="backslashreplace")) + b"\n")

    def drain(self) -> None:
        """Read what is there without waiting for more, and close all streams of the ranks.

        When the job has ended: a process that is not of it may hold a pipe open for ever.
        """
        for stream in list(self._streams.values()):
            for chunk in _read_remaining(stream.fd):
                _forward_chunk(stream, chunk)
            self._close(stream)

    def finish(self, final_lines: Iterable[str], *, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """The end of the job: what is left to read, what the files lack, ``final_lines``, and what nobody has read.

        A reader that takes nothing is waited for ``timeout_s`` seconds, or until ``give_up`` says that somebody has had
        enough; the last words come before that wait. The launcher's own streams are closed then.
        """
        self.drain()
        self._files.close()
        for line in [*(f"dtrain: launch: {lost}" for lost in self._files.describe_lost()), *final_lines]:
            self.write_line(line)
        flush_writers(self.writers, timeout_s=timeout_s, give_up=give_up)
        if self._stdout is not self._stderr and self._stdout.dropped_lines:
            self.write_line(
                f"dtrain: launch: {self._stdout.dropped_lines} lines of standard output were dropped: {self._stdout.reason}"
            )
            self._stderr.flush(timeout_s=0.0)
        for outlet in self.writers:
            outlet.close()

    def _make_formatter(self, rank: int) -> LinePrefixer | PlainStream:
        if self._layout.world_size == 1:
            return PlainStream()
        return LinePrefixer(fill_template("--prefix", self._plan.prefix, self._layout, rank))

    def _close(self, stream: _RankStream) -> None:
        del self._streams[stream.fd]
        os.close(stream.fd)
        if stream.formatter is not None:
            stream.writer.write(stream.formatter.close())
        stream.file.close()


def _forward_chunk(stream: _RankStream, chunk: bytes) -> None:
    stream.file.write(chunk)
    stream.tail.feed(chunk)
    if stream.formatter is not None:
        stream.writer.write(stream.formatter.feed(chunk))


def _read_remaining(fd: int) -> Iterable[bytes]:
    try:
        while chunk := os.read(fd, _CHUNK):
            yield chunk
    except OSError:  # nothing there now, or nothing to be read any more
        return
