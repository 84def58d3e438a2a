"""Names of files and prefixes of lines, with ``{rank}`` and the like in them. Pure.

The files that the ranks' streams are kept in. A disk that is full costs the file only, and only while it is full."""

from __future__ import annotations

import errno
import os
import string
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import NodeLayout, OutputPlan
from dtrain.launch.output.terminal_lines import LONGEST_LINE, count_lines, describe_os_error

TEMPLATE_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "host")
DEFAULT_STDOUT, DEFAULT_STDERR = "logs/rank-{rank:05d}.stdout", "logs/rank-{rank:05d}.stderr"
"""Where each rank's streams go unless asked otherwise, below the folder of the launch."""


def check_output_plan(plan: OutputPlan, layout: NodeLayout) -> None:
    """Return when every template can be filled for the ranks of ``layout``.

    Raises:
        ConfigError: an unknown field, an empty name, or a prefix of several lines.
    """
    for option, template in (("--stdout", plan.stdout), ("--stderr", plan.stderr), ("--prefix", plan.prefix)):
        if template is None:
            continue
        text = fill_template(option, template, layout, layout.base_rank)
        if option != "--prefix" and (not text.strip() or "\0" in text or text.endswith("/")):
            raise ConfigError(
                f"launch: {option} must name a file, got {template!r}; leave it out for {DEFAULT_STDOUT!r} and the like"
            )
        if option == "--prefix" and not set(text).isdisjoint("\r\n"):
            raise ConfigError(f"launch: --prefix must be one line, got {template!r}; it is put in front of each line")


def fill_template(option: str, template: str, layout: NodeLayout, rank: int) -> str:
    """``template`` with what is known about ``rank``.

    Raises:
        ConfigError: an unknown field, or braces that do not match.
    """
    known = {
        "rank": rank,
        "local_rank": rank - layout.base_rank,
        "world_size": layout.world_size,
        "local_world_size": layout.nproc,
        "node_rank": layout.node_rank,
        "host": os.uname().nodename,
    }
    try:
        stray = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None and name not in known]
        if not stray:
            return template.format_map(known)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"launch: {option} {template!r} cannot be filled in: {error}; a brace itself is {{{{ or }}}}"
        ) from None
    fields = " ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
    raise ConfigError(f"launch: {option} {template!r}: no field {{{stray[0]}}}; there are {fields}")


def log_paths(plan: OutputPlan, layout: NodeLayout, run_dir: Path, rank: int) -> tuple[Path, Path]:
    """The files of a rank's standard output and error; a relative name counts from the folder of the launch."""
    stdout = fill_template("--stdout", plan.stdout or DEFAULT_STDOUT, layout, rank)
    stderr = fill_template("--stderr", plan.stderr or DEFAULT_STDERR, layout, rank)
    return run_dir / stdout, run_dir / stderr


_OPEN_AT_ONCE = 64  # files; two for each of 256 ranks would pass the usual limit on descriptors
_MAX_FILES_NAMED = 2  # files that lack lines: hundreds of ranks share one full disk
_LINE_FEED = ord("\n")
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
# Non-blocking for the sake of a name that is a pipe: one without a reader, or with a slow one, must not stop the job.
_LOG_FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class LogFiles:
    """All files of a launch. They are opened at their first output; of many, the one that was silent longest is closed."""

    def __init__(self) -> None:
        self._files: dict[Path, LogFile] = {}
        self._open: dict[Path, int] = {}  # descriptors, the one used longest ago first

    def stream(self, path: Path, writer: object) -> LogStream:
        """The way into the file at ``path`` for ``writer``, who is the same one again when a rank was started again."""
        file = self._files.setdefault(path, LogFile(path, self))
        file.writers.add(writer)
        return LogStream(file)

    def descriptor(self, path: Path) -> int:
        """An open descriptor for appending to ``path``; good until the next call.

        Raises:
            OSError: it cannot be made or opened.
        """
        if path in self._open:
            self._open[path] = fd = self._open.pop(path)  # the last one now
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
        """Close ``path`` if it is open; a later write opens it again."""
        if path in self._open:
            os.close(self._open.pop(path))

    def describe_lost(self) -> list[str]:
        """What files lack lines: a line for each of the first two, and one for all others."""
        lines = [line for file in self._files.values() if (line := file.describe_lost()) is not None]
        more = len(lines) - _MAX_FILES_NAMED
        return lines if more <= 0 else [*lines[:_MAX_FILES_NAMED], f"lines are missing in {more} more files; is the disk full?"]

    def close(self) -> None:
        """Close every file; a later write opens it again."""
        for path in list(self._open):
            self.close_file(path)


class LogFile:
    """One file, of one stream or of several. Several write whole lines only; a single one writes as it comes."""

    def __init__(self, path: Path, files: LogFiles) -> None:
        self.path = path
        self.writers: set[object] = set()
        self._files = files
        self._mid_line = False  # what was written last
        self._unreported_lines = 0  # lines lost since the last note in the file
        self._lost_lines = 0  # lines lost in all
        self._reason = ""

    def append(self, data: bytes) -> None:
        """Append ``data``; what the disk does not take is dropped and counted."""
        if not data:
            return
        if self._unreported_lines:
            note = f"dtrain: launch: {self._unreported_lines} lines are missing here: {self._reason}\n".encode()
            note = b"\n" + note if self._mid_line else note
            if self._write(note) < len(note):
                self._count_lost(data)
                return
            self._unreported_lines = 0
        written = self._write(data)
        if written < len(data):
            self._count_lost(data[written:])

    def end_partial_line(self) -> None:
        """End the line that was written last, if it has no end."""
        if self._mid_line:
            self.append(b"\n")

    def describe_lost(self) -> str | None:
        """What is missing in the file, in a line, if anything is."""
        return f"{self._lost_lines} lines are missing in {str(self.path)!r}: {self._reason}" if self._lost_lines else None

    def _write(self, data: bytes) -> int:
        """How much of ``data`` the disk has taken."""
        written = 0
        try:
            fd = self._files.descriptor(self.path)
            while written < len(data):
                count = os.write(fd, data[written:])
                written += count
                self._mid_line = data[written - 1] != _LINE_FEED
        except OSError as error:
            self._reason = describe_os_error(error)
            self._files.close_file(self.path)  # opened anew: on a network disk, the old one may be dead for good
        return written

    def _count_lost(self, data: bytes) -> None:
        self._unreported_lines += count_lines(data)
        self._lost_lines += count_lines(data)


class LogStream:
    """One stream of one rank on its way into its file."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._partial = bytearray()

    def write(self, chunk: bytes) -> None:
        """Keep ``chunk``, as it is. In a file that several streams share, a line waits for its end."""
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
        """Let what is fed next begin a line."""
        self._file.end_partial_line()

    def close(self) -> None:
        """Keep what has no end yet; in a shared file it gets one."""
        if self._partial:
            self._file.append(bytes(self._partial) + b"\n")
            self._partial.clear()


def _open_log_file(path: Path) -> int:
    try:
        return os.open(path, _LOG_FILE_FLAGS, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, _LOG_FILE_FLAGS, 0o666)
