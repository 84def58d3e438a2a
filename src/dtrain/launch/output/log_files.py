"""Fill templates of file names and prefixes, and write the ranks' log files.

If a disk is full, lines are lost only while it is full, and the loss is reported.
"""

from __future__ import annotations

import errno
import os
import string
from pathlib import Path

from dtrain.arguments import format_count
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import NodeLayout, OutputPlan
from dtrain.launch.output.terminal_lines import LONGEST_LINE, count_lines, describe_os_error

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
