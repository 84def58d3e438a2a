"""Ctrl-C at a chosen line of the library's code."""

import signal
import sys
from collections.abc import Callable
from types import FrameType


def interrupted_at(line: int, fn: Callable[[], object], *, within: tuple[str, ...] = ("/dtrain/",)) -> bool:
    """Send SIGINT when ``fn`` reaches its ``line``-th line in files whose path contains one of ``within``.

    Returns:
        True if ``KeyboardInterrupt`` has ended ``fn``, False if ``fn`` has fewer lines.
    """
    left = line

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        nonlocal left
        if not any(folder in frame.f_code.co_filename for folder in within):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left > 0, "the interrupt was lost"
    return False
