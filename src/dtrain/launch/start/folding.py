"""Fold the frames of dtrain and torch in the traceback of a rank. Imports no torch.

A mistake in a script passes many frames of the libraries. The frames of the user stay, and the others are counted.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

import dtrain

_FOLDED = ("dtrain", "torch")
_MARK = "<folded>"


def format_folded(error: BaseException) -> str:
    """Format ``error`` as Python does, with one line instead of each row of frames of dtrain and torch.

    Frames of the standard library that such a frame has called are folded with it. Chained exceptions and the members of a
    group are folded too. An exception without any frame of the user is shown as it is.

    Args:
        error: the exception with its traceback; it is not changed.

    Returns:
        The text, which ends with a line feed.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    chain = list(_chain(whole))
    folders = _folders()
    if any(_owner(frame, folders) is None for one in chain for frame in one.stack):
        for one in chain:
            one.stack = _folded(one.stack, folders)
    return "".join(whole.format())


def _chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """List ``error``, its causes, its contexts, and the members of groups among them."""
    todo = [error]
    for one in todo:  # grows while it is walked
        yield one
        todo += [other for other in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())) if other]


def _folders() -> dict[str, str]:
    """Return the folder of each library that was imported, by the library's name."""
    found = {"dtrain": os.path.dirname(os.path.abspath(dtrain.__file__))}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        found["torch"] = os.path.dirname(os.path.abspath(torch))
    return found


def _owner(frame: traceback.FrameSummary, folders: dict[str, str]) -> str | None:
    """Return the name of the library that ``frame`` is of, None for a frame of the user."""
    return next((name for name, folder in folders.items() if frame.filename.startswith(folder + os.sep)), None)


def _folded(stack: traceback.StackSummary, folders: dict[str, str]) -> traceback.StackSummary:
    """Return ``stack`` with one frame instead of each row of frames of the libraries."""
    standard = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
    result = _FoldedStack()
    names: list[str] = []  # of the row that is being read
    for frame in stack:
        owner = _owner(frame, folders)
        called = bool(names) and frame.filename.startswith(standard) and "-packages" not in frame.filename
        if owner is not None or called:
            names.append(owner or names[-1])
            continue
        if names:
            result.append(_row(names))
            names = []
        result.append(frame)
    if names:
        result.append(_row(names))
    return result


def _row(names: list[str]) -> traceback.FrameSummary:
    """Return the frame that stands for a row of frames of these libraries."""
    libraries = " and ".join(name for name in _FOLDED if name in names)
    return traceback.FrameSummary(_MARK, len(names), libraries, lookup_line=False, line="")


class _FoldedStack(traceback.StackSummary):
    """A stack some of whose frames stand for several."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        """Format one frame, or the line that counts folded frames."""
        if frame_summary.filename != _MARK:
            return super().format_frame_summary(frame_summary, **options)
        count = frame_summary.lineno
        return f"  ... {count} frame{'s' * (count != 1)} of {frame_summary.name} (--full-traceback shows them)\n"
