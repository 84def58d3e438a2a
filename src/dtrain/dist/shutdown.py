"""What must come to its end before the process groups are closed, such as saves that are still being written."""

from __future__ import annotations

import sys
from collections.abc import Callable

ShutdownHook = Callable[[BaseException | None], None]
"""Gets the exception that leaves ``init_dist``'s block, None when all is well. What it raises then leaves the block instead."""

_HOOKS: dict[str, ShutdownHook] = {}
_LAST_HOOKS: dict[str, ShutdownHook] = {}


def register_shutdown_hook(name: str, hook: ShutdownHook, *, last: bool = False) -> None:
    """Have ``hook`` called whenever ``init_dist``'s block is left, while the groups are still open.

    Args:
        name: of what is to come to an end; a second registration under it replaces the first.
        hook: runs on the main thread. With an exception it must not raise one of its own.
        last: after all that are not.

    Mutates: this process's record.
    """
    (_LAST_HOOKS if last else _HOOKS)[name] = hook


def run_shutdown_hooks(error: BaseException | None) -> None:
    """Wait for everything that was registered: also after one has raised, of which those that follow hear."""
    failed: BaseException | None = None
    for finish in [*_HOOKS.values(), *_LAST_HOOKS.values()]:
        try:
            finish(error)
        except BaseException as failure:  # noqa: BLE001 - raised below
            failed = failure if failed is None else failed
            error = failure if error is None else error
    if failed is not None:
        raise failed


def exit_exception() -> BaseException | None:
    """For functions that run at the exit of the process: the exception that has ended it. What a notebook has shown is none."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
