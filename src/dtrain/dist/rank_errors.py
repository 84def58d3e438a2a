"""Failures and decisions that ranks agree on: what fails on one rank fails on all, what rank 0 decides holds for all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dtrain.dist.collectives import GroupName, broadcast_json, raise_if_any_failed
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError
from dtrain.typing import Plain


class RaiseOnAllRanks:
    """A block after which all ranks go on together, or all raise: ``with Agreed("save_sharded: write"): ...``.

    The ranks that failed raise their own error (an ``OSError`` as a ``CheckpointError`` with ``advice``), the others a
    ``PeerError`` that names the first of them. There must be no other collective in the block.

    Collective: one exchange of JSON on leaving, however the block ends (not for KeyboardInterrupt and its like).
    """

    def __init__(self, where: str, *, group: GroupName = "control", advice: str = "") -> None:
        self._where, self._group, self._advice = where, group, advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if isinstance(error, OSError):
            error = CheckpointError(f"{self._where}: {error}{self._advice}").with_traceback(trace)
        raise_if_any_failed(error, caller=self._where, group=self._group)


def broadcast_decision(where: str, decide: Callable[[], Plain], *, group: GroupName = "control", advice: str = "") -> Plain:
    """What ``decide`` returns on rank 0, where alone it is called, on every rank; if it raises, all ranks do.

    Collective: two exchanges of JSON.
    """
    decision: Plain = None
    with RaiseOnAllRanks(where, group=group, advice=advice):
        if get_dist_info().rank == 0:
            decision = decide()
    return broadcast_json(decision, group=group, caller=where)
