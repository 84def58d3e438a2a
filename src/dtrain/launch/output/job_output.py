"""Relay the output streams of all ranks to log files and the terminal, and write the launcher's own lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dtrain.arguments import format_count
from dtrain.launch.launch_plan import NodeLayout, OutputPlan
from dtrain.launch.output.live_line import LiveLineParser, LiveTerminal, has_live_line
from dtrain.launch.output.log_files import LogFiles, LogStream, fill_template, log_paths
from dtrain.launch.output.non_blocking_writer import NonBlockingWriter, flush_writers, open_standard_writers
from dtrain.launch.output.terminal_lines import LinePrefixer, PlainStream, TailBuffer, escape_controls, merge_tails

_CHUNK = 1 << 16


@dataclass(slots=True, kw_only=True, eq=False)
class _RankStream:
    """Output stream of one rank and its destinations.

    ``formatter`` is None if the terminal does not show the stream, ``parser`` is None if the stream has no live lines.
    """

    rank: int
    fd: int
    writer: NonBlockingWriter
    file: LogStream
    tail: TailBuffer
    formatter: LinePrefixer | PlainStream | None
    parser: LiveLineParser | None


class JobOutput:
    """Output of the ranks of this node and of the launcher.

    Every stream is written to its log file, and the terminal shows selected ranks. No method waits for a reader, or raises an
    error of a disk or a reader. Watch ``fds`` for reading, and the ``fd`` of each writer with ``has_pending`` for space
    (``flush_some``).
    """

    def __init__(self, plan: OutputPlan, layout: NodeLayout, run_dir: Path) -> None:
        self._plan, self._layout, self._run_dir = plan, layout, run_dir
        self._stdout, self._stderr = open_standard_writers()
        self._files = LogFiles()
        self._streams: dict[int, _RankStream] = {}
        self._tails: dict[int, tuple[TailBuffer, TailBuffer]] = {}
        self._shown = frozenset({0}) if plan.shown is None else plan.shown
        self._clock = count()
        self.has_live_line = 0 in self._shown and has_live_line(os.environ)
        self._terminal = LiveTerminal(self._stderr)

    @property
    def writers(self) -> tuple[NonBlockingWriter, ...]:
        """Writers of the launcher's own streams; a single writer if both streams go to the same file."""
        return (self._stdout,) if self._stdout is self._stderr else (self._stdout, self._stderr)

    def fds(self) -> list[int]:
        """Return the open descriptors to read from."""
        return list(self._streams)

    def set_layout(self, layout: NodeLayout, run_dir: Path) -> None:
        """Set the layout of this node and the run folder once they are known, before any rank is opened."""
        self._layout, self._run_dir = layout, run_dir

    def open(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Take over the read ends of a rank's pipes. A restarted rank gets empty tail buffers.

        Mutates: the descriptors, which become non-blocking and are closed at their end.
        """
        paths = log_paths(self._plan, self._layout, self._run_dir, rank)
        self._tails[rank] = TailBuffer(self._clock), TailBuffer(self._clock)
        sinks = zip((stdout_fd, stderr_fd), (self._stdout, self._stderr), paths, self._tails[rank], strict=True)
        for index, (fd, writer, path, tail) in enumerate(sinks):
            os.set_blocking(fd, False)
            formatter = self._make_formatter(rank) if rank in self._shown else None
            file = self._files.stream(path, (rank, index))
            parser = LiveLineParser() if self.has_live_line and (rank, index) == (0, 1) else None
            self._streams[fd] = _RankStream(
                rank=rank, fd=fd, writer=writer, file=file, tail=tail, formatter=formatter, parser=parser
            )

    def relay(self, fd: int) -> bool:
        """Read and relay one chunk. Return True if more may follow; at the end of the stream the descriptor is closed."""
        stream = self._streams[fd]
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        # A descriptor that cannot be read counts as ended.
        except OSError:
            chunk = b""
        if not chunk:
            self._close(stream)
            return False
        self._forward_chunk(stream, chunk)
        return True

    def append_to_log(self, rank: int, text: str) -> None:
        """Append ``text`` to the log of a rank's standard error, on its own lines, but not to the terminal."""
        _, path = log_paths(self._plan, self._layout, self._run_dir, rank)
        stream = self._files.stream(path, (rank, 1))
        stream.end_partial_line()
        stream.write(text.encode(errors="backslashreplace"))
        stream.close()

    def is_shown(self, rank: int) -> bool:
        """Return True if the terminal shows ``rank``."""
        return rank in self._shown

    def read_tail(self, rank: int, n: int) -> list[str]:
        """Return the last ``n`` lines of both streams of ``rank``, escaped for a terminal; up to 50 lines per stream exist."""
        return merge_tails(self._tails[rank], n) if rank in self._tails else []

    def write_line(self, line: str) -> None:
        """Write a line of the launcher, with control characters escaped."""
        self._write(self._stderr, escape_controls(line.encode(errors="backslashreplace")) + b"\n")

    def drain(self) -> None:
        """Read the available output without waiting, and close all streams of the ranks.

        Call after the end of the job, because a process outside of the job may hold a pipe open forever.
        """
        for stream in list(self._streams.values()):
            for chunk in _read_remaining(stream.fd):
                self._forward_chunk(stream, chunk)
            self._close(stream)

    def finish(self, final_lines: Iterable[str], *, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """Finish the output of the job: read the rest, report lost lines, write ``final_lines``, and wait for slow readers.

        A reader that accepts nothing is waited for up to ``timeout_s`` seconds, or until ``give_up`` returns True. The final
        lines are queued before the wait. Then the launcher's own streams are closed.
        """
        self.drain()
        self._terminal.finish()
        self._files.close()
        for line in [*(f"dtrain: launch: {lost}" for lost in self._files.describe_lost()), *final_lines]:
            self.write_line(line)
        flush_writers(self.writers, timeout_s=timeout_s, give_up=give_up)
        if self._stdout is not self._stderr and self._stdout.dropped_lines:
            stdout = self._stdout
            lines = format_count(stdout.dropped_lines, "line of standard output was", "lines of standard output were")
            self.write_line(f"dtrain: launch: {lines} dropped: {stdout.reason}")
            flush_writers([self._stderr], timeout_s=0.0)
        for writer in self.writers:
            writer.close()

    def _make_formatter(self, rank: int) -> LinePrefixer | PlainStream:
        if self._layout.world_size == 1:
            return PlainStream()
        return LinePrefixer(fill_template("--prefix", self._plan.prefix, self._layout, rank))

    def _close(self, stream: _RankStream) -> None:
        del self._streams[stream.fd]
        os.close(stream.fd)
        if stream.parser is not None:
            self._forward(stream, stream.parser.close())
        if stream.formatter is not None:
            self._write(stream.writer, stream.formatter.close())
        stream.file.close()

    def _forward_chunk(self, stream: _RankStream, chunk: bytes) -> None:
        if stream.parser is None:
            self._forward(stream, chunk)
            return
        before = stream.parser.text
        self._forward(stream, stream.parser.feed(chunk))
        if stream.parser.text != before:
            self._terminal.show(stream.parser.text)

    def _forward(self, stream: _RankStream, chunk: bytes) -> None:
        if chunk:
            stream.file.write(chunk)
            stream.tail.feed(chunk)
            if stream.formatter is not None:
                self._write(stream.writer, stream.formatter.feed(chunk))

    def _write(self, writer: NonBlockingWriter, data: bytes) -> None:
        if self.has_live_line and writer is self._stderr:
            self._terminal.write(data)
        else:
            writer.write(data)


def _read_remaining(fd: int) -> Iterable[bytes]:
    try:
        while chunk := os.read(fd, _CHUNK):
            yield chunk
    # Either no data is available, or the descriptor cannot be read.
    except OSError:
        return
