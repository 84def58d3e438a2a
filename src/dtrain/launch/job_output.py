"""Relay the output streams of all ranks to log files and the terminal, and write the launcher's own lines.

Templates name log files and prefixes. If a disk is full, lines are lost only while it is full, and the loss is reported.
``Events`` waits for all streams in one place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dtrain.arguments import format_count
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import NodeLayout, OutputPlan
from dtrain.launch.terminal import (
    LONGEST_LINE,
    LinePrefixer,
    LiveLineParser,
    LiveTerminal,
    NonBlockingWriter,
    PlainStream,
    TailBuffer,
    count_lines,
    describe_os_error,
    escape_controls,
    flush_writers,
    has_live_line,
    merge_tails,
    open_standard_writers,
)

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
            formatter: LinePrefixer | PlainStream | None = None
            if rank in self._shown and self._layout.world_size == 1:
                formatter = PlainStream()
            elif rank in self._shown:
                formatter = LinePrefixer(fill_template("--prefix", self._plan.prefix, self._layout, rank))
            file = self._files.stream(path, (rank, index))
            parser = LiveLineParser() if self.has_live_line and (rank, index) == (0, 1) else None
            self._streams[fd] = _RankStream(
                rank=rank, fd=fd, writer=writer, file=file, tail=tail, formatter=formatter, parser=parser
            )

    def open_pipes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Open pipes for the standard streams of a rank. Return their write ends, and the read ends that ``fds`` names.

        Raises:
            OSError: the limit of files is reached.
        """
        out, out_write = os.pipe()
        try:
            err, err_write = os.pipe()
        except OSError:
            os.close(out)
            os.close(out_write)
            raise
        self.open(rank, out, err)
        return (out_write, err_write), (out, err)

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
            # Either no data is available, or the descriptor cannot be read.
            with contextlib.suppress(OSError):
                while chunk := os.read(stream.fd, _CHUNK):
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


TEMPLATE_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "host")
DEFAULT_STDOUT, DEFAULT_STDERR = "logs/rank-{rank:05d}.stdout", "logs/rank-{rank:05d}.stderr"
"""Default templates of the log files, relative to the folder of the launch."""


def check_output_plan(plan: OutputPlan, layout: NodeLayout) -> None:
    """Check that every template can be filled for the ranks of ``layout``.

    Raises:
        ConfigError: an unknown field, an empty name, or a prefix of several lines.
    """
    for option, template in (("--stdout", plan.stdout), ("--stderr", plan.stderr), ("--prefix", plan.prefix)):
        if template is None:
            continue
        text = fill_template(option, template, layout, layout.base_rank)
        if option != "--prefix" and (not text.strip() or "\0" in text or text.endswith("/")):
            raise ConfigError(
                f"launch: {option} must name a file, got {template!r}. Remove {option} to use {DEFAULT_STDOUT!r} and the like."
            )
        if option == "--prefix" and not set(text).isdisjoint("\r\n"):
            raise ConfigError(f"launch: --prefix must be one line, got {template!r}. Remove the line end.")


def fill_template(option: str, template: str, layout: NodeLayout, rank: int) -> str:
    """Fill ``template`` with the fields of ``rank``.

    Raises:
        ConfigError: an unknown field, or unbalanced braces.
    """
    values = {
        "rank": rank,
        "local_rank": rank - layout.base_rank,
        "world_size": layout.world_size,
        "local_world_size": layout.nproc,
        "node_rank": layout.node_rank,
        "host": os.uname().nodename,
    }
    try:
        unknown = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None and name not in values]
        if not unknown:
            return template.format_map(values)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"launch: {option} {template!r} cannot be filled in: {error}. Write a brace itself as {{{{ or }}}}."
        ) from None
    fields = " ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
    raise ConfigError(f"launch: {option} {template!r}: no field {{{unknown[0]}}}. Use {fields}.")


def log_paths(plan: OutputPlan, layout: NodeLayout, run_dir: Path, rank: int) -> tuple[Path, Path]:
    """Return the log files of a rank's standard output and error; relative names are relative to the launch folder."""
    stdout = fill_template("--stdout", plan.stdout or DEFAULT_STDOUT, layout, rank)
    stderr = fill_template("--stderr", plan.stderr or DEFAULT_STDERR, layout, rank)
    return run_dir / stdout, run_dir / stderr


# Two files for each of 256 ranks would exceed the usual limit of descriptors.
_OPEN_AT_ONCE = 64
# Hundreds of ranks may share one full disk.
_MAX_FILES_NAMED = 2
_LINE_FEED = ord("\n")
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
# Non-blocking, because a name may be a pipe, and a pipe without a reader must not stop the job.
_LOG_FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class LogFiles:
    """Log files of a launch, opened at their first output. If too many are open, the least recently used file is closed."""

    def __init__(self) -> None:
        self._files: dict[Path, LogFile] = {}
        # Descriptors in order of their last use.
        self._open: dict[Path, int] = {}

    def stream(self, path: Path, writer: object) -> LogStream:
        """Return a stream into the file at ``path``. ``writer`` identifies a rank's stream, also after a restart."""
        file = self._files.setdefault(path, LogFile(path, self))
        file.writers.add(writer)
        return LogStream(file)

    def descriptor(self, path: Path) -> int:
        """Return a descriptor that appends to ``path``, valid until the next call.

        Raises:
            OSError: the file cannot be created or opened.
        """
        if path in self._open:
            # Move the file to the end of the order.
            self._open[path] = fd = self._open.pop(path)
            return fd
        while len(self._open) >= _OPEN_AT_ONCE:
            self.close_file(next(iter(self._open)))
        try:
            fd = _open_log_file(path)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS or not self._open:
                raise
            self.close_file(next(iter(self._open)))
            fd = _open_log_file(path)
        self._open[path] = fd
        return fd

    def close_file(self, path: Path) -> None:
        """Close ``path`` if it is open; a later write reopens the file."""
        if path in self._open:
            os.close(self._open.pop(path))

    def describe_lost(self) -> list[str]:
        """Describe the files with lost lines: a line for each of the first two files, and a line for all other files."""
        lines = [line for file in self._files.values() if (line := file.describe_lost()) is not None]
        more = len(lines) - _MAX_FILES_NAMED
        return lines if more <= 0 else [*lines[:_MAX_FILES_NAMED], f"lines are missing in {more} more files; is the disk full?"]

    def close(self) -> None:
        """Close every file; a later write reopens a file."""
        for path in list(self._open):
            self.close_file(path)


class LogFile:
    """Log file of one stream or of several streams. Several streams write whole lines; a single stream writes its chunks."""

    def __init__(self, path: Path, files: LogFiles) -> None:
        self.path = path
        self.writers: set[object] = set()
        self._files = files
        self._mid_line = False
        # lines lost since the last note in the file
        self._unreported_lines = 0
        self._lost_lines = 0
        self._reason = ""

    def append(self, data: bytes) -> None:
        """Append ``data``; bytes that the disk does not accept are dropped and counted."""
        if not data:
            return
        if self._unreported_lines:
            lines = format_count(self._unreported_lines, "line is", "lines are")
            note = f"dtrain: launch: {lines} missing here: {self._reason}\n".encode()
            note = b"\n" + note if self._mid_line else note
            if self._write(note) < len(note):
                self._count_lost(data)
                return
            self._unreported_lines = 0
        written = self._write(data)
        if written < len(data):
            self._count_lost(data[written:])

    def end_partial_line(self) -> None:
        """End the last line of the file if it has no line end."""
        if self._mid_line:
            self.append(b"\n")

    def describe_lost(self) -> str | None:
        """Describe the lost lines of the file; None without losses."""
        lines = format_count(self._lost_lines, "line is", "lines are")
        return f"{lines} missing in {str(self.path)!r}: {self._reason}" if self._lost_lines else None

    def _write(self, data: bytes) -> int:
        """Write ``data`` and return the number of bytes that the disk accepted."""
        written = 0
        try:
            fd = self._files.descriptor(self.path)
            while written < len(data):
                count = os.write(fd, data[written:])
                written += count
                self._mid_line = data[written - 1] != _LINE_FEED
        except OSError as error:
            self._reason = describe_os_error(error)
            # On a network disk, the old descriptor may be unusable forever.
            self._files.close_file(self.path)
        return written

    def _count_lost(self, data: bytes) -> None:
        self._unreported_lines += count_lines(data)
        self._lost_lines += count_lines(data)


class LogStream:
    """Stream of one rank into its log file."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._partial = bytearray()

    def write(self, chunk: bytes) -> None:
        """Write ``chunk`` unchanged. In a shared file, a line is written once it is complete."""
        if len(self._file.writers) == 1 and not self._partial:
            self._file.append(chunk)
            return
        self._partial += chunk
        end = self._partial.rfind(b"\n") + 1
        if end or len(self._partial) > LONGEST_LINE:
            end = end or len(self._partial)
            self._file.append(bytes(self._partial[:end]))
            del self._partial[:end]

    def end_partial_line(self) -> None:
        """End a partial line, so that the next output begins a line."""
        self._file.end_partial_line()

    def close(self) -> None:
        """Write the partial line; in a shared file it gets a line end."""
        if self._partial:
            self._file.append(bytes(self._partial) + b"\n")
            self._partial.clear()


def _open_log_file(path: Path) -> int:
    try:
        return os.open(path, _LOG_FILE_FLAGS, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, _LOG_FILE_FLAGS, 0o666)


class Events:
    """Event loop of the supervisor: files to watch, and what to do when one is readable."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()

    def watch(self, file: Any, action: Callable[[], None]) -> None:
        """Call ``action`` whenever ``file`` is readable, until ``unwatch``."""
        self._selector.register(file, selectors.EVENT_READ, action)

    def unwatch(self, file: Any) -> None:
        self._selector.unregister(file)

    def watch_pending(self, output: JobOutput) -> None:
        """Watch the launcher's own streams for space only while output is pending; otherwise they are always writable."""
        watched = self._selector.get_map()
        for writer in output.writers:
            if writer.has_pending and writer.fd not in watched:
                self._selector.register(writer.fd, selectors.EVENT_WRITE, writer.flush_some)
            elif not writer.has_pending and writer.fd in watched:
                self._selector.unregister(writer.fd)

    def handle(self, timeout_s: float | None) -> None:
        """Wait for events, and call their actions."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
