"""Where a thread stands, from what faulthandler wrote. Pure."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import dtrain

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]+) in (?P<function>.*)$')
_CURRENT = "Current thread"
_CUT = "..."  # instead of further threads
_INSTALLED = re.compile("-packages/|/torchinductor_")  # by pip, or made by torch.compile
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(dtrain.__file__).parent), "<")


def main_thread(stacks: str) -> list[tuple[str, int, str]]:
    """File, line and function of the main thread's frames, innermost first; empty when there are none.

    faulthandler writes the newest thread first, so the main thread comes last. When there were too many threads to write, it is
    the one that got the signal: the kernel prefers the main thread.
    """
    threads: list[tuple[bool, list[tuple[str, int, str]]]] = []
    cut = False
    for line in stacks.splitlines():
        if _THREAD.match(line):
            threads.append((line.startswith(_CURRENT), []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append((match["file"], int(match["line"]), match["function"]))
        cut = cut or line == _CUT
    candidates = [frames for current, frames in threads if current or not cut]
    return candidates[-1] if candidates else []


def own_frame(stacks: str, *, libraries: Iterable[str] = _LIBRARIES) -> str | None:
    """``file:line in function`` of the innermost frame of the main thread that is the user's own; None when there is none."""
    found = _own(stacks, tuple(libraries))
    return None if found is None else "{}:{} in {}".format(*found)


def short_place(stacks: str) -> str | None:
    """The same as ``file:line`` without its folders."""
    found = _own(stacks, _LIBRARIES)
    return None if found is None else f"{os.path.basename(found[0])}:{found[1]}"


def _own(stacks: str, libraries: tuple[str, ...]) -> tuple[str, int, str] | None:
    frames = main_thread(stacks)
    own = [frame for frame in frames if not frame[0].startswith(libraries) and not _INSTALLED.search(frame[0])]
    return next(iter(own or frames), None)
