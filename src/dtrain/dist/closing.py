"""What must come to its end before the process groups are closed, such as saves that are still being written."""

from __future__ import annotations

from collections.abc import Callable

Finish = Callable[[BaseException | None], None]
"""Gets the exception that leaves ``init_dist``'s block, None when all is well. What it raises then leaves the block instead."""

_FINISHES: dict[str, Finish] = {}


def before_closing(name: str, finish: Finish) -> None:
    """Have ``finish`` called whenever ``init_dist``'s block is left, while the groups are still open.

    Args:
        name: of what is to come to an end; a second registration under it replaces the first.
        finish: runs on the main thread. With an exception it must not raise one of its own.

    Mutates: this process's record.
    """
    _FINISHES[name] = finish


def finish_all(error: BaseException | None) -> None:
    """Wait for everything that was registered."""
    for finish in list(_FINISHES.values()):
        finish(error)
