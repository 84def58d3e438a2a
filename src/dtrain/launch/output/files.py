"""The files that the ranks' streams are kept in. A disk that is full costs the file only, and only while it is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dtrain.launch.output.lines import LONGEST_LINE
from dtrain.launch.output.lost import count_lines, describe

_OPEN_AT_ONCE = 64  # files; two for each of 256 ranks would pass the usual limit on descriptors
_NAMED = 2  # files that lack lines: hundreds of ranks share one full disk
_LINE_FEED = ord("\n")
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
# Non-blocking for the sake of a name that is a pipe: one without a reader, or with a slow one, must not stop the job.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class LogFiles:
    """All files of a launch. They are opened at their first output; of many, the one that was silent longest is closed."""

    def __init__(self) -> None:
        self._files: dict[Path, LogFile] = {}
        self._open: dict[Path, int] = {}  # descriptors, the one used longest ago first

    def stream(self, path: Path, writer: object) -> FileStream:
        """The way into the file at ``path`` for ``writer``, who is the same one again when a rank was started again."""
        file = self._files.setdefault(path, LogFile(path, self))
        file.writers.add(writer)
        return FileStream(file)

    def descriptor(self, path: Path) -> int:
        """An open descriptor for appending to ``path``; good until the next call.

        Raises:
            OSError: it cannot be made or opened.
        """
        if path in self._open:
            self._open[path] = fd = self._open.pop(path)  # the last one now
            return fd
        while len(self._open) >= _OPEN_AT_ONCE:
            self.forget(next(iter(self._open)))
        try:
            fd = _opened(path)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS or not self._open:
                raise
            self.forget(next(iter(self._open)))
            fd = _opened(path)
        self._open[path] = fd
        return fd

    def forget(self, path: Path) -> None:
        """Close ``path`` if it is open; a later write opens it again."""
        if path in self._open:
            os.close(self._open.pop(path))

    def lost(self) -> list[str]:
        """What files lack lines: a line for each of the first two, and one for all others."""
        lines = [line for file in self._files.values() if (line := file.lost()) is not None]
        more = len(lines) - _NAMED
        return lines if more <= 0 else [*lines[:_NAMED], f"lines are missing in {more} more files; is the disk full?"]

    def close(self) -> None:
        """Close every file; a later write opens it again."""
        for path in list(self._open):
            self.forget(path)


class LogFile:
    """One file, of one stream or of several. Several write whole lines only; a single one writes as it comes."""

    def __init__(self, path: Path, files: LogFiles) -> None:
        self.path = path
        self.writers: set[object] = set()
        self._files = files
        self._mid_line = False  # what was written last
        self._missing = 0  # lines lost since the last note in the file
        self._lost = 0  # lines lost in all
        self._reason = ""

    def put(self, data: bytes) -> None:
        """Append ``data``; what the disk does not take is dropped and counted."""
        if not data:
            return
        if self._missing:
            note = f"dtrain: launch: {self._missing} lines are missing here: {self._reason}\n".encode()
            note = b"\n" + note if self._mid_line else note
            if self._write(note) < len(note):
                self._drop(data)
                return
            self._missing = 0
        written = self._write(data)
        if written < len(data):
            self._drop(data[written:])

    def begin_line(self) -> None:
        """End the line that was written last, if it has no end."""
        if self._mid_line:
            self.put(b"\n")

    def lost(self) -> str | None:
        """What is missing in the file, in a line, if anything is."""
        return f"{self._lost} lines are missing in {str(self.path)!r}: {self._reason}" if self._lost else None

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
            self._reason = describe(error)
            self._files.forget(self.path)  # opened anew: on a network disk, the old one may be dead for good
        return written

    def _drop(self, data: bytes) -> None:
        self._missing += count_lines(data)
        self._lost += count_lines(data)


class FileStream:
    """One stream of one rank on its way into its file."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._partial = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Keep ``chunk``, as it is. In a file that several streams share, a line waits for its end."""
        if len(self._file.writers) == 1 and not self._partial:
            self._file.put(chunk)
            return
        self._partial += chunk
        end = self._partial.rfind(b"\n") + 1
        if end or len(self._partial) > LONGEST_LINE:
            end = end or len(self._partial)
            self._file.put(bytes(self._partial[:end]))
            del self._partial[:end]

    def begin_line(self) -> None:
        """Let what is fed next begin a line."""
        self._file.begin_line()

    def close(self) -> None:
        """Keep what has no end yet; in a shared file it gets one."""
        if self._partial:
            self._file.put(bytes(self._partial) + b"\n")
            self._partial.clear()


def _opened(path: Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, _FLAGS, 0o666)
