"""Run shutdown hooks before the process groups are closed, for example to complete background saves."""

from __future__ import annotations

import sys
from collections.abc import Callable

ShutdownHook = Callable[[BaseException | None], None]
"""Called with the exception that leaves ``init_dist``'s block, or None. An exception of the hook replaces it."""

_HOOKS: dict[str, ShutdownHook] = {}
_LAST_HOOKS: dict[str, ShutdownHook] = {}


def register_shutdown_hook(name: str, hook: ShutdownHook, *, last: bool = False) -> None:
    """Call ``hook`` whenever ``init_dist``'s block ends, while the groups are still open.

    Args:
        name: key of the hook. A second registration under the same name replaces the first.
        hook: called on the main thread. If called with an exception, the hook must not raise.
        last: if True, run after all hooks without ``last``.

    Mutates: this process's hooks.
    """
    (_LAST_HOOKS if last else _HOOKS)[name] = hook


def run_shutdown_hooks(error: BaseException | None) -> None:
    """Run all hooks, also after one has raised. Later hooks are called with the first exception."""
    failed: BaseException | None = None
    for hook in [*_HOOKS.values(), *_LAST_HOOKS.values()]:
        try:
            hook(error)
        except BaseException as failure:  # noqa: BLE001 - raised below
            failed = failure if failed is None else failed
            error = failure if error is None else error
    if failed is not None:
        raise failed


def exit_exception() -> BaseException | None:
    """Return the exception that ended the process, for exit handlers. None in an interactive session."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
