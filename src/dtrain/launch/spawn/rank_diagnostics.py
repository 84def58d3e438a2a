"""Register a signal that dumps Python stacks, and fold frames of dtrain and torch in a rank's traceback. Imports no torch."""

from __future__ import annotations

import faulthandler
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol


def register_stack_dump(path: Path) -> None:
    """Make ``launch_protocol.STACKS_SIGNAL`` write the Python stacks of all threads to ``path``.

    The handler is written in C and takes no lock, so it works while other code holds the interpreter's lock. The handler cannot
    open files, so the file is created now, empty. The launcher removes an empty file at the end.

    Mutates: this process's handler of the signal, which forks inherit. The file stays open.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError:
        # A full disk or a read-only folder costs the stacks of a hang, not the rank.
        return
    faulthandler.register(launch_protocol.STACKS_SIGNAL, file=file, all_threads=True, chain=False)


_FOLDED_LIBRARIES = ("dtrain", "torch")
_FOLDED_MARK = "<folded>"


def format_folded_traceback(error: BaseException) -> str:
    """Format ``error`` as Python does, with one line instead of each run of frames of dtrain and torch.

    Frames of the standard library that such a frame called are folded with it. Chained exceptions and members of exception
    groups are folded, too. An exception without frames of the user stays unfolded.

    Args:
        error: the exception with its traceback, which is not changed.

    Returns:
        The text, which ends with a line feed.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    chain = list(_exception_chain(whole))
    folders = _library_folders()
    if any(_library_of(frame, folders) is None for item in chain for frame in item.stack):
        for item in chain:
            item.stack = _fold_stack(item.stack, folders)
    return "".join(whole.format())


def _exception_chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield ``error``, its causes, its contexts, and the members of exception groups."""
    todo = [error]
    # The list grows during the loop.
    for item in todo:
        yield item
        todo += [other for other in (item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ())) if other]


def _library_folders() -> dict[str, str]:
    """Return the folder of each imported library, by name."""
    folders = {"dtrain": os.path.dirname(os.path.abspath(dtrain.__file__))}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        folders["torch"] = os.path.dirname(os.path.abspath(torch))
    return folders


def _library_of(frame: traceback.FrameSummary, folders: dict[str, str]) -> str | None:
    """Return the name of the library that contains ``frame``; None for a frame of the user."""
    return next((name for name, folder in folders.items() if frame.filename.startswith(folder + os.sep)), None)


def _fold_stack(stack: traceback.StackSummary, folders: dict[str, str]) -> traceback.StackSummary:
    """Replace each run of library frames in ``stack`` by one frame."""
    standard = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
    result = _FoldedStack()
    # Libraries of the current run of frames.
    names: list[str] = []
    for frame in stack:
        owner = _library_of(frame, folders)
        called = bool(names) and frame.filename.startswith(standard) and "-packages" not in frame.filename
        if owner is not None or called:
            names.append(owner or names[-1])
            continue
        if names:
            result.append(_folded_frame(names))
            names = []
        result.append(frame)
    if names:
        result.append(_folded_frame(names))
    return result


def _folded_frame(names: list[str]) -> traceback.FrameSummary:
    """Return the frame that replaces a run of frames of these libraries."""
    libraries = " and ".join(name for name in _FOLDED_LIBRARIES if name in names)
    return traceback.FrameSummary(_FOLDED_MARK, len(names), libraries, lookup_line=False, line="")


class _FoldedStack(traceback.StackSummary):
    """Stack in which one frame may replace a run of frames."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        """Format one frame, or the count of a folded run."""
        if frame_summary.filename != _FOLDED_MARK:
            return super().format_frame_summary(frame_summary, **options)
        count = frame_summary.lineno
        return f"  ... {count} frame{'s' * (count != 1)} of {frame_summary.name} (--full-traceback shows them)\n"
