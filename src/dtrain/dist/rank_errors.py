"""Raise errors on all ranks together (``RaiseOnAllRanks``), and broadcast decisions of rank 0 (``broadcast_decision``)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dtrain.dist.collectives import GroupName, broadcast_json, raise_if_any_failed
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError
from dtrain.typing import Plain


class RaiseOnAllRanks:
    """Context manager after which all ranks continue, or all ranks raise: ``with RaiseOnAllRanks("save_sharded: write"): ...``.

    Failed ranks raise their own error, an ``OSError`` as a ``CheckpointError`` with ``advice``. The other ranks raise a
    ``PeerError`` that names the first failed rank. The context must contain no other collective.

    Args:
        caller: prefix of error messages.
        group: gloo group that carries the exchange.
        advice: text after the message of an ``OSError``.

    Collective: one exchange of JSON on exit, except after exceptions like KeyboardInterrupt.
    """

    def __init__(self, caller: str, *, group: GroupName = "control", advice: str = "") -> None:
        self._caller, self._group, self._advice = caller, group, advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if isinstance(error, OSError):
            error = CheckpointError(f"{self._caller}: {error}{self._advice}").with_traceback(trace)
        raise_if_any_failed(error, caller=self._caller, group=self._group)


def broadcast_decision(caller: str, decide: Callable[[], Plain], *, group: GroupName = "control", advice: str = "") -> Plain:
    """Call ``decide`` on rank 0, and return its result on every rank. If ``decide`` raises, all ranks raise.

    Collective: two exchanges of JSON.
    """
    decision: Plain = None
    with RaiseOnAllRanks(caller, group=group, advice=advice):
        if get_dist_info().rank == 0:
            decision = decide()
    return broadcast_json(decision, group=group, caller=caller)
