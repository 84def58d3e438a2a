"""Python stacks on a signal: runs in a rank, before its script.

Fold the frames of dtrain and torch in the traceback of a rank. Imports no torch.

A mistake in a script passes many frames of the libraries. The frames of the user stay, and the others are counted."""

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
    """Have ``wire.STACKS_SIGNAL`` write the Python stacks of all threads to ``path``.

    The signal's handler is C and takes no lock, so it also answers while something holds the interpreter (the GIL). It can open
    no file, so the file is there from now on, empty; ``tidy`` removes it when nobody has asked.

    Mutates: this process's handler of the signal, which its forks inherit. The file stays open for good.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError:
        return  # a full disk or a read-only folder costs the stacks of a hang, not the rank
    faulthandler.register(launch_protocol.STACKS_SIGNAL, file=file, all_threads=True, chain=False)


_FOLDED_LIBRARIES = ("dtrain", "torch")
_FOLDED_MARK = "<folded>"


def format_folded_traceback(error: BaseException) -> str:
    """Format ``error`` as Python does, with one line instead of each row of frames of dtrain and torch.

    Frames of the standard library that such a frame has called are folded with it. Chained exceptions and the members of a
    group are folded too. An exception without any frame of the user is shown as it is.

    Args:
        error: the exception with its traceback; it is not changed.

    Returns:
        The text, which ends with a line feed.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    chain = list(_exception_chain(whole))
    folders = _library_folders()
    if any(_library_of(frame, folders) is None for one in chain for frame in one.stack):
        for one in chain:
            one.stack = _fold_stack(one.stack, folders)
    return "".join(whole.format())


def _exception_chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """List ``error``, its causes, its contexts, and the members of groups among them."""
    todo = [error]
    for one in todo:  # grows while it is walked
        yield one
        todo += [other for other in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())) if other]


def _library_folders() -> dict[str, str]:
    """Return the folder of each library that was imported, by the library's name."""
    found = {"dtrain": os.path.dirname(os.path.abspath(dtrain.__file__))}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        found["torch"] = os.path.dirname(os.path.abspath(torch))
    return found


def _library_of(frame: traceback.FrameSummary, folders: dict[str, str]) -> str | None:
    """Return the name of the library that ``frame`` is of, None for a frame of the user."""
    return next((name for name, folder in folders.items() if frame.filename.startswith(folder + os.sep)), None)


def _fold_stack(stack: traceback.StackSummary, folders: dict[str, str]) -> traceback.StackSummary:
    """Return ``stack`` with one frame instead of each row of frames of the libraries."""
    standard = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
    result = _FoldedStack()
    names: list[str] = []  # of the row that is being read
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
    """Return the frame that stands for a row of frames of these libraries."""
    libraries = " and ".join(name for name in _FOLDED_LIBRARIES if name in names)
    return traceback.FrameSummary(_FOLDED_MARK, len(names), libraries, lookup_line=False, line="")


class _FoldedStack(traceback.StackSummary):
    """A stack some of whose frames stand for several."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        """Format one frame, or the line that counts folded frames."""
        if frame_summary.filename != _FOLDED_MARK:
            return super().format_frame_summary(frame_summary, **options)
        count = frame_summary.lineno
        return f"  ... {count} frame{'s' * (count != 1)} of {frame_summary.name} (--full-traceback shows them)\n"
